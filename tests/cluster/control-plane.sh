#!/usr/bin/env bash
# The control plane, and the world outside of the cluster: a web server at every address of two networks, a name server for
# the nodes that knows no name, and the device of a virtual machine.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

ip netns add "$OUTSIDE"
ip netns add "$CONTROL"
ip -n "$OUTSIDE" link set lo up
ip -n "$CONTROL" link set lo up
ip -n "$OUTSIDE" link add bridge type bridge
ip -n "$OUTSIDE" link set bridge up
ip -n "$OUTSIDE" address add "$GATEWAY/$NODE_BITS" dev bridge "${ADDRESS_OPTIONS[@]}"
# ip-route(8): every address of a local route is this machine's.
for network in "${OUTSIDE_NETWORKS[@]}"; do
    ip -n "$OUTSIDE" route add local "$network" dev lo
done
ip -n "$OUTSIDE" link add control type veth peer name eth0 netns "$CONTROL"
ip -n "$OUTSIDE" link set control master bridge up
ip -n "$CONTROL" address add "$CONTROL_ADDRESS/$NODE_BITS" dev eth0 "${ADDRESS_OPTIONS[@]}"
ip -n "$CONTROL" link set eth0 up
ip -n "$CONTROL" route add default via "$GATEWAY"
if [ -n "$MACHINE" ]; then
    ip -n "$OUTSIDE" tuntap add dev "$MACHINE" mode tap
    ip -n "$OUTSIDE" link set "$MACHINE" master bridge up
fi

daemon web ip netns exec "$OUTSIDE" "$HELPER" web "$(socket "$ANY" 80)" "$WORK"
printf '.:53 {\n    bind %s\n    template ANY ANY . {\n        rcode NXDOMAIN\n    }\n}\n' "$GATEWAY" >"$WORK/Corefile"
daemon dns ip netns exec "$OUTSIDE" "$BIN/coredns" -conf "$WORK/Corefile"

cd "$WORK/pki"
EC=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
openssl req -x509 "${EC[@]}" -keyout ca.key -out ca.crt -subj /CN=kubernetes -days 30
openssl genrsa -out sa.key 2048
openssl rsa -in sa.key -pubout -out sa.pub
# certificate NAME SUBJECT [ALTERNATIVE-NAMES]
certificate() {
    openssl req "${EC[@]}" -keyout "$1.key" -out "$1.csr" -subj "$2"
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "$1.crt" \
        -extfile <(echo "${3:+subjectAltName=$3}")
}
# kubeconfig NAME: for the holder of its certificate
kubeconfig() {
    cat >"$1.conf" <<EOF
apiVersion: v1
kind: Config
clusters:
  - name: cluster
    cluster:
      server: $API
      certificate-authority-data: $(base64 --wrap 0 ca.crt)
users:
  - name: user
    user:
      client-certificate-data: $(base64 --wrap 0 "$1.crt")
      client-key-data: $(base64 --wrap 0 "$1.key")
contexts:
  - name: context
    context: {cluster: cluster, user: user}
current-context: context
EOF
}
service=kubernetes.default.svc
certificate server /CN=kube-apiserver \
    "DNS:kubernetes.default,DNS:$service,DNS:$service.cluster.local,IP:$CONTROL_ADDRESS,IP:$API_SERVICE,IP:127.0.0.1"
certificate admin /O=system:masters/CN=admin
certificate kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client
certificate controller-manager /CN=system:kube-controller-manager
certificate scheduler /CN=system:kube-scheduler
for node in "${NODES[@]}"; do
    certificate "$node" "/O=system:nodes/CN=system:node:$node" "DNS:$node,IP:${ADDRESSES[$node]}"
    kubeconfig "$node"
done
for name in admin controller-manager scheduler; do
    kubeconfig $name
done

ETCD=http://127.0.0.1
daemon etcd ip netns exec "$CONTROL" "$BIN/etcd" --data-dir "$WORK/etcd" --unsafe-no-fsync \
    --listen-client-urls $ETCD:2379 --advertise-client-urls $ETCD:2379 --listen-peer-urls $ETCD:2380
daemon kube-apiserver ip netns exec "$CONTROL" "$BIN/kube-apiserver" --etcd-servers=$ETCD:2379 \
    --advertise-address="$CONTROL_ADDRESS" --bind-address="$ANY" --secure-port=6443 \
    --service-cluster-ip-range="$SERVICE_NETWORK" --allow-privileged=true \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --tls-cert-file=server.crt --tls-private-key-file=server.key --client-ca-file=ca.crt \
    --service-account-key-file=sa.pub --service-account-signing-key-file=sa.key \
    --service-account-issuer=https://$service.cluster.local \
    --kubelet-client-certificate=kubelet-client.crt --kubelet-client-key=kubelet-client.key \
    --kubelet-preferred-address-types=InternalIP
eventually 120 kubectl get --raw /readyz
daemon kube-controller-manager ip netns exec "$CONTROL" "$BIN/kube-controller-manager" \
    --kubeconfig=controller-manager.conf --leader-elect=false --root-ca-file=ca.crt \
    --service-account-private-key-file=sa.key --use-service-account-credentials \
    --cluster-cidr="$POD_NETWORK" --allocate-node-cidrs=false
daemon kube-scheduler ip netns exec "$CONTROL" "$BIN/kube-scheduler" \
    --kubeconfig=scheduler.conf --leader-elect=false
kubectl apply --filename "$BIN/crds/" >/dev/null
