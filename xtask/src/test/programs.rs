//! The test programs: built by cargo, and asked which tests they have.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use dnsflow_tests::apiserver;
use serde_json::Value;

use crate::{interrupt, prepare::cargo};

/// The package whose programs run a process for each test.
const LAB_TESTS: &str = "dnsflow-tests";

/// The programs that run Open vSwitch, OVN or etcd of a Debian release.
const WITH_DEBIAN: [&str; 3] = [APISERVER, "clients", "node"];

/// The program whose tests run an API server.
const APISERVER: &str = "apiserver";

/// A module, wherever it is in the path of a test, whose tests measure the machine: nothing else runs beside them.
const ALONE: &str = "alone";

/// A test program that is built.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Program {
    /// The name of cargo's target.
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// The directory of its package, where cargo would run it.
    pub(super) directory: PathBuf,
    /// The paths of its tests.
    pub(super) tests: Vec<String>,
    /// Whether it belongs to the lab's package.
    pub(super) is_of_lab: bool,
}

impl Program {
    /// Whether its tests run once for each OVN.
    pub(super) fn runs_debian(&self) -> bool {
        self.is_of_lab && WITH_DEBIAN.contains(&self.name.as_str())
    }

    /// The full name of one of its tests.
    pub(super) fn full_name(&self, test: &str) -> String {
        format!("{}::{test}", self.name)
    }
}

/// The line of the output that a test of a program belongs to: the program and the module. A module of [`APISERVER`]
/// is a single scene.
pub(super) fn suite(full_name: &str) -> &str {
    if let Some(APISERVER) = full_name.split("::").next() {
        return APISERVER;
    }
    let mut ends = full_name.match_indices("::").map(|(at, _)| at);
    let (program, module) = (ends.next(), ends.next());
    let Some(end) = module.or(program) else {
        return full_name;
    };
    match &full_name[..end] {
        outer if outer.ends_with(&format!("::{ALONE}")) => {
            let end = ends.next().unwrap_or(full_name.len());
            &full_name[..end]
        }
        outer => outer,
    }
}

/// Whether nothing may run beside this test.
pub(super) fn is_alone(test: &str) -> bool {
    test.split("::").any(|part| part == ALONE)
}

/// A test target of the workspace, as `cargo metadata` describes it.
#[derive(Debug)]
struct Target {
    package: String,
    name: String,
    kind: String,
    source: PathBuf,
}

/// Builds the programs of the workspace that have tests with one of these in their names, all if there are none.
/// Builds the agent, the lab's helper, and for these releases of Debian what the tests of the API server run.
pub(super) fn build(filters: &[String], suites: &[&str]) -> Result<Vec<Program>> {
    let targets = targets()?;
    let is_server = |target: &&Target| target.name == APISERVER && may_have(target, filters);
    if !targets.iter().any(|target| is_server(&target)) {
        return build_by_cargo(&targets, filters);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for suite in suites {
                // The tests say why they cannot run.
                let _ = apiserver::ensure(suite, &|text| eprintln!("{text}"));
            }
        });
        build_by_cargo(&targets, filters)
    })
}

fn build_by_cargo(targets: &[Target], filters: &[String]) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    if filters.is_empty() {
        eprintln!("building the agent and the tests (the first time takes some minutes)");
        programs.extend(run_cargo(&["build", "--bins", "--tests"])?);
    } else {
        let wanted: Vec<&Target> = targets
            .iter()
            .filter(|target| may_have(target, filters))
            .collect();
        let (labs, units): (Vec<&Target>, Vec<&Target>) = wanted
            .iter()
            .copied()
            .partition(|target| target.kind == "test");
        eprintln!("building the agent and {} programs of tests", wanted.len());
        let mut arguments = vec!["build", "--bins"];
        for target in labs {
            arguments.extend(["--test", target.name.as_str()]);
        }
        programs.extend(run_cargo(&arguments)?);
        if !units.is_empty() {
            let mut arguments = vec!["test", "--no-run"];
            if units.iter().any(|target| target.kind == "lib") {
                arguments.push("--lib");
            }
            for target in units.iter().filter(|target| target.kind == "bin") {
                arguments.extend(["--bin", target.name.as_str()]);
            }
            programs.extend(run_cargo(&arguments)?);
        }
    }
    for program in &mut programs {
        program.tests = list(&program.path)?;
        program.is_of_lab = targets.iter().any(|target| {
            target.package == LAB_TESTS && target.kind == "test" && target.name == program.name
        });
    }
    programs.retain(|program| !program.tests.is_empty());
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

/// Runs cargo over the whole workspace, so that the packages have the same features each time, and returns what it
/// has built to run tests.
fn run_cargo(arguments: &[&str]) -> Result<Vec<Program>> {
    let mut command = cargo();
    command
        .args(arguments)
        .args(["--workspace", "--locked", "--quiet"])
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let (status, messages) = interrupt::output(&mut command)?;
    ensure!(status.success(), "the build of the tests failed");
    Ok(messages.lines().filter_map(program).collect())
}

/// The test program that a message of cargo's is about (`compiler-artifact` in the Cargo book, "External tools").
fn program(message: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(message).ok()?;
    let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let program = Program {
        name: message["target"]["name"].as_str()?.to_owned(),
        path: message["executable"].as_str()?.into(),
        directory: manifest.parent()?.to_owned(),
        tests: Vec::new(),
        is_of_lab: false,
    };
    is_test.then_some(program)
}

/// The test targets of the workspace.
fn targets() -> Result<Vec<Target>> {
    let mut command = cargo();
    command.args(["metadata", "--no-deps", "--format-version=1", "--locked"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let (status, text) = interrupt::output(&mut command)?;
    ensure!(status.success(), "cargo metadata failed");
    let metadata: Value = serde_json::from_str(&text)?;
    let mut targets = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        for target in package["targets"].as_array().into_iter().flatten() {
            if target["test"] != true {
                continue;
            }
            let text = |value: &Value| value.as_str().map(str::to_owned).context("a text");
            targets.push(Target {
                package: text(&package["name"])?,
                name: text(&target["name"])?,
                kind: text(&target["kind"][0])?,
                source: text(&target["src_path"])?.into(),
            });
        }
    }
    Ok(targets)
}

/// Whether a test of the target may have one of these in its name, by the names of files and functions.
fn may_have(target: &Target, filters: &[String]) -> bool {
    if filters.is_empty() {
        return true;
    }
    let is_file = target.kind == "test" && target.source.file_name() != Some("main.rs".as_ref());
    let sources = match (is_file, target.source.parent()) {
        (false, Some(directory)) => sources(directory),
        _ => vec![target.source.clone()],
    };
    let names = sources.iter().filter_map(|file| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let functions = text.lines().filter(|line| line.contains("fn "));
        let functions: Vec<&str> = functions.collect();
        let module = file.strip_prefix(target.source.parent()?).ok()?;
        let has_tests = text.contains("#[test]") || text.contains("::test]");
        has_tests.then(|| {
            format!(
                "{} {}\n{}",
                target.name,
                module.display(),
                functions.join("\n")
            )
        })
    });
    let names: Vec<String> = names.collect();
    filters.iter().any(|filter| {
        let (path, last) = filter.rsplit_once("::").unwrap_or(("", filter));
        let has_all = |names: &String| {
            let file = names.lines().next().unwrap_or_default();
            names.contains(last) && path.split("::").all(|part| file.contains(part))
        };
        names.iter().any(has_all)
    })
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            files.push(path);
        }
    }
    files
}

/// The paths of a program's tests, from libtest's lines `PATH: test`.
fn list(program: &Path) -> Result<Vec<String>> {
    let output = Command::new(program)
        .args(["--list", "--format=terse"])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() {
        bail!("{} does not list its tests", program.display());
    }
    let lines = String::from_utf8_lossy(&output.stdout);
    let names = lines.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_is_the_module_of_a_program() {
        for (test, expected) in [
            ("node::hold::no_first_packet_is_lost", "node::hold"),
            ("node::faults::pods::a_pod_goes", "node::faults"),
            ("node::alone::hostile::a_flood", "node::alone::hostile"),
            ("files::a_test_of_the_main_file", "files"),
            (
                "apiserver::a_watch_outlives_cuts::on_a_whole_server",
                "apiserver",
            ),
            ("dnsflow_core", "dnsflow_core"),
        ] {
            assert_eq!(suite(test), expected);
        }
    }

    #[test]
    fn a_test_in_a_module_of_that_name_runs_alone() {
        assert!(is_alone("alone::hostile::a_flood"));
        assert!(is_alone("hold::alone::a_stall"));
        assert!(!is_alone("hold::alone_at_last"));
    }

    #[test]
    fn test_programs_are_found_among_the_messages_of_cargo() {
        let message = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml","profile":{{"test":{test}}},
                "target":{{"kind":["test"],"name":"node"}},"executable":{executable}}}"#
            )
        };
        let found = program(&message(true, r#""/target/debug/deps/node-1""#)).expect("a program");
        assert_eq!(
            (found.name.as_str(), found.directory.as_path()),
            ("node", Path::new("/w/tests"))
        );
        assert_eq!(program(&message(false, r#""/target/debug/dnsflow""#)), None);
        assert_eq!(program(&message(true, "null")), None);
        assert_eq!(
            program(r#"{"reason":"build-finished","success":true}"#),
            None
        );
    }
}
