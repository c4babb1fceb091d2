#!/bin/bash
# ovn-kubernetes' CNI program. Then no checksum is left to the device of the pod, since the userspace datapath reads
# frames as they are.
"$0.real" "$@"
status=$?
if [ "$status" = 0 ] && [ "$CNI_COMMAND" = ADD ]; then
    nsenter --net="$CNI_NETNS" ethtool --offload "$CNI_IFNAME" tx off >/dev/null 2>&1
fi
exit "$status"
