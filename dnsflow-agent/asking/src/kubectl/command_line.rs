//! The command line of `kubectl dnsflow`: options of its own, at any place, and a command of `dnsflow`'s.

use std::{path::PathBuf, time::Duration};

use anyhow::bail;
use clap::{
    Arg, ArgMatches, Args, Command, CommandFactory as _, FromArgMatches as _, Parser, Subcommand,
    builder::{StringValueParser, StyledStr},
};

use super::NAME;
use crate::{
    VERSION,
    options::{self, Cli, OutputOptions},
};

/// The commands that the agents of all nodes can answer.
const COMMANDS: [&str; 11] = [
    "status",
    "cache",
    "flows",
    "explain",
    "observe",
    "log-level",
    "check",
    "learn",
    "try",
    "unused",
    "report",
];
/// The option of a command that names a namespace.
const NAMESPACE: [&str; 2] = ["-n", "--namespace"];
/// The options of `explain` that take a value.
const OF_EXPLAIN: [&str; 3] = ["-o", "--output", "--control-socket"];

/// The place of the commands of the cluster in the help: behind those of the agents.
const LAST: usize = 100;

/// What the help says of all else.
const OTHERS: &str = "\
Without --namespace, explain, learn and unused take the namespace of the kubeconfig's context.
All other commands of dnsflow are for one agent: kubectl exec --namespace dnsflow POD -- dnsflow …";

/// Ask the agents of all nodes
#[derive(Clone, Debug, Parser)]
#[command(name = NAME, bin_name = "kubectl dnsflow", version = VERSION)]
pub struct Plugin {
    /// The namespace of the agents
    #[arg(
        long,
        global = true,
        value_name = "NAMESPACE",
        default_value = "dnsflow"
    )]
    pub(super) agents_namespace: String,

    /// The labels of the agents' pods
    #[arg(
        long,
        global = true,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=dnsflow"
    )]
    pub(super) agents_selector: String,

    /// Only this node; may be given more than once
    #[arg(long, global = true, value_name = "NODE")]
    pub(super) node: Vec<String>,

    /// The kubeconfig file, as kubectl takes it
    #[arg(
        id = "kubeconfig_of_kubectl",
        long = "kubeconfig",
        global = true,
        value_name = "FILE"
    )]
    pub(super) kubeconfig: Option<String>,

    /// The context of the kubeconfig, as kubectl takes it
    #[arg(long, global = true, value_name = "CONTEXT")]
    pub(super) context: Option<String>,

    /// The time limit for the answer of one node
    #[arg(long, global = true, value_name = "TIME", default_value = "60s", value_parser = options::time)]
    pub(super) timeout: Duration,
}

/// The commands that concern the cluster, and not one agent.
#[derive(Clone, Debug, Subcommand)]
pub(super) enum OfCluster {
    /// Check each node with the manifests of dnsflow, before it is installed; the cluster stays as it is
    Preflight(PreflightOptions),
    /// Write an archive for a bug report of each node: DIRECTORY/NODE.tar.gz
    Bundle(BundleOptions),
    /// Clean up every node, and delete dnsflow's objects
    Uninstall(UninstallOptions),
}

/// The options of `kubectl dnsflow preflight`.
#[derive(Args, Clone, Debug)]
pub(super) struct PreflightOptions {
    /// The manifests, as kubectl kustomize or helm template prints them; - is standard input
    #[arg(short, long = "filename", value_name = "FILE|-", required = true)]
    pub(super) file: Vec<PathBuf>,

    /// How to print.
    #[command(flatten)]
    pub(super) output: OutputOptions,
}

/// The options of `kubectl dnsflow bundle`.
#[derive(Args, Clone, Debug)]
pub(super) struct BundleOptions {
    /// The directory of the archives, which are new files there
    #[arg(value_name = "DIRECTORY")]
    pub(super) directory: PathBuf,
}

/// The options of `kubectl dnsflow uninstall`.
#[derive(Args, Clone, Debug)]
pub(super) struct UninstallOptions {
    /// Show what would be removed and deleted
    #[arg(long)]
    pub(super) dry_run: bool,
}

/// The whole command line, with the commands.
pub fn command() -> Command {
    let cli = Cli::command();
    let commands = cli.get_subcommands();
    let commands = commands.filter(|command| COMMANDS.contains(&command.get_name()));
    let commands = commands.cloned().map(of_all_nodes);
    let commands = commands.map(|command| match command.get_name() {
        // The pod's namespace may come from elsewhere.
        "explain" => command
            .mut_arg("pod", |pod| {
                pod.index(1)
                    .value_name("[NAMESPACE/]POD")
                    .help("The pod; pod/NAME is the pod NAME of the namespace that is named elsewhere")
                    .value_parser(StringValueParser::new())
            })
            .mut_arg("target", |target| target.index(2))
            .mut_arg("port", |port| port.index(3))
            .arg(
                Arg::new("namespace")
                    .short('n')
                    .long("namespace")
                    .value_name("NAMESPACE")
                    .help("The namespace of the pod"),
            ),
        "learn" | "unused" => command.mut_arg("namespace", |namespace| namespace.required(false)),
        // That of kubectl has the name.
        "check" => command.mut_arg("kubeconfig", |kubeconfig| {
            kubeconfig.long("agent-kubeconfig").hide(true)
        }),
        _ => command,
    });
    // They would also give the help's first line, and stand among the others there.
    let of_cluster = OfCluster::augment_subcommands(Command::new(NAME));
    let of_cluster = of_cluster.get_subcommands().cloned();
    Plugin::command()
        .subcommands(commands)
        .subcommands(of_cluster.map(|command| command.display_order(LAST)))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .after_help(format!("{OTHERS}\n\n{}", crate::exit::HELP))
}

/// The same command with the help of one that asks all nodes.
fn of_all_nodes(command: Command) -> Command {
    let of_all = |text: &StyledStr| text.to_string().replace("this node", "each node");
    let about = command.get_about().map(of_all);
    let command = command.mut_args(|option| match option.get_help().map(of_all) {
        Some(help) => option.help(help),
        None => option,
    });
    match about {
        Some(about) => command.about(about),
        None => command,
    }
}

/// A command line in parts.
pub(super) struct Given {
    /// The plugin's options.
    pub(super) plugin: Plugin,
    /// The command with its options, each word as it was given.
    words: Vec<String>,
    /// The same, parsed as far as it goes without a namespace.
    matches: ArgMatches,
}

impl Given {
    /// Takes a command line in parts, without the program's name. An error may be that somebody asks for help.
    pub(super) fn parse(arguments: &[String]) -> Result<Self, clap::Error> {
        let all = [NAME.to_owned()]
            .into_iter()
            .chain(arguments.iter().cloned());
        let matches = command().try_get_matches_from(all)?;
        let (own, words) = split(arguments);
        Ok(Self {
            plugin: Plugin::try_parse_from([NAME.to_owned()].into_iter().chain(own))?,
            words,
            matches,
        })
    }

    /// The command, if it is one that concerns the cluster.
    pub(super) fn of_cluster(&self) -> Option<OfCluster> {
        OfCluster::from_arg_matches(&self.matches).ok()
    }

    /// Whether the command needs the namespace of the context.
    pub(super) fn lacks_namespace(&self) -> bool {
        let Some((command, matches)) = self.matches.subcommand() else {
            return false;
        };
        let text = |id| matches.get_one::<String>(id);
        match command {
            "explain" => {
                text("namespace").is_none() && text("pod").is_some_and(|pod| alone(pod).is_some())
            }
            "learn" | "unused" => text("namespace").is_none(),
            _ => false,
        }
    }

    /// The command as an agent takes it, with this namespace where it needs one.
    pub(super) fn command(self, of_context: Option<String>) -> anyhow::Result<Vec<String>> {
        let Self {
            mut words, matches, ..
        } = self;
        let Some(("explain", matches)) = matches.subcommand() else {
            let namespace = of_context.into_iter();
            words.extend(namespace.flat_map(|namespace| ["--namespace".to_owned(), namespace]));
            return Ok(words);
        };
        let pod = matches
            .get_one::<String>("pod")
            .cloned()
            .unwrap_or_default();
        let named = take_option(&mut words, &NAMESPACE);
        let Some(name) = alone(&pod) else {
            if named.is_none() {
                return Ok(words);
            }
            bail!("the namespace is named twice: leave out --namespace, or write {pod} without it");
        };
        if let Some(namespace) = named.or(of_context) {
            let is_value = |place: usize| {
                let before = place.checked_sub(1).map(|before| words[before].as_str());
                before.is_some_and(|before| OF_EXPLAIN.contains(&before))
            };
            let places = (1..words.len()).filter(|place| words[*place] == pod);
            let place = places.into_iter().find(|place| !is_value(*place));
            if let Some(place) = place {
                words[place] = format!("{namespace}/{name}");
            }
        }
        Ok(words)
    }
}

/// The name of a pod that stands without its namespace, alone or as kubectl has it: `pod/NAME`.
fn alone(pod: &str) -> Option<&str> {
    match pod.split_once('/') {
        None => Some(pod),
        Some(("pod" | "pods" | "po", name)) => Some(name),
        Some(_) => None,
    }
}

/// The plugin's own options, and all else.
fn split(arguments: &[String]) -> (Vec<String>, Vec<String>) {
    let plugin = Plugin::command();
    let names: Vec<&str> = plugin.get_arguments().filter_map(Arg::get_long).collect();
    let (mut own, mut others) = (Vec::new(), Vec::new());
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let option = argument.strip_prefix("--").unwrap_or_default();
        let (name, value) = option.split_once('=').unzip();
        if !names.contains(&name.unwrap_or(option)) {
            others.push(argument.clone());
            continue;
        }
        own.push(argument.clone());
        if value.is_none() {
            own.extend(rest.next().cloned());
        }
    }
    (own, others)
}

/// Takes an option with its value out of the words.
fn take_option(words: &mut Vec<String>, names: &[&str]) -> Option<String> {
    let place = words
        .iter()
        .position(|word| names.iter().any(|name| value_within(word, name).is_some()))?;
    let word = words.remove(place);
    let within = names.iter().find_map(|name| value_within(&word, name))?;
    match within {
        "" if place < words.len() => Some(words.remove(place)),
        value => Some(value.to_owned()),
    }
}

/// The value within a word that is this option; empty where it is the next word.
fn value_within<'a>(word: &'a str, name: &str) -> Option<&'a str> {
    let rest = word.strip_prefix(name)?;
    match (name.starts_with("--"), rest) {
        (_, "") => Some(rest),
        (true, rest) => rest.strip_prefix('='),
        (false, rest) => Some(rest.strip_prefix('=').unwrap_or(rest)),
    }
}

/// The same words without these options and their values.
pub(super) fn without(words: &[String], options: &[&str]) -> Vec<String> {
    let mut kept = words.to_vec();
    while take_option(&mut kept, options).is_some() {}
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_command_line_is_sound_and_lists_its_commands() {
        command().debug_assert();
        let help = command().render_help().to_string();
        for name in COMMANDS {
            assert!(help.contains(&format!("\n  {name} ")), "{name}: {help}");
        }
        let mut command = command();
        for name in COMMANDS {
            let of_one = command.find_subcommand_mut(name).expect(name);
            let help = of_one.render_long_help().to_string();
            assert!(!help.contains("this node"), "{name}: {help}");
        }
        for name in ["agent", "cleanup", "prune"] {
            assert!(!help.contains(&format!("\n  {name} ")), "{name}: {help}");
        }
    }

    #[test]
    fn options_stand_anywhere() {
        for written in [
            "--node n1 --timeout 5s cache list -n ns1",
            "cache --node n1 list -n ns1 --timeout=5s",
            "cache list -n ns1 --timeout 5s --node=n1",
        ] {
            let given = Given::parse(&words(written)).expect(written);
            assert_eq!(given.plugin.node, ["n1"], "{written}");
            assert_eq!(given.plugin.timeout, Duration::from_secs(5));
            assert!(!given.lacks_namespace());
            let command = given.command(None).expect("a command");
            assert_eq!(command, words("cache list -n ns1"));
        }
        let two = Given::parse(&words("--node n1 status --node n2")).expect("a command");
        assert_eq!(two.plugin.node, ["n1", "n2"]);
        let kubeconfig = Given::parse(&words("check --kubeconfig /k --strict")).expect("a command");
        assert_eq!(kubeconfig.plugin.kubeconfig.as_deref(), Some("/k"));
        assert_eq!(kubeconfig.words, words("check --strict"));
    }

    #[test]
    fn commands_of_the_cluster_are_no_commands_of_an_agent() {
        let of_cluster = |text: &str| Given::parse(&words(text)).expect(text).of_cluster();
        for text in [
            "preflight -f - --node n1",
            "--timeout 5s preflight --filename=a -o json",
        ] {
            let Some(OfCluster::Preflight(options)) = of_cluster(text) else {
                panic!("{text}");
            };
            assert_eq!(options.file.len(), 1, "{text}");
        }
        let Some(OfCluster::Uninstall(options)) = of_cluster("uninstall --dry-run") else {
            panic!("uninstall");
        };
        assert!(options.dry_run);
        let Some(OfCluster::Bundle(options)) = of_cluster("bundle /tmp/b --node n1") else {
            panic!("bundle");
        };
        assert_eq!(options.directory, PathBuf::from("/tmp/b"));
        assert!(of_cluster("status").is_none());
        assert!(Given::parse(&words("preflight")).is_err(), "no manifests");
    }

    #[test]
    fn what_is_for_one_agent_is_no_command_of_all() {
        // An archive of each node needs a directory.
        for command in ["agent", "cleanup", "bundle", "wait", "status --nod n1"] {
            let error = Given::parse(&words(command)).err().expect(command);
            assert_eq!(error.exit_code(), 2, "{command}");
        }
        assert!(Given::parse(&[]).is_err());
    }

    #[test]
    fn the_namespace_comes_from_the_option_or_the_context() {
        let command = |text: &str| {
            let given = Given::parse(&words(text)).expect(text);
            let of_context = given.lacks_namespace().then(|| "ctx".to_owned());
            let command = given.command(of_context).expect(text);
            command.join(" ")
        };
        for (given, expected) in [
            ("unused", "unused --namespace ctx"),
            ("prune", "prune --namespace ctx"),
            ("unused -n ns1", "unused -n ns1"),
            ("learn --for 3s", "learn --for 3s --namespace ctx"),
            ("explain p1 a.test", "explain ctx/p1 a.test"),
            ("explain ns1/p1 a.test", "explain ns1/p1 a.test"),
            ("explain -n ns1 p1 a.test", "explain ns1/p1 a.test"),
            ("explain p1 a.test --namespace=ns1", "explain ns1/p1 a.test"),
            ("explain pod/p1 a.test", "explain ctx/p1 a.test"),
            (
                "explain po/p1 a.test 443 -n ns1",
                "explain ns1/p1 a.test 443",
            ),
            (
                "explain -o json json a.test",
                "explain -o json ctx/json a.test",
            ),
            ("cache list", "cache list"),
            ("observe --last 3", "observe --last 3"),
        ] {
            assert_eq!(command(given), expected);
        }
        let twice = Given::parse(&words("explain ns1/p1 a.test -n ns2")).expect("it parses");
        assert!(twice.command(None).is_err());
    }

    #[test]
    fn options_are_taken_out_however_they_are_written() {
        for written in [
            "-o yaml",
            "-oyaml",
            "-o=yaml",
            "--output yaml",
            "--output=yaml",
        ] {
            let all = words(&format!("cache list {written} -n ns1"));
            assert_eq!(
                without(&all, &["-o", "--output"]),
                words("cache list -n ns1")
            );
        }
    }
}
