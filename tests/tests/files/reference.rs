//! The text of `docs/reference.md`: each command with its options, as the command line's parser has them.

use std::{collections::BTreeSet, fmt::Write as _};

use clap::{Arg, Command, CommandFactory as _, Id};
use dnsflow_agent::{
    kubectl::{self, Plugin},
    options::Cli,
};

const HEAD: &str = "\
# Commands and options

`DNSFLOW_BLESS=1 cargo test -p dnsflow-tests --test files` makes this file from the command line's parser.
[asking.md](asking.md) explains the answers.

A TIME has a unit: `500ms`, `60s`, `5m`, `1h`. A list has commas, in an environment variable too. An option on the command
line comes before its environment variable.
";

/// The whole document.
pub(crate) fn text() -> String {
    let cli = Cli::command();
    let agent = cli.find_subcommand("agent").expect("it is there");
    let of_agent: BTreeSet<&Id> = agent.get_arguments().map(Arg::get_id).collect();
    let status = cli.find_subcommand("status").expect("it is there");
    let common: Vec<String> = status.get_arguments().map(row).collect();
    let mut text = HEAD.to_owned();
    let _ = write!(
        text,
        "\n## Common options\n\nOptions of the commands that name them.\n{}",
        table(&common)
    );
    for command in shown(&cli) {
        section(command, "dnsflow", &of_agent, &common, &mut text);
    }
    let plugin = Plugin::command().name("dnsflow");
    section(&plugin, "kubectl", &of_agent, &common, &mut text);
    let plugin = kubectl::command();
    // Commands that no agent has.
    let mut of_cluster = String::new();
    for command in shown(&plugin) {
        if cli.find_subcommand(command.get_name()).is_none() {
            section(
                command,
                "kubectl dnsflow",
                &of_agent,
                &common,
                &mut of_cluster,
            );
        }
    }
    let commands = shown(&plugin).map(|command| format!("`{}`", command.get_name()));
    let commands = commands.collect::<Vec<_>>().join(", ");
    let _ = writeln!(text, "\nIts commands: {commands}.");
    text + &of_cluster
}

fn table(rows: &[String]) -> String {
    let rows = rows.concat();
    format!("\n| option | default | environment | meaning |\n|---|---|---|---|\n{rows}")
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    let commands = command.get_subcommands();
    commands.filter(|command| !command.is_hide_set())
}

fn section(
    command: &Command,
    parent: &str,
    of_agent: &BTreeSet<&Id>,
    common: &[String],
    text: &mut String,
) {
    let name = format!("{parent} {}", command.get_name());
    if command.has_subcommands() {
        for below in shown(command) {
            section(below, &name, of_agent, common, text);
        }
        return;
    }
    let arguments = command.get_arguments();
    let arguments: Vec<&Arg> = arguments.filter(|one| !one.is_hide_set()).collect();
    let is_shared = |one: &Arg| name != "dnsflow agent" && of_agent.contains(one.get_id());
    // A command with a few of the agent's options has them in its own table.
    let shares_all = arguments.iter().filter(|one| is_shared(one)).count() > 10;
    let own = arguments.into_iter();
    let own = own.filter(|one| !(shares_all && is_shared(one)));
    let (positional, options): (Vec<&Arg>, Vec<&Arg>) = own.partition(|one| one.is_positional());
    let about = command.get_about().map(ToString::to_string);
    let values: String = positional
        .iter()
        .map(|one| format!(" {}", value(one)))
        .collect();
    let _ = write!(
        text,
        "\n## {name}{values}\n\n{}.\n",
        about.unwrap_or_default()
    );
    let rows = positional.iter().chain(&options);
    let rows = rows.map(|one| row(one));
    let is_common = |one: &String| name != "dnsflow agent" && common.contains(one);
    let (known, rows): (Vec<String>, Vec<String>) = rows.partition(is_common);
    let table = table(&rows);
    match text.find(&table).filter(|_| rows.len() > 1) {
        None if rows.is_empty() => {}
        None => text.push_str(&table),
        // The title above the first such table.
        Some(end) => {
            let title = text[..end]
                .lines()
                .rev()
                .find_map(|line| line.strip_prefix("## "));
            let title = title.unwrap_or_default().to_owned();
            let link = title.replace(' ', "-");
            let _ = writeln!(text, "\nIts options are those of [{title}](#{link}).");
        }
    }
    if !known.is_empty() {
        let names: Vec<&str> = known
            .iter()
            .filter_map(|row| row.split('`').nth(1))
            .collect();
        let names = names.join("`, `");
        let _ = writeln!(text, "\n[Common options](#common-options): `{names}`.");
    }
    if shares_all {
        let _ = writeln!(
            text,
            "\nAll options of [dnsflow agent](#dnsflow-agent) are options of this command, too."
        );
    }
}

fn row(argument: &Arg) -> String {
    let names = match (argument.get_short(), argument.get_long()) {
        (Some(short), Some(long)) => format!("-{short}, --{long}"),
        (None, Some(long)) => format!("--{long}"),
        _ => String::new(),
    };
    let takes_value = argument.get_action().takes_values();
    let option = match (names.is_empty(), takes_value) {
        (true, _) => value(argument),
        (false, true) => format!("{names} {}", value(argument)),
        (false, false) => names,
    };
    let defaults = argument.get_default_values().iter();
    let defaults: Vec<_> = defaults.map(|one| one.to_string_lossy()).collect();
    let is_needed = argument.is_required_set();
    let default = match (&defaults[..], is_needed) {
        ([], true) => "must be given".to_owned(),
        ([], false) => String::new(),
        _ => format!("`{}`", defaults.join(",")),
    };
    let environment = argument
        .get_env()
        .map(|name| format!("`{}`", name.to_string_lossy()));
    let mut meaning = argument
        .get_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    let possible = argument.get_possible_values();
    if takes_value && !possible.is_empty() {
        let possible: Vec<String> = possible
            .iter()
            .filter(|one| !one.is_hide_set())
            .map(|one| format!("`{}`", one.get_name()))
            .collect();
        let _ = write!(meaning, " ({})", possible.join(", "));
    }
    let cells = [
        format!("`{option}`"),
        default,
        environment.unwrap_or_default(),
        meaning.replace('*', "\\*"),
    ];
    let cells = cells.map(|cell| cell.replace('|', "\\|"));
    format!("| {} |\n", cells.join(" | "))
}

/// The name of an argument's value.
fn value(argument: &Arg) -> String {
    let names = argument.get_value_names().into_iter().flatten();
    let names: Vec<&str> = names.map(|name| name.as_str()).collect();
    match names[..] {
        [] => argument.get_id().as_str().to_uppercase(),
        _ => names.join(" "),
    }
}
