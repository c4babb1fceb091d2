#!/usr/bin/env bash
# ovn-kubernetes in interconnect mode, with the options of its dist/images/ovnkube.sh: one cluster manager, and in each
# node a controller for the node's zone, with CNI.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

for namespace in ovn-kubernetes ovn-host-network; do
    kubectl create namespace $namespace
done
kubectl --namespace ovn-kubernetes create serviceaccount ovnkube
kubectl create clusterrolebinding ovnkube --clusterrole=cluster-admin --serviceaccount=ovn-kubernetes:ovnkube
token=$(kubectl --namespace ovn-kubernetes create token ovnkube --duration=24h)
options=(
    --k8s-apiserver="$API" --k8s-cacert=/cluster/pki/ca.crt --k8s-token="$token"
    --cluster-subnets="$POD_NETWORK/$POD_NETWORK_BITS" --k8s-service-cidr="$SERVICE_NETWORK"
    --ovn-config-namespace=ovn-kubernetes --host-network-namespace=ovn-host-network
    --enable-egress-firewall --enable-egress-ip --enable-egress-qos --enable-egress-service
    --enable-multicast --enable-multi-external-gateway
)
# ovnkube NODE LOG OPTION...
ovnkube() {
    # shellcheck disable=SC2016 # the shell in the node expands it
    on "$1" bash -c 'setsid /cluster/bin/ovnkube "${@:2}" >>"/cluster/log/$1.log" 2>&1 </dev/null &' bash "${@:2}" "${options[@]}"
}
ovnkube n1 cluster-manager --init-cluster-manager n1 --gateway-mode=shared --metrics-bind-address=127.0.0.1:9411
for node in "${NODES[@]}"; do
    program=/opt/cni/bin/ovn-k8s-cni-overlay
    mode=shared
    if [ "$node" = "$MACHINE" ]; then
        mode=$GATEWAY_MODE
    else
        on "$node" install /cluster/scripts/cni.sh $program
        program+=.real
    fi
    on "$node" install /cluster/bin/ovn-k8s-cni-overlay $program
    ovnkube "$node" "$node-ovnkube" --init-ovnkube-controller "$node" --init-node "$node" --gateway-mode="$mode" \
        --gateway-interface=br-ex --gateway-nexthop="$GATEWAY" --mtu=1400 --nodeport \
        --metrics-bind-address=127.0.0.1:9410
done
eventually 900 kubectl get node "${NODES[@]}"
kubectl wait --for=condition=Ready nodes --all --timeout=900s
sed "s/DNS_SERVICE/$DNS_SERVICE/" "$(dirname "$0")/coredns.yaml" | kubectl apply --filename -
kubectl --namespace kube-system rollout status deployment/coredns --timeout=900s
