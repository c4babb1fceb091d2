//! How time and memory of the engine grow with what a node has: pods, names, cache entries, rules, ACLs of other
//! namespaces, Services.
//!
//!     cargo bench --package dnsflow-tests --bench growth -- [--svg FILE]
//!
//! Each of these is taken at a tenth of its usual number, at that number and at ten times of it, with the others as
//! they are. Around the engine is a switch in memory that obeys at once, whose time is part of all figures.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU32,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Parser;
use dnsflow_core::{
    Input,
    cache::journal::{Folding, Parts},
    engine::{Config, Engine},
    ovn::rows::{
        Acl, Datapath, Interface, InterfaceUpdate, LoadBalancer, LogicalFlow, NbUpdate,
        PortBinding, PortGroup, RowId, SbUpdate,
    },
    testing::{
        DATAPATH, GROUP, Node, acl, acl_row, allow, answer_frame, deny_all, firewall, firewalls,
        ifindex_of, interface, logical_flow, logical_flow_row, port_binding,
    },
    values::{
        firewall::{Firewall, FirewallId, FirewallUpdate, Rule},
        flow::{Protocol, Transport},
        limits::CacheLimits,
    },
};

/// Measures growth
#[derive(Debug, Parser)]
struct Arguments {
    /// Plot to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// What cargo adds
    #[arg(long, hide = true)]
    bench: bool,
}

/// Counts the bytes in use.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        USED.fetch_add(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What a node has, and how its agent opens addresses.
#[derive(Clone, Copy, Debug)]
struct Size {
    by_marks: bool,
    pods: usize,
    /// Names that the pods were told.
    names: usize,
    /// Addresses that pods were told, one after the other.
    entries: usize,
    /// ACLs in namespaces without a pod here.
    others: usize,
    /// Rules of the namespace of the pods.
    rules: usize,
    /// Rules of the namespace without a pod here in which rules are edited.
    rules_elsewhere: usize,
    /// Services, each with an address.
    services: usize,
}

const USUAL: Size = Size {
    by_marks: false,
    pods: 50,
    names: 1_000,
    entries: 10_000,
    others: 5_000,
    rules: 800,
    rules_elsewhere: 800,
    services: 5_000,
};

/// A name, and a place in [`Size`].
type Dimension = (&'static str, fn(&mut Size) -> &mut usize);

const DIMENSIONS: [Dimension; 7] = [
    ("pods", |size| &mut size.pods),
    ("names", |size| &mut size.names),
    ("cache entries", |size| &mut size.entries),
    ("ACLs of other namespaces", |size| &mut size.others),
    ("rules of a namespace without a pod here", |size| {
        &mut size.rules_elsewhere
    }),
    ("rules of one with", |size| &mut size.rules),
    ("Services", |size| &mut size.services),
];

/// Rules of each EgressFirewall in another namespace that is not edited.
const RULES: usize = 10;
/// The namespace without a pod here in which rules are edited.
const ELSEWHERE: &str = "elsewhere";
/// How often each short step is taken; its median counts.
const TIMES: usize = 301;

/// The columns of the table.
const FIGURES: [&str; 9] = [
    "answer, new address, µs",
    "answer, known address, µs",
    "edit of a rule in use, ms",
    "edit of its ports, ms",
    "edit of another rule, ms",
    "edit in another namespace, µs",
    "a Service comes, µs",
    "restart, ms",
    "memory, MiB",
];

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut table = String::new();
    writeln!(table, "| what | {} |", FIGURES.join(" | "))?;
    writeln!(table, "|---|{}", "---|".repeat(FIGURES.len()))?;
    let mut row = |what: &str, figures: &[f64]| {
        let cells: Vec<_> = figures.iter().map(|figure| shown(*figure)).collect();
        writeln!(table, "| {what} | {} |", cells.join(" | "))
    };
    let usual = measure(USUAL);
    row("as said above", &usual)?;
    let mut lines = Vec::new();
    for (name, place) in DIMENSIONS {
        let number = *place(&mut USUAL.clone());
        let mut of = |number| {
            let mut size = USUAL;
            *place(&mut size) = number;
            let figures = measure(size);
            row(&format!("{number} {name}"), &figures).map(|()| figures)
        };
        lines.push((name, vec![of(number / 10)?, usual, of(number * 10)?]));
    }
    for entries in [USUAL.entries, USUAL.entries * 10] {
        let figures = measure(Size {
            by_marks: true,
            entries,
            ..USUAL
        });
        row(&format!("by marks, {entries} cache entries"), &figures)?;
    }
    print!("{table}");
    if let Some(file) = arguments.svg {
        fs::write(file, plot(&lines))?;
    }
    Ok(())
}

/// Two digits that count.
fn shown(figure: f64) -> String {
    match figure {
        ..10.0 => format!("{figure:.1}"),
        _ => format!("{figure:.0}"),
    }
}

fn measure(size: Size) -> [f64; 9] {
    let mut stage = Stage::new(size);
    let new = median(TIMES, || stage.tell_new());
    let known = median(TIMES, || stage.tell_known());
    let in_use = median(5, || stage.edit(&["example.com", "sub.example.com"]));
    let ports = median(5, || stage.edit_ports());
    let unused = median(5, || stage.edit_last());
    let elsewhere = median(TIMES, || stage.edit_elsewhere());
    let service = median(TIMES, || stage.add_service());
    let restart = median(3, || stage.restart());
    let memory = stage.memory_bytes();
    [
        micros(new),
        micros(known),
        micros(in_use) / 1e3,
        micros(ports) / 1e3,
        micros(unused) / 1e3,
        micros(elsewhere),
        micros(service),
        micros(restart) / 1e3,
        memory as f64 / f64::from(1 << 20),
    ]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(times: usize, mut step: impl FnMut() -> Duration) -> Duration {
    let mut all: Vec<_> = (0..times).map(|_| step()).collect();
    all.sort_unstable();
    all[times / 2]
}

/// A node of some size.
struct Stage {
    size: Size,
    node: Node,
    rules: Vec<Rule>,
    rules_elsewhere: Vec<Rule>,
    edits: u32,
    told: usize,
}

/// The bits of the marks, by default.
const MARK_MASK: Option<NonZeroU32> = NonZeroU32::new(0xffe0_0000);

fn config(by_marks: bool) -> Config {
    Config {
        mark_mask: MARK_MASK.filter(|_| by_marks),
        flow_changes_per_second: u32::MAX,
        cache_limits: CacheLimits {
            addresses_per_port_max: usize::MAX,
            ..CacheLimits::default()
        },
        ..Config::default()
    }
}

/// The row of a pod: the digits of its interface index.
fn pod_row(pod: usize) -> RowId {
    let digits = format!("{pod:06}");
    RowId::new(u128::from_str_radix(&digits, 16).expect("digits"))
}

fn port(pod: usize) -> String {
    format!("ns1_pod{pod}")
}

fn pod_address(pod: usize) -> [u8; 4] {
    let [high, low] = (pod as u16).to_be_bytes();
    [10, 244, high, low]
}

fn pod_interface(pod: usize) -> Interface {
    Interface {
        addresses: vec![IpAddr::from(pod_address(pod))],
        ..interface(&port(pod), 1, &format!("uid-{pod}"))
    }
}

fn pod_binding(pod: usize) -> PortBinding {
    PortBinding {
        tunnel_key: pod as u32,
        ..port_binding(&port(pod), 1)
    }
}

/// The address of an entry.
fn address(entry: usize) -> [u8; 4] {
    Ipv4Addr::from_bits(0xc612_0000 + entry as u32).octets()
}

/// An ACL in another namespace.
fn other_acl(number: usize, priority: u16) -> (RowId, Option<Acl>) {
    let hash = number as u64;
    // Row ids are random. A multiplication by an odd number spreads their first 32 bits.
    let prefix = u128::from((number as u32).wrapping_mul(0x9e37_79b1));
    let acl = Acl {
        namespace: format!("namespace-{}", number / RULES).into(),
        rule_index: (number % RULES) as u32,
        priority,
        matches: format!(
            "(ip4.dst == $a{}) && inport == @a{}",
            hash.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            hash.wrapping_mul(0xc2b2_ae3d_27d4_eb4f),
        ),
        action: "allow".into(),
    };
    (RowId::new(prefix << 96 | 1), Some(acl))
}

fn other_firewall(namespace: usize) -> (FirewallId, Option<Firewall>) {
    let rule = |rule| allow(&format!("service-{rule}.example-{namespace}.com"));
    let id = FirewallId {
        namespace: format!("namespace-{namespace}"),
        name: "default".into(),
    };
    let rules: Vec<_> = (0..RULES).map(rule).collect();
    (id, Some(firewall(&rules)))
}

fn elsewhere_firewall(rules: &[Rule]) -> (FirewallId, Option<Firewall>) {
    let id = FirewallId {
        namespace: ELSEWHERE.into(),
        name: "default".into(),
    };
    (id, Some(firewall(rules)))
}

fn elsewhere_acl(index: u32, rules: &[Rule]) -> (RowId, Option<Acl>) {
    let acl = acl(index, rules).map(|acl| Acl {
        namespace: ELSEWHERE.into(),
        matches: acl.matches.replace(GROUP, "a1"),
        ..acl
    });
    (RowId::new((0xe15_0000 + u128::from(index)) << 96), acl)
}

/// The load balancer of a Service.
fn service(number: usize) -> (RowId, Option<LoadBalancer>) {
    let balancer = LoadBalancer {
        service: Some(format!("namespace-{}/service-{number}", number / RULES)),
        network: None,
        addresses: [Ipv4Addr::from_bits(0x0a60_0000 + number as u32).into()].into(),
        backends: [Ipv4Addr::from_bits(0x0af4_0000 + number as u32).into()].into(),
    };
    // Row ids are random.
    let prefix = u128::from((number as u32).wrapping_mul(0x9e37_79b1));
    (RowId::new(prefix << 96 | 2), Some(balancer))
}

/// The ACL of a rule of the namespace of the pods.
fn own_acl(index: u32, rules: &[Rule]) -> (RowId, Option<Acl>) {
    (acl_row(index), acl(index, rules))
}

/// Its logical flow.
fn own_flow(index: u32, rules: &[Rule]) -> (RowId, Option<LogicalFlow>) {
    (logical_flow_row(index), logical_flow(index, rules))
}

impl Stage {
    fn new(size: Size) -> Self {
        let mut rules = vec![allow("example.com"), allow("other0.test")];
        let fillers = rules.len() + 1..size.rules;
        rules.extend(fillers.map(|number| allow(&format!("unused{number}.test"))));
        rules.push(deny_all());
        let elsewhere = 0..size.rules_elsewhere;
        let rules_elsewhere = elsewhere.map(|number| allow(&format!("service{number}.test")));
        let mut node = Node::bare();
        node.engine = Engine::new(config(size.by_marks));
        let mut stage = Self {
            size,
            node,
            rules,
            rules_elsewhere: rules_elsewhere.collect(),
            edits: 0,
            told: 0,
        };
        stage.start();
        for _ in 0..size.entries {
            stage.tell_new();
        }
        stage
    }

    /// All sources are read.
    fn start(&mut self) {
        let Self {
            size,
            node,
            rules,
            rules_elsewhere,
            ..
        } = self;
        let pods = || 1..=size.pods;
        node.trust_server();
        node.give(Input::SwitchUp);
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: pods()
                .map(|pod| (pod_row(pod), Some(pod_interface(pod))))
                .collect(),
        }));
        let others = (0..size.others / RULES).map(other_firewall);
        let own = match firewalls(true, Some(firewall(rules))) {
            Input::Firewalls(update) => update.firewalls,
            _ => Vec::new(),
        };
        node.give(Input::Firewalls(FirewallUpdate {
            reset: true,
            firewalls: others
                .chain(own)
                .chain([elsewhere_firewall(rules_elsewhere)])
                .collect(),
        }));
        let others = (0..size.others).map(|number| other_acl(number, 10_000));
        let elsewhere = 0..rules_elsewhere.len() as u32;
        let elsewhere = elsewhere.map(|index| elsewhere_acl(index, rules_elsewhere));
        let own = || 0..rules.len() as u32;
        node.give(Input::Nb(NbUpdate {
            reset: true,
            load_balancers: (0..size.services).map(service).collect(),
            acls: others
                .chain(elsewhere)
                .chain(own().map(|index| own_acl(index, rules)))
                .collect(),
            ..NbUpdate::default()
        }));
        let group = PortGroup {
            name: GROUP.into(),
            ports: pods().map(port).collect(),
        };
        node.give(Input::Sb(SbUpdate {
            reset: true,
            datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
            port_bindings: pods()
                .map(|pod| (pod_row(pod), Some(pod_binding(pod))))
                .collect(),
            port_groups: vec![(RowId::new(0xe << 100), Some(group))],
            logical_flows: own().map(|index| own_flow(index, rules)).collect(),
            ..SbUpdate::default()
        }));
        node.pass(Duration::ZERO);
        node.log.clear();
        node.reports.clear();
    }

    /// The time that this step takes.
    fn time(&mut self, step: impl FnOnce(&mut Self)) -> Duration {
        let start = Instant::now();
        step(self);
        let time = start.elapsed();
        self.node.log.clear();
        self.node.reports.clear();
        time
    }

    fn tell(&mut self, entry: usize) -> Duration {
        let pod = entry % self.size.pods + 1;
        let name = format!("n{}.example.com", entry % self.size.names);
        let mut frame = answer_frame(&name, &[address(entry)], 3_600);
        // The destination, behind Ethernet (RFC 791, section 3.1).
        frame[30..34].copy_from_slice(&pod_address(pod));
        let ifindex = ifindex_of(pod_row(pod));
        // The stand-in for the kernel is no work of the agent.
        let frame = self
            .node
            .captured(ifindex, &frame)
            .expect("rules mention it");
        self.time(|stage| stage.node.hand_in(frame))
    }

    /// A pod is told an address that it did not know.
    fn tell_new(&mut self) -> Duration {
        self.told += 1;
        self.tell(self.told - 1)
    }

    /// A pod is told again what it knows.
    fn tell_known(&mut self) -> Duration {
        self.edits += 1;
        self.tell(self.edits as usize * 7 % self.told)
    }

    fn set_rule(&mut self, place: usize, rule: Rule) -> Duration {
        self.rules[place] = rule;
        // The resource is read beside the engine, and OVN's rows are.
        let resource = firewalls(false, Some(firewall(&self.rules)));
        let acl = Input::Nb(NbUpdate {
            acls: vec![own_acl(place as u32, &self.rules)],
            ..NbUpdate::default()
        });
        let flow = Input::Sb(SbUpdate {
            logical_flows: vec![own_flow(place as u32, &self.rules)],
            ..SbUpdate::default()
        });
        let time = self.time(|stage| {
            for input in [resource, acl, flow] {
                stage.node.give(input);
                // What is due at once.
                stage.node.pass(Duration::ZERO);
            }
        });
        // What waits for OVN to be in step is over.
        self.node.pass(Duration::from_millis(1));
        time
    }

    /// The rule that opens all addresses gets one of these names, in turns: all close, or open.
    fn edit(&mut self, names: &[&str; 2]) -> Duration {
        self.edits += 1;
        let first = self.set_rule(0, allow(names[1]));
        let second = self.set_rule(0, allow(names[0]));
        (first + second) / 2
    }

    /// The rule that opens all addresses does so for one of two ports, in turns.
    fn edit_ports(&mut self) -> Duration {
        let mut edit = |port| {
            let transport = Transport {
                protocol: Protocol::Tcp,
                port: Some(port),
            };
            let rule = Rule {
                ports: vec![transport],
                ..allow("example.com")
            };
            self.set_rule(0, rule)
        };
        (edit(443) + edit(8443)) / 2
    }

    /// A rule that opens nothing gets another name.
    fn edit_last(&mut self) -> Duration {
        self.edits += 1;
        let name = format!("other{}.test", self.edits);
        self.set_rule(1, allow(&name))
    }

    /// A rule of a namespace without a pod here changes: the resource, and its ACL.
    fn edit_elsewhere(&mut self) -> Duration {
        self.edits += 1;
        let place = self.edits as usize % self.rules_elsewhere.len();
        self.rules_elsewhere[place] = allow(&format!("edited{}.test", self.edits));
        let resource = Input::Firewalls(FirewallUpdate {
            reset: false,
            firewalls: vec![elsewhere_firewall(&self.rules_elsewhere)],
        });
        let acl = Input::Nb(NbUpdate {
            acls: vec![elsewhere_acl(place as u32, &self.rules_elsewhere)],
            ..NbUpdate::default()
        });
        self.time(|stage| {
            for input in [resource, acl] {
                stage.node.give(input);
                // What is due at once.
                stage.node.pass(Duration::ZERO);
            }
        })
    }

    /// A Service comes beside the others, and goes again.
    fn add_service(&mut self) -> Duration {
        let (id, balancer) = service(self.size.services);
        let mut change = |balancer| {
            let update = Input::Nb(NbUpdate {
                load_balancers: vec![(id, balancer)],
                ..NbUpdate::default()
            });
            self.time(|stage| {
                stage.node.give(update);
                // What is due at once.
                stage.node.pass(Duration::ZERO);
            })
        };
        let comes = change(balancer);
        change(None);
        comes
    }

    /// Another agent takes over what is in the switch, with a journal.
    fn restart(&mut self) -> Duration {
        let mut parts = Parts::default();
        let mut folding = Folding::default();
        let records = std::iter::from_fn(|| self.node.engine.next_part(&mut parts)).flatten();
        records.for_each(|record| folding.take(record));
        let saved = folding.end(self.node.now);
        self.node.engine = Engine::new(config(self.size.by_marks));
        let flows = self.node.switch.len();
        let time = self.time(|stage| {
            stage.node.engine.load(saved, stage.node.now);
            stage.start();
        });
        assert_eq!(self.node.switch.len(), flows, "the flows stay");
        time
    }

    /// What the engine takes.
    fn memory_bytes(&mut self) -> usize {
        let before = USED.load(Relaxed);
        self.node.engine = Engine::new(config(self.size.by_marks));
        before - USED.load(Relaxed)
    }
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 190.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 200.0;
/// Told apart also by people who do not see all colours (Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// For each figure a panel: how many times the usual value it is, over how many times the usual number.
fn plot(lines: &[(&str, Vec<[f64; 9]>)]) -> String {
    let mut panels = String::new();
    for (figure, name) in FIGURES.iter().enumerate() {
        let y = HEIGHT * figure as f64;
        let _ = writeln!(
            panels,
            "<g transform=\"translate(0 {y})\"><text x=\"{LEFT}\" y=\"18\" font-weight=\"bold\">{name}: times the \
             value at the usual size</text>"
        );
        for tens in -1..=1 {
            let (along, up) = place(tens.into(), tens.into());
            let label = ["a tenth", "usual", "ten times"][(tens + 1) as usize];
            let times = ["0.1", "1", "10"][(tens + 1) as usize];
            let (left, right) = (LEFT, WIDTH - RIGHT);
            let _ = writeln!(
                panels,
                "<line x1=\"{left}\" x2=\"{right}\" y1=\"{up}\" y2=\"{up}\" stroke=\"#ddd\"/>\
                 <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{times}</text>\
                 <text x=\"{along}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                LEFT - 6.0,
                up + 4.0,
                HEIGHT - 14.0,
            );
        }
        for (index, (dimension, line)) in lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let points = line.iter().zip(-1..=1).map(|(figures, tens)| {
                let times = figures[figure] / line[1][figure];
                let (x, y) = place(f64::from(tens), times.log10().clamp(-1.5, 1.5));
                format!("{x:.1},{y:.1}")
            });
            let points: Vec<_> = points.collect();
            let _ = writeln!(
                panels,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\
                 <text x=\"{}\" y=\"{}\" fill=\"{colour}\">{dimension}</text>",
                points.join(" "),
                WIDTH - RIGHT + 10.0,
                TOP + 20.0 + 18.0 * index as f64,
            );
        }
        panels.push_str("</g>\n");
    }
    let height = HEIGHT * FIGURES.len() as f64;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n{panels}</svg>\n"
    )
}

/// Where a point is: both axes are powers of ten, from -1.5 to 1.5 upwards.
fn place(tens: f64, times: f64) -> (f64, f64) {
    let width = WIDTH - LEFT - RIGHT - 40.0;
    let height = HEIGHT - TOP - 30.0;
    let along = LEFT + 20.0 + (tens + 1.0) / 2.0 * width;
    (along, TOP + (1.5 - times) / 3.0 * height)
}
