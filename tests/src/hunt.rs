//! Random firewalls and real connections against a first-match oracle: each verdict of OVN and
//! dnsflow together is compared with what the EgressFirewall means, through edits in place.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::Result;
use serde_json::Value;

use crate::{
    agent::Agent,
    firewall::{Action, RuleSpec, To, address_set, manifest},
    lab::{Cluster, Lab},
    oracle::{Destination, deciding_rule, verdict},
    pod::{DNS, DNS_V6},
    probe::{Attempt, Outcome, Protocol},
    process::PATIENT,
    random::Random,
    topology,
    topology::{web_addresses, web_addresses_v6},
    web,
};

/// Edits of each firewall.
const EDITS: usize = 3;

/// How long a packet that must pass may take: its SYN comes again after 1, 3, 7 and 15 s (RFC 6298, section 2.1). Not
/// longer, since after an edit each packet that does not pass yet is waited for.
const PASSES: Duration = Duration::from_secs(20);
/// How long one that must not pass is waited for. Nothing is lost when it is too short on a slow
/// machine, but that a fault may be missed.
const BLOCKED: Duration = Duration::from_millis(300);
/// The second after which a lost SYN comes again (RFC 6298, section 2.1).
const SECOND_SYN: Duration = Duration::from_millis(990);

/// The pods that the firewall is for, and one of another namespace.
const PODS: [&str; 2] = ["ns1_pod1", "ns1_pod2"];
const FREE_POD: &str = "ns2_pod1";

/// With more lost answers than this, something is broken.
const LOST_MAX: usize = 100;

/// The network of the names beside; nobody is there.
const HOSTS: &str = "198.51.100.";

/// Each attempt has a source port that none had before: Open vSwitch 3.1 ends at a connection that
/// comes again (an assertion in `conn_update_state` of its lib/conntrack.c).
const SOURCE_PORTS: std::ops::Range<u16> = 10_000..60_000;

const NAMES: [&str; 10] = [
    "a.test",
    "x.a.test",
    "y.x.a.test",
    "b.test",
    "x.b.test",
    "y.b.test",
    "c.test",
    "x.c.test",
    "d.test",
    "xa.test",
];
const SERVICES: [(&str, u16); 4] = [("tcp", 80), ("tcp", 8080), ("udp", 80), ("udp", 8080)];

fn random_ports(random: &mut Random) -> Vec<(&'static str, u16)> {
    let mut ports = Vec::new();
    if random.one_in(2) {
        ports.extend(SERVICES.into_iter().filter(|_| random.one_in(3)));
    }
    ports
}

fn random_rule(random: &mut Random, cluster: Cluster) -> RuleSpec {
    let mut names = vec![
        "a.test",
        "X.a.test",
        "b.test",
        "y.B.test.",
        "c.test",
        "C.test",
        "d.test",
    ];
    if cluster.name_resolver {
        names.extend(["*.a.test", "*.b.test", "*.C.test"]);
    }
    let mut cidrs = vec!["203.0.113.4/30", "203.0.113.2/32"];
    // Without ports, these leave nothing to the rules behind them.
    let mut wide = vec!["203.0.113.0/29", "0.0.0.0/0"];
    if cluster.dual_stack {
        cidrs.extend(["2001:db8::4/126", "2001:db8::2/128"]);
        wide.extend(["2001:db8::/125", "::/0"]);
    }
    let ports = random_ports(random);
    if !ports.is_empty() {
        cidrs.append(&mut wide);
    }
    let rule = match random.below(8) {
        0 => RuleSpec::allow_nodes(random_addresses(random, cluster, 2)),
        1 | 2 => RuleSpec::allow(random.pick::<&str>(&cidrs)).expect("a CIDR"),
        _ => RuleSpec::allow_name(random.pick::<&str>(&names)),
    };
    RuleSpec {
        action: *random.pick(&[Action::Allow, Action::Deny]),
        ..rule.ports(&ports)
    }
}

fn random_firewall(random: &mut Random, cluster: Cluster) -> Vec<RuleSpec> {
    let mut rules: Vec<_> = (0..2 + random.below(5))
        .map(|_| random_rule(random, cluster))
        .collect();
    // Most end like this, or hardly any Allow would matter.
    for all in ["0.0.0.0/0", "::/0"] {
        let is_served = cluster.dual_stack || all != "::/0";
        if is_served && !random.one_in(4) {
            rules.push(RuleSpec::deny(all).expect("a CIDR"));
        }
    }
    rules
}

/// One edit, as people make them; what it was.
fn edit(random: &mut Random, rules: &mut Vec<RuleSpec>, cluster: Cluster) -> String {
    let at = random.below(rules.len());
    match random.below(5) {
        0 if rules.len() < 8 => {
            rules.insert(at, random_rule(random, cluster));
            format!("inserted at {at}")
        }
        1 if rules.len() > 2 => {
            rules.remove(at);
            format!("deleted {at}")
        }
        2 => {
            rules[at].ports = random_ports(random);
            format!("other ports at {at}")
        }
        3 => {
            rules[at].action = match rules[at].action {
                Action::Allow => Action::Deny,
                Action::Deny => Action::Allow,
            };
            format!("other action at {at}")
        }
        _ => {
            let rule = rules.remove(at);
            let to = random.below(rules.len() + 1);
            rules.insert(to, rule);
            format!("moved {at} to {to}")
        }
    }
}

fn random_addresses(random: &mut Random, cluster: Cluster, most: usize) -> BTreeSet<IpAddr> {
    let all: Vec<IpAddr> = destinations(cluster);
    (0..1 + random.below(most))
        .map(|_| *random.pick(&all))
        .collect()
}

fn destinations(cluster: Cluster) -> Vec<IpAddr> {
    let v6 = web_addresses_v6().map(IpAddr::from);
    let v6 = v6.filter(|_| cluster.dual_stack);
    web_addresses().map(IpAddr::from).chain(v6).collect()
}

/// A name in some other case, as resolvers write them that guard against forgers.
fn in_any_case(random: &mut Random, name: &str) -> String {
    let letter = |letter: char| match random.one_in(3) {
        true => letter.to_ascii_uppercase(),
        false => letter,
    };
    name.chars().map(letter).collect()
}

/// What a hunt does beside edits of firewalls.
#[derive(Clone, Debug, Default)]
pub struct HuntOptions {
    /// Arguments of the agent.
    pub arguments: Vec<String>,
    /// How long an address may be open without being asked for again, where names end during the hunt.
    /// Pods ask again before each edit, and not all pods are new with each firewall.
    pub fade: Option<Duration>,
    /// Names below those of the rules that pods ask for beside, at each edit.
    pub hosts: usize,
    /// Whether a first packet that is lost is explained.
    pub explains_slow: bool,
    /// Questions about connections of one pod, behind each edit: what `explain` says of them is compared.
    pub questions: usize,
}

/// How an agent ends before the next one starts.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum AgentEnd {
    /// SIGTERM.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// One lab with an agent, and everything that decides a verdict in it.
pub struct Hunt<'a> {
    lab: &'a Lab,
    agent: Option<Agent>,
    options: HuntOptions,
    random: Random,
    cluster: Cluster,
    records: BTreeMap<&'static str, BTreeSet<IpAddr>>,
    /// For each pod and address, the names that the pod was told it for.
    told: BTreeMap<&'static str, BTreeMap<IpAddr, BTreeSet<&'static str>>>,
    /// What a pod was told and does not ask for any more: it may count until then.
    fading: BTreeMap<(&'static str, IpAddr), Instant>,
    rules: Vec<RuleSpec>,
    /// The rule whose ACL a shrunk firewall has left behind. OVN goes on enforcing it, by what
    /// ovn-kubernetes itself has found.
    leftover: Option<RuleSpec>,
    /// What ovn-kubernetes has found, by address set.
    central: BTreeMap<String, BTreeSet<IpAddr>>,
    history: Vec<String>,
    source_ports: std::ops::Range<u16>,
    /// What was reached, but not by the first packet, since this was last looked at.
    slow: Vec<Wrong>,
    seen: Seen,
}

/// What was seen, for the summary.
#[derive(Debug, Default)]
pub struct Seen {
    /// Firewalls tried.
    pub firewalls: usize,
    /// States: a firewall as it was written, or after an edit.
    pub states: usize,
    /// Connections that passed, as they should.
    pub passed: usize,
    /// Connections that were blocked, as they should be.
    pub blocked: usize,
    /// Of those, what OVN alone would have judged otherwise.
    pub by_dnsflow: BTreeMap<&'static str, usize>,
    /// What was reached by a second SYN only, although nothing was being changed.
    pub second_packets: Vec<String>,
    /// Packets that passed right after the answer that was to deny them.
    pub late_denials: usize,
    /// How long it took at most until all was as a new firewall says.
    pub slowest_edit: Duration,
    /// Answers that did not come, with what was done last.
    pub lost_answers: Vec<String>,
    /// What `explain` said.
    pub explained: Explained,
    /// Where the datapath went on dropping what the flows let pass, until its megaflows were made anew.
    pub stale_megaflows: Vec<String>,
}

/// The verdicts of `explain`. None of them was contradicted.
#[derive(Debug, Default)]
pub struct Explained {
    /// Questions by verdict.
    pub verdicts: BTreeMap<String, usize>,
    /// Questions with a port, about an address, or about a name that the pod had asked for, all of whose addresses have
    /// one fate.
    pub certain: usize,
    /// Of these, those with a verdict that leaves it open, by reason.
    pub left_open: BTreeMap<String, usize>,
}

impl Explained {
    /// Whether at most one of twenty certain questions is left open.
    fn leaves_few_open(&self) -> bool {
        20 * self.left_open.values().sum::<usize>() <= self.certain
    }
}

/// A question to `explain`.
struct Question {
    pod: &'static str,
    target: String,
    /// Whether the pod asks for a name before it connects.
    is_by_name: bool,
    /// Whether the agent knows all that decides.
    is_known: bool,
}

/// The answer, in short.
struct Answer {
    verdict: String,
    reason: String,
    text: String,
}

/// One attempt that came out otherwise than it must.
#[derive(Clone, Debug)]
struct Wrong {
    pod: &'static str,
    attempt: Attempt,
    outcome: Outcome,
    expected: Action,
}

impl<'a> Hunt<'a> {
    /// Starts the agent.
    pub fn start(lab: &'a Lab, random: Random, options: HuntOptions) -> Self {
        lab.serve_echo().expect("the server starts");
        let mut hunt = Self {
            lab,
            agent: None,
            options,
            random,
            cluster: lab.cluster(),
            records: BTreeMap::new(),
            told: BTreeMap::new(),
            rules: Vec::new(),
            leftover: None,
            central: BTreeMap::new(),
            history: Vec::new(),
            source_ports: SOURCE_PORTS,
            slow: Vec::new(),
            seen: Seen::default(),
            fading: BTreeMap::new(),
        };
        hunt.start_agent();
        hunt
    }

    /// What was seen.
    pub fn seen(&self) -> &Seen {
        &self.seen
    }

    /// The agent that runs.
    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("it was started")
    }

    /// The random numbers of the hunt.
    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    fn start_agent(&mut self) {
        let arguments: Vec<&str> = self.options.arguments.iter().map(String::as_str).collect();
        let agent = self.lab.start_agent(&arguments);
        self.agent = Some(agent.expect("the agent is ready"));
    }

    /// Ends the agent.
    pub fn end(&mut self) {
        if let Some(agent) = self.agent.take() {
            agent.terminate().expect("it stops");
        }
    }

    /// Ends the agent and starts another one. What only its memory had is told once more.
    pub fn replace_agent(&mut self, how: AgentEnd) {
        let agent = self.agent.take().expect("it was started");
        match how {
            AgentEnd::Terminate => agent.terminate().map(|_| ()),
            AgentEnd::Kill => agent.kill(),
        }
        .expect("it ends");
        self.start_agent();
        self.ask_again();
    }

    /// Notes what is done, for the explanation of what comes of it.
    pub fn note(&mut self, what: String) {
        self.history.push(what);
    }

    /// Asks for addresses. In a hunt with faults, an answer may be lost: it is counted and asked for again.
    fn resolve(&mut self, pod: &'static str, kind: &str, names: &[String]) -> Vec<IpAddr> {
        loop {
            let told = self.lab.pod(pod).resolve_all::<IpAddr>(kind, names);
            match told {
                Ok(told) => return told,
                Err(error) if self.seen.lost_answers.len() < LOST_MAX => {
                    let done = self.history.last().map_or("", String::as_str);
                    let lost = format!("{pod}: {error:#}, behind: {done}");
                    let is_expected = self.options.fade.is_some();
                    assert!(is_expected, "{lost}\n{}", self.words_of_the_agent());
                    println!("{lost}");
                    self.seen.lost_answers.push(lost);
                }
                Err(error) => panic!("{pod}: {error:#}"),
            }
        }
    }

    /// What the agent says of itself: its metrics, without counters of what did not happen, and its log, the newest
    /// first.
    fn words_of_the_agent(&self) -> String {
        let metrics = self
            .lab
            .agent_metrics()
            .unwrap_or_else(|error| format!("{error:#}"));
        let did_not_happen = |line: &str| line.contains("_total") && line.ends_with(" 0");
        let metrics: Vec<&str> = metrics
            .lines()
            .filter(|line| !did_not_happen(line))
            .collect();
        let log = self
            .agent()
            .log()
            .unwrap_or_else(|error| format!("{error:#}"));
        let log: Vec<&str> = log.lines().rev().take(60).collect();
        format!("{}\n{}", metrics.join("\n"), log.join("\n"))
    }

    /// Tries so many firewalls.
    pub fn run(&mut self, firewalls: usize) {
        self.the_network_works();
        // More of them, until both verdicts of dnsflow's have made a difference, and until there are questions enough to
        // tell a share of them from chance.
        for round in 0..3 * firewalls {
            let is_enough =
                self.seen.by_dnsflow.len() == 2 && self.seen.explained.leaves_few_open();
            if round >= firewalls && is_enough {
                break;
            }
            // Each state takes less than this many.
            if self.source_ports.len() < (EDITS + 1) * 4 * self.everything().len() {
                println!("no source ports are left");
                break;
            }
            self.try_firewall(&mut |_| {});
        }
        println!("{:#?}", self.seen);
        let made_a_difference = !self.seen.by_dnsflow.is_empty();
        assert!(made_a_difference, "the firewalls were too tame");
        let Explained {
            certain, left_open, ..
        } = &self.seen.explained;
        let open: usize = left_open.values().sum();
        assert!(
            self.seen.explained.leaves_few_open(),
            "{open} of {certain}: {left_open:?}"
        );
    }

    /// Tries one firewall and edits of it, with other records and pods than before. Does something else
    /// after each edit.
    pub fn try_firewall(&mut self, between: &mut dyn FnMut(&mut Self)) {
        self.serve_new_records();
        if self.seen.firewalls > 0 {
            let pods: &[&'static str] = match self.options.fade {
                Some(_) => &PODS[..self.random.below(PODS.len() + 1)],
                None => &PODS,
            };
            self.recreate_pods(pods);
        }
        self.seen.firewalls += 1;
        let rules = random_firewall(&mut self.random, self.cluster);
        for pod in PODS {
            for _ in 0..2 {
                let name = *self.random.pick(&NAMES);
                self.ask(pod, name);
            }
        }
        self.apply(rules, "a new firewall".to_owned());
        between(self);
        for _ in 0..EDITS {
            let mut rules = self.rules.clone();
            let what = edit(&mut self.random, &mut rules, self.cluster);
            self.apply(rules, what);
            between(self);
        }
    }

    /// New pods and a last firewall, by which addresses are open that the pods were told.
    pub fn open_some(&mut self) {
        // A name that a rule has denied would count for an hour.
        self.recreate_pods(&PODS);
        let name = NAMES[0];
        let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
        let rules = vec![RuleSpec::allow_name(name), deny];
        self.apply(rules, "the last firewall".to_owned());
        for pod in PODS {
            self.tell(pod, name);
        }
    }

    /// Waits until all connections are judged as the oracle says, and returns how long that took.
    pub fn settle(&mut self) -> Duration {
        let start = Instant::now();
        let everywhere = PODS.map(|pod| (pod, self.everything()));
        self.follow(everywhere.to_vec());
        start.elapsed()
    }

    /// Without a firewall everything is reached; afterwards neighbours are known everywhere.
    pub fn the_network_works(&mut self) {
        for pod in [FREE_POD, PODS[0], PODS[1]] {
            let all = self.everything();
            let wrong = self.probe(pod, &all);
            assert!(wrong.is_empty(), "without a firewall: {wrong:#?}");
        }
        // The first packets waited for neighbours.
        self.slow.clear();
        self.seen = Seen::default();
    }

    fn serve_new_records(&mut self) {
        let mut zone = Vec::new();
        self.records.clear();
        for name in NAMES {
            let addresses = random_addresses(&mut self.random, self.cluster, 3);
            // Below names that no rule knows, as content networks have them.
            let owner = if self.random.one_in(4) {
                zone.push(format!("{name}. 3600 IN CNAME {name}.cdn.example."));
                format!("{name}.cdn.example.")
            } else {
                format!("{name}.")
            };
            for address in &addresses {
                let kind = if address.is_ipv4() { "A" } else { "AAAA" };
                zone.push(format!("{owner} 3600 IN {kind} {address}"));
            }
            for host in 0..self.options.hosts {
                zone.push(format!("h{host}.{name}. 3600 IN A {HOSTS}{}", host % 250));
            }
            self.records.insert(name, addresses);
        }
        let zone: Vec<&str> = zone.iter().map(String::as_str).collect();
        self.lab.serve_dns(&zone).expect("the server starts");
    }

    /// New pods with the addresses of the old ones, which were told nothing.
    fn recreate_pods(&mut self, pods: &[&'static str]) {
        for spec in topology::pods() {
            let lsp = spec.lsp();
            if pods.contains(&lsp.as_str()) {
                self.lab.delete_pod(&lsp).expect("the pod is deleted");
                self.lab.add_pod(&spec).expect("the pod is created");
                self.lab.wait_wired(&lsp).expect("OVN wires it");
            }
        }
        let until = Instant::now() + self.options.fade.unwrap_or_default();
        for (pod, told) in std::mem::take(&mut self.told) {
            let fading = told.into_keys().map(|address| ((pod, address), until));
            self.fading.extend(fading);
        }
        self.fading.retain(|(pod, _), _| !pods.contains(pod));
        self.lab.sync().expect("OVN is in step");
        // They ask only once. That a pod's first question is seen, has a test of its own (first_query.rs).
        let attached = self.lab.wait_attached(topology::pods().len());
        attached.expect("the agent attaches its programs");
    }

    /// Pods ask for all names again that they know the addresses of, and for names beside.
    fn ask_again(&mut self) {
        for (pod, told) in self.told.clone() {
            let names: BTreeSet<&str> = told.into_values().flatten().collect();
            for name in names {
                self.ask(pod, name);
            }
        }
        for pod in PODS {
            let name = *self.random.pick(&NAMES);
            let hosts = (0..self.options.hosts).map(|host| format!("h{host}.{name}"));
            let hosts: Vec<String> = hosts.collect();
            if !hosts.is_empty() {
                self.resolve(pod, "A", &hosts);
            }
        }
    }

    /// A firewall in the place of the one before, and everything that it decides.
    fn apply(&mut self, rules: Vec<RuleSpec>, what: String) {
        if self.options.fade.is_some() {
            self.ask_again();
        }
        self.history.push(format!(
            "{what}:\n{}",
            manifest("ns1", &rules)
                .lines()
                .skip(6)
                .fold(String::new(), |text, line| text + line + "\n")
        ));
        self.lab
            .set_firewall("ns1", &rules)
            .expect("the rows are written");
        let rows: Vec<RuleSpec> = self.rules.drain(..).chain(self.leftover.take()).collect();
        self.leftover = rows.get(rules.len()).cloned();
        self.rules = rules;
        self.resolve_centrally();
        self.seen.states += 1;

        let start = Instant::now();
        let everywhere = PODS.map(|pod| (pod, self.everything()));
        let was_late = self.follow(everywhere.to_vec()) > 0;
        self.seen.slowest_edit = self.seen.slowest_edit.max(start.elapsed());
        for (pod, all) in everywhere.iter().filter(|_| was_late) {
            self.must_hold("after the wait", pod, all);
        }
        for pod in PODS {
            let name = *self.random.pick(&NAMES);
            self.tell(pod, name);
        }
        let (pod, all) = (*self.random.pick(&PODS), self.everything());
        self.must_hold("after names were told", pod, &all);
        self.ask_about_addresses(pod, &all);
        if self.options.questions > 0 {
            self.ask_about_the_cluster(pod);
        }
    }

    /// What the agent says of a connection.
    fn answer(&self, question: &Question) -> Answer {
        let Question { pod, target, .. } = question;
        let pod = pod.replacen('_', "/", 1);
        let said = self
            .lab
            .ask_agent(&["explain", &pod, target, "--output", "json"]);
        let (text, _) = said.expect("the agent answers");
        let explained: Value = serde_json::from_str(&text).expect("a list");
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Answer {
            verdict: word(&explained[0]["verdict"]),
            reason: word(&explained[0]["addresses"][0]["reason"]),
            text,
        }
    }

    /// Compares an answer with what became of the connections that it is about.
    fn must_be_true(&mut self, question: &Question, answer: Answer, became: &[Action]) {
        let Answer {
            verdict,
            reason,
            text,
        } = answer;
        let all = |action| became.iter().all(|became| *became == action);
        let is_true = match (&*verdict, question.is_by_name) {
            // Nobody knows yet where the name leads.
            ("not_yet", true) if text.contains("if its name has the same address") => true,
            ("allowed", _) | ("not_yet", true) => all(Action::Allow),
            ("blocked", _) | ("not_yet", false) => all(Action::Deny),
            ("depends" | "not_known", _) => {
                let is_one = all(Action::Allow) || all(Action::Deny);
                if question.is_known && is_one {
                    let of_reason = self.seen.explained.left_open.entry(reason);
                    *of_reason.or_default() += 1;
                }
                true
            }
            _ => false,
        };
        if !is_true {
            panic!(
                "{} to {}: {became:?}, but\n{text}\n{}",
                question.pod,
                question.target,
                self.history.join("\n")
            );
        }
        let explained = &mut self.seen.explained;
        explained.certain += usize::from(question.is_known);
        *explained.verdicts.entry(verdict).or_default() += 1;
    }

    /// Asks about some of these connections, which were just tried.
    fn ask_about_addresses(&mut self, pod: &'static str, all: &[(Protocol, SocketAddr)]) {
        for _ in 0..self.options.questions {
            let (protocol, to) = *self.random.pick(all);
            let has_port = !self.random.one_in(4);
            let target = match has_port {
                true => format!("{to}/{}", protocol.name()),
                false => to.ip().to_string(),
            };
            let is_meant = |(other, at): &&(Protocol, SocketAddr)| match has_port {
                true => (*other, *at) == (protocol, to),
                false => at.ip() == to.ip(),
            };
            let meant = all.iter().filter(is_meant);
            if meant
                .clone()
                .any(|(of, at)| self.is_left_behind(pod, *of, *at))
            {
                continue;
            }
            let became = meant.map(|(of, at)| self.expected(pod, *of, *at).0);
            let became: Vec<Action> = became.collect();
            let question = Question {
                pod,
                target,
                is_by_name: false,
                is_known: has_port,
            };
            let answer = self.answer(&question);
            self.must_be_true(&question, answer, &became);
        }
    }

    /// Asks about a destination in the cluster, and connects to it. The oracle says nothing of these: no rule applies there.
    fn ask_about_the_cluster(&mut self, pod: &'static str) {
        let is_v6 = self.cluster.dual_stack && self.random.one_in(2);
        let address_of = |lsp: &str| -> IpAddr {
            let pods = topology::pods();
            let spec = pods.iter().find(|spec| spec.lsp() == lsp);
            let spec = spec.expect("one of the lab's pods");
            match is_v6 {
                true => spec.address_v6().into(),
                false => spec.address.into(),
            }
        };
        let (server, to) = match self.random.below(3) {
            0 => (Some(pod), SocketAddr::new(address_of(pod), 0)),
            1 => (Some(FREE_POD), SocketAddr::new(address_of(FREE_POD), 0)),
            _ => (None, if is_v6 { DNS_V6 } else { DNS }),
        };
        let listener = server.map(|server| {
            let listener = self
                .lab
                .pod(server)
                .netns()
                .run(|| Ok(TcpListener::bind(to)?));
            listener.expect("it listens")
        });
        let to = listener
            .as_ref()
            .map_or(to, |listener| listener.local_addr().expect("it is bound"));
        let connected = self
            .lab
            .pod(pod)
            .netns()
            .run(|| Ok(TcpStream::connect_timeout(&to, PASSES)));
        let became = match connected.expect("the pod is there") {
            Ok(_) => Action::Allow,
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => Action::Deny,
            Err(error) => panic!("{pod} to {to}: {error}"),
        };
        let has_port = !self.random.one_in(4);
        let question = Question {
            pod,
            target: match has_port {
                true => to.to_string(),
                false => to.ip().to_string(),
            },
            is_by_name: false,
            is_known: true,
        };
        let answer = self.answer(&question);
        self.must_be_true(&question, answer, &[became]);
    }

    /// Whether an ACL decides that is of no rule any more.
    fn is_left_behind(&self, pod: &str, protocol: Protocol, to: SocketAddr) -> bool {
        let destination = self.destination(pod, protocol, to);
        self.leftover.is_some() && verdict(&self.rules, &destination).is_none()
    }

    /// A pod asks for a name and goes there at once: an answer comes when its addresses are open.
    fn tell(&mut self, pod: &'static str, name: &'static str) {
        let addresses = &self.records[name];
        let (mut of_name, all) = (Vec::new(), self.everything());
        for (protocol, to) in all.iter().filter(|(_, to)| addresses.contains(&to.ip())) {
            of_name.push((*protocol, *to, self.expected(pod, *protocol, *to).0));
        }
        let question = self.random_question(pod, name);
        let answer = question.map(|(asked, service)| (self.answer(&asked), asked, service));
        self.ask(pod, name);
        if let Some((answer, asked, service)) = answer {
            let meant = of_name.iter().filter(|(protocol, to, _)| {
                service.is_none_or(|service| service == (*protocol, to.port()))
            });
            if !meant
                .clone()
                .any(|(of, at, _)| self.is_left_behind(pod, *of, *at))
            {
                let became = meant.map(|(of, at, _)| self.expected(pod, *of, *at).0);
                let became: Vec<Action> = became.collect();
                self.must_be_true(&asked, answer, &became);
            }
        }
        let (mut at_once, mut soon) = (Vec::new(), Vec::new());
        for (protocol, to, before) in of_name {
            match (before, self.expected(pod, protocol, to).0) {
                // Packets have just passed. What the switch has cached of that goes on until its
                // revalidators have come by; how long the answer waits for that is an estimate.
                (Action::Allow, Action::Deny) => soon.push((protocol, to)),
                _ => at_once.push((protocol, to)),
            }
        }
        self.must_hold(&format!("right after {name} was told"), pod, &at_once);
        self.seen.late_denials += self.follow(vec![(pod, soon)]);
    }

    /// A question by name, and the service that it is about if it has a port.
    fn random_question(
        &mut self,
        pod: &'static str,
        name: &str,
    ) -> Option<(Question, Option<(Protocol, u16)>)> {
        if self.options.questions == 0 {
            return None;
        }
        let protocol = *self.random.pick(&[Protocol::Tcp, Protocol::Udp]);
        let port = *self.random.pick(&web::PORTS);
        let service = (!self.random.one_in(4)).then_some((protocol, port));
        let target = match service {
            Some(_) => format!("{name}:{port}/{}", protocol.name()),
            None => name.to_owned(),
        };
        let told = self.told.get(pod);
        let was_told = |address: &IpAddr| {
            let names = told.and_then(|told| told.get(address));
            names.is_some_and(|names| names.contains(name))
        };
        let question = Question {
            pod,
            target,
            is_by_name: true,
            is_known: service.is_some() && self.records[name].iter().all(was_told),
        };
        Some((question, service))
    }

    /// What ovn-kubernetes' controller finds for the names of the rules: often something else than
    /// the pods.
    fn resolve_centrally(&mut self) {
        for rule in &self.rules {
            let To::Name(name) = &rule.to else { continue };
            let mut addresses = BTreeSet::new();
            if self.random.one_in(2) {
                addresses = random_addresses(&mut self.random, self.cluster, 2);
            }
            let list: Vec<IpAddr> = addresses.iter().copied().collect();
            self.lab
                .resolve_centrally(name, &list)
                .expect("the set is filled");
            let set = address_set(name, "v4", self.cluster);
            self.central.insert(set, addresses);
        }
    }

    /// Asks the lab's DNS for everything that there is of a name.
    fn ask(&mut self, pod: &'static str, name: &'static str) {
        let addresses = self.records[name].clone();
        let mut kinds = vec!["A", "AAAA"];
        kinds.retain(|kind| addresses.iter().any(|to| to.is_ipv4() == (*kind == "A")));
        for kind in kinds {
            let asked = in_any_case(&mut self.random, name);
            for address in self.resolve(pod, kind, &[asked]) {
                let of_pod = self.told.entry(pod).or_default();
                of_pod.entry(address).or_default().insert(name);
            }
        }
        self.history
            .push(format!("{pod} asks for {name}: {addresses:?}"));
    }

    /// Every service at every address.
    fn everything(&self) -> Vec<(Protocol, SocketAddr)> {
        let mut all = Vec::new();
        for address in destinations(self.cluster) {
            for port in web::PORTS {
                for protocol in [Protocol::Tcp, Protocol::Udp] {
                    all.push((protocol, SocketAddr::new(address, port)));
                }
            }
        }
        all
    }

    fn destination(&self, pod: &str, protocol: Protocol, to: SocketAddr) -> Destination<'_> {
        let told = self.told.get(pod).and_then(|told| told.get(&to.ip()));
        let rules = self.rules.iter().chain(&self.leftover);
        let central = rules.filter_map(|rule| match &rule.to {
            To::Name(name) => {
                let set = self.central.get(&address_set(name, "v4", self.cluster))?;
                set.contains(&to.ip()).then_some(name.as_str())
            }
            To::Cidr(_) | To::Nodes(_) => None,
        });
        Destination {
            address: to.ip(),
            protocol: protocol.name(),
            port: to.port(),
            told: told.cloned().unwrap_or_default(),
            central: central.collect(),
        }
    }

    /// What the oracle says, and what OVN alone would say.
    fn expected(&self, pod: &str, protocol: Protocol, to: SocketAddr) -> (Action, Action) {
        if pod == FREE_POD {
            return (Action::Allow, Action::Allow);
        }
        let with = self.destination(pod, protocol, to);
        let without = Destination {
            told: BTreeSet::new(),
            ..with.clone()
        };
        let of = |to: &Destination<'_>| {
            verdict(&self.rules, to)
                .or_else(|| {
                    let leftover = Destination {
                        told: BTreeSet::new(),
                        ..to.clone()
                    };
                    verdict(self.leftover.as_slice(), &leftover)
                })
                .unwrap_or(Action::Allow)
        };
        (of(&with), of(&without))
    }

    /// Tries these and returns what came out otherwise than the oracle says.
    fn probe(&mut self, pod: &'static str, what: &[(Protocol, SocketAddr)]) -> Vec<Wrong> {
        let now = Instant::now();
        self.fading.retain(|_, until| *until > now);
        let is_certain =
            |(_, to): &&(Protocol, SocketAddr)| !self.fading.contains_key(&(pod, to.ip()));
        let what: Vec<_> = what.iter().filter(is_certain).collect();
        let mut attempts = Vec::new();
        for (protocol, to) in what {
            if self.source_ports.is_empty() && self.options.fade.is_some() {
                // The first ones were used long ago.
                self.source_ports = SOURCE_PORTS;
            }
            let limit = match self.expected(pod, *protocol, *to).0 {
                Action::Allow => PASSES,
                Action::Deny => BLOCKED,
            };
            attempts.push(Attempt {
                protocol: *protocol,
                to: *to,
                source_port: self.source_ports.next().expect("there are enough"),
                limit,
            });
        }
        let outcomes = self.lab.pod(pod).probe(&attempts).expect("they are made");
        let mut wrong = Vec::new();
        for (attempt, outcome) in attempts.into_iter().zip(outcomes) {
            let (expected, without) = self.expected(pod, attempt.protocol, attempt.to);
            let is_right = match (expected, outcome) {
                (Action::Allow, Outcome::Reached(after)) => {
                    self.seen.passed += 1;
                    if after >= SECOND_SYN && attempt.protocol == Protocol::Tcp {
                        self.slow.push(Wrong {
                            pod,
                            attempt,
                            outcome,
                            expected,
                        });
                    }
                    true
                }
                (Action::Deny, Outcome::TimedOut) => {
                    self.seen.blocked += 1;
                    true
                }
                _ => false,
            };
            let by_dnsflow = match (without, expected) {
                (Action::Deny, Action::Allow) => Some("let pass"),
                (Action::Allow, Action::Deny) => Some("dropped"),
                _ => None,
            };
            if let Some(what) = by_dnsflow {
                *self.seen.by_dnsflow.entry(what).or_default() += 1;
            }
            if !is_right {
                wrong.push(Wrong {
                    pod,
                    attempt,
                    outcome,
                    expected,
                });
            }
        }
        wrong
    }

    /// Waits until each of these came out as the oracle says once, and returns how many did not at
    /// first.
    fn follow(&mut self, mut left: Vec<(&'static str, Vec<(Protocol, SocketAddr)>)>) -> usize {
        let start = Instant::now();
        let mut late = None;
        loop {
            let mut wrong = Vec::new();
            for (pod, what) in std::mem::take(&mut left) {
                let of_pod = self.probe(pod, &what);
                let again: Vec<_> = of_pod
                    .iter()
                    .map(|wrong| (wrong.attempt.protocol, wrong.attempt.to))
                    .collect();
                if !again.is_empty() {
                    left.push((pod, again));
                }
                wrong.extend(of_pod);
            }
            let late = *late.get_or_insert(wrong.len());
            if wrong.is_empty() {
                // What was lost on the way is no fault.
                self.slow.clear();
                return late;
            }
            if start.elapsed() > PATIENT && !self.are_stale_megaflows(&wrong) {
                panic!("it stays like this\n{}", self.explain(&wrong));
            }
        }
    }

    /// Whether the flows let all of these pass, by a trace, and so does the datapath once its megaflows are made anew.
    /// Then a megaflow was stale, which Open vSwitch 3.1 was seen to leave for two minutes.
    fn are_stale_megaflows(&mut self, wrong: &[Wrong]) -> bool {
        let lets_out = |wrong: &Wrong| {
            let Attempt { protocol, to, .. } = wrong.attempt;
            let trace = self.lab.lets_out(wrong.pod, protocol.name(), to);
            wrong.expected == Action::Allow && trace.is_ok_and(|passes| passes)
        };
        if !wrong.iter().all(lets_out) {
            return false;
        }
        let dropping = self.lab.appctl(&["dpif/dump-flows", "-m", "br-int"]);
        let purged = self.lab.appctl(&["revalidator/purge"]);
        purged.expect("the megaflows go");
        let again: Vec<_> = wrong
            .iter()
            .map(|wrong| (wrong.pod, wrong.attempt.protocol, wrong.attempt.to))
            .collect();
        for (pod, protocol, to) in again {
            if !self.probe(pod, &[(protocol, to)]).is_empty() {
                return false;
            }
            let stale = format!("{pod} to {to}, {}", protocol.name());
            println!("a stale megaflow, {stale}\n{dropping:?}");
            self.seen.stale_megaflows.push(stale);
        }
        true
    }

    /// Everything is as the oracle says, at the first attempt, which lasts as long as several SYNs. A stale megaflow is
    /// no fault.
    fn must_hold(&mut self, when: &str, pod: &'static str, what: &[(Protocol, SocketAddr)]) {
        let wrong = self.probe(pod, what);
        if !wrong.is_empty() && !self.are_stale_megaflows(&wrong) {
            panic!("{when}\n{}", self.explain(&wrong));
        }
        let slow = std::mem::take(&mut self.slow);
        let lost = slow.iter().map(|slow| format!("{when}: {slow:?}"));
        self.seen.second_packets.extend(lost);
        if !slow.is_empty() && self.options.explains_slow {
            println!("{when}: a first packet was lost\n{}", self.explain(&slow));
        }
    }

    /// What it takes to explain a wrong verdict.
    fn explain(&mut self, wrong: &[Wrong]) -> String {
        let mut text = String::new();
        let mut say = |what: &str, text_of: String| {
            writeln!(text, "== {what}\n{text_of}").expect("a string takes it");
        };
        let shown = |result: Result<String>| match result {
            Ok(text) => text,
            Err(error) => format!("{error:#}"),
        };
        let lab = self.lab;
        // First what goes away soonest.
        let flows = shown(lab.appctl(&["dpif/dump-flows", "-m", "br-int"]));
        let conntrack = shown(lab.appctl(&["dpctl/dump-conntrack"]));
        let openflow = shown(lab.ofctl(&["--protocols=OpenFlow15", "dump-flows", "br-int"]));
        let addresses: BTreeSet<String> = wrong
            .iter()
            .map(|wrong| wrong.attempt.to.ip().to_string())
            .collect();
        let mentions = |line: &&str| addresses.iter().any(|address| line.contains(address));
        let of_acls = |line: &&str| {
            (10_990..=11_000).any(|priority| line.contains(&format!("priority={priority},")))
                && !line.contains("actions=conjunction(")
        };
        let pods: BTreeSet<&str> = wrong.iter().map(|wrong| wrong.pod).collect();
        let veths: Vec<String> = pods
            .iter()
            .map(|pod| format!("in_port({})", shown(lab.host_veth(pod))))
            .collect();
        let of_pods = |line: &&str| veths.iter().any(|veth| line.contains(veth));
        let lines = |text: &str, is_wanted: &dyn Fn(&&str) -> bool| {
            text.lines()
                .filter(is_wanted)
                .collect::<Vec<_>>()
                .join("\n")
        };
        for Wrong {
            pod,
            attempt,
            outcome,
            expected,
        } in wrong
        {
            let (protocol, to) = (attempt.protocol, attempt.to);
            let decides = deciding_rule(&self.rules, &self.destination(pod, protocol, to));
            let trace = lab.lets_out(pod, protocol.name(), to);
            let what = format!(
                "{pod} {attempt}: {outcome:?}, but {expected:?} by rule {decides:?}; told {:?}; a trace passes: {trace:?}",
                self.destination(pod, protocol, to).told
            );
            say("wrong", what);
            let (namespace, name) = pod.split_once('_').expect("a namespace and a name");
            let target = format!("{to}/{}", protocol.name());
            let why = lab.ask_agent(&["explain", &format!("{namespace}/{name}"), &target]);
            say("why, by the agent", shown(why.map(|(text, _)| text)));
        }
        say("the agent", self.words_of_the_agent());
        let mut again = Vec::new();
        for Wrong { pod, attempt, .. } in wrong {
            again.extend(self.probe(pod, &[(attempt.protocol, attempt.to)]));
        }
        say("wrong at a second attempt", format!("{again:#?}"));
        say("the leftover ACL", format!("{:?}", self.leftover));
        say("what was told", format!("{:#?}", self.told));
        say("what the controller found", format!("{:?}", self.central));
        say(
            "dnsflow's flows and OVN's to these addresses",
            lines(&openflow, &mentions),
        );
        say(
            "the flows of EgressFirewalls' ACLs",
            lines(&openflow, &of_acls),
        );
        say(
            "megaflows of the pod, before the second attempt",
            lines(&flows, &of_pods),
        );
        say(
            "conntrack, before the second attempt",
            lines(&conntrack, &mentions),
        );
        for pod in [PODS[0], PODS[1], "inet"] {
            let neighbours = lab.pod(pod).run("ip", &["neighbour"]);
            say(&format!("neighbours of {pod}"), shown(neighbours));
        }
        let bindings = lab.sbctl(&["--columns=ip,mac,logical_port", "list", "MAC_Binding"]);
        say("OVN's neighbours", shown(bindings));
        say("ovs-vswitchd", lab.log_tail("ovs-vswitchd.log"));
        say("ovn-controller", lab.log_tail("ovn-controller.log"));
        let history = self.history.iter().rev().take(12).rev();
        say(
            "what was done",
            history.cloned().collect::<Vec<_>>().join("\n"),
        );
        say("what was seen", format!("{:#?}", self.seen));
        text
    }
}
