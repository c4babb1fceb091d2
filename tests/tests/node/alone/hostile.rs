//! Pods and a name server that do as much harm as they can, and a neighbour that must not notice.
//!
//! Each scene has three phases, and the neighbour does the same in all of them. In the first phase, nobody
//! does harm. In the second, the attackers flood a port that is no DNS server's: the phase shows what the
//! flood costs the machine and the switch without dnsflow. In the third, the attackers flood the DNS server's
//! port. In each phase, the agent must open each name that the neighbour is told, unless it counts as many answers in
//! the same phase that its ring buffer had no room for, or whose query its program had not seen. An agent that other work
//! keeps from the processor does not keep up with a flood. A query reaches the switch by a packet socket before it reaches
//! the program, so that its answer can be first where the host takes the processor from the machine in between.
//!
//! Beside the neighbour, a pod without a firewall, the twin, does the same. What both lose at the same time, the machine
//! or the switch has lost. What only the neighbour loses must not be more in the third phase than in the others, by
//! Fisher's exact test: wrong once in a million runs. An agent that had to wait for a processor for longer than it had one
//! cannot keep up with a flood, which is then said in place of a failure. If the attack is long enough to tell, the
//! neighbour's p99 in the third phase must be at most twice that of the first or the second.
//!
//! The neighbour has a name server of its own. One that all pods share can be kept busy by any pod, with and
//! without dnsflow.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    net::{Ipv4Addr, SocketAddrV4},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{
    agent::{Agent, FlowWatch},
    counts::Share,
    firewall::RuleSpec,
    flood::{Flood, NETWORK, NameServer, SHAPES},
    lab,
    lab::Lab,
    neighbour::{LossKind, Visits, numbered, visit},
    pod::PodSpec,
    process::{PATIENT, run, wait_until},
    processor::Processor,
    support::{LEFT_TO_OTHERS, is_emulated, not_run, this_test},
    topology::DNS_POD_PORT,
};
use rustix::process::Pid;

/// The environment variable that says how many seconds an attack takes.
const SECONDS_VARIABLE: &str = "DNSFLOW_HOSTILE_SECONDS";
const SECONDS: u64 = 5;
/// The phases before an attack take as long, but no longer than this.
const SECONDS_BEFORE_MAX: u64 = 20;

/// The neighbour's own names.
const NEIGHBOUR_DOMAIN: &str = "example.org";
/// What the hostile name server serves. Short labels let a name have as many as possible.
const HOSTILE_DOMAIN: &str = "e.c";
/// Nobody's true answer leads here.
const FORGED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);

/// What the neighbour asks for, one at a time. Its own limits are far.
const NAMES_PER_SECOND: u64 = 40;
const PAUSE: Duration = Duration::from_millis(1000 / NAMES_PER_SECOND);
/// Names before anything is measured.
const WARM_UP: u32 = 40;
/// The hostile name server's address and port, and a port beside it that is no DNS server's.
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 54);
const PORT: u16 = 53;
const OTHER_PORT: u16 = 54;

const P99: f64 = 0.99;
/// Activations of an attack from which on their p99 says something: 20 are beyond it.
const ACTIVATIONS_MIN: usize = 2000;

/// By how much an attack may make the agent's memory grow, in MiB: a pod's share of the cache is 4,096
/// addresses with 8,192 names of up to 255 bytes, and each address has two flows.
const GROWTH_MAX_MIB: f64 = 16.0;
/// On a busy machine, threads come so late that a smaller p99 says nothing.
const NOISE: Duration = Duration::from_millis(25);
/// What a pod may change in the switch at once, and in each second.
const CHANGES_AT_ONCE: u64 = 8192;
const CHANGES_PER_SECOND: u64 = 256;
/// Flows of the addresses of one answer, which the budget lets through as a whole.
const CHANGES_OF_ONE_ANSWER: u64 = 512;

/// What one phase has done to the neighbour.
#[derive(Debug)]
struct Phase {
    visits: Visits,
    of_twin: Visits,
    /// Names that the neighbour was told, and that were not opened.
    unopened: usize,
    /// The agent's time from the answer's capture to the switch's confirmation, ascending.
    activations: Vec<Duration>,
}

impl Phase {
    /// What only the neighbour has lost, of what it has tried.
    fn lost(&self) -> Share {
        let of = self.visits.count();
        let lost = self.visits.lost_beside(&self.of_twin) + self.unopened;
        Share {
            count: lost.min(of),
            of,
        }
    }
}

/// A name that the log does not have by then was not opened, if the agent counts an answer that it was not handed.
const LOGGED: Duration = Duration::from_secs(10);

/// The smallest that at least this part of all are not above (nearest rank).
fn quantile(ascending: &[Duration], part: f64) -> Duration {
    let rank = (part * ascending.len() as f64).ceil() as usize;
    ascending[rank.clamp(1, ascending.len()) - 1]
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// What the process keeps in memory of its own, in MiB (proc_pid_status(5)).
fn memory_mib(pid: Pid) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.context("RssAnon")?.trim().trim_end_matches(" kB");
    Ok(kilobytes.parse::<f64>()? / 1024.0)
}

/// A lab with a neighbour and an attacker, and the agent.
struct Scene<'a> {
    lab: &'a Lab,
    attacker: PodSpec,
    agent: Agent,
    _servers: [NameServer; 2],
    seconds: u64,
    next: u32,
}

const NEIGHBOUR: &str = "ns2_pod1";
/// A pod without a firewall.
const TWIN: &str = "ns1_pod1";

impl<'a> Scene<'a> {
    /// The attacker is a pod of a namespace with these rules; without any, it has no EgressFirewall.
    fn set(lab: &'a Lab, rules: &[RuleSpec]) -> Result<Self> {
        let seconds = env::var(SECONDS_VARIABLE).map_or(Ok(SECONDS), |text| text.parse());
        let seconds = seconds.context(SECONDS_VARIABLE)?;
        run(lab
            .pod("inet")
            .command("ip")?
            .args(["route", "add", "local", NETWORK, "dev", "lo"]))?;
        let server = PodSpec::new("kube-system", "hostile-dns", SERVER);
        let attacker = PodSpec::new("ns6", "attacker", [10, 244, 0, 66].into());
        for pod in [&server, &attacker] {
            lab.add_pod(pod)?;
            lab.wait_wired(&pod.lsp())?;
        }
        let own = [
            RuleSpec::allow_name(NEIGHBOUR_DOMAIN),
            RuleSpec::deny("0.0.0.0/0")?,
        ];
        lab.set_firewall("ns2", &own)?;
        if !rules.is_empty() {
            lab.set_firewall("ns6", rules)?;
        }
        lab.stop_dns()?;
        let servers = [
            NameServer::start(lab, "dns", &[DNS_POD_PORT], false)?,
            NameServer::start(lab, &server.lsp(), &[PORT, OTHER_PORT], true)?,
        ];
        let agent = lab.start_agent(&["--resolver", &SERVER.to_string()])?;
        let mut scene = Self {
            lab,
            attacker,
            agent,
            _servers: servers,
            seconds,
            next: 0,
        };
        scene.phase(WARM_UP)?;
        Ok(scene)
    }

    /// The neighbour and its twin ask for so many names.
    fn phase(&mut self, names: u32) -> Result<Phase> {
        let numbers = self.next..self.next + names;
        self.next = numbers.end;
        let before = self.lab.account()?;
        let visit = |pod| visit(self.lab, pod, NEIGHBOUR_DOMAIN, numbers.clone(), PAUSE);
        let (visits, of_twin) = thread::scope(|scope| {
            let twin = scope.spawn(|| visit(TWIN));
            let visits = visit(NEIGHBOUR);
            let of_twin = twin
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (visits, of_twin)
        });
        let visits = visits?;
        let told = visits.answered.iter();
        let told: BTreeSet<_> = told.map(|&name| numbered(name, NEIGHBOUR_DOMAIN)).collect();
        let mut opened = BTreeMap::new();
        let unseen = || {
            let account = self.lab.account()?.since(before);
            anyhow::Ok(account.ring_full + account.not_asked)
        };
        // The log is written by a thread of its own.
        let start = Instant::now();
        wait_until("each name to be opened", PATIENT, || {
            opened = self.activations(&told)?;
            let missing = (told.len() - opened.len()) as u64;
            Ok(missing == 0 || (start.elapsed() > LOGGED && missing <= unseen()?))
        })
        .with_context(|| {
            let missing: Vec<_> = told
                .iter()
                .filter(|name| !opened.contains_key(*name))
                .collect();
            format!("not opened: {missing:?}\n{}", self.lab.counted())
        })?;
        let unopened = told.len() - opened.len();
        let mut activations: Vec<_> = opened.into_values().collect();
        activations.sort();
        ensure!(
            !activations.is_empty(),
            "the neighbour had no answer at all"
        );
        Ok(Phase {
            visits,
            of_twin: of_twin?,
            unopened,
            activations,
        })
    }

    /// How long the agent says that it took to open each of these names that it has opened.
    fn activations(&self, names: &BTreeSet<String>) -> Result<BTreeMap<String, Duration>> {
        let mut opened = BTreeMap::new();
        for event in self.agent.events()? {
            let fields = &event["fields"];
            if fields["message"] == "opened"
                && let Some(name) = fields["name"].as_str()
                && names.contains(name)
                && let Some(micros) = fields["activation_us"].as_u64()
            {
                opened.insert(name.to_owned(), Duration::from_micros(micros));
            }
        }
        Ok(opened)
    }

    /// Plays it, prints what was measured, and checks it.
    fn play(
        mut self,
        what: &str,
        attack: impl Fn(&mut Flood<'_>) -> Result<()>,
        opens: bool,
    ) -> Result<()> {
        let lab = self.lab;
        let names = |seconds: u64| (seconds * NAMES_PER_SECOND) as u32;
        let before = names(self.seconds.min(SECONDS_BEFORE_MAX));
        let (pod, address) = (self.attacker.lsp(), self.attacker.address);
        let flood = |port| -> Result<Flood<'_>> {
            let mut flood = Flood::new(lab, &pod, address, SocketAddrV4::new(SERVER, port));
            attack(&mut flood)?;
            Ok(flood)
        };
        let watch = lab.watch_flows()?;
        let quiet = self.phase(before)?;
        let beside = flood(OTHER_PORT)?;
        let other_port = self.phase(before)?;
        beside.stop()?;
        let memory = memory_mib(self.agent.pid())?;
        let start = Instant::now();
        let before_attack = Processor::of(self.agent.pid())?;
        let attackers = flood(PORT)?;
        let (attacked, most) = self.watching_memory(|scene| scene.phase(names(scene.seconds)))?;
        let processor = Processor::of(self.agent.pid())?.since(before_attack);
        let sent = attackers.stop()?;
        let (added, removed) = changes(watch, address)?;
        // The budget grows as long as flows are counted.
        let took = start.elapsed();
        let sent: Vec<_> = summed(&sent)
            .into_iter()
            .map(|(name, count)| format!("{:.0}/s {name}", count as f64 / took.as_secs_f64()))
            .collect();
        println!("{what}: {} s of {}", took.as_secs(), sent.join(", "));
        let phases = [
            ("quiet", &quiet),
            ("no DNS port", &other_port),
            ("attack", &attacked),
        ];
        for (phase, of) in &phases {
            println!("    {phase:>12}: {}", told(of));
        }
        println!(
            "    memory {memory:.1} -> {most:.1} MiB; flows of the attacker: {added} added, {removed} removed"
        );
        println!(
            "    {} lines of log; the agent {processor:?}",
            self.agent.log()?.lines().count()
        );
        if !attacked.visits.losses.is_empty() {
            let (status, _) = lab.ask_agent(&["status"])?;
            println!("{status}");
        }

        let allowed =
            CHANGES_AT_ONCE + CHANGES_PER_SECOND * (took.as_secs() + 1) + CHANGES_OF_ONE_ANSWER;
        ensure!(
            added <= allowed,
            "{added} flows added, {allowed} are the pod's budget"
        );
        // By marks, no flow is added for an address.
        let flows = lab.dnsflow_flows()?;
        let source = source(address);
        let is_open = flows.iter().any(|flow| flow.contains(&source));
        ensure!(
            (added > 0 || is_open) == opens,
            "{added} flows of the attacker were added; something is open to it: {is_open}"
        );
        ensure!(
            most - memory <= GROWTH_MAX_MIB,
            "{memory:.1} -> {most:.1} MiB"
        );
        if is_emulated() {
            let why = "beside a flood, an emulated machine has no processor left for a neighbour";
            not_run(
                &format!("{}: the neighbour", this_test()),
                format!("{why}; {LEFT_TO_OTHERS}"),
            );
        } else {
            nobody_else_is_harmed(&phases, processor)?;
        }
        let forged = flows.iter().find(|flow| flow.contains(&FORGED.to_string()));
        ensure!(forged.is_none(), "{forged:?}");
        ensure!(self.agent.terminate()?.success(), "the agent has failed");
        Ok(())
    }

    /// Does `work`; returns the most memory that the agent had meanwhile.
    fn watching_memory<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<(T, f64)> {
        let pid = self.agent.pid();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let watcher = scope.spawn(|| -> Result<f64> {
                let mut most = 0.0_f64;
                while !stop.load(Relaxed) {
                    most = most.max(memory_mib(pid)?);
                    thread::sleep(Duration::from_millis(50));
                }
                Ok(most)
            });
            let result = work(self);
            stop.store(true, Relaxed);
            let most = watcher
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok((result?, most))
        })
    }
}

/// Checks that the attack has cost the neighbour nothing, and that it has not delayed it.
fn nobody_else_is_harmed(phases: &[(&str, &Phase); 3], processor: Processor) -> Result<()> {
    let [(_, quiet), (_, other_port), (_, attacked)] = phases;
    let [quiet_lost, beside_lost] = [quiet, other_port].map(|phase| phase.lost());
    let before = Share {
        count: quiet_lost.count + beside_lost.count,
        of: quiet_lost.of + beside_lost.of,
    };
    let lost = attacked.lost();
    if lost.is_more_than(before) && processor.waited > processor.had {
        let why = format!(
            "{lost:?} after {before:?}, but the agent had a processor for {:?} and waited for one for {:?}; \
             {LEFT_TO_OTHERS}",
            processor.had, processor.waited
        );
        not_run(&format!("{}: the neighbour", this_test()), why);
        return Ok(());
    }
    ensure!(
        !lost.is_more_than(before),
        "the attack costs the neighbour more than its twin: {lost:?} after {before:?}; {:?}",
        attacked.visits.losses
    );
    // Fewer say little of the p99; a longer attack gives more.
    if attacked.activations.len() < ACTIVATIONS_MIN {
        return Ok(());
    }
    let before = [quiet, other_port].map(|phase| quantile(&phase.activations, P99));
    let p99 = quantile(&attacked.activations, P99);
    let allowed = before[0].max(before[1]).max(NOISE) * 2;
    ensure!(
        p99 <= allowed,
        "p99 of the activation is {p99:?}, more than {allowed:?}"
    );
    Ok(())
}

fn told(phase: &Phase) -> String {
    let mut took = phase.visits.took.clone();
    took.sort();
    let lost = |visits: &Visits| {
        let [answers, first_packets, connections] = [
            LossKind::Answer,
            LossKind::FirstPacket,
            LossKind::Connection,
        ]
        .map(|kind| visits.lost(kind));
        format!(
            "{first_packets} first packets lost, {answers} answers lost, {connections} names not reached"
        )
    };
    let line = |what: &str, ascending: &[Duration]| {
        let [p50, p90, p99, max] =
            [0.5, 0.9, 0.99, 1.0].map(|part| millis(quantile(ascending, part)));
        format!(
            "{what} p50 {p50:.2}, p90 {p90:.2}, p99 {p99:.2}, max {max:.2} ms (n {})",
            ascending.len()
        )
    };
    format!(
        "{}; {}; {}, {} not opened; the twin: {}",
        line("activation", &phase.activations),
        line("name to connection", &took),
        lost(&phase.visits),
        phase.unopened,
        lost(&phase.of_twin)
    )
}

fn summed(sent: &[(String, u64)]) -> BTreeMap<&str, u64> {
    let mut sums = BTreeMap::new();
    for (name, count) in sent {
        *sums.entry(name.as_str()).or_default() += count;
    }
    sums
}

/// The source in a flow.
fn source(address: Ipv4Addr) -> String {
    format!("nw_src={address},")
}

/// How many flows with this source were added and removed.
fn changes(watch: FlowWatch, source: Ipv4Addr) -> Result<(u64, u64)> {
    let log = watch.finish()?;
    let source = self::source(source);
    let of = |event: &str| {
        let lines = log
            .lines()
            .filter(|line| line.contains(event) && line.contains(&source));
        lines.count() as u64
    };
    Ok((of("event=ADDED"), of("event=DELETED")))
}

/// Somebody asks for messages that cost by their shape.
fn shaped(flood: &mut Flood<'_>) -> Result<()> {
    for (letter, _) in SHAPES {
        flood.ask_over_tcp(letter, HOSTILE_DOMAIN, 1)?;
    }
    Ok(())
}

/// Somebody asks a hostile name server for whatever it has.
fn served(flood: &mut Flood<'_>) -> Result<()> {
    flood.ask(HOSTILE_DOMAIN)?;
    flood.ask_over_tcp('w', HOSTILE_DOMAIN, 4)?;
    shaped(flood)?;
    flood.leave_half_open(HOSTILE_DOMAIN, 1000)
}

/// A pod sends whatever it can, and has help from outside.
fn flooded(flood: &mut Flood<'_>) -> Result<()> {
    flood.ask(HOSTILE_DOMAIN)?;
    flood.ask_over_tcp('s', HOSTILE_DOMAIN, 8)?;
    shaped(flood)?;
    flood.forge_questions(HOSTILE_DOMAIN)?;
    flood.forge_answers(HOSTILE_DOMAIN, FORGED)
}

/// One flood at a time: each takes what the machine has.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rules by which a namespace may reach this name and nothing else.
fn only(name: &str) -> Vec<RuleSpec> {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    vec![RuleSpec::allow_name(name), deny]
}

#[test]
fn a_hostile_name_server_harms_only_those_who_ask_it() {
    let _alone = alone();
    let lab = lab!("hostile-server", agent);
    let scene = Scene::set(&lab, &only(HOSTILE_DOMAIN)).expect("the scene is set");
    let played = scene.play("a hostile name server", served, true);
    played.expect("nobody else is harmed");
}

/// What a rule denies is closed whatever the budget.
#[test]
fn a_hostile_name_server_of_a_denied_name_harms_only_those_who_ask_it() {
    let _alone = alone();
    let lab = lab!("hostile-denied", agent);
    let rules = [RuleSpec::deny_name(HOSTILE_DOMAIN)];
    let scene = Scene::set(&lab, &rules).expect("the scene is set");
    let played = scene.play("a hostile name server of a denied name", served, true);
    played.expect("nobody else is harmed");
}

#[test]
fn a_pod_that_floods_with_rules_harms_only_itself() {
    let _alone = alone();
    let lab = lab!("hostile-rules", agent);
    let scene = Scene::set(&lab, &only(HOSTILE_DOMAIN)).expect("the scene is set");
    let played = scene.play("a flood, with a rule for the name", flooded, true);
    played.expect("nobody else is harmed");
}

#[test]
fn a_pod_that_floods_without_a_rule_for_the_name_harms_only_itself() {
    let _alone = alone();
    let lab = lab!("hostile-other", agent);
    let scene = Scene::set(&lab, &only("other.test")).expect("the scene is set");
    let played = scene.play("a flood, with rules for other names", flooded, false);
    played.expect("nobody else is harmed");
}

#[test]
fn a_pod_that_floods_without_a_firewall_harms_only_itself() {
    let _alone = alone();
    let lab = lab!("hostile-free", agent);
    let scene = Scene::set(&lab, &[]).expect("the scene is set");
    let played = scene.play("a flood, without a firewall", flooded, false);
    played.expect("nobody else is harmed");
}
