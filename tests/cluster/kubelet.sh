#!/usr/bin/env bash
# kubelet.sh NODE [ADDRESS]: the kubelet, in place of one that runs, which has the same address. Runs in the node.
set -euo pipefail
node=$1
kept=/run/node-address
[ -z "${2:-}" ] || echo "$2" >$kept
address=$(<$kept)
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/cluster/bin
if pkill --exact kubelet; then
    while pgrep --exact kubelet >/dev/null; do sleep 0.2; done
fi
setsid /cluster/bin/kubelet --config=/var/lib/kubelet/config.yaml --kubeconfig="/cluster/pki/$node.conf" \
    --hostname-override="$node" --node-ip="$address" >>"/cluster/log/$node-kubelet.log" 2>&1 </dev/null &
