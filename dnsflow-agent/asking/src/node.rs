//! The node that this process runs on.

use std::fs;

/// The name of this node, as the kernel has it (proc_sys_kernel(5)); with hostNetwork it is the node's own.
const HOSTNAME: &str = "/proc/sys/kernel/hostname";

/// The name of this node.
pub fn name() -> String {
    let name = fs::read_to_string(HOSTNAME).unwrap_or_default();
    match name.trim() {
        "" => "unknown".to_owned(),
        name => name.to_owned(),
    }
}
