//! `kubectl dnsflow …`: the subcommands that ask an agent, over all nodes.
//!
//! kubectl runs a program named `kubectl-dnsflow` for that, which is this one. It asks by `kubectl exec` in
//! the agents' containers, and so with the user's own credentials and rights, whatever way kubectl gets
//! them (`docs/decisions/kubectl-plugin.md`).

mod agents;
mod all_nodes;
mod follow;
mod merge;

use std::{ffi::OsString, io, path::Path, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use clap::Parser;
use dnsflow_core::ask::view::PortView;
use tokio::runtime;

use crate::{
    VERSION,
    exit::Exit,
    manifests,
    options::{
        self, CacheCommand, CheckOptions, Cli, Command, ExplainOptions, FlowsCommand, LearnOptions,
        ObserveOptions, OutputFormat, ReportOptions,
    },
    output::UNWRITTEN,
};
use agents::Kubectl;
use merge::Question;

/// Agents that are followed at the same time: each takes a process of kubectl.
const FOLLOWED_MAX: usize = 128;
/// The name under which kubectl finds this program.
const NAME: &str = "kubectl-dnsflow";

/// Asks the agents of all nodes, and merges what they say.
#[derive(Clone, Debug, Parser)]
#[command(
    name = NAME,
    bin_name = "kubectl dnsflow",
    version = VERSION,
    after_help = crate::exit::HELP
)]
pub struct Plugin {
    /// The namespace of the agents
    #[arg(long, value_name = "NAMESPACE", default_value = "dnsflow")]
    agents_namespace: String,

    /// The labels of the agents' pods
    #[arg(
        long,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=dnsflow"
    )]
    agents_selector: String,

    /// Only this node; may be given more than once
    #[arg(long, value_name = "NODE")]
    node: Vec<String>,

    /// The kubeconfig file, as kubectl takes it
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<String>,

    /// The context of the kubeconfig, as kubectl takes it
    #[arg(long, value_name = "CONTEXT")]
    context: Option<String>,

    /// The time that one node may take for its answer
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = options::time)]
    timeout: Duration,

    /// status, cache list, flows list, explain, observe, log-level, check, learn, try, unused or report, with
    /// their options
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    command: Vec<String>,
}

/// Whether the program was called by the name of the plugin.
pub fn is_called(program: Option<&OsString>) -> bool {
    let name = program.and_then(|program| Path::new(program).file_name());
    name.is_some_and(|name| name == NAME)
}

/// Runs the plugin with the process's command line.
pub fn run(output: &mut impl io::Write) -> anyhow::Result<Exit> {
    let Plugin {
        agents_namespace,
        agents_selector,
        node: nodes,
        kubeconfig,
        context,
        timeout: patience,
        command,
    } = Plugin::parse();
    let Some(asked) = asked(&command)? else {
        bail!(
            "over all nodes there are: status, cache list, flows list, explain, observe, log-level, check, \
             learn, try, unused and report; all others are for one agent: kubectl exec --namespace \
             {agents_namespace} POD -- dnsflow …"
        );
    };
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
    runtime.block_on(async {
        let mut agents = kubectl.agents(&agents_selector).await?;
        if !nodes.is_empty() {
            agents.retain(|agent| nodes.contains(&agent.node));
        }
        if let Asked::Once(Question::Explain { namespace, pod, .. }, _) = &asked {
            let node = kubectl.node_of(namespace, pod).await?;
            agents.retain(|agent| agent.node == node);
        }
        if agents.is_empty() {
            bail!(
                "no pod has the labels {agents_selector} in the namespace {agents_namespace} on the nodes asked for: see \
                 --agents-namespace, --agents-selector and --node"
            );
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

/// What a command line asks of agents; `None` for what is no question to all of them. A wrong command line
/// ends the process, as does one that asks for help.
fn asked(command: &[String]) -> anyhow::Result<Option<Asked>> {
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
        Command::Explain(ExplainOptions {
            pod,
            target,
            control,
        }) => {
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
            true => return Ok(Some(Asked::Events(control.output.format))),
            false => (Question::Observe { last }, control.output.format),
        },
        Command::LogLevel(options) => (Question::LogLevel, options.control.output.format),
        Command::Check(options) => {
            let CheckOptions { output, .. } = *options;
            (Question::Check, output.format)
        }
        Command::Learn(options) => return Ok(Some(Asked::Learn(options))),
        Command::Try(options) => {
            let manifests = manifests::texts(&options.file);
            let manifests =
                manifests.map_err(|reason| anyhow!("cannot read the manifests: {reason}"))?;
            (Question::Try(manifests), options.control.output.format)
        }
        Command::Unused(options) => (Question::Unused, options.control.output.format),
        Command::Report(ReportOptions { html, .. }) => (Question::Report(html), OutputFormat::Json),
        _ => return Ok(None),
    };
    Ok(Some(Asked::Once(question, format)))
}

/// The same command for programs, without these options and with these arguments.
fn in_json(command: &[String], without: &[&str], with: &[&str]) -> Vec<String> {
    in_format("json", command, without, with)
}

fn in_format(format: &str, command: &[String], without: &[&str], with: &[&str]) -> Vec<String> {
    let without = [&["-o", "--output"], without].concat();
    let mut rest = command.iter();
    let mut kept = Vec::new();
    while let Some(argument) = rest.next() {
        // With its value behind it, or within.
        if without.contains(&argument.as_str()) {
            rest.next();
        } else if !without.iter().any(|option| match option.starts_with("--") {
            true => argument.starts_with(&format!("{option}=")),
            false => argument.starts_with(option) && !argument.starts_with("--"),
        }) {
            kept.push(argument.clone());
        }
    }
    let output = ["--output", format];
    kept.extend(
        with.iter()
            .chain(&output)
            .map(|argument| (*argument).to_owned()),
    );
    kept
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_command_line_is_sound() {
        Plugin::command().debug_assert();
        let plugin = Plugin::try_parse_from(words("kubectl-dnsflow --node n1 cache list -n ns1"));
        let plugin = plugin.expect("a command");
        assert_eq!(plugin.node, ["n1"]);
        assert_eq!(plugin.command, ["cache", "list", "-n", "ns1"]);
        assert!(is_called(Some(&"/usr/bin/kubectl-dnsflow".into())));
        assert!(!is_called(Some(&"/usr/bin/dnsflow".into())));
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
            assert_eq!(
                asked,
                Some(Asked::Once(Question::Cache, OutputFormat::Yaml))
            );
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

    #[test]
    fn what_is_for_one_agent_is_no_question_to_all() {
        let is_asked = |command: &str| asked(&words(command)).expect("no manifests").is_some();
        for command in ["agent", "cleanup", "bundle", "wait"] {
            assert!(!is_asked(command), "{command}");
        }
        for command in [
            "observe --last 3",
            "observe --follow",
            "unused -n ns1",
            "prune -n ns1",
        ] {
            assert!(is_asked(command), "{command}");
        }
    }
}
