//! Runs tests side by side, each test of the lab in a process of its own, and says how they go.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Result;
use dnsflow_tests::support::NOT_RUN_VARIABLE;

use super::{
    programs::{Program, is_alone, suite},
    summary::{Outcome, Summary},
};
use crate::interrupt;

/// Labs wait most of the time: so many tests run at once on each processor. Two take a third longer, four hardly less
/// (`docs/decisions/test-runner.md`).
const TESTS_PER_PROCESSOR: usize = 3;
/// After so long a test is ended. The longest takes a minute.
const LIMIT: Duration = Duration::from_secs(900);

/// A process: one test of the lab, or a whole program of unit tests.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// The full name of the test, or the name of the program.
    pub(super) name: String,
    program: PathBuf,
    directory: PathBuf,
    arguments: Vec<String>,
    is_whole: bool,
}

impl Job {
    fn suite(&self) -> &str {
        suite(&self.name)
    }
}

/// The jobs of these programs, for the tests that have one of the filters in their full names.
pub(super) fn jobs<'a>(
    programs: impl IntoIterator<Item = &'a Program>,
    filters: &[String],
) -> Vec<Job> {
    let mut jobs = Vec::new();
    for program in programs {
        let is_wanted = |test: &&String| {
            let name = program.full_name(test);
            filters.is_empty() || filters.iter().any(|filter| name.contains(filter))
        };
        let tests: Vec<&String> = program.tests.iter().filter(is_wanted).collect();
        let job = |name: String, arguments: Vec<String>, is_whole| Job {
            name,
            program: program.path.clone(),
            directory: program.directory.clone(),
            arguments,
            is_whole,
        };
        if program.is_of_lab {
            jobs.extend(tests.into_iter().map(|test| {
                // libtest names the thread of a test after it unless only one may run at a time.
                let arguments = [test, "--exact", "--nocapture", "--test-threads=2"];
                let arguments = arguments.map(str::to_owned).to_vec();
                job(program.full_name(test), arguments, false)
            }));
        } else if tests.len() == program.tests.len() {
            jobs.push(job(program.name.clone(), Vec::new(), true));
        } else if !tests.is_empty() {
            let mut arguments: Vec<String> = tests.into_iter().cloned().collect();
            arguments.push("--exact".to_owned());
            jobs.push(job(program.name.clone(), arguments, true));
        }
    }
    jobs
}

/// How the tests of one run are started.
#[derive(Debug)]
pub(super) struct Runner<'a> {
    /// For every test.
    pub(super) environment: &'a [(&'a str, String)],
    /// Which suites go first: those that take the most processor time.
    pub(super) budgets: &'a BTreeMap<&'a str, u64>,
    /// For output and results of single tests.
    pub(super) scratch: &'a Path,
}

/// What the threads that run jobs share.
struct State<'a> {
    waiting: VecDeque<Job>,
    /// How many jobs of a suite have not ended.
    left: BTreeMap<String, usize>,
    suites: usize,
    summary: &'a mut Summary,
}

impl Runner<'_> {
    /// Runs the jobs; those that measure the machine come last, one at a time.
    pub(super) fn run(&self, jobs: Vec<Job>, summary: &mut Summary) -> Result<()> {
        let mut left = BTreeMap::new();
        for job in &jobs {
            *left.entry(job.suite().to_owned()).or_insert(0) += 1;
        }
        let (alone, mut beside): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|job| is_alone(&job.name));
        beside.sort_by_key(|job| std::cmp::Reverse(self.budgets.get(job.suite()).copied()));
        let processors = std::thread::available_parallelism()?.get();
        let state = Mutex::new(State {
            waiting: beside.into(),
            suites: left.len(),
            left,
            summary,
        });
        self.work(&state, processors * TESTS_PER_PROCESSOR)?;
        lock(&state).waiting = alone.into();
        self.work(&state, 1)
    }

    /// Runs what waits, so many at a time.
    fn work(&self, state: &Mutex<State<'_>>, at_a_time: usize) -> Result<()> {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..at_a_time)
                .map(|number| {
                    scope.spawn(move || {
                        let scratch = self.scratch.join(number.to_string());
                        fs::create_dir_all(&scratch)?;
                        loop {
                            let Some(job) = lock(state).waiting.pop_front() else {
                                return Ok(());
                            };
                            let outcome = self.run_one(&job, &scratch)?;
                            lock(state).end(&job, outcome);
                        }
                    })
                })
                .collect();
            let ends = workers.into_iter().map(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            ends.collect::<Vec<Result<()>>>().into_iter().collect()
        })
    }

    fn run_one(&self, job: &Job, scratch: &Path) -> Result<Outcome> {
        let file = |name: &str| scratch.join(name);
        let (output, usage, not_run) = (file("output"), file("usage"), file("not-run"));
        // What the test before has left goes.
        for file in [&usage, &not_run] {
            File::create(file)?;
        }
        let to = File::create(&output)?;
        // Not by its path: the build of the tests may have replaced the file.
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["contain", "--usage"])
            .arg(&usage)
            .arg("--")
            .arg(&job.program)
            .args(&job.arguments)
            .current_dir(&job.directory)
            .env("CARGO_MANIFEST_DIR", &job.directory)
            .env(NOT_RUN_VARIABLE, &not_run)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(to.try_clone()?)
            .stderr(to);
        let start = Instant::now();
        let status = interrupt::wait_at_most(interrupt::spawn(&mut command)?, LIMIT)?;
        let took = start.elapsed();
        let output = fs::read(&output)?;
        let mut output = String::from_utf8_lossy(&output).into_owned();
        if status.is_none() {
            output += &format!("it was ended after {LIMIT:?}\n");
        }
        // Empty, if the process that counts was killed.
        let used = fs::read_to_string(&usage)?.parse().unwrap_or(0);
        Ok(Outcome {
            is_ok: status.is_some_and(|status| status.success()),
            is_whole: job.is_whole,
            output,
            not_run: fs::read_to_string(&not_run)?,
            took,
            processor: Duration::from_millis(used),
        })
    }
}

impl State<'_> {
    fn end(&mut self, job: &Job, outcome: Outcome) {
        let suite = job.suite();
        self.summary.add(suite, &job.name, outcome);
        let left = self.left.entry(suite.to_owned()).or_default();
        *left -= 1;
        if *left == 0 {
            self.left.remove(suite);
            let ended = self.suites - self.left.len();
            self.summary.print_suite(suite, ended, self.suites);
        }
    }
}

/// A panic of another thread ends the run by itself.
fn lock<'a, 'b>(state: &'a Mutex<State<'b>>) -> MutexGuard<'a, State<'b>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
