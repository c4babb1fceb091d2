#!/usr/bin/env bash
# node.sh NODE: a node in namespaces of its own, on the root file system $BIN/node, which is not written.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
node=$1
address=${ADDRESSES[$node]}
space=$NAME-$node

ip netns add "$space"
ip -n "$space" link set lo up
ip -n "$OUTSIDE" link add "$node" type veth peer name eth0 netns "$space"
ip -n "$OUTSIDE" link set "$node" master bridge up
ip -n "$space" link set eth0 up
ip -n "$space" address add "$address/$NODE_BITS" dev eth0 "${ADDRESS_OPTIONS[@]}"
ip -n "$space" route add default via "$GATEWAY"
# The userspace datapath reads frames as they are: nobody fills in a checksum that was left to the device.
ip netns exec "$space" ethtool --offload eth0 tx off >/dev/null
ip netns exec "$OUTSIDE" ethtool --offload "$node" tx off >/dev/null

for controller in "${CONTROLLERS[@]}"; do
    mkdir -p "/sys/fs/cgroup/$controller/$space"
done
for file in cpuset.cpus cpuset.mems; do
    cat /sys/fs/cgroup/cpuset/$file >"/sys/fs/cgroup/cpuset/$space/$file"
done

mkdir -p "$WORK/nodes/$node"
# Not by ip-netns(8), which hides the control groups.
daemon "$node" nsenter --net="/run/netns/$space" unshare --mount --pid --uts --ipc --fork --kill-child \
    "$WORK/scripts/node-init.sh" "$node" "$address"
eventually 30 test -e "$WORK/nodes/$node/upper/ready"
pgrep --parent "$(<"$WORK/run/$node.pid")" >"$WORK/run/$node.init"
on "$node" env NAME="$space" DATAPATH=netdev FAMILY="$FAMILY" bash /cluster/scripts/node-daemons.sh "$node" "$address"
