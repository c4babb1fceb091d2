//! The soak: what `cargo xtask soak` builds and runs.
//!
//! `soak --root DIR [--minutes N] [--one-process M]`, with `DNSFLOW_SEED` to repeat a run.
//!
//! Random firewalls, edits, names that change and pods that come and go, as in `tests/random_firewalls.rs`,
//! with restarts in between. Each connection is judged by the first-match oracle. The agent is replaced at
//! first only: one process serves the rest, and its memory, files and threads have to stay as they are.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use dnsflow_tests::{
    hunt::{AgentEnd, Hunt, HuntOptions, Seen},
    lab::{Cluster, Lab, LabOptions},
    ovs::{Daemon, Stop},
    process::{run, wait_until},
    random::Random,
    root::Root,
    support,
};

/// `--max-ttl`: an hour of soak is sixty lifetimes.
const MAX_TTL: Duration = Duration::from_secs(60);
/// How long an address may be open that nobody asks for: its lifetime, the time without a packet, and the
/// time between two readings of the counters, with something to spare.
const FADE: Duration = Duration::from_secs(200);
/// Names beside that each pod asks for at each edit.
const HOSTS: usize = 40;
/// Where the agent tells its metrics.
const METRICS: &str = "127.0.0.1:9474";
/// How long the kernel may take to free what nobody has open.
const FREED: Duration = Duration::from_secs(30);
/// The name of a thread for calls that block. It ends ten seconds after its last call, and there is another one if
/// two calls block at a time (`max_blocking_threads` in tokio's `runtime::Builder`).
const BLOCKING: &str = "tokio-rt-worker";
/// The agent's limit of such threads.
const BLOCKING_MAX: usize = 8;
/// Parts of the names and labels of counters that are told.
const COUNTERS: [&str; 11] = [
    "answers_total",
    "packets_to_pods_total",
    "held_answers",
    "_lost",
    "left_out",
    "not_kept",
    "refused",
    "full",
    "over_share",
    "failed",
    "displaced",
];

/// Lets dnsflow work for long, and disturbs it
#[derive(Debug, Parser)]
struct Arguments {
    /// The unpacked Debian packages
    #[arg(long, value_name = "DIR")]
    root: PathBuf,
    /// How long
    #[arg(long, value_name = "N", default_value_t = 60)]
    minutes: u64,
    /// How many of them one process of the agent serves at the end; half of them, when left out
    #[arg(long, value_name = "M")]
    one_process: Option<u64>,
}

/// What is done between two edits.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Disturbance {
    Replace(AgentEnd),
    Freeze,
    Restart(&'static str),
}

/// The daemons by their names.
const DAEMONS: [(&str, Daemon); 6] = [
    ("ovs-vswitchd", Daemon::Vswitchd),
    ("ovn-controller", Daemon::OvnController),
    ("ovn-northd", Daemon::Northd),
    ("the OVS database", Daemon::OvsDb),
    ("the northbound database", Daemon::NbDb),
    ("the southbound database", Daemon::SbDb),
];

/// What the agent's process takes.
#[derive(Clone, Debug)]
struct Sample {
    minute: f64,
    resident_kib: f64,
    files: usize,
    /// The names of its threads, but for [`BLOCKING`], in their order.
    threads: Vec<String>,
    /// How many threads are for calls that block.
    blocking: usize,
}

fn main() -> Result<()> {
    let Arguments {
        root,
        minutes,
        one_process,
    } = Arguments::parse();
    let time = Duration::from_secs(60 * minutes);
    let one_process = one_process.map_or(time / 2, |minutes| Duration::from_secs(60 * minutes));
    ensure!(
        one_process <= time,
        "--one-process {} minutes: no longer than --minutes {minutes}",
        one_process.as_secs() / 60
    );
    let name = support::lab_name("soak");
    let lab = Lab::up(LabOptions {
        name: name.clone(),
        root: Root::existing(&root)?,
        datapath: support::datapath()?,
        cluster: Cluster::default(),
        helper: support::helper()?,
    })?;
    let objects = soak(&lab, time, time - one_process)?;
    drop(lab);
    let mut left = BTreeSet::new();
    wait_until("the kernel to free the BPF objects", FREED, || {
        left = &bpf_objects()? & &objects;
        Ok(left.is_empty())
    })
    .with_context(|| format!("left:\n{}", describe(&left)))?;
    ensure!(!Lab::names()?.contains(&name), "a namespace is left");
    println!("left behind: no flow, no BPF object, no network namespace");
    Ok(())
}

/// Runs for `time`, and replaces the agent in the first part of it only. Returns the BPF objects that the agents have
/// had.
fn soak(lab: &Lab, time: Duration, replaced: Duration) -> Result<BTreeSet<BpfObject>> {
    let state = lab.base().join("state");
    fs::create_dir_all(&state)?;
    let options = HuntOptions {
        arguments: vec![
            format!("--max-ttl={}s", MAX_TTL.as_secs()),
            format!("--state-dir={}", state.display()),
            format!("--listen={METRICS}"),
        ],
        fade: Some(FADE),
        hosts: HOSTS,
        explains_slow: false,
        questions: 0,
    };
    let mut hunt = Hunt::start(lab, Random::from_environment()?, options);
    hunt.the_network_works();
    let start = Instant::now();
    let mut samples = Vec::new();
    let mut objects = BTreeSet::new();
    let mut recoveries: BTreeMap<Disturbance, Vec<Duration>> = BTreeMap::new();
    while start.elapsed() < time {
        hunt.try_firewall(&mut |hunt| {
            objects.extend(bpf_objects_of(hunt).expect("the agent runs"));
            let is_late = start.elapsed() > replaced;
            if let Some(what) = disturbance(hunt.random(), is_late) {
                disturb(lab, hunt, what).expect("it comes back");
                recoveries.entry(what).or_default().push(hunt.settle());
            }
            if is_late {
                samples.push(sample(hunt, start).expect("the agent runs"));
            }
        });
        let Seen {
            firewalls, states, ..
        } = hunt.seen();
        let minute = start.elapsed().as_secs() / 60;
        eprintln!("minute {minute}: {firewalls} firewalls, {states} states");
    }

    hunt.open_some();
    println!("{:.1} minutes", start.elapsed().as_secs_f64() / 60.0);
    let metrics = metrics(lab)?;
    // Nobody asks any more, and nobody connects.
    let (flows, began) = (lab.dnsflow_flows()?, Instant::now());
    ensure!(!flows.is_empty(), "the last firewall has opened nothing");
    let mut left = Vec::new();
    wait_until("all addresses to close", FADE, || {
        left = lab.dnsflow_flows()?;
        // Those of groups stay a while.
        left.retain(|flow| flow.contains("nw_dst=") || flow.contains("ipv6_dst="));
        Ok(left.is_empty())
    })
    .with_context(|| left.join("\n"))?;
    println!(
        "{} flows at the end, all gone {:.0} s after the last question",
        flows.len(),
        began.elapsed().as_secs_f64()
    );
    hunt.end();
    report(&hunt, &samples, &recoveries, &metrics);
    let first = samples.first().context("one process served no minute")?;
    let last = samples.last().context("one process served no minute")?;
    ensure!(
        last.files <= first.files + 4,
        "files have become more: {} and {}",
        first.files,
        last.files
    );
    ensure!(
        last.threads == first.threads,
        "other threads: {:?} and {:?}",
        first.threads,
        last.threads
    );
    ensure!(
        last.blocking <= BLOCKING_MAX,
        "{} threads for calls that block",
        last.blocking
    );
    Ok(objects)
}

fn disturbance(random: &mut Random, is_late: bool) -> Option<Disturbance> {
    match random.below(8) {
        0 if !is_late => Some(Disturbance::Replace(AgentEnd::Terminate)),
        1 if !is_late => Some(Disturbance::Replace(AgentEnd::Kill)),
        2 => Some(Disturbance::Freeze),
        3 | 4 => Some(Disturbance::Restart(random.pick(&DAEMONS).0)),
        _ => None,
    }
}

fn disturb(lab: &Lab, hunt: &mut Hunt<'_>, what: Disturbance) -> Result<()> {
    hunt.note(format!("{what:?}"));
    match what {
        Disturbance::Replace(how) => hunt.replace_agent(how),
        Disturbance::Freeze => {
            hunt.agent().freeze()?;
            std::thread::sleep(Duration::from_secs(2));
            hunt.agent().thaw()?;
        }
        Disturbance::Restart(name) => {
            let how = *hunt.random().pick(&[Stop::Terminate, Stop::Kill]);
            let daemon = DAEMONS.iter().find(|(known, _)| *known == name);
            lab.restart(daemon.context("a daemon")?.1, how)?;
        }
    }
    Ok(())
}

fn sample(hunt: &Hunt<'_>, start: Instant) -> Result<Sample> {
    let process = PathBuf::from(format!("/proc/{}", hunt.agent().pid()));
    let status = fs::read_to_string(process.join("status"))?;
    let resident = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let resident = resident.and_then(|line| line.split_whitespace().next());
    let mut sample = Sample {
        minute: start.elapsed().as_secs_f64() / 60.0,
        resident_kib: resident.context("no RssAnon")?.parse()?,
        files: fs::read_dir(process.join("fd"))?.count(),
        threads: Vec::new(),
        blocking: 0,
    };
    for thread in fs::read_dir(process.join("task"))? {
        // It may have ended meanwhile.
        let Ok(name) = fs::read_to_string(thread?.path().join("comm")) else {
            continue;
        };
        if name.trim() == BLOCKING {
            sample.blocking += 1;
        } else {
            sample.threads.push(name.trim().to_owned());
        }
    }
    sample.threads.sort();
    Ok(sample)
}

/// The slope of the least squares' line, in KiB per minute.
fn slope(samples: &[Sample]) -> f64 {
    let count = samples.len() as f64;
    let mean = |of: fn(&Sample) -> f64| samples.iter().map(of).sum::<f64>() / count;
    let (minute, resident) = (mean(|it| it.minute), mean(|it| it.resident_kib));
    let sum = |of: &dyn Fn(&Sample) -> f64| samples.iter().map(of).sum::<f64>();
    let together = sum(&|it| (it.minute - minute) * (it.resident_kib - resident));
    together / sum(&|it| (it.minute - minute).powi(2)).max(f64::MIN_POSITIVE)
}

/// What the agent has counted: answers and packets to the pods, and whatever may mean a loss.
fn metrics(lab: &Lab) -> Result<Vec<String>> {
    let mut curl = lab.node_command("curl")?;
    let url = format!("http://{METRICS}/metrics");
    curl.args(["--silent", "--fail", &url]).stdin(Stdio::null());
    let text = run(&mut curl)?;
    let counters = text.lines().filter(|line| {
        let is_told = COUNTERS.iter().any(|part| line.contains(part));
        !line.starts_with('#') && is_told && !line.ends_with(" 0")
    });
    Ok(counters.map(str::to_owned).collect())
}

/// Kind and number of a program or a map in the kernel.
type BpfObject = (&'static str, u32);

/// `BPF_PROG_GET_NEXT_ID` and `BPF_MAP_GET_NEXT_ID` (Linux `include/uapi/linux/bpf.h`).
const NEXT_IDS: [(&str, libc::c_int); 2] = [(PROGRAM, 11), (MAP, 12)];

/// Those that there are. None is opened to be looked at: a map of programs would be there for ever, if it was opened
/// and closed while the kernel empties it behind its last user (`docs/decisions/soak.md`).
fn bpf_objects() -> Result<BTreeSet<BpfObject>> {
    let mut objects = BTreeSet::new();
    for (kind, command) in NEXT_IDS {
        let mut id = 0;
        while let Some(next) = next_id(command, id)? {
            objects.insert((kind, next));
            id = next;
        }
    }
    Ok(objects)
}

/// The number after this one.
fn next_id(command: libc::c_int, id: u32) -> io::Result<Option<u32>> {
    // The fields `start_id`, `next_id` and `open_flags` of `union bpf_attr`.
    let mut attributes = [id, 0, 0];
    let size = size_of_val(&attributes);
    // SAFETY: the kernel reads and writes the attributes only, which are as long as said.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_mut_ptr(), size) };
    if result == 0 {
        return Ok(Some(attributes[1]));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOENT) => Ok(None),
        _ => Err(error),
    }
}

/// Their names, and the processes that have them open.
fn describe(objects: &BTreeSet<BpfObject>) -> String {
    let programs = aya::programs::loaded_programs().flatten();
    let programs = programs.map(|program| {
        (
            (PROGRAM, program.id()),
            format!("{:?}", program.name_as_str()),
        )
    });
    let maps = aya::maps::loaded_maps().flatten();
    let maps = maps.map(|map| {
        let text = format!("{:?} of type {:?}", map.name_as_str(), map.map_type().ok());
        ((MAP, map.id()), text)
    });
    let names: BTreeMap<BpfObject, String> = programs.chain(maps).collect();
    let lines = objects.iter().map(|object @ (kind, id)| {
        let name = names.get(object).map_or("gone by now", String::as_str);
        let open = processes_with(*object).join(", ");
        format!("{kind} {id}: {name}, open in: [{open}]\n")
    });
    lines.collect()
}

/// The processes that have it open.
fn processes_with(object: BpfObject) -> Vec<String> {
    let directories = fs::read_dir("/proc").into_iter().flatten().flatten();
    let with = directories.filter(|directory| {
        bpf_objects_in(&directory.path()).is_ok_and(|objects| objects.contains(&object))
    });
    with.map(|directory| {
        let command = fs::read_to_string(directory.path().join("comm")).unwrap_or_default();
        format!("{} {}", directory.file_name().display(), command.trim())
    })
    .collect()
}

/// Those that the agent has open.
fn bpf_objects_of(hunt: &Hunt<'_>) -> Result<BTreeSet<BpfObject>> {
    let objects = bpf_objects_in(&PathBuf::from(format!("/proc/{}", hunt.agent().pid())))?;
    ensure!(!objects.is_empty(), "the agent has no BPF objects");
    Ok(objects)
}

/// Those that a process has open, by `/proc/PID/fdinfo` (proc(5)).
fn bpf_objects_in(process: &Path) -> Result<BTreeSet<BpfObject>> {
    let mut objects = BTreeSet::new();
    for file in fs::read_dir(process.join("fdinfo"))? {
        // The process may have closed it meanwhile.
        let text = fs::read_to_string(file?.path()).unwrap_or_default();
        for line in text.lines() {
            for kind in [PROGRAM, MAP] {
                if let Some(id) = line.strip_prefix(kind) {
                    objects.insert((kind, id.trim().parse()?));
                }
            }
        }
    }
    Ok(objects)
}

/// How the lines of fdinfo begin that name a program and a map.
const PROGRAM: &str = "prog_id:";
const MAP: &str = "map_id:";

fn report(
    hunt: &Hunt<'_>,
    samples: &[Sample],
    recoveries: &BTreeMap<Disturbance, Vec<Duration>>,
    metrics: &[String],
) {
    let Seen {
        firewalls,
        states,
        passed,
        blocked,
        second_packets,
        late_denials,
        slowest_edit,
        lost_answers,
        ..
    } = hunt.seen();
    println!("{firewalls} firewalls, {states} states");
    println!("connections as the oracle says: {passed} passed, {blocked} blocked");
    println!(
        "first packets lost while nothing was changed: {}",
        second_packets.len()
    );
    println!("packets that passed right after the answer that denies them: {late_denials}");
    println!("answers lost: {}", lost_answers.len());
    for lost in lost_answers {
        println!("  {lost}");
    }
    println!("slowest edit: {:.1} s", slowest_edit.as_secs_f64());
    println!("\ndisturbance, times, and until all connections are judged right (median, longest)");
    for (what, times) in recoveries {
        let mut times = times.clone();
        times.sort();
        let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
        let name = match what {
            Disturbance::Replace(AgentEnd::Terminate) => "another agent after SIGTERM",
            Disturbance::Replace(AgentEnd::Kill) => "another agent after SIGKILL",
            Disturbance::Freeze => "the agent stopped for 2 s",
            Disturbance::Restart(daemon) => daemon,
        };
        println!(
            "  {name:28} {:4}  {:5.1} s {:5.1} s",
            times.len(),
            median.as_secs_f64(),
            longest.as_secs_f64()
        );
    }
    println!("\nthe process that served the rest: minute, KiB, files, threads");
    for sample in samples.iter().step_by(samples.len().div_ceil(10).max(1)) {
        println!(
            "  {:6.1} {:8} {:4} {:4}",
            sample.minute,
            sample.resident_kib,
            sample.files,
            sample.threads.len() + sample.blocking
        );
    }
    let last = &samples[samples.len() * 9 / 10..];
    println!(
        "  slope: {:+.2} KiB per minute, {:+.2} in the last tenth",
        slope(samples),
        slope(last)
    );
    println!("\nits counters");
    for line in metrics {
        println!("  {line}");
    }
}
