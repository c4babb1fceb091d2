//! What a shell is offered behind `kubectl dnsflow`.
//!
//! kubectl asks the program `kubectl_complete-dnsflow` with the words so far, the last of which may be empty. It takes
//! a candidate a line, with its description behind a tab, and at the end `:` with a number: the sum of directives, as
//! cobra has them (`ShellCompDirective` in its completions.go).

use std::io::{self, Write};

use clap::{Arg, Command, ValueHint};

/// No directive: files are offered if there is no candidate.
const FILES: u8 = 0;
/// Files are not offered.
const NO_FILES: u8 = 4;

/// Writes the candidates behind these words.
pub(super) fn write(words: &[String], output: &mut impl Write) -> io::Result<()> {
    let (candidates, directive) = candidates(words);
    for (candidate, description) in candidates {
        match description.is_empty() {
            true => writeln!(output, "{candidate}")?,
            false => writeln!(output, "{candidate}\t{description}")?,
        }
    }
    writeln!(output, ":{directive}")
}

/// The candidates for the last word, with their descriptions, and the directive.
fn candidates(words: &[String]) -> (Vec<(String, String)>, u8) {
    let mut root = super::command();
    root.build();
    let Some((current, before)) = words.split_last() else {
        return (Vec::new(), NO_FILES);
    };
    let (command, valued) = place(&root, before);
    let (start, option) = match (valued, current.split_once('=')) {
        (Some(option), _) => (current.as_str(), Some((option, String::new()))),
        (None, Some((name, value))) if name.starts_with('-') => {
            let option = option_of(command, name);
            (value, option.map(|option| (option, format!("{name}="))))
        }
        _ => (current.as_str(), None),
    };
    if let Some((option, prefix)) = option {
        let values = option.get_possible_values();
        let offered = values.iter().filter(|value| !value.is_hide_set());
        let offered = offered.filter(|value| value.get_name().starts_with(start));
        let offered = offered.map(|value| {
            let help = value.get_help().map(ToString::to_string);
            (
                format!("{prefix}{}", value.get_name()),
                help.unwrap_or_default(),
            )
        });
        let directive = match takes_file(option) {
            true => FILES,
            false => NO_FILES,
        };
        return (offered.collect(), directive);
    }
    let first_line = |text: Option<String>| {
        let text = text.unwrap_or_default();
        text.lines().next().unwrap_or_default().to_owned()
    };
    let mut offered: Vec<(String, String)> = match start.starts_with('-') {
        true => {
            let options = command.get_arguments().filter(|one| !one.is_hide_set());
            let named = options.filter_map(|one| {
                let help = one.get_help().map(ToString::to_string);
                Some((format!("--{}", one.get_long()?), first_line(help)))
            });
            named.collect()
        }
        false => {
            let commands = command.get_subcommands().filter(|one| !one.is_hide_set());
            let named = commands.map(|one| {
                let about = one.get_about().map(ToString::to_string);
                (one.get_name().to_owned(), first_line(about))
            });
            named.collect()
        }
    };
    offered.retain(|(candidate, _)| candidate.starts_with(start));
    (offered, NO_FILES)
}

/// The command that the words lead to, and the option whose value comes next, if one does.
fn place<'a>(root: &'a Command, words: &[String]) -> (&'a Command, Option<&'a Arg>) {
    let mut command = root;
    let mut valued = None;
    for word in words {
        if valued.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            valued = option_of(command, word).filter(|one| one.get_action().takes_values());
        } else if let Some(below) = command.find_subcommand(word) {
            command = below;
        }
    }
    (command, valued)
}

/// The option of this name.
fn option_of<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|one| {
        let is_long = one
            .get_long()
            .is_some_and(|long| name == format!("--{long}"));
        is_long
            || one
                .get_short()
                .is_some_and(|short| name == format!("-{short}"))
    })
}

/// Whether an option's value is a file.
fn takes_file(option: &Arg) -> bool {
    let is_path = matches!(
        option.get_value_hint(),
        ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath
    );
    is_path || option.get_long() == Some("kubeconfig")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(words: &str) -> (Vec<String>, u8) {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let (candidates, directive) = candidates(&words);
        (
            candidates
                .into_iter()
                .map(|(candidate, _)| candidate)
                .collect(),
            directive,
        )
    }

    #[test]
    fn commands_options_and_values_are_offered() {
        for (words, expected) in [
            ("sta", vec!["status"]),
            ("--node n1 unu", vec!["unused"]),
            ("cache ", vec!["list", "help"]),
            ("cache list --names", vec!["--namespace"]),
            ("status --agents-s", vec!["--agents-selector"]),
            ("status -o ", vec!["table", "json", "yaml"]),
            ("status --output=j", vec!["--output=json"]),
            ("observe --event den", vec!["denied"]),
            ("explain ", vec![]),
        ] {
            let (candidates, directive) = offered(words);
            assert_eq!(candidates, expected, "{words}");
            assert_eq!(directive, NO_FILES, "{words}");
        }
        for words in ["try -f ", "--kubeconfig ", "report --html "] {
            assert_eq!(offered(words), (vec![], FILES), "{words}");
        }
    }

    #[test]
    fn a_candidate_has_its_description_behind_a_tab() {
        let mut output = Vec::new();
        write(&["unu".to_owned()], &mut output).expect("memory has room");
        let text = String::from_utf8(output).expect("text");
        let (line, rest) = text.split_once('\n').expect("a line");
        assert!(
            line.starts_with("unused\tList a namespace's rules "),
            "{line}"
        );
        assert_eq!(rest, ":4\n");
    }
}
