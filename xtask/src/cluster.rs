//! `cargo xtask cluster`: a cluster of ovn-kubernetes on this machine, and dnsflow in it.
//!
//! Two nodes run in namespaces, on Open vSwitch's userspace datapath, below a whole control plane; with `--vm`, the
//! first one runs in a virtual machine, on the datapath of its kernel. The scripts in `tests/cluster` start programs
//! that `CLUSTER_BIN` has, and build none. Everything goes again, also after a failure and Ctrl-C.

mod family;
mod nodes;
mod programs;
mod releases;
mod restarts;
mod table;
mod virtual_node;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use dnsflow_tests::{
    go::{HELM, HELM_4},
    support::{helper, lab_name, root_directory},
};

use self::{
    family::Family,
    nodes::Nodes,
    programs::Programs,
    releases::Release,
    restarts::{Restart, Restarts},
    virtual_node::{Gateway, VirtualNode},
};
use crate::{
    image, interrupt,
    kind::{self, deployment::Deployment},
    prepare::cargo,
    vm::{Kernel, Machine},
};

/// The agent's image, which `deploy/base` names.
const IMAGE: &str = "dnsflow:latest";
/// The image of all other pods, which `tests/cluster/image.sh` makes.
const POD_IMAGE: &str = "cluster:local";

/// The image of `--other-image`.
const OTHER_IMAGE: &str = "dnsflow:other";
/// Each run takes eight networks of [`Family::server`].
const MAX_RUNS: i64 = 30;

/// Brings up a cluster of two nodes, tells the story in it, restarts agents under fresh names, and takes it down.
#[derive(Debug, Args)]
pub(crate) struct ClusterCommand {
    /// An archive with the agent's image [default: one that is built from this checkout]
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// Write the counts to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The life of a release, by Helm 3 and by Helm 4; then everything else by the chart, and not by kustomize
    #[arg(long, conflicts_with = "other_base")]
    chart: bool,
    /// Without the story, which takes four minutes
    #[arg(long)]
    without_story: bool,
    /// How often each restart is done
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=MAX_RUNS))]
    runs: u8,
    /// Only these restarts
    #[arg(long, value_enum, value_name = "RESTART", value_delimiter = ',')]
    only: Vec<Restart>,
    /// Also updates agents from another version, and takes them back to it: an archive with its image, dnsflow:other
    #[arg(long, value_name = "FILE", requires = "other_base")]
    other_image: Option<PathBuf>,
    /// The other version's deploy/base
    #[arg(long, value_name = "DIRECTORY", requires = "other_image")]
    other_base: Option<PathBuf>,
    /// The one family of pods, Services, nodes and what is outside
    #[arg(long, value_enum, default_value = "ipv4")]
    family: Family,
    /// The first node in a virtual machine with this kernel of Debian's, and its openvswitch module
    #[arg(long, value_enum, value_name = "KERNEL", num_args = 0..=1, default_missing_value = "6.12")]
    vm: Option<Kernel>,
    /// The gateway mode of the virtual machine's node
    #[arg(long, value_enum, default_value = "shared", requires = "vm")]
    gateway: Gateway,
}

/// Brings it up, runs everything, and takes it down.
pub(crate) fn run(command: &ClusterCommand) -> Result<()> {
    let programs = Programs::find()?;
    let directory = root_directory("")?.with_file_name("cluster");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    // Seen in its own place by a virtual machine.
    let directory = directory.canonicalize()?;
    let image = match &command.image {
        Some(image) => std::path::absolute(image)?,
        None => {
            let image = directory.join("dnsflow.tar");
            kind::step("the agent's image", || image::write_for_here(&image, IMAGE))?;
            image
        }
    };
    let images: Vec<_> = [image]
        .into_iter()
        .chain(command.other_image.clone())
        .collect();
    for image in &images {
        ensure!(image.is_file(), "{} is no file", image.display());
    }
    build_helper()?;
    let virtual_node = match command.vm {
        Some(kernel) => {
            let machine = Machine::prepare(kernel, &|text| eprintln!("{text}"))?;
            Some(VirtualNode::new(machine, command.gateway))
        }
        None => None,
    };
    let name = lab_name("cluster");
    let mut nodes = Nodes::new(
        name,
        directory,
        programs,
        helper()?,
        command.family,
        virtual_node,
    );
    // Of a run that was killed.
    nodes.down()?;
    let counted = run_in(&mut nodes, &images, command);
    println!("\n== taking it down");
    let down = nodes.down();
    if let (Err(_), Err(error)) = (&counted, &down) {
        eprintln!("error: {error:#}");
    }
    let counts = counted?;
    down?;
    println!("\nthe cluster is gone again\n\n{}", counts.text());
    if let Some(file) = &command.json {
        fs::write(file, serde_json::to_string_pretty(&counts)? + "\n")
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    ensure!(
        counts.marked() == 0,
        "{} packets left {} with a bit of dnsflow's mark",
        counts.marked(),
        nodes::FIRST
    );
    // By flows, names are late while no agent holds them.
    ensure!(
        !nodes.is_virtual() || counts.worse_of_one_version() == 0,
        "names were late or lost with rules alone, in {} restarts",
        counts.worse_of_one_version()
    );
    Ok(())
}

/// Everything between up and down.
fn run_in(
    nodes: &mut Nodes,
    images: &[PathBuf],
    command: &ClusterCommand,
) -> Result<table::Counts> {
    let access = nodes.access();
    let home = nodes.directory().to_owned();
    let deployment = Deployment::new(access.clone(), home, "base", IMAGE, Vec::new())?;
    let mut by_helm = Vec::new();
    if command.chart {
        let options: [&[&str]; 2] = [&[], &["--force-conflicts"]];
        for (helm, force) in [HELM, HELM_4].into_iter().zip(options) {
            let program = helm.ensure(&|text| eprintln!("{text}"))?;
            by_helm.push((helm.package, force, deployment.clone().by_chart(program)));
        }
    }
    let deployment = match by_helm.first() {
        Some((_, _, by_helm)) => by_helm.clone(),
        None => deployment,
    };
    let other = command
        .other_base
        .as_ref()
        .map(|base| deployment.of_version(base, OTHER_IMAGE))
        .transpose()?;
    kind::step("two nodes", || nodes.up(images))?;
    if !command.without_story {
        let servers = command.family.story_servers();
        kind::tell_with(&access, &deployment, POD_IMAGE, servers)?;
    }
    let restarts = Restarts::begin(nodes, &access, &deployment, other.as_ref())?;
    for (helm, force, deployment) in &by_helm {
        let release = Release {
            nodes,
            access: &access,
            deployment,
            pods: &restarts,
            force,
        };
        release.live(helm)?;
    }
    kind::step("dnsflow is deployed", || deployment.roll_out())?;
    restarts.run(usize::from(command.runs), &command.only)
}

/// Builds the program that asks for names in a pod.
fn build_helper() -> Result<()> {
    let mut build = cargo();
    build.args(["build", "--quiet", "--package", "dnsflow-tests", "--bins"]);
    let status = interrupt::wait(interrupt::spawn(&mut build)?)?;
    ensure!(status.success(), "the build failed");
    Ok(())
}

/// Why `cargo xtask test` leaves it out.
pub(crate) fn why_not_run() -> String {
    match Programs::find() {
        Err(missing) => missing.0,
        Ok(_) => "it takes ten minutes; it has a command of its own".to_owned(),
    }
}
