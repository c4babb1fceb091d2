//! `cargo xtask kind`: dnsflow in a cluster of ovn-kubernetes' own kind environment.
//!
//! Makes a cluster and two web servers beside it, plays the scenes of the lab's story there, and
//! takes everything down again, after a failure and Ctrl-C too. It must never touch a cluster
//! that it did not make.

mod cluster;
mod story;
mod tools;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;

use self::{cluster::Cluster, story::Story};
use crate::{image, interrupt};

/// The image that the overlay `kind` names.
const IMAGE: &str = "dnsflow:kind";

/// Runs dnsflow in ovn-kubernetes' kind environment; needs Docker, kind, kubectl and the internet.
#[derive(Debug, Args)]
pub(crate) struct KindCommand {
    /// The cluster's name
    #[arg(long, default_value = "dnsflow")]
    name: String,
    /// A checkout of ovn-kubernetes [default: one that is made below target/]
    #[arg(long, value_name = "DIR")]
    ovn_kubernetes: Option<PathBuf>,
    /// The branch or tag of ovn-kubernetes to check out
    #[arg(long, default_value = "master", conflicts_with = "ovn_kubernetes")]
    git_ref: String,
    /// Without ovn-kubernetes' DNS name resolver, and so without a wildcard
    #[arg(long)]
    without_resolver: bool,
    /// Leave the cluster up
    #[arg(long)]
    keep: bool,
}

/// Brings it up, tells the story, and takes it down.
pub(crate) fn run(command: &KindCommand) -> Result<()> {
    tools::check()?;
    let cluster = Cluster::new(
        &command.name,
        command.ovn_kubernetes.as_deref(),
        !command.without_resolver,
    )?;
    ensure!(
        !cluster.exists()?,
        "there is a cluster `{name}` already, which is left alone; --name gives another name, and \
         `kind delete cluster --name {name}` ends it",
        name = command.name
    );
    cluster.check_out(&command.git_ref)?;
    let told = tell(&cluster);
    if command.keep {
        println!(
            "the cluster stays: export KUBECONFIG={}",
            cluster.kubeconfig().display()
        );
        return told;
    }
    let down = cluster.down();
    if let (Err(_), Err(error)) = (&told, &down) {
        eprintln!("error: {error:#}");
    }
    told?;
    down?;
    println!("\nthe cluster is gone again\n\nok");
    Ok(())
}

/// Everything between up and down.
fn tell(cluster: &Cluster) -> Result<()> {
    step("ovn-kubernetes' kind environment", || cluster.up())?;
    step("the image", || {
        image::build(IMAGE)?;
        cluster.load(&[IMAGE])
    })?;
    let servers = step("web servers beside the cluster", || cluster.start_servers())?;
    let story = step("names, firewalls and pods", || {
        Story::begin(cluster, &servers)
    })?;
    for (name, play) in story.steps() {
        step(name, || {
            for seen in play(&story)? {
                println!("   {seen}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    interrupt::check()?;
    println!("\n== {name}");
    let result = work();
    // A signal may be why it failed.
    interrupt::check()?;
    result.map_err(|error| error.context(format!("{name}: not as it should be")))
}

/// Why `cargo xtask test` leaves it out.
pub(crate) fn why_not_run() -> String {
    match tools::check() {
        Err(missing) => missing.to_string(),
        Ok(()) => "it builds ovn-kubernetes and takes long; it has a command of its own".to_owned(),
    }
}
