//! The programs that a cluster is made of, and whether they are present.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::unavailable::Unavailable;

/// The variable that names the directory with the programs.
const VARIABLE: &str = "CLUSTER_BIN";

/// In the directory itself: the programs that Debian lacks, and two of Debian's that run outside of the nodes.
const OUTSIDE: &[&str] = &[
    "coredns",
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "ovn-k8s-cni-overlay",
    "ovnkube",
];
/// The definitions of ovn-kubernetes' resources (`helm/ovn-kubernetes/crds` of its checkout).
const DEFINITIONS: &str = "crds";
/// The root file system of the nodes.
const NODE: &str = "node";

/// A file in the nodes' root file system, and its package in Debian.
const IN_NODES: &[(&str, &str)] = &[
    ("usr/bin/busybox", "busybox-static"),
    ("usr/bin/containerd", "containerd"),
    ("usr/lib/cni/loopback", "containernetworking-plugins"),
    ("usr/sbin/conntrack", "conntrack"),
    ("usr/bin/curl", "curl"),
    ("usr/sbin/ethtool", "ethtool"),
    ("usr/bin/ip", "iproute2"),
    ("usr/sbin/iptables", "iptables"),
    ("usr/bin/kmod", "kmod"),
    ("usr/sbin/nft", "nftables"),
    ("usr/bin/ovn-northd", "ovn-central"),
    ("usr/bin/ovn-controller", "ovn-host"),
    ("usr/bin/ovs-vsctl", "openvswitch-switch"),
    ("usr/bin/pgrep", "procps"),
    ("usr/sbin/runc", "runc"),
];

/// A program of this machine's, and its package in Debian.
const HERE: &[(&str, &str)] = &[
    ("bash", "bash"),
    ("ethtool", "ethtool"),
    ("ip", "iproute2"),
    ("openssl", "openssl"),
    ("pgrep", "procps"),
    ("nsenter", "util-linux"),
];

/// The directory of `CLUSTER_BIN`, which has everything.
#[derive(Clone, Debug)]
pub(super) struct Programs(PathBuf);

impl Programs {
    /// An error that names everything that is missing.
    pub(super) fn find() -> Result<Self, Unavailable> {
        let directory = env::var_os(VARIABLE).map(PathBuf::from);
        let missing = missing(directory.as_deref());
        match directory {
            // A virtual machine sees no link to it.
            Some(directory) if missing.is_empty() => {
                Ok(Self(directory.canonicalize().unwrap_or(directory)))
            }
            _ => Err(Unavailable(format!(
                "a cluster takes {}",
                missing.join(", ")
            ))),
        }
    }

    /// Where they are.
    pub(super) fn directory(&self) -> &Path {
        &self.0
    }
}

/// What a cluster takes and this machine lacks.
fn missing(directory: Option<&Path>) -> Vec<String> {
    let mut missing = Vec::new();
    // A link in the nodes' file system may lead to a file that is there only from inside.
    let has = |file: &Path| file.symlink_metadata().is_ok();
    let in_directory = |name: &str| directory.is_some_and(|directory| has(&directory.join(name)));
    if directory.is_none() {
        missing.push(format!("${VARIABLE}, a directory with the programs"));
    }
    let outside = OUTSIDE.iter().chain([&DEFINITIONS]);
    let outside: Vec<&str> = outside
        .copied()
        .filter(|name| !in_directory(name))
        .collect();
    if !outside.is_empty() {
        missing.push(format!("in ${VARIABLE}: {}", outside.join(" ")));
    }
    let packages: Vec<&str> = IN_NODES
        .iter()
        .filter(|(file, _)| !in_directory(&format!("{NODE}/{file}")))
        .map(|(_, package)| *package)
        .collect();
    if !packages.is_empty() {
        missing.push(format!(
            "in ${VARIABLE}/{NODE}, a root file system of Debian (debootstrap), the packages {}",
            packages.join(" ")
        ));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let here = |name: &str| env::split_paths(&path).any(|directory| directory.join(name).is_file());
    for (name, package) in HERE {
        if !here(name) {
            missing.push(format!("{name} (Debian's package {package})"));
        }
    }
    // The kubelet and `tests/cluster/node.sh` were run with no other.
    if !Path::new("/sys/fs/cgroup/memory").is_dir() {
        missing.push("control groups of version 1 at /sys/fs/cgroup".to_owned());
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_is_missing_is_named() {
        let missing = missing(None).join(", ");
        let names = OUTSIDE.iter().chain([&DEFINITIONS, &VARIABLE]);
        for name in names.chain(IN_NODES.iter().map(|(_, package)| package)) {
            assert!(missing.contains(name), "{name}: {missing}");
        }
    }
}
