//! What ovn-kubernetes and OVN were recorded to write, through the parser and the engine: every
//! logical flow of an EgressFirewall, and every transaction of a series of edits.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::Ipv4Addr,
};

use dnsflow_core::{
    Input,
    ovn::{
        acl::{self, AclMatch},
        hash::{Family, address_set_hashes},
        rows::{Acl, LogicalFlow, NbUpdate, Pipeline, RowId, SbUpdate},
        template::{AclTemplate, ActionTemplate, ActionText, CachedActions, acl_match},
    },
    testing::{BASE, GROUP, Node, answer_frame, firewall, firewalls, ifindex_of},
    values::{
        firewall::{Destination, Rule, RuleAction},
        flow::{Action, Addresses, Ends, Masked, Protocol, Tag, Transport},
        name::DnsName,
    },
};
use dnsflow_tests::support::workspace;
use serde_json::Value;

fn fixtures() -> std::path::PathBuf {
    workspace()
        .expect("a workspace")
        .join("tests/fixtures/ovn-kubernetes")
}

fn read(name: &str) -> String {
    let file = fixtures().join(name);
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// A logical flow, and what ovn-controller made of it.
#[derive(Debug)]
struct Recorded {
    /// `k8s.ovn.org/id` of the ACL, and its match.
    acl: String,
    acl_match: String,
    flow: LogicalFlow,
    /// Table, match and actions of each of its OpenFlow flows, as `ovs-ofctl` prints them.
    openflow: Vec<(u8, String, String)>,
}

/// One `*-acl-flows.txt`.
fn recorded(text: &str) -> Vec<Recorded> {
    let mut found: Vec<Recorded> = Vec::new();
    let (mut acl, mut of_acl, mut hint) = (String::new(), String::new(), 0);
    for line in text.lines() {
        let line = line.trim();
        if let Some(head) = line.strip_prefix("=== ") {
            let words: Vec<&str> = head.split(' ').collect();
            acl = words[0].to_owned();
            hint = u32::from_str_radix(words[1].strip_prefix("acl=").expect("acl="), 16)
                .expect("a row id's start");
            // id, row, direction, priority, tier, action, and the rest is the match.
            of_acl = words[6..].join(" ");
        } else if let Some(head) = line.strip_prefix("LF ") {
            let words: Vec<&str> = head.split(' ').collect();
            let field = |name: &str| {
                let word = words.iter().find_map(|word| word.strip_prefix(name));
                word.unwrap_or_else(|| panic!("{name} in `{head}`"))
            };
            found.push(Recorded {
                acl: acl.clone(),
                acl_match: of_acl.clone(),
                flow: LogicalFlow {
                    pipeline: match words[1] {
                        "egress" => Pipeline::Egress,
                        _ => Pipeline::Ingress,
                    },
                    table_id: field("table=").parse().expect("a table"),
                    priority: field("prio=").parse().expect("a priority"),
                    matches: String::new(),
                    actions: String::new(),
                    stage_hint: Some(hint),
                },
                openflow: Vec::new(),
            });
        } else if let Some(last) = found.last_mut() {
            if let Some(text) = line.strip_prefix("match ") {
                last.flow.matches = text.trim().to_owned();
            } else if let Some(text) = line.strip_prefix("action ") {
                last.flow.actions = text.trim().to_owned();
            } else if let Some(text) = line.strip_prefix("OF table=") {
                let (table, rest) = text.split_once(", ").expect("a table and the rest");
                let (matches, actions) = rest.split_once(" actions=").expect("actions");
                let table = table.parse().expect("a table");
                last.openflow.push((table, matches.into(), actions.into()));
            }
        }
    }
    found
}

/// The register bits in `field=value/mask` as ovs-ofctl prints them: `reg8`, `xreg4`, `xxreg0`.
fn register_bits(field: &str, value: &str) -> Option<BTreeMap<u8, Masked>> {
    // ovs-fields(7): xxreg0 is reg0 to reg3, xreg4 is reg8 and reg9, the first one on top.
    let (registers, name) = match field.trim_start_matches('x') {
        name if field.starts_with("xx") => (4, name),
        name if field.starts_with('x') => (2, name),
        name => (1, name),
    };
    let number: u8 = name.strip_prefix("reg")?.parse().ok()?;
    let read = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u128::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    let (value, mask) = match value.split_once('/') {
        Some((value, mask)) => (read(value)?, read(mask)?),
        None => (read(value)?, u128::MAX >> (128 - 32 * u32::from(registers))),
    };
    let bits = (0..registers).filter_map(|at| {
        let shift = 32 * u32::from(registers - 1 - at);
        let mask = (mask >> shift) as u32;
        let register = number * registers + at;
        (mask != 0).then(|| (register, Masked::new((value >> shift) as u32, mask)))
    });
    Some(bits.collect())
}

/// The actions that ovs-ofctl printed, one by one: split at commas outside parentheses.
fn split_actions(text: &str) -> Vec<&str> {
    let mut depth = 0;
    text.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    })
    .filter(|action| *action != "drop")
    .collect()
}

/// What these actions are in the core; `None` where one is of a kind that is not built.
fn built(texts: &[&str]) -> Option<Vec<Action>> {
    let mut actions = Vec::new();
    for text in texts {
        if let Some(set) = text.strip_prefix("set_field:") {
            let (value, field) = set.split_once("->")?;
            let bits = register_bits(field, value)?;
            actions.extend(
                bits.into_iter()
                    .map(|(register, bits)| Action::SetRegister { register, bits }),
            );
        } else {
            let table = text.strip_prefix("resubmit(,")?.strip_suffix(')')?;
            actions.push(Action::Resubmit {
                table: table.parse().ok()?,
            });
        }
    }
    Some(actions)
}

/// The register tests in a match as ovs-ofctl printed it, the logical input port aside.
fn tests(text: &str) -> BTreeMap<u8, Masked> {
    text.split(',')
        .filter_map(|field| field.split_once('='))
        .filter_map(|(field, value)| register_bits(field, value))
        .flatten()
        .filter(|(register, _)| *register != 14)
        .collect()
}

/// The networks of pods in the recordings: of the cluster, and of user-defined networks.
const POD_NETWORKS: [&str; 5] = [
    "10.244.0.0/16",
    "fd00:10:244::/48",
    "10.130.0.0/16",
    "10.140.0.0/16",
    "10.150.0.0/16",
];

#[test]
fn every_logical_flow_becomes_what_ovn_controller_made_of_it() {
    let mut as_built = 0;
    let mut copied = 0;
    let mut excluded = 0;
    let mut files: Vec<_> = fs::read_dir(fixtures())
        .expect("the fixtures")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("a name")
        })
        .filter(|name| name.ends_with("-acl-flows.txt"))
        .collect();
    files.sort();
    assert_eq!(files.len(), 11, "{files:?}");
    for file in files {
        let mut bases: BTreeSet<(Pipeline, u8)> = BTreeSet::new();
        for row in recorded(&read(&file)) {
            let Recorded {
                acl,
                acl_match: of_acl,
                flow,
                openflow,
            } = row;
            if !acl.contains(":EgressFirewall:") {
                continue;
            }
            let at = format!("{file}: {acl}: {}", flow.matches);
            assert_eq!(acl_match(&flow), Some(of_acl.as_str()), "{at}");
            let parsed = acl::parse(&of_acl).unwrap_or_else(|error| panic!("{at}: {error}"));
            let is_right = match parsed {
                AclMatch::Name(_) => of_acl.contains("$a"),
                AclMatch::Nodes(_) => !of_acl.contains(['$', '/']),
                AclMatch::Network(matches) => {
                    let left_out = acl::excluded_networks(acl::exclusions(&of_acl));
                    let left_out: Vec<_> = left_out.map(|one| one.to_string()).collect();
                    excluded += left_out.len();
                    of_acl.contains(&format!(".dst == {}", matches.network))
                        && left_out.len() == of_acl.matches("!=").count()
                        && left_out.iter().all(|one| POD_NETWORKS.contains(&&**one))
                }
                AclMatch::Other => false,
            };
            assert!(is_right, "{at}");
            let template =
                AclTemplate::parse(&flow).unwrap_or_else(|error| panic!("{at}: {error}"));
            assert_eq!(flow.pipeline, Pipeline::Egress, "{at}");
            for (table, matches, text) in openflow {
                let base = table - flow.table_id;
                bases.insert((flow.pipeline, base));
                assert_eq!(template.table(base), table, "{at}");
                assert!(
                    matches.contains(&format!("priority={},", template.priority)),
                    "{at}"
                );
                assert_eq!(template.registers, tests(&matches), "{at}: {matches}");
                let nothing_known = template.actions(base, &CachedActions::new());
                let mut made = split_actions(&text);
                match (&template.actions, built(&made)) {
                    (ActionTemplate::Build(_), Some(expected)) => {
                        assert_eq!(nothing_known, Some(expected), "{at}: {text}");
                        as_built += 1;
                    }
                    (ActionTemplate::Copy { source, meanwhile }, None) => {
                        assert_eq!(*source, ActionText::of(&flow), "{at}");
                        let bytes = vec![1; 16];
                        let cached_actions = CachedActions::from([(source.clone(), bytes.clone())]);
                        let copy = Some(vec![Action::Copied(bytes)]);
                        assert_eq!(template.actions(base, &cached_actions), copy, "{at}");
                        // Without a log, and without marking a connection as blocked, there may
                        // be something left that can be built.
                        let marks = |action: &str| {
                            action.starts_with("ct(commit,")
                                && action.contains("set_field:0x1/0x1->ct_mark")
                        };
                        made.retain(|action| !action.starts_with("controller(") && !marks(action));
                        let expected = built(&made);
                        assert_eq!(meanwhile.is_some(), expected.is_some(), "{at}: {text}");
                        assert_eq!(nothing_known, expected, "{at}: {text}");
                        copied += 1;
                    }
                    (actions, expected) => panic!("{at}: {actions:?} for {text}: {expected:?}"),
                }
            }
        }
        // The file on admin network policies has no EgressFirewall.
        assert!(bases.len() <= 1, "{file}: {bases:?}");
    }
    println!("{as_built} built, {copied} copied, {excluded} networks left out");
    assert!(as_built > 100 && copied > 30 && excluded > 30);
}

const POD: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 5);

/// What the pod was told before anything was recorded, one address for each name.
const TOLD: [(&str, [u8; 4]); 4] = [
    ("example.com", [203, 0, 113, 1]),
    ("ports.test", [203, 0, 113, 3]),
    ("example.org", [203, 0, 113, 5]),
    ("example.net", [203, 0, 113, 6]),
];

/// An ACL as the recording has it, and whether it is logged.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Row {
    acl: Acl,
    log: bool,
}

/// A node, and OVN's rows as they are on either side of ovn-northd.
struct Recording {
    node: Node,
    nb: BTreeMap<RowId, Row>,
    sb: BTreeMap<RowId, Row>,
    rules: Vec<Rule>,
}

impl Recording {
    fn new() -> Self {
        let mut node = Node::bare();
        node.ovn_table = BASE + 6;
        node.read_sources();
        Self {
            node,
            nb: BTreeMap::new(),
            sb: BTreeMap::new(),
            rules: Vec::new(),
        }
    }

    /// The kernel has deferred what the pod was told, and keeps what no rule mentions.
    fn give(&mut self, input: Input) {
        let ifindex = ifindex_of(self.node.pods["ns1_p1"]);
        let told = TOLD.map(|(name, address)| {
            let bytes = answer_frame(name, &[address], 300);
            (ifindex, self.node.now, bytes)
        });
        self.node.kernel.deferred = told.into();
        self.node.give(input);
    }

    fn set_rules(&mut self, rules: Vec<Rule>) {
        let edited = (!rules.is_empty()).then(|| firewall(&rules));
        self.rules = rules;
        self.give(firewalls(false, edited));
    }

    /// Brings the NB database to these rows.
    fn set_nb(&mut self, rows: &BTreeMap<RowId, Row>) {
        let changed = changes(&self.nb, rows);
        self.nb = rows.clone();
        self.give(Input::Nb(NbUpdate {
            reset: false,
            acls: changed
                .into_iter()
                .map(|(id, row)| (id, row.map(|row| row.acl)))
                .collect(),
            ..NbUpdate::default()
        }));
    }

    /// Brings the SB database to what ovn-northd makes of these rows.
    fn set_sb(&mut self, rows: &BTreeMap<RowId, Row>) {
        let changed = changes(&self.sb, rows);
        self.sb = rows.clone();
        let mut logical_flows = Vec::new();
        for (id, row) in changed {
            // A logical flow whose match or actions change is another row.
            let old: Vec<RowId> = (0..2).map(|bit| flow_row(id, bit)).collect();
            match row {
                None => logical_flows.extend(old.into_iter().map(|id| (id, None))),
                Some(row) => {
                    let flows = logical_flows_of(id, &row);
                    logical_flows.extend(
                        old.into_iter()
                            .zip(flows)
                            .map(|(id, flow)| (id, Some(flow))),
                    );
                }
            }
        }
        self.give(Input::Sb(SbUpdate {
            logical_flows,
            ..SbUpdate::default()
        }));
    }

    /// The rules of the resource and OVN's enforced rows, against what is in the switch.
    fn check(&self, at: &str) {
        let in_firewall = |name: &str| {
            self.rules.iter().any(|rule| {
                matches!(&rule.destination, Destination::Name(of) if of.name().to_string() == name)
            })
        };
        for (name, address) in TOLD {
            let hashes = hashes_of(name);
            let places: Vec<&Row> = self
                .sb
                .values()
                .filter(|row| {
                    &*row.acl.namespace == "ns1"
                        && hashes.iter().any(|hash| row.acl.matches.contains(hash))
                })
                .collect();
            let within = |row: &&&Row| (row.acl.rule_index as usize) < self.rules.len();
            // A row beyond the rules is no place where there is another.
            let ruled: Vec<&Row> = places.iter().filter(within).copied().collect();
            let places = if ruled.is_empty() { places } else { ruled };
            let mut expected: BTreeSet<(u16, Masked, Option<Transport>)> = BTreeSet::new();
            if in_firewall(name) {
                for row in places {
                    for hint in hints(&row.acl.action) {
                        for transport in transports(&row.acl.matches) {
                            let hint = Masked::new(1 << hint, 1 << hint);
                            expected.insert((row.acl.priority + 1000, hint, transport));
                        }
                    }
                }
            }
            let told = Ends::Addresses(Addresses::V4 {
                src: POD,
                dst: address.into(),
            });
            let switch = &self.node.switch;
            let tags: BTreeSet<Tag> = switch
                .iter()
                .filter(|(key, _)| key.matches.ends == told)
                .filter_map(|(_, (cookie, _))| cookie.tag())
                .collect();
            let is_of_group = |ends| match ends {
                Ends::Tagged { tag, is_ipv6 } => !is_ipv6 && tags.contains(&tag),
                _ => false,
            };
            let found: BTreeSet<_> = switch
                .keys()
                .filter(|key| is_of_group(key.matches.ends))
                .map(|key| {
                    let hint = key.matches.registers[&0];
                    (key.priority, hint, key.matches.transport)
                })
                .collect();
            assert_eq!(found, expected, "{at}: {name}");
        }
    }
}

fn changes(old: &BTreeMap<RowId, Row>, new: &BTreeMap<RowId, Row>) -> BTreeMap<RowId, Option<Row>> {
    let ids: BTreeSet<&RowId> = old.keys().chain(new.keys()).collect();
    ids.into_iter()
        .filter(|id| old.get(id) != new.get(id))
        .map(|id| (*id, new.get(id).cloned()))
        .collect()
}

fn flow_row(acl: RowId, bit: u128) -> RowId {
    RowId::new((u128::from(acl.prefix()) << 96) + 0xf0 + bit)
}

/// The hint bits of an ACL's two logical flows.
fn hints(action: &str) -> [u32; 2] {
    if action == "drop" { [9, 10] } else { [7, 8] }
}

/// What OVN 26.03 makes of an ACL, by its recording.
fn logical_flows_of(id: RowId, row: &Row) -> [LogicalFlow; 2] {
    let Row { acl, log } = row;
    let verdict = if acl.action == "drop" { 17 } else { 16 };
    hints(&acl.action).map(|hint| {
        let mut actions = format!("reg8[{verdict}] = 1; next;");
        if *log {
            actions = format!("log(name=\"EF:ns1\", meter=\"{id}\"); {actions}");
        }
        LogicalFlow {
            pipeline: Pipeline::Egress,
            table_id: 6,
            priority: acl.priority + 1000,
            matches: format!(
                "reg8[30..31] == 2 && reg0[{hint}] == 1 && ({})",
                acl.matches
            ),
            actions,
            stage_hint: Some(id.prefix()),
        }
    })
}

/// What an ACL's match says about ports, in the two forms that the recording has.
fn transports(matches: &str) -> Vec<Option<Transport>> {
    if matches.ends_with(&format!("@{GROUP}")) {
        return vec![None];
    }
    assert!(
        matches.ends_with("((udp && ( udp.dst == 53 )) || (tcp && ( tcp.dst == 443 )))"),
        "{matches}"
    );
    let transport = |protocol, port| {
        Some(Transport {
            protocol,
            port: Some(port),
        })
    };
    vec![transport(Protocol::Udp, 53), transport(Protocol::Tcp, 443)]
}

/// `$a…` of every spelling of `name` in the recording.
fn hashes_of(name: &str) -> Vec<String> {
    let spelt = match name {
        "example.org" => "Example.ORG",
        "example.net" => "example.net.",
        name => name,
    };
    let name: DnsName = spelt.parse().expect("a name");
    let hashes = address_set_hashes(&name, Family::V4);
    hashes.iter().map(|hash| format!("$a{hash})")).collect()
}

/// The EgressFirewall of ns1 from a mark of the recording on.
fn rules_at(mark: &str) -> Option<Vec<Rule>> {
    let name = |name: &str, ports: &[(Protocol, u16)]| Rule {
        action: RuleAction::Allow,
        destination: Destination::Name(name.parse().expect("a name")),
        ports: ports
            .iter()
            .map(|&(protocol, port)| Transport {
                protocol,
                port: Some(port),
            })
            .collect(),
    };
    let deny = |cidr: &str| Rule {
        action: RuleAction::Deny,
        destination: Destination::Cidr(cidr.parse().expect("a CIDR")),
        ports: vec![],
    };
    let example = name("example.com", &[]);
    let ports = name("ports.test", &[(Protocol::Tcp, 443), (Protocol::Udp, 53)]);
    let (v4, v6) = (deny("0.0.0.0/0"), deny("::/0"));
    let four = vec![example.clone(), ports.clone(), v4.clone(), v6.clone()];
    let changed = |change: &dyn Fn(&mut Vec<Rule>)| {
        let mut rules = four.clone();
        change(&mut rules);
        rules
    };
    let rules = match mark {
        mark if mark.starts_with("start:") => four,
        "rule inserted at index 0" => changed(&|rules| rules.insert(0, deny("198.51.100.0/24"))),
        mark if mark.starts_with("4 -> 2 rules") => vec![example, ports],
        mark if mark.starts_with("touch:") => vec![ports, example],
        mark if mark.starts_with("dnsName spelt") => changed(&|rules| {
            rules.extend([name("Example.ORG", &[]), name("example.net.", &[])]);
        }),
        mark if mark.starts_with("wildcard added") => {
            changed(&|rules| rules.insert(0, name("*.wild.test", &[])))
        }
        mark if mark.starts_with("and removed again") => four,
        "back to four" | "EgressFirewall ns1 created again" => four,
        "EgressFirewall ns1 deleted" => vec![],
        _ => return None,
    };
    Some(rules)
}

/// The 32 bits that the recording names a row by.
fn row_id(start: &str) -> RowId {
    let bits = u32::from_str_radix(&start[..8], 16).expect("a row id's start");
    RowId::new(u128::from(bits) << 96)
}

/// Takes these columns over into a row: `external_ids` as an object, or in OVSDB's notation.
fn update(row: &mut Row, columns: &Value) {
    for (column, value) in columns.as_object().expect("columns") {
        let text = || value.as_str().expect("a string").to_owned();
        match column.as_str() {
            "match" => row.acl.matches = text(),
            "action" => row.acl.action = text(),
            "direction" => {}
            "priority" => {
                row.acl.priority =
                    u16::try_from(value.as_u64().expect("a number")).expect("16 bits");
            }
            "log" => row.log = value.as_bool().expect("a flag"),
            "external_ids" => {
                let id = |key: &str| {
                    value.get(key).and_then(Value::as_str).or_else(|| {
                        let pairs = value[1].as_array()?;
                        pairs.iter().find(|pair| pair[0] == key)?[1].as_str()
                    })
                };
                row.acl.namespace = id("k8s.ovn.org/name").expect("a namespace").into();
                row.acl.rule_index = id("rule-index").expect("an index").parse().expect("one");
            }
            _ => {}
        }
    }
}

fn empty_row() -> Row {
    Row {
        acl: Acl {
            namespace: "".into(),
            rule_index: 0,
            priority: 0,
            matches: String::new(),
            action: String::new(),
        },
        log: false,
    }
}

/// One of the sources that an edit reaches the engine by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Heard {
    Kubernetes,
    Nb,
    Sb,
}

/// Runs the whole recording; the sources of each edit are heard of in this order.
fn replay(order: [Heard; 3]) {
    let mut rows: BTreeMap<RowId, Row> = BTreeMap::new();
    for line in read("26.03-v4-nb.jsonl").lines() {
        if line.starts_with('#') || !line.contains("\"k8s.ovn.org/owner-type\": \"EgressFirewall\"")
        {
            continue;
        }
        let columns: Value = serde_json::from_str(line).expect("JSON");
        let mut row = empty_row();
        update(&mut row, &columns);
        rows.insert(row_id(columns["_uuid"].as_str().expect("a row id")), row);
    }
    let mut node = Recording::new();
    let mut mark = String::new();
    let mut transactions = 0;
    let mut stale = 0;
    // The resource as edited, while the engine has not heard of it.
    let mut unheard: Option<Vec<Rule>> = None;
    let text = read("transactions-26.03-v4.jsonl");
    for line in text.lines() {
        let event: Value = serde_json::from_str(line).expect("JSON");
        let is_mark = event.get("mark").is_some();
        if is_mark {
            // Nothing came of the last edit but this.
            if let Some(rules) = unheard.take() {
                node.set_rules(rules);
                node.check(&format!("{order:?}: {mark}, at its end"));
            }
            mark = event["mark"].as_str().expect("a text").to_owned();
            unheard = rules_at(&mark);
        }
        let changes = event["tx"]["ACL"].as_array();
        for change in changes.into_iter().flatten() {
            let id = row_id(change["uuid"].as_str().expect("a row id"));
            let columns = &change["cols"];
            match change["op"].as_str() {
                Some("insert") => {
                    let mut row = empty_row();
                    update(&mut row, columns);
                    rows.insert(id, row);
                }
                Some("modify") => update(rows.get_mut(&id).expect("the row"), &columns["new"]),
                Some("delete") => assert!(rows.remove(&id).is_some(), "{mark}"),
                other => panic!("{other:?}"),
            }
        }
        transactions += usize::from(event.get("tx").is_some());
        for from in order {
            match from {
                Heard::Kubernetes if changes.is_some() || order[0] == from => {
                    if let Some(rules) = unheard.take() {
                        node.set_rules(rules);
                    }
                }
                Heard::Kubernetes => {}
                Heard::Nb => node.set_nb(&rows),
                Heard::Sb => node.set_sb(&rows),
            }
            node.check(&format!("{order:?}: {mark}, after {from:?}"));
        }
        let beyond = |row: &&Row| {
            &*row.acl.namespace == "ns1" && row.acl.rule_index as usize >= node.rules.len()
        };
        stale += usize::from(rows.values().any(|row| beyond(&row)) && !node.rules.is_empty());
    }
    // Not in the recording: the row that is left behind is for a name that has another place.
    let only = rules_at("start:").expect("the firewall")[1].clone();
    let at = |index| move |row: &&Row| &*row.acl.namespace == "ns1" && row.acl.rule_index == index;
    let second = rows.values().find(at(1)).expect("a second rule").clone();
    assert_eq!(second.acl.matches.matches("$a").count(), 1, "a name");
    rows.retain(|_, row| &*row.acl.namespace != "ns1" || row.acl.rule_index < 2);
    let first = rows.values_mut().find(|row| at(0)(&&**row));
    first.expect("a first rule").acl.matches = second.acl.matches;
    node.set_rules(vec![only]);
    node.set_nb(&rows);
    node.set_sb(&rows);
    node.check(&format!("{order:?}: a stale row of the same name"));
    assert!(
        transactions > 30 && stale > 5,
        "{transactions} transactions, {stale} with a stale row"
    );
}

#[test]
fn every_transaction_leaves_flows_only_where_a_name_belongs() {
    use Heard::{Kubernetes, Nb, Sb};
    for order in [
        [Kubernetes, Nb, Sb],
        [Nb, Kubernetes, Sb],
        [Nb, Sb, Kubernetes],
    ] {
        replay(order);
    }
}
