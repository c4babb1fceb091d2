//! Prepares the lab, the tests and the demo: root, Debian's programs, the BPF object, the agent.

use std::{env, process::Command};

use anyhow::{Result, ensure};
use clap::ValueEnum;
use dnsflow_tests::{
    root::{Contents, Root},
    support::{LAB_PACKAGES, PROMETHEUS, root_directory},
};

use crate::{ebpf, interrupt};

/// Which OVN, by the Debian release that ships it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Ovn {
    /// OVN 23.03, Open vSwitch 3.1 (Debian 12)
    Bookworm,
    /// OVN 25.03, Open vSwitch 3.5 (Debian 13)
    Trixie,
    /// Whatever Debian's unstable distribution has: OVN 26.03, Open vSwitch 4.0 in November 2026
    Sid,
}

impl Ovn {
    /// Debian's code name.
    pub(crate) fn suite(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::Sid => "sid",
        }
    }

    /// The versions of OVN and of Open vSwitch. Those of `sid` are the ones that the project was last tested with.
    pub(crate) fn versions(self) -> [&'static str; 2] {
        match self {
            Self::Bookworm => ["23.03", "3.1"],
            Self::Trixie => ["25.03", "3.5"],
            Self::Sid => ["26.03", "4.0"],
        }
    }
}

/// Stops right here without root.
pub(crate) fn require_root(what: &str) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "`cargo xtask {what}` needs root, for network namespaces and BPF programs; nothing was done"
    );
    Ok(())
}

/// Open vSwitch and OVN of a Debian release, fetched unless they are there.
pub(crate) fn ovn(ovn: Ovn, say: &dyn Fn(&str)) -> Result<Root> {
    let contents = Contents {
        suite: ovn.suite(),
        packages: LAB_PACKAGES,
    };
    let root = Root::ensure(&root_directory(ovn.suite())?, contents, say)?;
    interrupt::check()?;
    Ok(root)
}

/// The directory and the package of skopeo, which the tests ask about images.
pub(crate) const SKOPEO: (&str, Contents<'_>) = (
    "skopeo",
    Contents {
        suite: "trixie",
        packages: &["skopeo"],
    },
);

/// The programs that tests ask about files, fetched unless they are there.
pub(crate) fn askers(say: &dyn Fn(&str)) -> Result<()> {
    for (directory, contents) in [SKOPEO, PROMETHEUS] {
        Root::ensure(&root_directory(directory)?, contents, say)?;
        interrupt::check()?;
    }
    Ok(())
}

/// The BPF object, the agent and the lab's helper, built.
pub(crate) fn build(say: &dyn Fn(&str)) -> Result<()> {
    ebpf::build(say)?;
    interrupt::check()?;
    say("building the agent (the first time takes a few minutes)");
    let mut command = cargo();
    command.args(["build", "--quiet", "--bins"]);
    command.args(["--package", "dnsflow-agent", "--package", "dnsflow-tests"]);
    let status = interrupt::wait(interrupt::spawn(&mut command)?)?;
    ensure!(status.success(), "the build failed");
    Ok(())
}

/// The cargo that runs this program.
pub(crate) fn cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}
