# shellcheck shell=bash disable=SC2034 # the scripts use the names
# Names and helpers of the scripts in this directory. `cargo xtask cluster` sets these variables:
#   NAME     the beginning of the names of network namespaces and control groups
#   WORK     the directory of the run; the nodes see its parts in /cluster
#   BIN      $CLUSTER_BIN, with the programs and the root file system `node`
#   HELPER   the lab's helper
#   FAMILY   ipv4 or ipv6, the one family of the cluster
#   MACHINE  the node that is a virtual machine, or nothing; unset inside of it
#   GATEWAY_MODE  that node's gateway mode
: "${NAME:?}" "${WORK:?}" "${BIN:?}" "${HELPER:?}"
# shellcheck source=networks.sh
. "$(dirname "${BASH_SOURCE[0]}")/networks.sh"
OUTSIDE=$NAME-outside
CONTROL=$NAME-control
API=https://$(socket "$CONTROL_ADDRESS" 6443)
NODES=(n1 n2)
CONTROLLERS=(blkio cpu cpuacct cpuset devices freezer memory pids systemd)

# daemon NAME COMMAND...: starts it in a session of its own, with a log and a pid file.
daemon() {
    local name=$1
    shift
    setsid "$@" >>"$WORK/log/$name.log" 2>&1 </dev/null &
    echo $! >"$WORK/run/$name.pid"
}

# eventually SECONDS COMMAND...: repeats it until it succeeds.
eventually() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        if ((SECONDS >= end)); then
            echo "still failing: $*" >&2
            "$@"
            return
        fi
        sleep 0.3
    done
}

# on NODE COMMAND...: runs it in the node. machine.sh does so in a virtual machine.
on() {
    local node=$1 request=$WORK/run/$1.request status
    shift
    if [ "$node" != "${MACHINE:-}" ]; then
        nsenter --target "$(<"$WORK/run/$node.init")" --mount --pid --net --uts --ipc --root --wd -- "$@"
        return
    fi
    printf '%q ' "$@" >"$request.new"
    mv "$request.new" "$request"
    until [ -e "$request.status" ]; do
        if [ -e "$WORK/run/$node.ended" ]; then
            echo "the virtual machine has ended" >&2
            return 1
        fi
        sleep 0.1
    done
    cat "$request.output"
    cat "$request.errors" >&2
    status=$(<"$request.status")
    rm "$request".{output,errors,status}
    return "$status"
}

kubectl() {
    KUBECONFIG=$WORK/pki/admin.conf nsenter --net="/run/netns/$CONTROL" "$BIN/kubectl" "$@"
}
