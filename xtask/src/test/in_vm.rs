//! The lab tests in a virtual machine: built here, run there, on the kernel's datapath.

use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use dnsflow_tests::{
    random::{PROPERTY_SEED_VARIABLE, SEED_VARIABLE},
    support::{DATAPATH_VARIABLE, NOT_RUN_VARIABLE, ROOT_VARIABLE, root_directory},
};

use super::{
    Prepared, TestCommand,
    programs::{Program, suite},
    summary::{Outcome, Summary},
};
use crate::{
    prepare::Ovn,
    vm::{Event, Job, Machine},
};

/// A suite takes up to five minutes under emulation.
const LIMIT: Duration = Duration::from_secs(1200);

/// What `--short` runs: suites, or single tests of them. docs/internals/kernels.md says what each adds to the same test
/// outside.
const SHORT: [&str; 16] = [
    "bpf::attach::",
    "bpf::hold::",
    "bpf::marks::",
    "bpf::opens::",
    "bpf::others::",
    "bpf::release::",
    "node::handover::",
    "node::hold::no_first_packet_is_lost",
    "node::hold::the_first_denied_packet_is_counted_before_any_revalidation",
    "node::marks::",
    "node::opens::",
    "node::restarts::ovn_controller_stopped_and_killed",
    "node::restarts::vswitchd_stopped_and_killed",
    "node::rights::the_main_job_is_done_with_the_capabilities_of_the_restricted_overlay",
    "node::story::a_pod_reaches_what_its_firewall_names_and_nothing_more",
    "node::ways::",
];

/// Suites whose tests neither kernel nor datapath make a difference to: they run outside. Those of the clients are
/// about what goes over a socket.
const OUTSIDE: [&str; 6] = [
    "apiserver::",
    "clients::",
    "files::",
    "node::benchmark::",
    "node::scale::",
    "node::large::",
];

/// Its tests run one at a time, since each of them fills an emulated machine.
const FAULTS: &str = "node::faults";

/// Runs the tests and adds what became of them.
pub(super) fn run(
    machine: &Machine,
    command: &TestCommand,
    prepared: &Prepared,
    seed: u64,
    summary: &mut Summary,
) -> Result<()> {
    let TestCommand {
        short,
        open_by,
        filters,
        ..
    } = command;
    let is_wanted = |name: &str| {
        let is_one_of = |of: &[&str]| of.iter().any(|start| name.starts_with(start));
        !is_one_of(&OUTSIDE)
            && (!short || is_one_of(&SHORT))
            && (filters.is_empty() || filters.iter().any(|filter| name.contains(filter)))
    };
    let not_run = machine.result("not-run.txt");
    let mut again = format!(
        "{SEED_VARIABLE}={seed} cargo xtask test --vm {}",
        machine.kernel().name()
    );
    let mut shared = vec![
        (DATAPATH_VARIABLE, "system".to_owned()),
        (NOT_RUN_VARIABLE, not_run.display().to_string()),
        (SEED_VARIABLE, seed.to_string()),
        (PROPERTY_SEED_VARIABLE, seed.to_string()),
    ];
    for generation in &prepared.ovn {
        again += &format!(" --ovn {}", generation.suite());
    }
    if let Some(open_by) = open_by {
        let (variable, value) = open_by.environment();
        again += &format!(" --open-by {value}");
        shared.push((variable, value));
    }
    let mut jobs = Vec::new();
    for generation in &prepared.ovn {
        for program in prepared.programs.iter().filter(|program| program.is_of_lab) {
            jobs.extend(jobs_of(program, *generation, command, &shared, is_wanted)?);
        }
    }
    ensure!(
        !jobs.is_empty(),
        "no test of this name runs in a virtual machine"
    );
    summary.begin(again);
    let (mut output, mut start, mut ended) = (String::new(), Instant::now(), 0);
    machine.run(&jobs, |event| match event {
        Event::Line(line) => {
            output += line;
            output.push('\n');
        }
        Event::Ended(job, status) => {
            ended += 1;
            let outcome = Outcome {
                is_ok: status == "0",
                is_whole: true,
                output: std::mem::take(&mut output),
                not_run: String::new(),
                took: start.elapsed(),
                processor: Duration::ZERO,
            };
            start = Instant::now();
            summary.add(&job.name, &job.name, outcome);
            summary.print_suite(&job.name, ended, jobs.len());
        }
    })?;
    summary.add_not_run_of_passed(&fs::read_to_string(&not_run).unwrap_or_default());
    Ok(())
}

/// A job for each suite of the program with such tests.
fn jobs_of(
    program: &Program,
    ovn: Ovn,
    command: &TestCommand,
    shared: &[(&'static str, String)],
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Vec<Job>> {
    let debian = ovn.suite();
    let names = program
        .tests
        .iter()
        .map(|test| (test, program.full_name(test)));
    let wanted: Vec<_> = names.filter(|(_, name)| is_wanted(name)).collect();
    let suites: BTreeSet<&str> = wanted.iter().map(|(_, name)| suite(name)).collect();
    let mut jobs = Vec::new();
    for of in suites {
        let tests = wanted.iter().filter(|(_, name)| suite(name) == of);
        let mut arguments: Vec<String> = tests.map(|(test, _)| (*test).clone()).collect();
        arguments.push("--exact".to_owned());
        if command.show_output {
            arguments.push("--show-output".to_owned());
        }
        if of == FAULTS {
            arguments.push("--test-threads=1".to_owned());
        }
        let mut environment = shared.to_vec();
        environment.push((ROOT_VARIABLE, root_directory(debian)?.display().to_string()));
        jobs.push(Job {
            name: of.to_owned(),
            program: program.path.clone(),
            arguments,
            environment,
            directory: program.directory.clone(),
            stdout: None,
            limit: LIMIT,
        });
    }
    Ok(jobs)
}
