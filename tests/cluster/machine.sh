#!/usr/bin/env bash
# machine.sh NODE: brings up the node in the virtual machine in which it runs, and then runs there each request of `on`
# (lib.sh), until the machine is ended from outside.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
node=$1
address=${ADDRESSES[$node]}
request=$WORK/run/$node.request

# The node has no directory of the machine's session, where runc would put files.
unset XDG_RUNTIME_DIR
# Nobody else loads the drivers of devices here.
"$(</proc/sys/kernel/modprobe)" virtio_net
for device in /sys/class/net/*/device; do
    device=$(basename "$(dirname "$device")")
    [ "$device" = eth0 ] || ip link set "$device" name eth0
done
ip link set lo up
ip link set eth0 up
for controller in cpuset cpu io memory hugetlb pids; do
    echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done
mkdir "/sys/fs/cgroup/$NAME-$node"

# The files of the node, in memory. The kubelet tells file systems by this name.
mkdir -p "$WORK/nodes"
mount -t tmpfs -o size=80% nodes "$WORK/nodes"
mkdir "$WORK/nodes/$node"
unshare --mount --pid --uts --ipc --fork --kill-child "$(dirname "$0")/node-init.sh" "$node" "$address" \
    >>"$WORK/log/$node.log" 2>&1 </dev/null &
until [ -e "$WORK/nodes/$node/upper/ready" ]; do
    kill -0 $!
    sleep 1
done
pgrep --parent $! >"$WORK/run/$node.init"
on "$node" env NAME="$NAME-$node" DATAPATH=system FAMILY="$FAMILY" bash /cluster/scripts/node-daemons.sh "$node" "$address"

# A pipe to which nobody writes: a pause without a new process.
exec {nothing}<> <(:)
while :; do
    if [ -e "$request" ]; then
        status=0
        eval "on $node $(<"$request")" >"$request.output" 2>"$request.errors" </dev/null || status=$?
        rm "$request"
        echo "$status" >"$request.done"
        mv "$request.done" "$request.status"
    fi
    read -r -t 0.2 -u "$nothing" || true
done
