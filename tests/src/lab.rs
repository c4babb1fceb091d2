//! One lab: its directory, its "node" namespace, its daemons and its pods.
//!
//! A lab has its own namespaces and one directory. Labs can therefore run side by side, and never
//! touch a real Open vSwitch or OVN of the host. Dropping a [`Lab`] ends it; [`Lab::keep`] leaves
//! it running for `cargo xtask lab`.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, unmount},
};
use serde::{Deserialize, Serialize};

use crate::{
    database::Database,
    dns,
    netns::{NetNs, require_mount_at_root},
    ovs::Daemon,
    pod::{Pod, PodRecord},
    process::{PATIENT, kill_all, run},
    root::Root,
    topology,
};

/// Where labs have their directories. Unix socket paths are limited to 107 bytes (unix(7)), so
/// this is not below the workspace.
const PARENT: &str = "/tmp";
const PREFIX: &str = "dnsflow-";
/// The lab's BPF file system, if one is mounted, below the lab's directory.
const BPF_FS: &str = "bpf";

/// The longest name of a lab, in bytes.
const NAME_MAX: usize = 40;

/// The datapath of br-int and br-ex.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Datapath {
    /// ovs-vswitchd's own, in user space: no kernel module.
    Netdev,
    /// The kernel's openvswitch module.
    System,
}

impl Datapath {
    /// The datapath with this `datapath_type`.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Netdev, Self::System]
            .into_iter()
            .find(|datapath| datapath.ovs_name() == name)
    }

    /// The bridge's `datapath_type`.
    pub(crate) fn ovs_name(self) -> &'static str {
        match self {
            Self::Netdev => "netdev",
            Self::System => "system",
        }
    }
}

/// The set-up of the cluster, as far as ovn-kubernetes' rows depend on it.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Cluster {
    /// Pods have an IPv6 address beside that of IPv4.
    pub dual_stack: bool,
    /// The DNSNameResolver feature is on: a name's address set is hashed from its lower case with
    /// a final dot.
    pub name_resolver: bool,
}

/// What a lab is made of.
#[derive(Clone, Debug)]
pub struct LabOptions {
    /// Lower-case letters, digits and hyphens, distinct among the labs of the machine.
    pub name: String,
    /// The Debian programs.
    pub root: Root,
    /// The datapath of the bridges.
    pub datapath: Datapath,
    /// How the cluster is set up.
    pub cluster: Cluster,
    /// The `dnsflow-lab-helper` binary: the web server.
    pub helper: PathBuf,
}

/// The facts that [`Lab::attach`] needs about a lab of another process.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct State {
    root: PathBuf,
    datapath: Datapath,
    cluster: Cluster,
    helper: PathBuf,
    chassis: String,
    has_tiers: bool,
}

/// A running lab.
#[derive(Debug)]
pub struct Lab {
    name: String,
    base: PathBuf,
    root: Root,
    state: State,
    keep: bool,
    /// Held while this process uses the lab; the kernel lets go of it when the process ends.
    _lock: Option<File>,
}

impl Lab {
    /// Brings a lab up. First removes the leftovers of an earlier lab of the same name.
    pub fn up(options: LabOptions) -> Result<Self> {
        let lab = Self::create(options)?;
        lab.start()?;
        Ok(lab)
    }

    /// The lab with its directory and nothing that runs.
    fn create(options: LabOptions) -> Result<Self> {
        let LabOptions {
            name,
            root,
            datapath,
            cluster,
            helper,
        } = options;
        let base = directory(&name)?;
        require_mount_at_root()?;
        remove(&name, &base)?;
        fs::create_dir(&base)?;
        let lock = lock(&base)?;
        for dir in ["run", "db", "log", "etc", "pods", "manifests"] {
            fs::create_dir(base.join(dir))?;
        }
        let state = State {
            // Without the last component, which Root::existing adds.
            root: root.path().parent().unwrap_or(root.path()).to_owned(),
            datapath,
            cluster,
            helper,
            chassis: random_uuid()?,
            has_tiers: schema_has_acl_tiers(&root)?,
        };
        fs::write(base.join("lab.json"), serde_json::to_string_pretty(&state)?)?;
        // From here on, dropping it on an error cleans up.
        Ok(Self {
            name,
            base,
            root,
            state,
            keep: false,
            _lock: Some(lock),
        })
    }

    fn start(&self) -> Result<()> {
        NetNs::create(self.node().name())?;
        self.ip_batch(&self.node(), "link set lo up\n")?;
        for database in [Daemon::OvsDb, Daemon::NbDb, Daemon::SbDb] {
            self.create_database(database)?;
            self.start_daemon(database)?;
        }
        std::thread::scope(|scope| {
            // The switch's half and OVN's half come up beside each other.
            let ovn = scope.spawn(|| -> Result<()> {
                topology::build(self)?;
                self.start_daemon(Daemon::Northd)
            });
            self.configure_switch()?;
            self.start_daemon(Daemon::Vswitchd)?;
            self.add_bridges()?;
            self.add_management_port()?;
            self.start_daemon(Daemon::OvnController)?;
            ovn.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        self.write_resolver_files()?;
        self.add_internet()?;
        for pod in topology::pods() {
            self.add_pod(&pod)?;
        }
        self.serve_dns(dns::DEFAULT_RECORDS)?;
        self.sync()
    }

    /// The lab of this name that another process has brought up and left running.
    pub fn attach(name: &str) -> Result<Self> {
        let base = directory(name)?;
        let file = base.join("lab.json");
        let text = fs::read_to_string(&file)
            .with_context(|| format!("there is no lab {name} ({} is missing)", file.display()))?;
        let state: State = serde_json::from_str(&text)?;
        Ok(Self {
            name: name.to_owned(),
            base,
            root: Root::existing(&state.root)?,
            state,
            keep: true,
            _lock: None,
        })
    }

    /// Leaves the lab running when this value goes.
    pub fn keep(mut self) {
        self.keep = true;
    }

    /// Ends the lab of this name, if there is one that no live process uses. Says whether there
    /// was anything to end.
    pub fn down(name: &str) -> Result<bool> {
        let base = directory(name)?;
        let found = base.exists() || node_namespace(name).exists();
        remove(name, &base)?;
        Ok(found)
    }

    /// The names of all labs that exist on this machine.
    pub fn names() -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(PARENT)? {
            let entry = entry?;
            if entry.path().join("lab.json").exists()
                && let Some(name) = entry.file_name().to_string_lossy().strip_prefix(PREFIX)
            {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// The lab's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The lab's directory.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// The directory of EgressFirewall manifests that the agent reads.
    pub fn manifests(&self) -> PathBuf {
        self.base.join("manifests")
    }

    /// A Unix socket in the lab's run directory: `db.sock`, `ovnnb_db.sock`, `ovnsb_db.sock`,
    /// `br-int.mgmt`.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.base.join("run").join(name)
    }

    pub(crate) fn root(&self) -> &Root {
        &self.root
    }

    /// The datapath of the bridges.
    pub fn datapath(&self) -> Datapath {
        self.state.datapath
    }

    /// How the cluster is set up.
    pub fn cluster(&self) -> Cluster {
        self.state.cluster
    }

    /// A BPF file system of the lab's own, mounted when first asked for.
    pub fn bpf_fs(&self) -> Result<PathBuf> {
        let dir = self.base().join(BPF_FS);
        if !dir.exists() {
            fs::create_dir(&dir)?;
            mount("bpf", &dir, "bpf", MountFlags::empty(), None)?;
        }
        Ok(dir)
    }

    pub(crate) fn helper(&self) -> &Path {
        &self.state.helper
    }

    /// The chassis' `system-id`, a UUID as in a cluster.
    pub fn chassis(&self) -> &str {
        &self.state.chassis
    }

    /// Whether the NB schema has `ACL.tier` (OVN 23.06 and later).
    pub fn has_tiers(&self) -> bool {
        self.state.has_tiers
    }

    /// The namespace that stands for the node: Open vSwitch, OVN and the agent run there.
    pub fn node(&self) -> NetNs {
        node_namespace(&self.name)
    }

    /// The pod of this name: `<namespace>_<pod>`, `dns`, or `inet` for the hosts behind the
    /// gateway.
    pub fn pod(&self, name: &str) -> Pod<'_> {
        Pod::new(self, name)
    }

    /// A Debian program, or else one of the host's, in the node's namespace, with the environment
    /// for this lab's sockets and databases.
    pub fn node_command(&self, program: &str) -> Result<Command> {
        let mut command = self.program(program)?;
        for directory in ["OVS_RUNDIR", "OVN_RUNDIR"] {
            command.env(directory, self.base.join("run"));
        }
        for directory in ["OVS_DBDIR", "OVN_DBDIR"] {
            command.env(directory, self.base.join("db"));
        }
        for directory in ["OVS_LOGDIR", "OVN_LOGDIR"] {
            command.env(directory, self.base.join("log"));
        }
        for directory in ["OVS_SYSCONFDIR", "OVN_SYSCONFDIR"] {
            command.env(directory, self.base.join("etc"));
        }
        command.env("OVN_NB_DB", self.remote("ovnnb_db.sock"));
        command.env("OVN_SB_DB", self.remote("ovnsb_db.sock"));
        self.node().enter(&mut command)?;
        Ok(command)
    }

    /// The address of one of the lab's databases as OVS and OVN write it: `unix:…`.
    pub fn remote(&self, socket: &str) -> String {
        format!("unix:{}", self.socket(socket).display())
    }

    pub(crate) fn program(&self, program: &str) -> Result<Command> {
        match self.root.command(program) {
            Ok(command) => Ok(command),
            Err(_) if on_host(program) => Ok(Command::new(program)),
            Err(error) => Err(error),
        }
    }

    /// Runs `ip -batch` with these commands in `namespace`.
    pub(crate) fn ip_batch(&self, namespace: &NetNs, commands: &str) -> Result<()> {
        let file = self.base.join("etc").join(format!("{namespace}.ip"));
        fs::write(&file, commands)?;
        let mut command = self.root.command("ip")?;
        command.arg("-batch").arg(&file);
        namespace.enter(&mut command)?;
        run(&mut command)?;
        Ok(())
    }

    /// Runs `ovn-nbctl` with these arguments and returns what it prints.
    pub fn nbctl(&self, arguments: &[&str]) -> Result<String> {
        self.control("ovn-nbctl", arguments)
    }

    /// Runs these `ovn-nbctl` commands, one per line, in one transaction.
    pub(crate) fn nbctl_lines(&self, commands: &str) -> Result<()> {
        let mut arguments = Vec::new();
        for line in commands.lines() {
            arguments.push("--");
            arguments.extend(line.split_whitespace());
        }
        self.nbctl(&arguments)?;
        Ok(())
    }

    /// Runs `ovn-sbctl` with these arguments and returns what it prints.
    pub fn sbctl(&self, arguments: &[&str]) -> Result<String> {
        self.control("ovn-sbctl", arguments)
    }

    /// Runs `ovs-vsctl` with these arguments and returns what it prints.
    pub fn vsctl(&self, arguments: &[&str]) -> Result<String> {
        self.control("ovs-vsctl", arguments)
    }

    /// Runs `ovs-ofctl` with these arguments and returns what it prints.
    pub fn ofctl(&self, arguments: &[&str]) -> Result<String> {
        self.control("ovs-ofctl", arguments)
    }

    /// Runs `ovs-appctl` with these arguments and returns what it prints.
    pub fn appctl(&self, arguments: &[&str]) -> Result<String> {
        self.control("ovs-appctl", arguments)
    }

    fn control(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let limit = format!("--timeout={}", PATIENT.as_secs());
        run(self.node_command(program)?.arg(limit).args(arguments))
    }

    /// Waits until OVN has brought every change of the NB database down to the flow tables.
    pub fn sync(&self) -> Result<()> {
        self.nbctl(&["--wait=hv", "sync"])?;
        Ok(())
    }

    /// The OVN northbound database.
    pub fn nb(&self) -> Result<Database> {
        Database::connect(&self.socket("ovnnb_db.sock"), "OVN_Northbound")
    }

    /// The OVN southbound database.
    pub fn sb(&self) -> Result<Database> {
        Database::connect(&self.socket("ovnsb_db.sock"), "OVN_Southbound")
    }

    /// The local Open_vSwitch database.
    pub fn ovs_db(&self) -> Result<Database> {
        Database::connect(&self.socket("db.sock"), "Open_vSwitch")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Err(error) = tear_down(&self.name, &self.base) {
            eprintln!("cannot clean up the lab {}: {error:#}", self.name);
        }
    }
}

fn directory(name: &str) -> Result<PathBuf> {
    let fits = (1..=NAME_MAX).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    ensure!(
        fits,
        "`{name}` cannot name a lab: 1 to {NAME_MAX} lower-case letters, digits and hyphens"
    );
    Ok(Path::new(PARENT).join(format!("{PREFIX}{name}")))
}

fn node_namespace(lab: &str) -> NetNs {
    NetNs::named(format!("{lab}-node"))
}

/// The namespace of a pod.
pub(crate) fn pod_namespace(lab: &str, pod: &str) -> NetNs {
    NetNs::named(format!("{lab}-{pod}"))
}

fn lock(base: &Path) -> Result<File> {
    let directory = File::open(base)?;
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(directory),
        Err(Errno::WOULDBLOCK) => bail!("another process uses the lab at {}", base.display()),
        Err(error) => Err(error.into()),
    }
}

/// Ends and removes a lab, unless a live process uses it.
fn remove(name: &str, base: &Path) -> Result<()> {
    let _lock = if base.exists() {
        Some(lock(base)?)
    } else {
        None
    };
    tear_down(name, base)
}

fn tear_down(name: &str, base: &Path) -> Result<()> {
    // The pods that every lab has, also if the directory is gone already.
    let mut pods = vec!["inet".to_owned()];
    pods.extend(topology::pods().iter().map(|pod| pod.lsp()));
    pods.extend(PodRecord::names(base)?);
    let mut namespaces: Vec<_> = pods.iter().map(|pod| pod_namespace(name, pod)).collect();
    namespaces.push(node_namespace(name));
    // Nothing of a lab is worth an orderly shutdown.
    kill_all(&namespaces)?;
    for namespace in namespaces {
        namespace.delete()?;
    }
    if base.join(BPF_FS).exists() {
        // Not mounted if the lab ended in between.
        let _ = unmount(base.join(BPF_FS), UnmountFlags::DETACH);
    }
    if base.exists() {
        fs::remove_dir_all(base).with_context(|| format!("cannot remove {}", base.display()))?;
    }
    Ok(())
}

fn on_host(program: &str) -> bool {
    program.contains('/')
        || std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// A random UUID from the kernel.
pub(crate) fn random_uuid() -> Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?
        .trim()
        .to_owned())
}

fn schema_has_acl_tiers(root: &Root) -> Result<bool> {
    let file = root.path().join("usr/share/ovn/ovn-nb.ovsschema");
    let schema: serde_json::Value = serde_json::from_slice(
        &fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?,
    )?;
    Ok(schema["tables"]["ACL"]["columns"].get("tier").is_some())
}
