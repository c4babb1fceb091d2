//! `dnsflow replay`: a capture through the whole core, without node, cluster and privileges.
//!
//! The engine is the agent's. The kernel's part is in `kernel`, which tests hold to the TC programs
//! themselves; the switch's part is one that obeys at once (`switch`), OVN's part are the rows of its databases (`ovn`). Time is that of the capture, so that
//! the same capture always leads to the same answer.

pub mod capture;
pub mod kernel;
mod ovn;
mod pods;
mod switch;

use std::{
    collections::BTreeMap,
    io::{self, Write},
    net::IpAddr,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use dnsflow_common::{
    key::{ResolverKey, SourceKey, SourceMac},
    record::ATTEMPT_AGAIN_NS,
};
use dnsflow_core::{
    Command, Input, Timestamp,
    ask::{
        attempts::Attempts,
        view::{self, Judged, Verdict},
    },
    engine::{Config, Engine},
    io::{input::Frame, report::Report},
    ovn::rows::{Interface, InterfaceUpdate, MacAddress, RowId, pod_of_port},
    policy::refused::{Refusals, TooManyNetworks},
    values::{connection::Attempt, firewall::FirewallUpdate, flow::Protocol},
};
use serde::{Deserialize, Serialize};

use self::{
    capture::{Capture, CaptureError, Packet},
    kernel::{Kernel, Sent},
    switch::SimulatedSwitch,
};
use crate::{
    asking::{event::Event, moment::rfc3339_micros, print},
    exit::Exit,
    journal,
    manifests::Files,
    options::{OutputFormat, PodAddresses, ReplayOptions},
    output::{write_json_line, write_yaml},
};

/// The clock at the first packet: late enough for whatever looks back.
const START: Timestamp = Timestamp::from_nanos(1_000_000_000_000);
/// The kernel tells of attempts to connect to one place once in this time.
const TOLD_AGAIN: Duration = Duration::from_nanos(ATTEMPT_AGAIN_NS);
/// Deadlines that are met between two packets, at most: a capture that pauses for a year has no more to say.
const DEADLINES_MAX: usize = 100_000;

/// Why a capture cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The capture cannot be read.
    #[error("cannot read the capture")]
    Capture(#[from] CaptureError),
    /// The manifests cannot be read.
    #[error("cannot read the manifests: {0}")]
    Manifests(String),
    /// Nobody is known whose packets these could be.
    #[error(
        "no pod is known: name one with --pod NAMESPACE/POD=ADDRESS, or put its manifest into --manifests"
    )]
    NoPods,
    /// More networks than are looked at.
    #[error("--cluster-networks: {0}")]
    TooManyNetworks(#[from] TooManyNetworks),
    /// The answer cannot be written.
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// A line for programs.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// Something that would have happened.
    Event(Box<Event>),
    /// What became of a pod's packets that led to no event.
    Ignored {
        /// The namespace.
        namespace: String,
        /// The pod.
        pod: String,
        /// By reason.
        reasons: BTreeMap<String, u64>,
    },
}

/// `dnsflow replay`. The answer is not whole where the capture is broken off or holds packets that cannot be
/// read.
pub fn run(options: &ReplayOptions, output: &mut impl Write) -> Result<Exit, ReplayError> {
    let files = Files::read_with_pods(&manifests(options)?).map_err(ReplayError::Manifests)?;
    for reason in &files.reasons {
        eprintln!("{reason}");
    }
    for (id, _, reasons) in &files.firewalls {
        for reason in reasons {
            eprintln!("{id}: {reason}");
        }
    }
    let mut pods = options.pod.clone();
    pods.extend(files.pods.iter().filter_map(pods::of_manifest));
    if pods.is_empty() {
        return Err(ReplayError::NoPods);
    }
    let firewalls = files.firewalls.into_iter();
    let firewalls = firewalls.map(|(id, firewall, _)| (id, Some(firewall)));
    let update = FirewallUpdate {
        reset: true,
        firewalls: firewalls.collect(),
    };
    let mut capture = Capture::open(&options.file)?;
    let mut replay = Replay::new(options, &pods, update)?;
    let format = options.output.format;
    replay.write(format, output)?;
    let broken = loop {
        match capture.read() {
            Ok(Some(packet)) => replay.packet(&packet),
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
        replay.write(format, output)?;
    };
    replay.end();
    replay.write(format, output)?;
    replay.write_ignored(format, output)?;
    if capture.cut() > 0 {
        eprintln!(
            "{} packets were captured in part: take captures with tcpdump --snapshot-length 0",
            capture.cut()
        );
    }
    if let Some(error) = &broken {
        eprintln!("the capture is read up to here: {error}");
    }
    Ok(match broken.is_some() || capture.cut() > 0 {
        true => Exit::Incomplete,
        false => Exit::Done,
    })
}

/// The manifests of the directory, in the order of their names.
fn manifests(options: &ReplayOptions) -> Result<Vec<PathBuf>, ReplayError> {
    let Some(directory) = &options.manifests else {
        return Ok(Vec::new());
    };
    crate::manifests::names(directory)
        .map_err(|error| ReplayError::Manifests(format!("{}: {error}", directory.display())))
}

/// A pod of the capture.
struct Pod {
    ifindex: u32,
    port: String,
}

/// The engine with what is around it.
struct Replay {
    engine: Engine,
    kernel: Kernel,
    switch: SimulatedSwitch,
    attempts: Attempts,
    told: BTreeMap<(u32, IpAddr, Protocol, u16), Timestamp>,
    pods: BTreeMap<IpAddr, Pod>,
    now: Timestamp,
    /// The time of the capture's first packet.
    began: Option<Duration>,
    lines: Vec<Line>,
    ignored: BTreeMap<String, BTreeMap<String, u64>>,
}

impl Replay {
    fn new(
        options: &ReplayOptions,
        pods: &[PodAddresses],
        firewalls: FirewallUpdate,
    ) -> Result<Self, ReplayError> {
        let config = Config {
            subdomains: options.subdomains,
            resolvers: options.resolver.iter().copied().collect(),
            refusals: Refusals::new(&options.cluster_networks, &[], &[], &[])?,
            ..Config::default()
        };
        let dns_ports = config.dns_ports;
        let mut replay = Self {
            engine: Engine::new(config),
            kernel: Kernel::new(dns_ports),
            switch: SimulatedSwitch::default(),
            attempts: Attempts::new(dns_ports),
            told: BTreeMap::new(),
            pods: BTreeMap::new(),
            now: START,
            began: None,
            lines: Vec::new(),
            ignored: BTreeMap::new(),
        };
        let resolvers = options.resolver.iter();
        let resolvers = resolvers.map(|one| ResolverKey::new(one.address, one.port));
        replay.kernel.resolvers = resolvers.collect();
        let mut interfaces = Vec::new();
        let mut ports = BTreeMap::new();
        for (number, pod) in (1u32..).zip(pods) {
            let port = format!("{}_{}", pod.namespace, pod.name);
            ports.insert(port.clone(), pod);
            let [.., a, b] = number.to_be_bytes();
            let row = Interface {
                name: format!("pod{number}").into(),
                iface_id: port.clone(),
                iface_id_ver: Some(port.clone()),
                addresses: pod.addresses.clone(),
                // Locally administered: the capture's own are not looked at.
                mac: MacAddress::parse(&format!("02:00:00:00:{a:02x}:{b:02x}")),
                network: None,
                sandbox: None,
                ifindex: Some(number),
                policing_kbps: 0,
            };
            interfaces.push((RowId::new(u128::from(number)), Some(row)));
            for address in &pod.addresses {
                let pod = Pod {
                    ifindex: number,
                    port: port.clone(),
                };
                replay.pods.insert(*address, pod);
                // Every Ethernet address counts: cooked captures have none.
                let source = SourceKey::new(number, *address);
                replay.kernel.sources.insert(source, SourceMac::default());
            }
        }
        let rows: Vec<(RowId, u32)> = (1u32..)
            .zip(&interfaces)
            .map(|(number, (row, _))| (*row, number))
            .collect();
        replay.give(Input::SwitchUp);
        replay.give(Input::Resolvers([].into()));
        replay.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces,
        }));
        for (interface, ifindex) in rows {
            replay.give(Input::Found { interface, ifindex });
            replay.give(Input::Attached { interface, ifindex });
        }
        let (nb, sb) = ovn::rows(&ports, &firewalls);
        replay.give(Input::Firewalls(firewalls));
        replay.give(Input::Nb(nb));
        replay.give(Input::Sb(sb));
        Ok(replay)
    }

    fn give(&mut self, input: Input) {
        self.engine.handle(input, self.now);
        self.obey();
    }

    /// Carries out what the engine wants, until it wants no more.
    fn obey(&mut self) {
        loop {
            self.engine.end_turn(self.now);
            // Nobody starts behind it.
            drop(self.engine.take_records());
            let commands = self.engine.take_commands();
            for report in self.engine.take_reports() {
                self.report(report);
            }
            if commands.is_empty() {
                return;
            }
            for command in commands {
                if let Command::ReplayAnswers = command {
                    // Nothing was deferred: the rules were there before the first answer.
                    continue;
                }
                for input in self.switch.obey(command) {
                    self.engine.handle(input, self.now);
                }
            }
        }
    }

    /// Lets time pass, with every deadline met on the way.
    fn pass_until(&mut self, at: Timestamp) {
        for _ in 0..DEADLINES_MAX {
            let due = self.engine.next_deadline().filter(|(due, _)| *due <= at);
            let Some((due, _)) = due else {
                break;
            };
            self.now = self.now.max(due);
            self.engine.handle_timeout(self.now);
            self.obey();
        }
        self.now = self.now.max(at);
    }

    /// What still waits gets the time that it waits for at most.
    fn end(&mut self) {
        self.pass_until(self.now + Duration::from_secs(1));
    }

    fn packet(&mut self, packet: &Packet) {
        let began = *self.began.get_or_insert(packet.at);
        self.pass_until(START + packet.at.saturating_sub(began));
        let bytes = &packet.frame;
        let Some((source, destination)) = kernel::addresses(bytes) else {
            return;
        };
        if let Some(Pod { ifindex, port }) = self.pods.get(&source) {
            let (ifindex, port) = (*ifindex, port.clone());
            self.switch.saw(source, destination);
            match self.kernel.ingress(ifindex, bytes) {
                Ok(Sent::Segment) => self.frame(ifindex, &port, bytes, true),
                Ok(Sent::Question) => {}
                Ok(Sent::Attempt(protocol, dst_port)) => {
                    self.attempt(ifindex, destination, protocol, dst_port, &port);
                }
                Err(reason) => self.ignore(&port, reason.as_str()),
            }
        }
        if let Some(Pod { ifindex, port }) = self.pods.get(&destination) {
            let (ifindex, port) = (*ifindex, port.clone());
            match self.kernel.egress(ifindex, bytes) {
                Ok(()) => self.frame(ifindex, &port, bytes, false),
                Err(reason) => self.ignore(&port, reason.as_str()),
            }
        }
    }

    /// A frame that the kernel would have handed over.
    fn frame(&mut self, ifindex: u32, port: &str, bytes: &[u8], from_pod: bool) {
        let frame = Frame {
            ifindex,
            captured_at: self.now,
            bytes,
            from_pod,
            held: false,
            opened: false,
            gso_size: 0,
            left_out: 0,
        };
        let before = self.counted();
        let is_unmentioned = self.engine.replay(frame, self.now);
        if is_unmentioned {
            self.attempts.hear(frame, self.now);
        }
        let after = self.counted();
        for ((reason, before), (_, after)) in before.into_iter().zip(after) {
            if after > before {
                self.ignore(port, reason);
            }
        }
        self.obey();
    }

    /// What the engine counts of answers that open nothing.
    fn counted(&self) -> [(&'static str, u64); 3] {
        let counters = self.engine.counters();
        [
            ("answer_malformed", counters.answers_malformed),
            ("answer_unusable", counters.answers_unusable),
            ("no_rule_matches", counters.answers_unmatched),
        ]
    }

    fn attempt(&mut self, ifindex: u32, address: IpAddr, protocol: Protocol, port: u16, of: &str) {
        let place = (ifindex, address, protocol, port);
        let is_late = |at: &Timestamp| self.now.since(*at) < TOLD_AGAIN;
        if self.told.get(&place).is_some_and(is_late) {
            return;
        }
        self.told.insert(place, self.now);
        let attempt = Attempt {
            ifindex,
            protocol,
            address,
            port,
            at: self.now,
        };
        let heard = self.attempts.heard(&attempt);
        let view = self.engine.view();
        match view.judge_attempt(&attempt, &heard, self.now) {
            Judged::Denied(_, denied) | Judged::DeniedBehind(denied) => {
                self.report(Report::Denied(denied));
            }
            Judged::NotJudged => self.ignore(of, "not_judged"),
            Judged::Allowed(tried) => {
                let (namespace, pod) = pod_of_port(&tried.port);
                let event = Event {
                    time: self.time(),
                    event: "allowed".to_owned(),
                    namespace: Some(namespace.to_owned()),
                    pod: Some(pod.to_owned()),
                    name: tried.names.first().map(ToString::to_string),
                    addresses: vec![address],
                    rules: tried.rule.into_iter().collect(),
                    target: Some(view::target_text(&attempt)),
                    reason: Some(tried.reason),
                    text: allowed_text(tried.names.first().map(ToString::to_string), tried.rule),
                    ..Event::default()
                };
                debug_assert_eq!(tried.verdict, Verdict::Allowed);
                self.lines.push(Line::Event(Box::new(event)));
            }
        }
    }

    fn ignore(&mut self, port: &str, reason: &str) {
        let reasons = self.ignored.entry(port.to_owned()).or_default();
        *reasons.entry(reason.to_owned()).or_default() += 1;
    }

    /// The capture's time, as RFC 3339 writes it.
    fn time(&self) -> String {
        let began = self.began.unwrap_or_default();
        rfc3339_micros(SystemTime::UNIX_EPOCH + began + self.now.since(START))
    }

    fn report(&mut self, report: Report) {
        // What concerns the switch, the cluster and the agent itself is made up here.
        match report {
            Report::Opened { .. }
            | Report::Denied(_)
            | Report::Closed { .. }
            | Report::AddressRefused { .. }
            | Report::LimitReached { .. }
            | Report::WouldOpen { .. }
            | Report::Problems { .. } => {}
            Report::Ready { .. }
            | Report::PortNotTrusted { .. }
            | Report::ClusterNetworks { .. }
            | Report::AllowedAnyway(_)
            | Report::ResolverCovered { .. }
            | Report::MarksEndNowhere
            | Report::LoadBalancersUnread(_)
            | Report::TableTooLarge(_)
            | Report::TableReadAgain { .. }
            | Report::ForeignFlow { .. }
            | Report::Trusting(_)
            | Report::Restored { .. }
            | Report::Unblocked { .. }
            | Report::Resynced { .. }
            | Report::FlowsRefused { .. }
            | Report::NotAttached { .. } => return,
        }
        let event = journal::event(SystemTime::UNIX_EPOCH, report);
        self.lines.push(Line::Event(Box::new(Event {
            time: self.time(),
            activation_us: None,
            ..event
        })));
    }

    fn write(&mut self, format: OutputFormat, output: &mut impl Write) -> io::Result<()> {
        for line in self.lines.drain(..) {
            write_line(&line, format, output)?;
        }
        Ok(())
    }

    fn write_ignored(&mut self, format: OutputFormat, output: &mut impl Write) -> io::Result<()> {
        for (port, reasons) in std::mem::take(&mut self.ignored) {
            let (namespace, pod) = pod_of_port(&port);
            let line = Line::Ignored {
                namespace: namespace.to_owned(),
                pod: pod.to_owned(),
                reasons,
            };
            write_line(&line, format, output)?;
        }
        Ok(())
    }
}

fn allowed_text(name: Option<String>, rule: Option<u32>) -> String {
    let rule = match rule {
        Some(rule) => format!("rule {rule} allows it"),
        None => "no rule matches".to_owned(),
    };
    match name {
        // The text of what has a name begins with the name.
        Some(name) => format!("{name}; {rule}"),
        None => rule,
    }
}

fn write_line(line: &Line, format: OutputFormat, output: &mut impl Write) -> io::Result<()> {
    match (format, line) {
        (OutputFormat::Json, line) => write_json_line(line, output),
        (OutputFormat::Yaml, line) => write_yaml(line, output),
        (OutputFormat::Table, Line::Event(event)) => print::event(event, output),
        (
            OutputFormat::Table,
            Line::Ignored {
                namespace,
                pod,
                reasons,
            },
        ) => {
            let reasons: Vec<_> = reasons
                .iter()
                .map(|(reason, count)| format!("{reason} {count}"))
                .collect();
            writeln!(output, "ignored  {namespace}/{pod}  {}", reasons.join(", "))
        }
    }
}

#[cfg(test)]
mod tests;
