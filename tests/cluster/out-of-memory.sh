#!/usr/bin/env bash
# Has the kernel kill the agent for want of memory. Runs in the node. The pages of a file in memory count for the agent's
# control group and belong to no process, so that the agent is the largest one.
set -euo pipefail
agent=$(pgrep --exact dnsflow)
groups=/sys/fs/cgroup controller='' usage=memory.current limit=memory.max
if [ -d $groups/memory ]; then
    groups+=/memory controller=memory usage=memory.usage_in_bytes limit=memory.limit_in_bytes
fi
group=$groups$(sed -n "s/^[0-9]*:$controller://p" "/proc/$agent/cgroup")
file=/run/out-of-memory
echo $(($(<"$group/$usage") + (8 << 20))) >"$group/$limit"
(
    echo "$BASHPID" >"$group/cgroup.procs"
    echo "$(<"/proc/$agent/oom_score_adj")" >/proc/self/oom_score_adj || true
    exec head --bytes 256M /dev/zero >$file
) || true
rm -f $file
