//! Shared by the lab tests: [`lab!`](crate::lab!), and how a test says that it cannot run.

use std::{
    env::VarError,
    fmt::Display,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use crate::{
    agent::{self, beside_this_program},
    lab::{Cluster, Datapath, Lab, LabOptions},
    root::{Contents, Root},
};

/// The environment variable that names the directory of the unpacked Debian packages to use.
pub const ROOT_VARIABLE: &str = "DNSFLOW_LAB_ROOT";

/// The environment variable that names the file to which tests that cannot run say so.
pub const NOT_RUN_VARIABLE: &str = "DNSFLOW_NOT_RUN";

/// The environment variable that says what the labs' bridges are made of: `netdev`, the default, or
/// `system`, the kernel's openvswitch module.
pub const DATAPATH_VARIABLE: &str = "DNSFLOW_LAB_DATAPATH";

/// The environment variable of the agents' option `--open-by`.
pub const OPEN_BY_VARIABLE: &str = "DNSFLOW_OPEN_BY";

/// Whether the agents open addresses by marks.
pub fn is_by_marks() -> bool {
    std::env::var_os(OPEN_BY_VARIABLE).is_some_and(|value| value == "marks")
}

/// Whether QEMU emulates this machine's processors. Such a machine is some ten times slower than its host.
pub fn is_emulated() -> bool {
    let processors = fs::read_to_string("/proc/cpuinfo");
    processors.is_ok_and(|processors| processors.contains("QEMU TCG CPU"))
}

/// Ends the reason of a test that this machine's kernel cannot run, but a stock one can.
pub const LEFT_TO_VM: &str = "left to `cargo xtask test --vm`";

/// Ends the reason of a test that takes what neither Debian nor a package registry has: a whole
/// kube-apiserver, or containers and the internet.
pub const LEFT_TO_OTHERS: &str = "left to a machine that has it";

/// Begins what a test says of a scene that it runs once more, because the machine stood still.
pub const RUN_AGAIN: &str = "run again: ";

/// The Debian packages that a lab is made of: `openvswitch-switch` brings the switch, `ovn-central`
/// the databases and northd, `ovn-host` ovn-controller.
pub const LAB_PACKAGES: &[&str] = &[
    "openvswitch-switch",
    "ovn-central",
    "ovn-host",
    "unbound",
    "curl",
    "iproute2",
    "ethtool",
];

/// The directory and the package of Prometheus, whose promtool the tests ask about the alerts.
pub const PROMETHEUS: (&str, Contents<'_>) = (
    "prometheus",
    Contents {
        suite: "trixie",
        packages: &["prometheus"],
    },
);

/// The lab of a test, or `return` after saying why it cannot run. The name must be distinct
/// among all tests; with `agent`, the agent's binary must be there too.
#[macro_export]
macro_rules! lab {
    ($name:literal) => {
        match $crate::support::test_lab($name, false, $crate::lab::Cluster::default()) {
            Some(lab) => lab,
            None => return,
        }
    };
    ($name:literal, agent) => {
        $crate::lab!($name, agent, $crate::lab::Cluster::default())
    };
    ($name:literal, agent, $cluster:expr) => {
        match $crate::support::test_lab($name, true, $cluster) {
            Some(lab) => lab,
            None => return,
        }
    };
}

/// Reports that a test could not run, and why: on standard error past the test harness's capture,
/// and in the file that `cargo xtask test` counts.
pub fn not_run(test: &str, why: impl Display) {
    let line = format!("not run: {test}: {why}\n");
    let mut stderr = std::io::stderr();
    stderr
        .write_all(line.as_bytes())
        .expect("standard error is open");
    if let Some(file) = std::env::var_os(NOT_RUN_VARIABLE) {
        std::fs::File::options()
            .create(true)
            .append(true)
            .open(file)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("the file of DNSFLOW_NOT_RUN can be written");
    }
}

/// Reports on standard error, past the test harness's capture, that a scene is run once more because the machine stood
/// still for so long.
pub fn run_again(test: &str, stood: Duration) {
    let line = format!(
        "{RUN_AGAIN}{test}: the machine stood still for {} ms\n",
        stood.as_millis()
    );
    let mut stderr = std::io::stderr();
    stderr
        .write_all(line.as_bytes())
        .expect("standard error is open");
}

/// The name of the test that runs on this thread: libtest names a test's thread after it.
pub fn this_test() -> String {
    let thread = std::thread::current();
    thread.name().unwrap_or("a test").to_owned()
}

/// The programs that a lab needs, or why they are missing.
fn prerequisites(needs_agent: bool) -> Result<Root> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "it takes root to make network namespaces"
    );
    let path = match std::env::var_os(ROOT_VARIABLE) {
        Some(path) => path.into(),
        None => root_directory("bookworm")?,
    };
    let root = Root::existing(&path).context("`cargo xtask test` fetches them")?;
    if needs_agent {
        agent::binary()?;
    }
    Ok(root)
}

/// The unpacked packages for a test that needs no lab; `None` after saying why there are none.
pub fn test_root(test: &str) -> Option<Root> {
    prerequisites(false)
        .inspect_err(|why| not_run(test, format!("{why:#}")))
        .ok()
}

/// The function behind [`lab!`](crate::lab!).
pub fn test_lab(name: &str, needs_agent: bool, cluster: Cluster) -> Option<Lab> {
    let options = options(name, needs_agent, cluster)?;
    Some(Lab::up(options).expect("the lab comes up"))
}

fn options(name: &str, needs_agent: bool, cluster: Cluster) -> Option<LabOptions> {
    let root = prerequisites(needs_agent)
        .inspect_err(|why| not_run(name, format!("{why:#}")))
        .ok()?;
    Some(LabOptions {
        name: lab_name(name),
        root,
        datapath: datapath().expect("a datapath"),
        cluster,
        helper: helper().expect("this program has a path"),
    })
}

/// The datapath of [`DATAPATH_VARIABLE`].
pub fn datapath() -> Result<Datapath> {
    match std::env::var(DATAPATH_VARIABLE) {
        Ok(name) => Datapath::named(&name)
            .with_context(|| format!("{DATAPATH_VARIABLE}={name}: neither netdev nor system")),
        Err(VarError::NotPresent) => Ok(Datapath::Netdev),
        Err(error) => Err(error).context(DATAPATH_VARIABLE),
    }
}

/// `dnsflow-lab-helper`, as built beside this program.
pub fn helper() -> Result<PathBuf> {
    beside_this_program("dnsflow-lab-helper")
}

/// Where `cargo xtask` keeps the unpacked packages of a Debian release, in cargo's target
/// directory.
pub fn root_directory(suite: &str) -> Result<PathBuf> {
    let profile = beside_this_program("")?;
    let target = profile
        .parent()
        .context("a program without target directory")?;
    Ok(target.join("roots").join(suite))
}

/// The workspace: the one that cargo runs this program in, or that the current directory is in.
/// Not the one that the program was built in: a checkout may have moved since.
pub fn workspace() -> Result<PathBuf> {
    let from = match std::env::var_os("CARGO_MANIFEST_DIR") {
        Some(package) => package.into(),
        None => std::env::current_dir()?,
    };
    workspace_around(&from)
}

fn workspace_around(directory: &Path) -> Result<PathBuf> {
    let is_workspace = |directory: &&Path| {
        ["Cargo.toml", "xtask/Cargo.toml"]
            .iter()
            .all(|file| directory.join(file).is_file())
    };
    let found = directory.ancestors().find(is_workspace);
    found.map(Path::to_owned).with_context(|| {
        format!(
            "{} is in no checkout of dnsflow: run this by cargo, or from inside of one",
            directory.display()
        )
    })
}

/// The full name of a lab that tests or the demo bring up: other checkouts may be doing the same.
pub fn lab_name(name: &str) -> String {
    format!("{}-{}", name.replace('_', "-"), checkout())
}

/// Whether [`lab_name`] has made this name, in this checkout.
pub fn is_ours(lab: &str) -> bool {
    lab.ends_with(&format!("-{}", checkout()))
}

fn checkout() -> String {
    let mut hasher = DefaultHasher::new();
    // A program that is started outside of all checkouts has labs of its own.
    workspace().ok().hash(&mut hasher);
    format!("{:08x}", hasher.finish() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_found_from_anywhere_inside() {
        let name = format!("dnsflow-workspace-{}", std::process::id());
        let top = std::env::temp_dir().join(name);
        let deep = top.join("tests/src/netns");
        std::fs::create_dir_all(&deep).expect("a directory");
        std::fs::create_dir_all(top.join("xtask")).expect("a directory");
        for file in ["Cargo.toml", "tests/Cargo.toml", "xtask/Cargo.toml"] {
            std::fs::write(top.join(file), "").expect("a file");
        }
        for from in [&top, &top.join("tests"), &top.join("xtask"), &deep] {
            assert_eq!(workspace_around(from).expect("it is there"), top);
        }
        std::fs::remove_dir_all(&top).expect("it is removed");
        let outside = workspace_around(Path::new("/")).expect_err("it is outside");
        assert!(outside.to_string().contains("in no checkout"), "{outside}");
    }
}
