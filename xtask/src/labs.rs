//! `cargo xtask lab`: a lab to play in. And the end of labs that others have left behind.

mod manifest;

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use dnsflow_tests::{
    dns,
    lab::{Cluster, Lab, LabOptions},
    support,
};

use crate::{
    interrupt,
    prepare::{self, Ovn},
};

/// The agent's variable for its control socket.
const CONTROL_SOCKET: &str = "DNSFLOW_CONTROL_SOCKET";

/// A lab to play in.
#[derive(Debug, Args)]
pub(crate) struct LabCommand {
    /// The lab's name
    #[arg(long, default_value = "play", global = true)]
    name: String,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Bring it up, and leave it up
    Up {
        /// Whose OVN
        #[arg(long, value_enum, default_value = "bookworm")]
        ovn: Ovn,
    },
    /// Run the agent on the node, until ^C
    Agent {
        /// Further options of the agent's
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Give the lab an EgressFirewall: the agent gets the manifest, and OVN the rows that ovn-kubernetes would write
    Apply {
        /// The manifest
        file: PathBuf,
    },
    /// Run a command in a pod, or on the node: ns1_pod1, ns1_pod2, ns2_pod1, dns, inet, node
    Exec {
        /// Where
        pod: String,
        /// The command; dnsflow, ovs-vsctl, ovn-nbctl, curl and the like come with the lab
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// End it and remove everything that it made
    Down,
}

/// Does what the command says.
pub(crate) fn run(command: LabCommand) -> Result<()> {
    let LabCommand { name, action } = command;
    match action {
        Action::Up { ovn } => up(&name, ovn),
        Action::Agent { arguments } => {
            let mut agent = Lab::attach(&name)?.agent_command(&agent()?)?;
            Err(agent.args(arguments).exec().into())
        }
        Action::Apply { file } => apply(&name, &file),
        Action::Exec { pod, command } => exec(&name, &pod, &command),
        Action::Down => {
            let found = Lab::down(&name)?;
            println!("{}", if found { "down" } else { "there was no lab" });
            Ok(())
        }
    }
}

fn up(name: &str, ovn: Ovn) -> Result<()> {
    let say = |text: &str| eprintln!("{text}");
    let root = prepare::ovn(ovn, &say)?;
    prepare::build(&say)?;
    let lab = Lab::up(options(name.to_owned(), root)?)?;
    interrupt::check()?;
    println!(
        "The lab `{name}` is up, in {base}.

  pods     ns1_pod1 ns1_pod2 (namespace ns1), ns2_pod1 (namespace ns2), dns, inet, and the node
  names    {records}
  try      cargo xtask lab exec ns1_pod1 -- curl http://www.example.com/
           cargo xtask lab exec node -- ovn-nbctl show
  rules    cargo xtask lab apply FILE                 (an EgressFirewall of ns1 or ns2)
  agent    cargo xtask lab agent                      (in a terminal of its own)
  ask      cargo xtask lab exec node -- dnsflow status
  end      cargo xtask lab down",
        base = lab.base().display(),
        records = dns::DEFAULT_RECORDS.join("\n           "),
    );
    lab.keep();
    Ok(())
}

/// The agent's program.
fn agent() -> Result<PathBuf> {
    Ok(support::helper()?.with_file_name("dnsflow"))
}

fn apply(name: &str, file: &Path) -> Result<()> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let (namespace, rules) =
        manifest::parse(&text).with_context(|| format!("{}", file.display()))?;
    Lab::attach(name)?.apply(&namespace, &text, &rules)?;
    println!(
        "egressfirewall.k8s.ovn.org/default of {namespace}: {} rules",
        rules.len()
    );
    Ok(())
}

/// The options of a lab, on the datapath that the environment chooses.
pub(crate) fn options(name: String, root: dnsflow_tests::root::Root) -> Result<LabOptions> {
    Ok(LabOptions {
        name,
        root,
        datapath: support::datapath()?,
        cluster: Cluster::default(),
        helper: support::helper()?,
    })
}

fn exec(name: &str, pod: &str, command: &[String]) -> Result<()> {
    let lab = Lab::attach(name)?;
    let Some((program, arguments)) = command.split_first() else {
        bail!("no command");
    };
    let mut command: Command = if pod == "node" && program == "dnsflow" {
        let mut command = Command::new(agent()?);
        command.env(CONTROL_SOCKET, lab.control_socket());
        command
    } else if pod == "node" {
        lab.node_command(program)?
    } else {
        let pod = lab.pod(pod);
        ensure!(
            pod.netns().exists(),
            "the lab {name} has no pod {}",
            pod.netns()
        );
        pod.command(program)?
    };
    Err(command.args(arguments).exec().into())
}

/// Ends labs of this checkout's tests and demo that a killed process has left behind.
pub(crate) fn sweep() -> Result<()> {
    for name in Lab::names()? {
        if support::is_ours(&name) {
            Lab::down(&name)?;
        }
    }
    Ok(())
}
