//! `kubectl dnsflow …`: the subcommands that ask an agent, over all nodes, and those that concern the cluster.
//!
//! kubectl runs a program named `kubectl-dnsflow` for that, which is this one, and `kubectl_complete-dnsflow` for a
//! shell. It asks by `kubectl exec` in
//! the agents' containers, and so with the user's own credentials and rights, whatever way kubectl gets
//! them (`docs/decisions/kubectl-plugin.md`).

mod agents;
mod all_nodes;
mod bundles;
mod command_line;
mod completion;
mod follow;
mod merge;
mod objects;
mod preflight;
mod uninstall;

use std::{env, ffi::OsString, io, path::Path};

use anyhow::{Context as _, anyhow, bail};
use clap::Parser as _;
use dnsflow_core::ask::view::PortView;
use tokio::runtime;

use crate::{
    commands::kind_hint,
    exit::Exit,
    manifests,
    options::{
        CacheCommand, CheckOptions, Cli, Command, ExplainOptions, FlowsCommand, LearnOptions,
        ObserveOptions, OutputFormat, ReportOptions,
    },
    output::UNWRITTEN,
};
use agents::Kubectl;
use command_line::{Given, OfCluster};
pub use command_line::{Plugin, command};
use merge::Question;

/// Agents that are followed at the same time: each takes a process of kubectl.
const FOLLOWED_MAX: usize = 128;
/// The name under which kubectl finds this program.
const NAME: &str = "kubectl-dnsflow";
/// The name under which kubectl finds the program that completes its command lines.
const COMPLETION_NAME: &str = "kubectl_complete-dnsflow";

/// What the program does because of the name that it was called by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Called {
    /// It asks the agents.
    Plugin,
    /// It completes a command line of the plugin.
    Completion,
}

/// Whether the program was called by a name of the plugin.
pub fn called(program: Option<&OsString>) -> Option<Called> {
    let name = Path::new(program?).file_name()?;
    match name.to_str()? {
        NAME => Some(Called::Plugin),
        COMPLETION_NAME => Some(Called::Completion),
        _ => None,
    }
}

/// Does that with the process's command line. A wrong one ends the process, as does one that asks for help.
pub fn run(called: Called, output: &mut impl io::Write) -> anyhow::Result<Exit> {
    let arguments: Vec<String> = env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    if called == Called::Completion {
        completion::write(&arguments, output).context(UNWRITTEN)?;
        return Ok(Exit::Done);
    }
    let given = Given::parse(&arguments).unwrap_or_else(|error| error.exit());
    let Plugin {
        agents_namespace,
        agents_selector,
        node: nodes,
        kubeconfig,
        context,
        timeout: patience,
    } = given.plugin.clone();
    let options = [("--kubeconfig", kubeconfig), ("--context", context)];
    let options = options
        .into_iter()
        .filter_map(|(name, value)| Some([name.to_owned(), value?]));
    let kubectl = Kubectl {
        options: options.flatten().collect(),
        namespace: agents_namespace.clone(),
        patience,
    };
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    let agents_of = async || {
        let agents = kubectl.agents(&agents_selector).await?;
        if agents.is_empty() {
            bail!(
                "no pod has the labels {agents_selector} in the namespace {agents_namespace}: see \
                 --agents-namespace and --agents-selector"
            );
        }
        Ok(match &nodes[..] {
            [] => agents,
            nodes => agents::on(agents, nodes),
        })
    };
    match given.of_cluster() {
        Some(OfCluster::Bundle(options)) => {
            return runtime.block_on(async {
                let agents = agents_of().await?;
                bundles::run(&kubectl, agents, &options.directory, output).await
            });
        }
        Some(OfCluster::Preflight(options)) => {
            return runtime.block_on(preflight::run(&kubectl, &options, output));
        }
        Some(OfCluster::Uninstall(options)) => {
            let uninstall = uninstall::run(&kubectl, &agents_selector, &options, output);
            return runtime.block_on(uninstall);
        }
        None => {}
    }
    runtime.block_on(async {
        let of_context = match given.lacks_namespace() {
            true => Some(kubectl.namespace_of_context().await?),
            false => None,
        };
        let command = given.command(of_context)?;
        let asked = asked(&command)?;
        let mut agents = agents_of().await?;
        if let Asked::Once(Question::Explain { namespace, pod, .. }, _) = &asked {
            let node = kubectl.node_of(namespace, pod).await;
            let node = node.map_err(|error| anyhow!("{error}{}", kind_hint(namespace, pod)))?;
            if !nodes.is_empty() && !nodes.contains(&node) {
                bail!("the pod {namespace}/{pod} is on node {node}, which --node leaves out");
            }
            agents = agents::on(agents, &[node]);
        }
        let count = agents.len();
        if count > FOLLOWED_MAX && !matches!(asked, Asked::Once(..)) {
            bail!(
                "{count} nodes are too many to follow, {FOLLOWED_MAX} are possible: name some with --node"
            );
        }
        match asked {
            Asked::Once(question, format) => {
                let (arguments, input) = match &question {
                    Question::Try(manifests) => (
                        in_json(&command, &["-f", "--filename"], &["-f", "-"]),
                        Some(&**manifests),
                    ),
                    Question::Report(_) => (in_json(&command, &["--html"], &[]), None),
                    _ => (in_json(&command, &[], &[]), None),
                };
                let answers = kubectl.ask(agents, &arguments, input).await;
                merge::write(&question, format, answers, output)
            }
            Asked::Events(format) => {
                let heard = kubectl.follow(agents, &in_json(&command, &[], &[]), |_| true);
                let printed = follow::events(heard, format, output).await;
                printed.context(UNWRITTEN)
            }
            Asked::Learn(options) => {
                let lines = in_format("lines", &command, &[], &[]);
                let namespace = options.namespace.clone();
                let is_there = move |port: &PortView| port.namespace == namespace;
                let heard = kubectl.follow(agents, &lines, move |status| {
                    status.node.ports.iter().any(&is_there)
                });
                let printed = follow::learn(heard, &options, patience, output).await;
                printed.context(UNWRITTEN)?.with_context(|| {
                    let namespace = &options.namespace;
                    format!("no pod of {namespace} has an interface on the nodes that have answered")
                })
            }
        }
    })
}

/// What a command line asks of agents.
#[derive(Debug, PartialEq)]
enum Asked {
    /// One answer of each, and how it is to be printed.
    Once(Question, OutputFormat),
    /// The events that come.
    Events(OutputFormat),
    /// A recording.
    Learn(LearnOptions),
}

/// What a command line asks of agents. A wrong one ends the process.
fn asked(command: &[String]) -> anyhow::Result<Asked> {
    let arguments = ["kubectl dnsflow"].into_iter().map(str::to_owned);
    let cli = Cli::try_parse_from(arguments.chain(command.iter().cloned()));
    let (question, format) = match cli.unwrap_or_else(|error| error.exit()).command {
        Command::Status(control) => (Question::Status, control.output.format),
        Command::Cache(CacheCommand::List(options)) => {
            (Question::Cache, options.control.output.format)
        }
        Command::Flows(FlowsCommand::List(options)) => {
            (Question::Flows, options.control.output.format)
        }
        Command::Explain(options) => {
            let target = options.whole_target();
            let ExplainOptions { pod, control, .. } = options;
            let question = Question::Explain {
                namespace: pod.namespace,
                pod: pod.name,
                target,
            };
            (question, control.output.format)
        }
        Command::Observe(ObserveOptions {
            follow,
            last,
            control,
            ..
        }) => match follow {
            true => return Ok(Asked::Events(control.output.format)),
            false => (Question::Observe { last }, control.output.format),
        },
        Command::LogLevel(options) => (Question::LogLevel, options.control.output.format),
        Command::Check(options) => {
            let CheckOptions { output, .. } = *options;
            (Question::Check, output.format)
        }
        Command::Learn(options) => return Ok(Asked::Learn(options)),
        Command::Try(options) => {
            let manifests = manifests::texts(&options.file);
            let manifests =
                manifests.map_err(|reason| anyhow!("cannot read the manifests: {reason}"))?;
            (Question::Try(manifests), options.control.output.format)
        }
        Command::Unused(options) => (Question::Unused, options.control.output.format),
        Command::Report(ReportOptions { html, .. }) => (Question::Report(html), OutputFormat::Json),
        _ => bail!("this command is for one agent"),
    };
    Ok(Asked::Once(question, format))
}

/// The same command for programs, without these options and with these arguments.
fn in_json(command: &[String], without: &[&str], with: &[&str]) -> Vec<String> {
    in_format("json", command, without, with)
}

fn in_format(format: &str, command: &[String], without: &[&str], with: &[&str]) -> Vec<String> {
    let mut words = command_line::without(command, &[&["-o", "--output"], without].concat());
    let output = ["--output", format];
    words.extend(
        with.iter()
            .chain(&output)
            .map(|argument| (*argument).to_owned()),
    );
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_name_of_the_program_says_what_it_does() {
        let called = |program: &str| super::called(Some(&program.into()));
        assert_eq!(called("/usr/bin/kubectl-dnsflow"), Some(Called::Plugin));
        let completion = called("/usr/bin/kubectl_complete-dnsflow");
        assert_eq!(completion, Some(Called::Completion));
        assert_eq!(called("/usr/bin/dnsflow"), None);
    }

    #[test]
    fn agents_are_asked_for_json_whatever_people_want() {
        for written in ["-o yaml", "--output yaml", "-oyaml", "--output=yaml"] {
            let command = words(&format!("cache list {written} -n ns1"));
            assert_eq!(
                in_json(&command, &[], &[]),
                words("cache list -n ns1 --output json")
            );
            let asked = asked(&command).expect("no manifests");
            assert_eq!(asked, Asked::Once(Question::Cache, OutputFormat::Yaml));
        }
        assert_eq!(
            in_json(&words("status"), &[], &[]),
            words("status --output json")
        );
        for written in ["-f a", "-fa", "--filename a", "--filename=a"] {
            let command = words(&format!("try {written}"));
            assert_eq!(
                in_json(&command, &["-f", "--filename"], &["-f", "-"]),
                words("try -f - --output json")
            );
        }
    }
}
