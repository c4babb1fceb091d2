//! What became of the tests: a line for each suite while they run, and the summary.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    time::Duration,
};

use dnsflow_tests::support::{LEFT_TO_OTHERS, LEFT_TO_VM, RUN_AGAIN};

/// What became of one process.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) is_ok: bool,
    /// Whether it has run many tests, which libtest's output tells apart.
    pub(super) is_whole: bool,
    pub(super) output: String,
    /// Lines `not run: TEST: WHY`.
    pub(super) not_run: String,
    pub(super) took: Duration,
    /// The processor time of the process and of all that it has started.
    pub(super) processor: Duration,
}

/// The sums of a suite.
#[derive(Debug, Default)]
struct Suite {
    passed: usize,
    failed: usize,
    not_run: usize,
    took: Duration,
    processor: Duration,
}

/// A test that failed.
#[derive(Debug)]
struct Failure {
    name: String,
    cause: String,
    /// The command that runs it again.
    again: String,
}

/// The results so far.
#[derive(Debug)]
pub(super) struct Summary {
    /// The command that runs a test again, without the name of the test.
    command: String,
    /// Whether the output of tests that pass is printed, too.
    shows_output: bool,
    /// The processor time that suites may take, in seconds.
    budgets: BTreeMap<&'static str, u64>,
    suites: BTreeMap<String, Suite>,
    failures: Vec<Failure>,
    /// Tests that could not run, by the reason.
    not_run: BTreeMap<String, BTreeSet<String>>,
    /// Scenes that ran once more because the machine had stood still.
    run_again: Vec<String>,
    passed: usize,
    over_budget: BTreeSet<String>,
}

impl Summary {
    pub(super) fn new(budgets: BTreeMap<&'static str, u64>, shows_output: bool) -> Self {
        Self {
            command: String::new(),
            shows_output,
            budgets,
            suites: BTreeMap::new(),
            failures: Vec::new(),
            not_run: BTreeMap::new(),
            run_again: Vec::new(),
            passed: 0,
            over_budget: BTreeSet::new(),
        }
    }

    /// Results from here on come from this command. The suites' sums begin anew.
    pub(super) fn begin(&mut self, command: String) {
        self.command = command;
        self.suites.clear();
    }

    /// Adds what became of a process of a suite. Prints the output if a test has failed.
    pub(super) fn add(&mut self, suite: &str, name: &str, outcome: Outcome) {
        let Outcome {
            is_ok,
            is_whole,
            output,
            not_run,
            took,
            processor,
        } = outcome;
        let (mut passed, mut failed) = match (is_whole, is_ok) {
            (true, _) => counts(&output),
            (false, true) => (1, Vec::new()),
            (false, false) => (0, vec![name.to_owned()]),
        };
        if is_whole {
            let program = name.split("::").next().unwrap_or(name);
            for test in &mut failed {
                *test = format!("{program}::{test}");
            }
            if !is_ok && failed.is_empty() {
                failed.push(name.to_owned());
            }
        }
        let mut skipped = 0;
        for line in not_run.lines() {
            self.add_not_run(line);
            skipped += 1;
        }
        // They end without a failure.
        passed -= skipped.min(passed);
        let again = output.lines().filter_map(|line| line.split_once(RUN_AGAIN));
        self.run_again
            .extend(again.map(|(_, what)| what.to_owned()));
        if !failed.is_empty() || self.shows_output {
            let end = if failed.is_empty() {
                "passed"
            } else {
                "failed"
            };
            println!(
                "\n---- {name} {end}, with this output:\n{}\n----",
                output.trim_end()
            );
        }
        self.passed += passed;
        let sums = self.suites.entry(suite.to_owned()).or_default();
        sums.passed += passed;
        sums.failed += failed.len();
        sums.not_run += skipped;
        sums.took += took;
        sums.processor += processor;
        self.failures.extend(failed.into_iter().map(|name| Failure {
            again: format!("{} {name}", self.command),
            cause: cause(&output, &name).to_owned(),
            name,
        }));
    }

    /// Adds a line `not run: TEST: WHY`.
    pub(super) fn add_not_run(&mut self, line: &str) {
        let line = line.strip_prefix("not run: ").unwrap_or(line);
        let (test, why) = line.split_once(": ").unwrap_or(("", line));
        let tests = self.not_run.entry(why.to_owned()).or_default();
        tests.insert(test.to_owned());
    }

    /// Adds lines `not run: TEST: WHY` of tests that counted as passed, since they end without a failure.
    pub(super) fn add_not_run_of_passed(&mut self, lines: &str) {
        for line in lines.lines() {
            self.add_not_run(line);
            self.passed = self.passed.saturating_sub(1);
        }
    }

    /// Prints the line of a suite that has ended.
    pub(super) fn print_suite(&mut self, name: &str, ended: usize, of: usize) {
        let Some(suite) = self.suites.get(name) else {
            return;
        };
        let mut line = format!("[{ended:>2}/{of}] {name:<26} {:>4} passed", suite.passed);
        for (count, what) in [(suite.failed, "FAILED"), (suite.not_run, "not run")] {
            if count > 0 {
                let _ = write!(line, ", {count} {what}");
            }
        }
        let _ = write!(line, "; {:.1} s", suite.took.as_secs_f64());
        if !suite.processor.is_zero() {
            let _ = write!(
                line,
                ", {:.1} s of processor",
                suite.processor.as_secs_f64()
            );
            if let Some(&budget) = self.budgets.get(name) {
                let _ = write!(line, " (budget {budget} s)");
                if suite.processor > Duration::from_secs(budget) {
                    self.over_budget.insert(name.to_owned());
                }
            }
        }
        println!("{line}");
    }

    /// The tests that failed, each with its cause.
    pub(super) fn failures(&self) -> Vec<(&str, &str)> {
        let failures = self.failures.iter();
        failures
            .map(|failure| (failure.name.as_str(), failure.cause.as_str()))
            .collect()
    }

    /// How many scenes ran once more.
    pub(super) fn run_again(&self) -> &[String] {
        &self.run_again
    }

    /// How many tests passed.
    pub(super) fn passed(&self) -> usize {
        self.passed
    }

    /// Whether each test ran, but for those that are left to another machine.
    pub(super) fn all_ran(&self) -> bool {
        let is_left = |why: &String| {
            [LEFT_TO_VM, LEFT_TO_OTHERS]
                .iter()
                .any(|left| why.contains(left))
        };
        self.not_run.keys().all(is_left)
    }

    /// Prints the summary.
    pub(super) fn print(&self) {
        let not_run: usize = self.not_run.values().map(BTreeSet::len).sum();
        println!(
            "\n{} passed, {} failed, {not_run} not run",
            self.passed,
            self.failures.len()
        );
        for (why, tests) in &self.not_run {
            println!("  not run: {why}");
            for test in tests {
                println!("      {test}");
            }
        }
        for what in &self.run_again {
            println!("  run again: {what}");
        }
        for suite in &self.over_budget {
            println!("  over its budget of processor time: {suite}");
        }
        for failure in &self.failures {
            println!(
                "  FAILED: {}: {}\n      {}",
                failure.name, failure.cause, failure.again
            );
        }
    }
}

/// How many tests passed, and which failed, by libtest's lines `test result: ok. 5 passed; 0 failed; …` and
/// `test NAME ... FAILED`.
fn counts(output: &str) -> (usize, Vec<String>) {
    let passed = output.lines().filter_map(|line| {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        counts.split_once(' ')?.0.parse::<usize>().ok()
    });
    let failed = output.lines().filter_map(|line| {
        let line = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        Some(line.to_owned())
    });
    (passed.sum(), failed.collect())
}

/// The message of the panic of this test, or of the first one, or the last line.
fn cause<'o>(output: &'o str, test: &str) -> &'o str {
    let in_program = test.split_once("::").map_or(test, |(_, test)| test);
    let of_test = format!("thread '{in_program}'");
    let after = |is_it: &dyn Fn(&str) -> bool| {
        let mut lines = output.lines();
        lines.find(|line| line.contains(" panicked at ") && is_it(line))?;
        lines.next()
    };
    let message = after(&|line| line.starts_with(&of_test)).or_else(|| after(&|_| true));
    message
        .or_else(|| output.lines().last())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(is_ok: bool, is_whole: bool, output: &str, not_run: &str) -> Outcome {
        Outcome {
            is_ok,
            is_whole,
            output: output.to_owned(),
            not_run: not_run.to_owned(),
            took: Duration::from_secs(1),
            processor: Duration::from_secs(3),
        }
    }

    #[test]
    fn counts_are_read_from_the_lines_of_libtest() {
        let passed = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.00s";
        assert_eq!(counts(passed), (12, Vec::new()));
        let failed = "test a::b ... ok\ntest a::c ... FAILED\n\ntest result: FAILED. 3 passed; 1 failed; 0 ignored";
        assert_eq!(counts(failed), (3, vec!["a::c".to_owned()]));
    }

    #[test]
    fn the_cause_is_the_message_of_the_panic() {
        let output = "told 5\nthread 'x' (7) panicked at tests/x.rs:5:1:\nassertion failed: it came\nnote: run with";
        assert_eq!(cause(output, "node::y"), "assertion failed: it came");
        assert_eq!(cause("told 5\nkilled", "node::y"), "killed");
        let both = format!("{output}\nthread 'y' (8) panicked at tests/x.rs:9:1:\nlost\n");
        assert_eq!(cause(&both, "node::y"), "lost");
    }

    #[test]
    fn every_process_is_counted_once() {
        let mut summary = Summary::new(BTreeMap::from([("node::hold", 5)]), false);
        summary.begin("xtask test".to_owned());
        summary.add("node::hold", "node::hold::a", outcome(true, false, "", ""));
        let why = "not run: hold::b: no TCX\n";
        summary.add("node::hold", "node::hold::b", outcome(true, false, "", why));
        let panic = "thread 'c' panicked at x:\nlost\n";
        summary.add(
            "node::hold",
            "node::hold::c",
            outcome(false, false, panic, ""),
        );
        let crashed = outcome(false, true, "signal 11", "");
        summary.add("dnsflow_core", "dnsflow_core", crashed);
        summary.print_suite("node::hold", 1, 2);
        assert_eq!(summary.passed(), 1);
        let failures = [("node::hold::c", "lost"), ("dnsflow_core", "signal 11")];
        assert_eq!(summary.failures(), failures);
        assert!(!summary.all_ran());
        assert_eq!(summary.over_budget.len(), 1, "three times three seconds");
        assert_eq!(summary.failures[0].again, "xtask test node::hold::c");
    }
}
