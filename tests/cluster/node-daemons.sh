#!/usr/bin/env bash
# node-daemons.sh NODE ADDRESS: containerd, Open vSwitch and OVN with $DATAPATH (netdev: userspace, system: the kernel's),
# and the kubelet. Runs in the node.
set -euo pipefail
: "${DATAPATH:?}"
# shellcheck source=networks.sh
. "$(dirname "$0")/networks.sh"
node=$1
address=$2
log=/cluster/log
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/cluster/bin
start() {
    setsid "$@" >>"$log/$node-${1##*/}.log" 2>&1 </dev/null &
}

# What containerd must not lower it must not try.
containerd config default | sed -E "s#(sandbox = ).*#\1'cluster:local'#; s#(restrict_oom_score_adj = ).*#\1true#
    s#(bin_dirs = ).*#\1['/opt/cni/bin', '/usr/lib/cni']#" >/etc/containerd/config.toml
start containerd

mkdir -p /etc/openvswitch /lib/modules /var/lib/{openvswitch,ovn} /var/log/{openvswitch,ovn}
system=$(</proc/sys/kernel/random/uuid)
/usr/share/openvswitch/scripts/ovs-ctl start --no-ovs-vswitchd --no-monitor --system-id="$system" \
    >>"$log/$node-openvswitch.log" 2>&1
ovs-vsctl --no-wait set open . external_ids:hostname="$node" \
    external_ids:ovn-remote=unix:/var/run/ovn/ovnsb_db.sock external_ids:ovn-bridge-datapath-type="$DATAPATH" \
    external_ids:ovn-encap-type=geneve external_ids:ovn-encap-ip="$address"
options=()
[ "$DATAPATH" = system ] || options=(--disable-system)
ovs-vswitchd unix:/run/openvswitch/db.sock "${options[@]}" -vconsole:off --pidfile --log-file --detach \
    >>"$log/$node-openvswitch.log" 2>&1
ovs-vsctl add-br br-int -- set bridge br-int datapath_type="$DATAPATH" fail-mode=secure
mac=$(</sys/class/net/eth0/address)
ovs-vsctl add-br br-ex -- set bridge br-ex datapath_type="$DATAPATH" "other_config:hwaddr=\"$mac\"" \
    -- br-set-external-id br-ex bridge-id br-ex -- br-set-external-id br-ex bridge-uplink eth0 \
    -- add-port br-ex eth0
ip address flush dev eth0
ip link set br-ex address "$mac" up
ip address add "$address/$NODE_BITS" dev br-ex "${ADDRESS_OPTIONS[@]}"
# The route of eth0 outlives its address in IPv6.
ip route replace default via "$GATEWAY"
if [ "$DATAPATH" = netdev ]; then
    ethtool --offload br-ex tx off >/dev/null
    # The datapath reads eth0 by a packet socket. The kernel's own stack must not answer the same frames.
    nft -f - <<'EOF'
table netdev cluster {
    chain uplink { type filter hook ingress device "eth0" priority 0; policy drop; }
}
EOF
fi

ovn=/usr/share/ovn/scripts/ovn-ctl
start "$ovn" run_nb_ovsdb --no-monitor
start "$ovn" run_sb_ovsdb --no-monitor
for database in ovn-nbctl ovn-sbctl; do
    until $database --timeout=1 show >/dev/null 2>&1; do sleep 0.2; done
done
ovn-nbctl set NB_Global . name="$node" options:name="$node" options:northd-backoff-interval-ms=300
$ovn start_northd --no-monitor --ovn-manage-ovsdb=no >>"$log/$node-ovn.log" 2>&1
$ovn start_controller --no-monitor >>"$log/$node-ovn.log" 2>&1

cat >/var/lib/kubelet/config.yaml <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: "$ANY"
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: /cluster/pki/ca.crt}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
cgroupRoot: /$NAME
clusterDNS: ["$DNS_SERVICE"]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
failCgroupV1: false
failSwapOn: false
imageGCHighThresholdPercent: 100
tlsCertFile: /cluster/pki/$node.crt
tlsPrivateKeyFile: /cluster/pki/$node.key
EOF
until [ -S /run/containerd/containerd.sock ]; do sleep 0.2; done
for image in /cluster/images/*.tar; do
    ctr --namespace k8s.io images import "$image" >/dev/null
done
bash /cluster/scripts/kubelet.sh "$node" "$address"
