#!/usr/bin/env bash
# node-init.sh NODE ADDRESS: process 1 of a node, in fresh namespaces. It makes the mounts of the node, and then sleeps.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
node=$1
address=$2
own=$WORK/nodes/$node
mkdir -p "$own"/{root,upper,work,containerd,kubelet,sysctls}

mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$(realpath "$BIN/node"),upperdir=$own/upper,workdir=$own/work" "$own/root"
cd "$own/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount -t bpf bpf sys/fs/bpf
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mkdir -p run/{lock,netns,openvswitch} etc/{cni/net.d,containerd,kubernetes} opt/cni/bin var/lib/{containerd,kubelet}
ln -s openvswitch run/ovn
# overlayfs does not lie on overlayfs.
mount --bind "$own/containerd" var/lib/containerd
mount --bind "$own/kubelet" var/lib/kubelet
mkdir -p cluster/{bin,images,log,pki,scripts}
mount --bind "$BIN" cluster/bin
for directory in images log pki scripts; do
    mount --bind "$WORK/$directory" cluster/$directory
done
# The kubelet writes these, which are those of the whole machine: it gets files of its own.
for sysctl in kernel/keys/root_maxbytes=25000000 kernel/keys/root_maxkeys=1000000 kernel/panic=10 \
    kernel/panic_on_oops=1 vm/overcommit_memory=1 vm/panic_on_oom=0; do
    file=$own/sysctls/${sysctl//\//_}
    echo "${sysctl#*=}" >"$file"
    mount --bind "$file" "proc/sys/${sysctl%=*}"
done
hostname "$node"
echo "nameserver $GATEWAY" >etc/resolv.conf
printf '127.0.0.1 localhost\n%s %s\n' "$address" "$node" >etc/hosts
printf '%s' "$node" | md5sum | cut -d ' ' -f 1 >etc/machine-id

mkdir -p .old
pivot_root . .old
cd /
umount --lazy /.old
mount --make-rshared /
touch /ready
# A shell reaps what is left to it.
exec bash -c 'trap "exit 0" TERM; while :; do sleep 60 & wait $!; done'
