//! `cargo xtask demo`: the main job as a story, each step checked.

mod recording;

use std::{
    cell::RefCell,
    env, fs,
    io::{self, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dnsflow_tests::{
    agent::Agent,
    firewall::{RuleSpec, manifest},
    lab::Lab,
    support::{DATAPATH_VARIABLE, lab_name},
};
use serde::Serialize;

use self::recording::Recording;
use crate::{
    interrupt, labs,
    prepare::{self, Ovn},
    vm::{Event, Job, Kernel, Machine},
};

/// A lost SYN is sent again after a second; this leaves room for that.
const PATIENT: Duration = Duration::from_secs(5);
const BLOCKED: Duration = Duration::from_secs(2);
/// It takes about a minute under emulation.
const VM_LIMIT: Duration = Duration::from_secs(600);

const NAME: &str = "example.com";
const URL: &str = "http://www.example.com/";
/// The lab's DNS answer to pods for `www.example.com`.
const POD_ANSWER: &str = "203.0.113.2";
/// The controller's DNS answer for `example.com`.
const CONTROLLER_ANSWER: &str = "203.0.113.8";
/// A web server like the others, which no name leads to.
const NEVER_RESOLVED: &str = "203.0.113.7";

/// Shows the main job in a lab, and checks it.
#[derive(Debug, Args)]
pub(crate) struct DemoCommand {
    /// Print nothing but the steps and their timings, as one JSON object
    #[arg(long)]
    json: bool,
    /// Whose OVN
    #[arg(long, value_enum, default_value = "bookworm")]
    ovn: Ovn,
    /// In a virtual machine with this kernel of Debian's and its openvswitch module
    #[arg(long, value_enum, value_name = "KERNEL")]
    vm: Option<Kernel>,
    /// Write a recording to this directory: demo.cast, and demo.svg
    #[arg(long, value_name = "DIR", conflicts_with = "vm")]
    record: Option<PathBuf>,
    /// Everything is built already: what the demo in a virtual machine is told
    #[arg(long, hide = true)]
    built: bool,
}

/// The story so far.
struct Story {
    out: RefCell<Box<dyn Write>>,
    recording: RefCell<Recording>,
    steps: Vec<Step>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    steps: Vec<Step>,
    ok: bool,
}

#[derive(Serialize)]
struct Step {
    name: &'static str,
    ok: bool,
    ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Story {
    /// A paragraph for the reader.
    fn say(&self, text: &str) {
        // If the reader is gone, the checks go on.
        let _closed = writeln!(self.out.borrow_mut(), "{text}");
        self.recording.borrow_mut().say(text);
    }

    /// Announces, runs, checks and times one step. `work` returns what it has found, for the
    /// reader.
    fn step<T>(
        &mut self,
        name: &'static str,
        told: &str,
        work: impl FnOnce() -> Result<(T, String)>,
    ) -> Result<T> {
        interrupt::check()?;
        let number = self.steps.len() + 1;
        self.say(&format!("\n{number}. {told}"));
        let start = Instant::now();
        let result = work();
        // A signal may be why it failed.
        interrupt::check()?;
        let ms = (start.elapsed().as_secs_f64() * 1e4).round() / 10.0;
        let error = result.as_ref().err().map(|error| format!("{error:#}"));
        self.steps.push(Step {
            name,
            ok: result.is_ok(),
            ms,
            error,
        });
        match result {
            Ok((value, found)) => {
                for line in found.lines() {
                    self.say(&format!("     {line}"));
                }
                self.say(&format!("   ok, {ms} ms"));
                Ok(value)
            }
            Err(error) => {
                self.say(&format!("   NOT as said, {ms} ms"));
                Err(error.context(format!("step {number} ({name}) is not as said")))
            }
        }
    }
}

/// Tells the story; an error if any step is not as said.
pub(crate) fn run(command: DemoCommand) -> Result<()> {
    let DemoCommand {
        json,
        ovn,
        vm,
        record,
        built,
    } = command;
    if let Some(kernel) = vm {
        return run_in_vm(kernel, ovn, json);
    }
    let out: Box<dyn Write> = if json {
        Box::new(io::stderr())
    } else {
        Box::new(io::stdout())
    };
    let mut story = Story {
        out: RefCell::new(out),
        recording: RefCell::new(Recording::begin()),
        steps: Vec::new(),
    };
    labs::sweep()?;
    let result = tell(&mut story, ovn, built);
    let swept = labs::sweep();
    interrupt::check()?;
    if json {
        let report = Report {
            ok: result.is_ok(),
            steps: std::mem::take(&mut story.steps),
        };
        println!("{}", serde_json::to_string(&report)?);
    }
    result?;
    swept?;
    story.say("\nThe lab is gone again. Play in one yourself: cargo xtask lab up\n\nok");
    match record {
        Some(directory) => story.recording.borrow().write(&directory),
        None => Ok(()),
    }
}

/// The same, told from inside a virtual machine.
fn run_in_vm(kernel: Kernel, ovn: Ovn, json: bool) -> Result<()> {
    let say = |text: &str| eprintln!("{text}");
    prepare::ovn(ovn, &say)?;
    prepare::build(&say)?;
    let machine = Machine::prepare(kernel, &say)?;
    let report = json.then(|| machine.result("report.json"));
    let mut arguments = vec!["demo", "--built", "--ovn", ovn.suite()];
    arguments.extend(json.then_some("--json"));
    let job = Job {
        name: "demo".to_owned(),
        program: env::current_exe()?,
        arguments: arguments.into_iter().map(str::to_owned).collect(),
        environment: vec![(DATAPATH_VARIABLE, "system".to_owned())],
        directory: env::current_dir()?,
        stdout: report.clone(),
        limit: VM_LIMIT,
    };
    let failed = machine.run(&[job], |event| match event {
        Event::Line(line) if json => eprintln!("{line}"),
        Event::Line(line) => println!("{line}"),
        Event::Ended(..) => {}
    })?;
    if let Some(report) = report {
        print!("{}", fs::read_to_string(report)?);
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn tell(story: &mut Story, ovn: Ovn, built: bool) -> Result<()> {
    let root = prepare::ovn(ovn, &|text| story.say(text))?;
    if !built {
        prepare::build(&|text| story.say(text))?;
    }
    let lab = story.step(
        "lab up",
        "A node of a cluster, in network namespaces: real Open vSwitch and OVN, pods, a DNS\n   \
         service, and an \"internet\" behind a gateway.",
        || {
            let lab = Lab::up(labs::options(lab_name("demo"), root)?)?;
            let version = lab.nbctl(&["--version"])?;
            let first = version.lines().next().unwrap_or_default();
            let version = first.rsplit(' ').next().unwrap_or_default();
            Ok((lab, format!("OVN {version}")))
        },
    )?;
    without_dnsflow(story, &lab)?;
    let agent = story.step(
        "agent ready",
        "Now dnsflow. It finds the pods, reads the rules, and learns from OVN where they live.",
        || {
            let agent = lab.start_agent(&[])?;
            Ok((agent, "$ dnsflow agent ...".to_owned()))
        },
    )?;
    with_dnsflow(story, &lab, agent)
}

fn without_dnsflow(story: &mut Story, lab: &Lab) -> Result<()> {
    let deny = RuleSpec::deny("0.0.0.0/0")?;
    let rules = [RuleSpec::allow_name(NAME), deny.clone()];
    story.step(
        "firewall",
        "Namespace ns1 may reach example.com and nothing else; namespace ns2 nothing at all.\n   \
         OVN gets the same rows as ovn-kubernetes would write for it.",
        || {
            lab.set_firewall("ns1", &rules)?;
            lab.set_firewall("ns2", &[deny])?;
            Ok(((), manifest("ns1", &rules)))
        },
    )?;
    story.step(
        "resolved elsewhere",
        "The cluster's controller resolves the name, once for all pods. The pod asks for itself,\n   \
         and is told another address, as content networks do.",
        || {
            lab.resolve_centrally(NAME, &[CONTROLLER_ANSWER.parse()?])?;
            let told = lab.pod("ns1_pod1").resolve("www.example.com")?;
            ensure!(told == [POD_ANSWER.parse::<std::net::Ipv4Addr>()?], "the pod was told {told:?}");
            Ok((
                (),
                format!("controller: {NAME} is {CONTROLLER_ANSWER}\npod: www.{NAME} is {POD_ANSWER}"),
            ))
        },
    )?;
    story.step(
        "blocked without dnsflow",
        "So the pod is blocked, although the rule allows it.",
        || blocked(lab, "ns1_pod1", URL),
    )
}

fn with_dnsflow(story: &mut Story, lab: &Lab, agent: Agent) -> Result<()> {
    story.step(
        "works with dnsflow",
        "The same command: dnsflow sees the answer that the pod gets, and opens that address.",
        || works(lab, "ns1_pod1", URL),
    )?;
    story.step(
        "works again",
        "Once more, now that the address is open.",
        || works(lab, "ns1_pod1", URL),
    )?;
    story.step(
        "never resolved stays blocked",
        "An address that no answer has named stays blocked.",
        || blocked(lab, "ns1_pod1", &format!("http://{NEVER_RESOLVED}/")),
    )?;
    story.step(
        "other namespace stays blocked",
        "So does a pod of the other namespace, whatever it asks.",
        || blocked(lab, "ns2_pod1", URL),
    )?;
    story.step(
        "the flow",
        "This is what dnsflow has added to the switch, next to OVN's own flows for the rules.",
        || Ok(((), flows(lab)?)),
    )?;
    story.step("agent stopped", "dnsflow stops when it is told to.", || {
        let status = agent.terminate()?;
        ensure!(status.success(), "it ended with {status}");
        Ok(((), String::new()))
    })
}

fn command_line(pod: &str, url: &str) -> String {
    format!("{pod}$ curl {url}\n")
}

fn works(lab: &Lab, pod: &str, url: &str) -> Result<((), String)> {
    let fetch = lab.pod(pod).fetch(url, PATIENT)?;
    match fetch.result {
        Ok(page) => Ok(((), command_line(pod, url) + &page)),
        Err(error) => bail!("{}{error}", command_line(pod, url)),
    }
}

fn blocked(lab: &Lab, pod: &str, url: &str) -> Result<((), String)> {
    let fetch = lab.pod(pod).fetch(url, BLOCKED)?;
    match fetch.result {
        // Not a name that does not resolve, or a server that refuses.
        Err(error) if error.contains("timed out") => Ok(((), command_line(pod, url) + &error)),
        Err(error) => bail!("{}failed otherwise: {error}", command_line(pod, url)),
        Ok(page) => bail!("{}reached: {page}", command_line(pod, url)),
    }
}

/// dnsflow's flows and OVN's flows of the same table for the same rules.
fn flows(lab: &Lab) -> Result<String> {
    let all = lab.dnsflow_flows()?;
    let mut ours: Vec<_> = all
        .iter()
        .filter(|flow| flow.contains(POD_ANSWER))
        .collect();
    ours.extend(Lab::of_groups_of(&all, POD_ANSWER.parse()?));
    let first = ours
        .first()
        .with_context(|| format!("no flow of dnsflow for {POD_ANSWER}"))?;
    let field = |flow: &str, name: &str| {
        let (_, rest) = flow.split_once(name)?;
        Some(rest.split([',', ' ']).next()?.to_owned())
    };
    let table = field(first, "table=").context("a flow without table")?;
    let dump = lab.ofctl(&[
        "--protocols=OpenFlow15",
        "--no-stats",
        "dump-flows",
        "br-int",
        &format!("table={table}"),
    ])?;
    let mut theirs: Vec<_> = dump
        .lines()
        .map(str::trim)
        .filter(|flow| flow.starts_with("cookie=") && !ours.iter().any(|our| our == flow))
        // The rows of this pod, and the drops of all pods, which OVN writes as conjunctions.
        .filter(|flow| flow.contains("conj_id=") || field(flow, "reg14=") == field(first, "reg14="))
        .filter(|flow| field(flow, "metadata=") == field(first, "metadata="))
        .collect();
    theirs.sort_unstable();
    let mut text = String::from("dnsflow:\n");
    for flow in ours {
        text += &format!("  {flow}\n");
    }
    text += "OVN:\n";
    for flow in theirs {
        text += &format!("  {flow}\n");
    }
    Ok(text)
}
