//! The tutorial can be followed: its commands print what it shows.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use dnsflow_tests::{
    agent::Agent,
    lab,
    lab::Lab,
    process::{PATIENT, wait_until},
    support::{helper, workspace},
};

/// The reader's shell, and the second terminal.
struct Reader<'a> {
    lab: &'a Lab,
    directory: PathBuf,
    agent: Option<Agent>,
}

impl Reader<'_> {
    /// Does what the text says between its commands.
    fn reads(&mut self, line: &str) {
        if line.contains("`cargo xtask lab agent`") {
            let agent = self.lab.start_agent(&[]).expect("the agent is ready");
            self.agent = Some(agent);
        }
    }

    /// Runs a command. Returns its output.
    fn runs(&self, command: &str, shown: &str) -> String {
        let file = |name: &str| self.directory.join(name);
        if let Some(name) = command.strip_prefix("cat ") {
            if !file(name).exists() {
                // The reader writes it.
                fs::write(file(name), shown).expect("it is written");
            }
            return fs::read_to_string(file(name)).expect("it is there");
        }
        let (command, written) = match command.split_once(" > ") {
            Some((command, name)) => (command, Some(file(name))),
            None => (command, None),
        };
        let words = command.strip_prefix("cargo xtask lab ");
        let words = words.unwrap_or_else(|| panic!("no command of the lab: {command}"));
        let xtask = helper().expect("it is built").with_file_name("xtask");
        let mut lab = Command::new(xtask);
        lab.args(["lab", "--name", self.lab.name()])
            .args(words.split(' '))
            .current_dir(&self.directory)
            .stdin(Stdio::null());
        let output = thread::scope(|scope| {
            let running = scope.spawn(move || lab.output().expect("it runs"));
            // The recording does not begin at once.
            while words.contains(" learn ") && !running.is_finished() {
                match words.contains("--namespace ns2") {
                    true => self.works("ns2_pod1", &["example.com", "203.0.113.7"]),
                    false => self.works(
                        "ns1_pod2",
                        &["example.com", "www.example.com", "www.example.net"],
                    ),
                }
            }
            running.join().expect("no panic")
        });
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        if let Some(file) = written {
            fs::write(file, output.stdout).expect("it is written");
            return text(output.stderr);
        }
        text(output.stdout) + &text(output.stderr)
    }

    /// Runs a command until it prints what is shown, but for times. Only a `curl` that has timed out is repeated: on a
    /// slow machine, its 2 s can be too short.
    fn sees(&self, command: &str, shown: &str) {
        let mut printed = String::new();
        wait_until(command, PATIENT, || {
            printed = timeless(&self.runs(command, shown));
            Ok(printed == timeless(shown) || !printed.starts_with("curl: (28)"))
        })
        .unwrap_or_else(|error| panic!("{error:#}; the last time, it has printed: {printed}"));
        assert_eq!(printed, timeless(shown), "`{command}` prints otherwise");
    }

    /// The work of a pod while names are learned: all at the same time, so that each name is asked for every 2 s.
    fn works(&self, pod: &str, hosts: &[&str]) {
        let pod = &self.lab.pod(pod);
        thread::scope(|scope| {
            for host in hosts {
                // One of them may be denied.
                scope.spawn(move || {
                    let url = format!("http://{host}/");
                    pod.fetch(&url, Duration::from_secs(2)).expect("curl runs")
                });
            }
        });
    }
}

/// A text without its times, which differ.
fn timeless(text: &str) -> String {
    let of_line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let word = |(at, word): (usize, &&str)| {
            let time = word.trim_end_matches(['.', ',']);
            let is_digit = |it: char| it.is_ascii_digit();
            let is_time = match &*time.replace(is_digit, "") {
                "" => words.get(at + 1) == Some(&"milliseconds"),
                // As 8s, or 1m8s.
                "s" | "ms" => true,
                _ => false,
            };
            match is_time && time.starts_with(is_digit) {
                true => format!("N{}", &word[time.len()..]),
                false => (*word).to_owned(),
            }
        };
        let timeless: Vec<String> = words.iter().enumerate().map(word).collect();
        timeless.join(" ")
    };
    let lines: Vec<String> = text.trim_end().lines().map(of_line).collect();
    lines.join("\n")
}

/// The commands of a document with the outputs that it shows, and the lines between them.
fn steps(document: &Path) -> Vec<Result<(String, String), String>> {
    let text = fs::read_to_string(document).expect("a document");
    let mut steps: Vec<Result<(String, String), String>> = Vec::new();
    for line in text.lines() {
        let code = line.strip_prefix("    ");
        match (code, steps.last_mut()) {
            (Some(code), last) => match (code.strip_prefix("$ "), last) {
                (Some(command), _) => steps.push(Ok((command.to_owned(), String::new()))),
                (None, Some(Ok((_, shown)))) => *shown += &format!("{code}\n"),
                (None, _) => steps.push(Err(code.to_owned())),
            },
            (None, Some(Ok((_, shown)))) if line.is_empty() => *shown += "\n",
            (None, _) => steps.push(Err(line.to_owned())),
        }
    }
    steps
}

#[test]
fn the_tutorial_can_be_followed() {
    let lab = lab!("tutorial", agent);
    let directory = lab.base().join("reader");
    fs::create_dir(&directory).expect("a directory");
    let mut reader = Reader {
        lab: &lab,
        directory,
        agent: None,
    };
    let document = workspace().expect("a workspace").join("docs/tutorial.md");
    let mut commands = 0;
    for step in steps(&document) {
        match step {
            Err(line) => reader.reads(&line),
            Ok((command, shown)) => {
                reader.sees(&command, &format!("{}\n", shown.trim_end()));
                commands += 1;
            }
        }
    }
    assert!(commands > 10 && reader.agent.is_some());
}
