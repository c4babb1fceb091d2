//! The cluster and what stands beside it: up, and down again.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::process::run;

use super::{
    POD_IMAGE,
    access::{Access, shown},
    story::Servers,
};
use crate::unavailable::Unavailable;

const REPOSITORY: &str = "https://github.com/ovn-kubernetes/ovn-kubernetes.git";
/// Beside the control plane, so that CoreDNS, of which there are two, is not on every node.
const WORKERS: &str = "2";
/// The Docker network of kind's nodes (kind, `pkg/cluster/internal/providers/docker`).
const NETWORK: &str = "kind";
/// What the web servers run.
const SERVER_IMAGE: &str = "busybox:1.37";

/// Where the manifests want it.
const MOUNT_BPF: &str = "mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf";

/// A cluster of this name.
#[derive(Debug)]
pub(super) struct Cluster {
    name: String,
    /// The checkout of ovn-kubernetes.
    checkout: PathBuf,
    /// Whether to make the checkout where it is missing.
    may_clone: bool,
    kubeconfig: PathBuf,
    /// Whether ovn-kubernetes gets its DNS name resolver.
    resolver: bool,
}

impl Cluster {
    /// `home` is a directory for files of its own.
    pub(super) fn new(
        name: &str,
        home: &Path,
        checkout: Option<&Path>,
        resolver: bool,
    ) -> Result<Self> {
        fs::create_dir_all(home)?;
        Ok(Self {
            name: name.to_owned(),
            checkout: match checkout {
                Some(checkout) => std::path::absolute(checkout)?,
                None => home.join("ovn-kubernetes"),
            },
            may_clone: checkout.is_none(),
            kubeconfig: home.join("kubeconfig"),
            resolver,
        })
    }

    pub(super) fn access(&self) -> Access {
        Access::by_kubeconfig(self.kubeconfig.clone())
    }

    /// Whether kind has a cluster of this name.
    pub(super) fn exists(&self) -> Result<bool> {
        let clusters = run(Command::new("kind").args(["get", "clusters"]))?;
        Ok(clusters.lines().any(|cluster| cluster == self.name))
    }

    /// Makes the checkout of ovn-kubernetes, unless it is there.
    pub(super) fn check_out(&self, git_ref: &str) -> Result<()> {
        if self.script().is_file() {
            return Ok(());
        }
        ensure!(
            self.may_clone,
            "{} is missing: not a checkout of ovn-kubernetes",
            self.script().display()
        );
        let mut reachable = Command::new("git");
        reachable
            .args(["ls-remote", "--exit-code", REPOSITORY, git_ref])
            .env("GIT_TERMINAL_PROMPT", "0");
        run(&mut reachable).map_err(|error| {
            Unavailable(format!(
                "checking ovn-kubernetes out takes the internet, and {REPOSITORY} to have \
                 `{git_ref}`: {error:#}"
            ))
        })?;
        let mut clone = Command::new("git");
        clone
            .args(["clone", "--depth", "1", "--branch", git_ref, REPOSITORY])
            .arg(&self.checkout);
        shown(&mut clone)
    }

    fn script(&self) -> PathBuf {
        self.checkout.join("contrib/kind-helm.sh")
    }

    /// Makes the cluster, by ovn-kubernetes' own script. Its defaults are two workers, a zone for
    /// each node, IPv4 and the shared gateway mode; it takes the cluster's name and the kubeconfig,
    /// which it removes first, from the environment (`contrib/kind-common.sh`,
    /// `set_common_default_params`).
    pub(super) fn up(&self) -> Result<()> {
        let mut script = Command::new(self.script());
        script
            .args(["--num-workers", WORKERS])
            .env("KIND_CLUSTER_NAME", &self.name)
            .env("KUBECONFIG", &self.kubeconfig)
            .current_dir(self.checkout.join("contrib"));
        if self.resolver {
            script.arg("--enable-dnsnameresolver");
        }
        shown(&mut script)
    }

    /// Loads images into every node, those of the pods among them.
    pub(super) fn load(&self, images: &[&str]) -> Result<()> {
        for image in [SERVER_IMAGE, POD_IMAGE] {
            shown(Command::new("docker").args(["pull", image]))?;
        }
        let mut load = Command::new("kind");
        load.args(["load", "docker-image"]).args(images);
        shown(load.args([POD_IMAGE, "--name", &self.name]))
    }

    /// Mounts a BPF file system on every node where there is none: systemd mounts none in a container (`mount_one` in
    /// its `src/shared/mount-setup.c`).
    pub(super) fn mount_bpf(&self) -> Result<()> {
        let nodes = run(Command::new("kind").args(["get", "nodes", "--name", &self.name]))?;
        for node in nodes.lines() {
            let mut mount = Command::new("docker");
            mount.args(["exec", node, "sh", "-c", MOUNT_BPF]);
            shown(&mut mount)?;
        }
        Ok(())
    }

    /// Starts the web servers in the network of the nodes.
    pub(super) fn start_servers(&self) -> Result<Servers> {
        Ok(Servers {
            www: self.start_server("www")?,
            rest: self.start_server("rest")?,
        })
    }

    fn server(&self, name: &str) -> String {
        format!("{}-{name}", self.name)
    }

    /// Starts a web server, whose page is its name; its address.
    fn start_server(&self, name: &str) -> Result<String> {
        let container = self.server(name);
        let script = format!("echo {name} >/tmp/index.html && exec httpd -f -p 80 -h /tmp");
        let mut start = Command::new("docker");
        start
            .args(["run", "--detach", "--rm", "--name", &container])
            .args(["--network", NETWORK, SERVER_IMAGE, "sh", "-c", &script]);
        shown(&mut start)?;
        let address = format!("{{{{(index .NetworkSettings.Networks {NETWORK:?}).IPAddress}}}}");
        let mut inspect = Command::new("docker");
        let address = run(inspect.args(["inspect", "--format", &address, &container]))?;
        let address = address.trim();
        address
            .parse::<std::net::Ipv4Addr>()
            .with_context(|| format!("{container} has no IPv4 address: {address:?}"))?;
        Ok(address.to_owned())
    }

    /// Ends whatever of it there is. A signal does not keep it from that.
    ///
    /// ovn-kubernetes' own `kind-helm.sh --delete` is not used: it wants its checkout as it was.
    pub(super) fn down(&self) -> Result<()> {
        println!("\n== taking it down");
        let mut failed = Vec::new();
        let servers = [self.server("www"), self.server("rest")];
        let mut remove = Command::new("docker");
        remove.args(["rm", "--force"]).args(servers);
        let mut delete = Command::new("kind");
        delete.args(["delete", "cluster", "--name", &self.name]);
        for command in [&mut remove, &mut delete] {
            // In a group of its own, which Ctrl-C does not reach.
            let status = command.process_group(0).stdin(Stdio::null()).status();
            if !status.is_ok_and(|status| status.success()) {
                failed.push(format!("{command:?}"));
            }
        }
        ensure!(failed.is_empty(), "left to be done: {}", failed.join(", "));
        Ok(())
    }
}
