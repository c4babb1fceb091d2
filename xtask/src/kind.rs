//! `cargo xtask kind`: dnsflow in a cluster, with the scenes of the lab's story.
//!
//! Either makes a cluster of ovn-kubernetes' own kind environment and two web servers beside it,
//! and takes them down again; or goes to a cluster that is there, and takes away what it put there.
//! Both after a failure and Ctrl-C, too. It must never touch a cluster, or an object in one, that
//! it did not make.

pub(crate) mod access;
mod cluster;
pub(crate) mod deployment;
mod dns;
mod story;
mod tools;

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use dnsflow_tests::support::root_directory;

use self::{
    access::Access,
    cluster::Cluster,
    deployment::Deployment,
    dns::Dns,
    story::{Servers, Setting, Story},
};
use crate::{image, interrupt};

/// The agent's image, which the overlay `kind` names.
const IMAGE: &str = "dnsflow:kind";
/// The image of the pods.
const POD_IMAGE: &str = "curlimages/curl:8.11.1";
/// The cluster's DNS, unless something else is said.
const DNS_SERVICE: &str = "kube-system/k8s-app=kube-dns";
/// Between two changes of the rules, unless something else is said.
const EDIT_PAUSE: Duration = Duration::from_secs(4);
/// What ovn-kubernetes' DNS name resolver reads and writes; only it accepts a wildcard.
const RESOLVER_DEFINITION: &str = "customresourcedefinition/dnsnameresolvers.network.openshift.io";

/// Runs dnsflow in a cluster: in ovn-kubernetes' kind environment, which needs Docker, kind,
/// kubectl and the internet; or in one that is there, which needs kubectl.
#[derive(Debug, Args)]
pub(crate) struct KindCommand {
    /// The cluster's name
    #[arg(long, default_value = "dnsflow", conflicts_with = "attach")]
    name: String,
    /// A checkout of ovn-kubernetes [default: one that is made below target/]
    #[arg(long, value_name = "DIR", conflicts_with = "attach")]
    ovn_kubernetes: Option<PathBuf>,
    /// The branch or tag of ovn-kubernetes to check out
    #[arg(
        long,
        default_value = "v1.3.0",
        conflicts_with_all = ["ovn_kubernetes", "attach"]
    )]
    git_ref: String,
    /// Without ovn-kubernetes' DNS name resolver, and so without a wildcard
    #[arg(long)]
    without_resolver: bool,
    /// Leave the cluster up
    #[arg(long, conflicts_with = "attach")]
    keep: bool,
    /// Go to the cluster of this kubeconfig, where dnsflow is not, and leave it as it was
    #[arg(long, value_name = "KUBECONFIG", requires_all = ["www", "rest"])]
    attach: Option<PathBuf>,
    /// There: the address of a web server outside of the cluster
    #[arg(long, value_name = "ADDRESS", requires = "attach")]
    www: Option<IpAddr>,
    /// There: the address of another one
    #[arg(long, value_name = "ADDRESS", requires = "attach")]
    rest: Option<IpAddr>,
    /// There: the agent's image, as the nodes have it or pull it [default: dnsflow:kind]
    #[arg(long, value_name = "NAME", requires = "attach")]
    image: Option<String>,
    /// There: an image with curl and a shell [default: curlimages/curl:8.11.1]
    #[arg(long, value_name = "NAME", requires = "attach")]
    pod_image: Option<String>,
    /// There: the Services of the cluster's DNS [default: kube-system/k8s-app=kube-dns]
    #[arg(long, value_name = "SERVICE", requires = "attach")]
    dns_service: Option<String>,
    /// There: the directory in deploy/ that fits the cluster [default: base]
    #[arg(long, value_name = "DIR", requires = "attach")]
    overlay: Option<String>,
    /// There: the node of the pods [default: one without a DNS server]
    #[arg(long, requires = "attach")]
    node: Option<String>,
    /// Seconds between two changes of the rules: OVN and dnsflow follow them
    #[arg(long, value_name = "SECONDS", default_value_t = EDIT_PAUSE.as_secs())]
    edit_pause: u64,
}

impl KindCommand {
    fn edit_pause(&self) -> Duration {
        Duration::from_secs(self.edit_pause)
    }
}

/// Tells the story.
pub(crate) fn run(command: &KindCommand) -> Result<()> {
    let home = root_directory("")?.with_file_name("kind");
    match &command.attach {
        Some(kubeconfig) => attach(command, kubeconfig, home.join("attached")),
        None => make(command, home.join(&command.name)),
    }
}

/// In a cluster that is made for it.
fn make(command: &KindCommand, home: PathBuf) -> Result<()> {
    tools::check()?;
    let cluster = Cluster::new(
        &command.name,
        &home,
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
    let told = tell_in(&cluster, home, command);
    if command.keep {
        println!(
            "the cluster stays: export KUBECONFIG={}",
            cluster.access().kubeconfig.display()
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
fn tell_in(cluster: &Cluster, home: PathBuf, command: &KindCommand) -> Result<()> {
    step("ovn-kubernetes' kind environment", || {
        cluster.up()?;
        cluster.mount_bpf()
    })?;
    step("the image", || {
        image::build(IMAGE)?;
        cluster.load(&[IMAGE])
    })?;
    let servers = step("web servers beside the cluster", || cluster.start_servers())?;
    let access = cluster.access();
    let deployment = Deployment::new(access.clone(), home, "overlays/kind", IMAGE, Vec::new())?;
    tell(&Setting {
        access: &access,
        deployment: &deployment,
        dns: &Dns::parse(DNS_SERVICE)?,
        servers: &servers,
        pod_image: POD_IMAGE,
        node: None,
        wildcard: !command.without_resolver,
        edit_pause: command.edit_pause(),
    })
}

/// In a cluster that is there.
fn attach(command: &KindCommand, kubeconfig: &Path, home: PathBuf) -> Result<()> {
    tools::check_kubectl()?;
    let access = Access::by_kubeconfig(std::path::absolute(kubeconfig)?);
    let address = |address: Option<IpAddr>| address.context("an address").map(|it| it.to_string());
    let servers = Servers {
        www: address(command.www)?,
        rest: address(command.rest)?,
    };
    let service = command.dns_service.as_deref();
    let options = service.map(|service| ("DNSFLOW_DNS_SERVICE", service.to_owned()));
    let deployment = Deployment::new(
        access.clone(),
        home,
        command.overlay.as_deref().unwrap_or("base"),
        command.image.as_deref().unwrap_or(IMAGE),
        options.into_iter().collect(),
    )?;
    let dns = Dns::parse(service.unwrap_or(DNS_SERVICE))?;
    deployment.ensure_absent()?;
    Story::ensure_absent(&access)?;
    let wildcard = !command.without_resolver && access.has(&[RESOLVER_DEFINITION])?;
    let told = tell(&Setting {
        access: &access,
        deployment: &deployment,
        dns: &dns,
        servers: &servers,
        pod_image: command.pod_image.as_deref().unwrap_or(POD_IMAGE),
        node: command.node.as_deref(),
        wildcard,
        edit_pause: command.edit_pause(),
    });
    println!("\n== taking everything away again");
    let down = [deployment.remove(), Story::remove(&access)];
    let down = down.into_iter().collect::<Result<Vec<()>>>();
    if let (Err(_), Err(error)) = (&told, &down) {
        eprintln!("error: {error:#}");
    }
    told?;
    down?;
    println!("\nthe cluster is as it was\n\nok");
    Ok(())
}

/// In the cluster of `cargo xtask cluster`, with servers at these addresses. dnsflow and what the story has made are gone
/// afterwards.
pub(crate) fn tell_with(
    access: &Access,
    deployment: &Deployment,
    pod_image: &str,
    [www, rest]: [&str; 2],
) -> Result<()> {
    tell(&Setting {
        access,
        deployment,
        dns: &Dns::parse(DNS_SERVICE)?,
        servers: &Servers {
            www: www.to_owned(),
            rest: rest.to_owned(),
        },
        pod_image,
        node: None,
        wildcard: false,
        edit_pause: EDIT_PAUSE,
    })?;
    Story::remove(access)
}

/// From the first pod to the last flow.
fn tell(setting: &Setting<'_>) -> Result<()> {
    let story = step("names, firewalls and pods", || Story::begin(setting))?;
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

pub(crate) fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    interrupt::check()?;
    println!("\n== {name}");
    let start = Instant::now();
    let result = work();
    println!("   took {:.1} s", start.elapsed().as_secs_f64());
    // A signal may be why it failed.
    interrupt::check()?;
    result.map_err(|error| error.context(format!("{name}: not as it should be")))
}

/// Why `cargo xtask test` leaves it out.
pub(crate) fn why_not_run() -> String {
    match tools::check() {
        Err(missing) => missing.0,
        Ok(()) => "it builds ovn-kubernetes and takes long; it has a command of its own".to_owned(),
    }
}
