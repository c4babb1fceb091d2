//! `kubectl dnsflow …`: the subcommands that ask an agent, over all nodes.
//!
//! kubectl runs a program named `kubectl-dnsflow` for that, which is this one. It asks by `kubectl exec` in
//! the agents' containers, and so with the user's own credentials and rights, whatever way kubectl gets
//! them (`docs/decisions/kubectl-plugin.md`).

mod agents;
mod merge;

use std::{ffi::OsString, io, path::Path};

use clap::Parser;
use tokio::runtime;

use crate::{
    exit::Exit,
    options::{
        CacheCommand, CheckOptions, Cli, Command, ExplainOptions, FlowsCommand, ObserveOptions,
        OutputFormat,
    },
};
use agents::{Kubectl, KubectlError};
use merge::Question;

/// The name under which kubectl finds this program.
const NAME: &str = "kubectl-dnsflow";

/// Asks the agents of all nodes, and merges what they say.
#[derive(Clone, Debug, Parser)]
#[command(
    name = NAME,
    bin_name = "kubectl dnsflow",
    version = env!("DNSFLOW_VERSION"),
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

    /// status, cache list, flows list, explain, observe, log-level or check, with their options
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    command: Vec<String>,
}

/// Why the nodes cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// No runtime.
    #[error("cannot start the runtime")]
    Runtime(#[source] io::Error),
    /// The command is for one node.
    #[error(
        "over all nodes there are: status, cache list, flows list, explain, observe without --follow, \
         log-level and check; all others are for one agent: kubectl exec --namespace {namespace} POD -- \
         dnsflow …"
    )]
    OneNode {
        /// The namespace of the agents.
        namespace: String,
    },
    /// kubectl has failed.
    #[error(transparent)]
    Kubectl(#[from] KubectlError),
    /// No agent is there.
    #[error(
        "no pod has the labels {selector} in the namespace {namespace} on the nodes asked for: see \
             --agents-namespace, --agents-selector and --node"
    )]
    NoAgents {
        /// The namespace.
        namespace: String,
        /// The labels.
        selector: String,
    },
    /// The answer cannot be written.
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Whether the program was called by the name of the plugin.
pub fn is_called(program: Option<&OsString>) -> bool {
    let name = program.and_then(|program| Path::new(program).file_name());
    name.is_some_and(|name| name == NAME)
}

/// Runs the plugin with the process's command line.
pub fn run(output: &mut impl io::Write) -> Result<Exit, PluginError> {
    let Plugin {
        agents_namespace,
        agents_selector,
        node: nodes,
        kubeconfig,
        context,
        command,
    } = Plugin::parse();
    let one_node = || PluginError::OneNode {
        namespace: agents_namespace.clone(),
    };
    let (question, format) = question(&command).ok_or_else(one_node)?;
    let options = [("--kubeconfig", kubeconfig), ("--context", context)];
    let options = options
        .into_iter()
        .filter_map(|(name, value)| Some([name.to_owned(), value?]));
    let kubectl = Kubectl::new(options.flatten().collect(), agents_namespace.clone());
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(PluginError::Runtime)?;
    let answers = runtime.block_on(async {
        let mut agents = kubectl.agents(&agents_selector).await?;
        if !nodes.is_empty() {
            agents.retain(|agent| nodes.contains(&agent.node));
        }
        if let Question::Explain { namespace, pod, .. } = &question {
            let node = kubectl.node_of(namespace, pod).await?;
            agents.retain(|agent| agent.node == node);
        }
        if agents.is_empty() {
            return Err(PluginError::NoAgents {
                namespace: agents_namespace,
                selector: agents_selector,
            });
        }
        Ok(kubectl.ask(agents, &in_json(&command)).await)
    })?;
    Ok(merge::write(&question, format, answers, output)?)
}

/// What a command line asks of agents, and how the answer is to be printed; `None` for what is no question
/// to all of them. A wrong command line ends the process, as does one that asks for help.
fn question(command: &[String]) -> Option<(Question, OutputFormat)> {
    let arguments = ["kubectl dnsflow"].into_iter().map(str::to_owned);
    let cli = Cli::try_parse_from(arguments.chain(command.iter().cloned()));
    Some(match cli.unwrap_or_else(|error| error.exit()).command {
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
            follow: false,
            control,
            ..
        }) => (Question::Observe, control.output.format),
        Command::LogLevel(options) => (Question::LogLevel, options.control.output.format),
        Command::Check(options) => {
            let CheckOptions { output, .. } = *options;
            (Question::Check, output.format)
        }
        _ => return None,
    })
}

/// The same command with `--output json`, which programs read.
fn in_json(command: &[String]) -> Vec<String> {
    let mut rest = command.iter();
    let mut kept = Vec::new();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "-o" | "--output" => {
                rest.next();
            }
            one if one.starts_with("--output=") => {}
            one if one.starts_with("-o") && !one.starts_with("--") => {}
            _ => kept.push(argument.clone()),
        }
    }
    kept.extend(["--output".to_owned(), "json".to_owned()]);
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
            assert_eq!(in_json(&command), words("cache list -n ns1 --output json"));
            let (question, format) = question(&command).expect("a question");
            assert_eq!((question, format), (Question::Cache, OutputFormat::Yaml));
        }
        assert_eq!(in_json(&words("status")), words("status --output json"));
    }

    #[test]
    fn what_is_for_one_agent_is_no_question_to_all() {
        for command in ["agent", "cleanup", "observe --follow", "bundle", "wait"] {
            assert_eq!(question(&words(command)), None, "{command}");
        }
        assert!(question(&words("observe --last 3")).is_some());
    }
}
