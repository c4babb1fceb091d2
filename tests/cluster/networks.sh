# shellcheck shell=bash disable=SC2034 # the scripts use the names
# The networks and addresses of a cluster of one family. `cargo xtask cluster` sets FAMILY.
case ${FAMILY:?} in
ipv4)
    ANY=0.0.0.0
    NODE_BITS=16
    GATEWAY=172.18.0.1
    CONTROL_ADDRESS=172.18.0.10
    declare -A ADDRESSES=([n1]=172.18.0.2 [n2]=172.18.0.3)
    POD_NETWORK=10.244.0.0/16
    POD_NETWORK_BITS=24
    SERVICE_NETWORK=10.96.0.0/16
    API_SERVICE=10.96.0.1
    DNS_SERVICE=10.96.0.10
    OUTSIDE_NETWORKS=(198.18.0.0/15 203.0.113.0/24)
    ADDRESS_OPTIONS=()
    ;;
ipv6)
    ANY=::
    NODE_BITS=64
    GATEWAY=fd00:172:18::1
    CONTROL_ADDRESS=fd00:172:18::10
    declare -A ADDRESSES=([n1]=fd00:172:18::2 [n2]=fd00:172:18::3)
    POD_NETWORK=fd00:10:244::/48
    POD_NETWORK_BITS=64
    SERVICE_NETWORK=fd00:10:96::/112
    API_SERVICE=fd00:10:96::1
    DNS_SERVICE=fd00:10:96::a
    OUTSIDE_NETWORKS=(2001:2::/48 2001:db8::/32)
    # An address is used at once, without the search for a duplicate (RFC 4862, section 5.4).
    ADDRESS_OPTIONS=(nodad)
    ;;
*)
    echo "no family: $FAMILY" >&2
    exit 2
    ;;
esac

# socket ADDRESS PORT: both in the form of a URL (RFC 3986, section 3.2.2).
socket() {
    if [[ $1 == *:* ]]; then echo "[$1]:$2"; else echo "$1:$2"; fi
}
