#!/usr/bin/env bash
# Ends every process of the run by its network namespaces, and removes these, the control groups and the directory. What a
# node has mounted goes with its process 1, and so do its pods.
set -u
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
failed=0
for space in "$NAME-n1" "$NAME-n2" "$CONTROL" "$OUTSIDE"; do
    [ -e "/run/netns/$space" ] || continue
    for attempt in {1..100}; do
        mapfile -t pids < <(ip netns pids "$space")
        ((${#pids[@]})) || break
        # virtme-ng removes its files, if it is let.
        kill -"$([ "$attempt" -le 20 ] && echo TERM || echo KILL)" "${pids[@]}" 2>/dev/null
        sleep 0.1
    done
    ip netns delete "$space" || failed=1
done
# The container runtime also makes groups in hierarchies that node.sh leaves alone.
for hierarchy in /sys/fs/cgroup/*; do
    for group in "$hierarchy/$NAME"-n{1,2}; do
        [ -d "$group" ] || continue
        for _ in {1..50}; do
            find "$group" -depth -type d -exec rmdir {} + 2>/dev/null
            [ -d "$group" ] || break
            sleep 0.1
        done
        [ ! -d "$group" ] || failed=1
    done
done
rm -rf "$WORK"/{Corefile,etcd,image,images,nodes,pki,run,scripts} || failed=1
exit $failed
