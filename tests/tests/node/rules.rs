//! The rules of an EgressFirewall in real OVN: their order, their verdicts, their ports, and what
//! becomes of their flows when OVN's rows change, or log.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use dnsflow_tests::{
    firewall::{Action, RuleSpec, Severities, To, address_set, manifest},
    lab,
    lab::{Cluster, Lab},
    oracle::{Destination, verdict},
    process::{PATIENT, wait_until},
    random::Random,
};

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

fn fetch(lab: &Lab, pod: &str, url: &str, limit: Duration) -> Result<String, String> {
    lab.pod(pod).fetch(url, limit).expect("curl runs").result
}

fn deny(cidr: &str) -> RuleSpec {
    RuleSpec::deny(cidr).expect("a CIDR")
}

fn allow(cidr: &str) -> RuleSpec {
    RuleSpec::allow(cidr).expect("a CIDR")
}

fn web(last: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, last).into()
}

fn random_addresses(random: &mut Random, dual_stack: bool) -> BTreeSet<IpAddr> {
    let mut addresses = BTreeSet::new();
    for _ in 0..=random.below(2) {
        addresses.insert(web(1 + random.below(8) as u8));
        if dual_stack {
            addresses.insert(web_v6(1 + random.below(8) as u8));
        }
    }
    addresses
}

fn web_v6(last: u8) -> IpAddr {
    format!("2001:db8::{last}").parse().expect("an address")
}

/// What the pods ask for; rules name some of these.
const NAMES: [&str; 8] = [
    "a.test",
    "x.a.test",
    "y.x.a.test",
    "b.test",
    "x.b.test",
    "c.test",
    "d.test",
    "xa.test",
];

/// Destinations of every kind that a rule can tell apart.
const SERVICES: [(&str, u16); 4] = [("tcp", 80), ("tcp", 8080), ("udp", 53), ("sctp", 9)];

fn random_rule(random: &mut Random, cluster: Cluster) -> RuleSpec {
    let action = *random.pick(&[Action::Allow, Action::Deny]);
    let mut names = vec![
        "a.test", "X.a.test", "b.test", "b.test.", "C.test", "d.test",
    ];
    if cluster.name_resolver {
        names.extend(["*.a.test", "*.b.test"]);
    }
    let mut cidrs = vec![
        "203.0.113.0/29",
        "203.0.113.4/30",
        "203.0.113.2/32",
        "0.0.0.0/0",
    ];
    if cluster.dual_stack {
        cidrs.extend([
            "2001:db8::/125",
            "2001:db8::4/126",
            "2001:db8::2/128",
            "::/0",
        ]);
    }
    let mut rule = match random.below(5) {
        0 | 1 => allow(random.pick::<&str>(&cidrs)),
        _ => RuleSpec::allow_name(random.pick::<&str>(&names)),
    };
    rule.action = action;
    for service in SERVICES {
        if random.below(4) == 0 {
            rule.ports.push(service);
        }
    }
    rule
}

/// Random firewalls, and what OVN and our flows together do with every kind of packet.
fn order_holds(lab: &Lab, firewalls: usize) {
    let cluster = lab.cluster();
    let mut random = Random::from_environment().expect("a seed");
    let records: BTreeMap<&str, BTreeSet<IpAddr>> = NAMES
        .into_iter()
        .map(|name| (name, random_addresses(&mut random, cluster.dual_stack)))
        .collect();
    let zone: Vec<String> = records
        .iter()
        .flat_map(|(name, addresses)| {
            addresses.iter().map(move |address| {
                let kind = if address.is_ipv4() { "A" } else { "AAAA" };
                format!("{name}. 3600 IN {kind} {address}")
            })
        })
        .collect();
    let zone: Vec<&str> = zone.iter().map(String::as_str).collect();
    lab.serve_dns(&zone).expect("the server starts");
    // The gateway must know its next hop before a trace can reach it.
    fetch(lab, "ns2_pod1", "http://203.0.113.1/", PATIENT).expect("ns2 has no firewall");
    if cluster.dual_stack {
        let fetched = lab
            .pod("ns2_pod1")
            .fetch_v6("http://[2001:db8::1]/", PATIENT);
        fetched
            .expect("curl runs")
            .result
            .expect("ns2 has no firewall");
    }
    let _agent = lab.start_agent(&[]).expect("the agent is ready");

    let pod = lab.pod("ns1_pod1");
    let mut resolved: BTreeSet<&str> = BTreeSet::new();
    // What ovn-kubernetes has been told for each address set, as long as it is in use.
    let mut central: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
    let mut acls: Vec<RuleSpec> = Vec::new();
    let mut made_to_pass = 0;
    let mut made_to_drop = 0;
    // More of them, until both verdicts of ours have made a difference.
    for round in 0..5 * firewalls {
        if round >= firewalls && made_to_pass > 0 && made_to_drop > 0 {
            break;
        }
        let mut rules: Vec<RuleSpec> = (0..3 + random.below(5))
            .map(|_| random_rule(&mut random, cluster))
            .collect();
        // Most end like this, or hardly any Allow would matter.
        if random.below(4) > 0 {
            rules.push(deny("0.0.0.0/0"));
        }
        lab.set_firewall("ns1", &rules)
            .expect("the rows are written");
        // OVN goes on enforcing the row that a firewall leaves behind when it shrinks.
        let stale = acls.get(rules.len()).cloned();
        acls = rules.iter().cloned().chain(stale.clone()).collect();
        for rule in &rules {
            // A set that the last firewall had too still holds what it held.
            if let To::Name(name) = &rule.to {
                let mut addresses = BTreeSet::new();
                if random.below(2) == 0 {
                    addresses = random_addresses(&mut random, cluster.dual_stack);
                }
                let list: Vec<IpAddr> = addresses.iter().copied().collect();
                lab.resolve_centrally(name, &list)
                    .expect("the set is filled");
                central.insert(address_set(name, "v4", cluster), addresses);
            }
        }
        // What was asked under an earlier firewall counts, too.
        let asked = [*random.pick(&NAMES), *random.pick(&NAMES)];
        let kinds: &[&str] = if cluster.dual_stack {
            &["A", "AAAA"]
        } else {
            &["A"]
        };
        for kind in kinds {
            pod.resolve_all::<IpAddr>(kind, &asked)
                .expect("the names are known");
        }
        resolved.extend(asked);

        let destination = |to: IpAddr, (protocol, port)| {
            let told = resolved.iter().filter(|name| records[*name].contains(&to));
            let found = acls.iter().filter_map(|rule| match &rule.to {
                To::Name(name) => Some(name.as_str()),
                To::Cidr(_) | To::Nodes(_) => None,
            });
            let by_the_controller = |name: &&str| {
                let set = central.get(&address_set(name, "v4", cluster));
                set.is_some_and(|addresses| addresses.contains(&to))
            };
            Destination {
                address: to,
                protocol,
                port,
                told: told.copied().collect(),
                central: found.filter(by_the_controller).collect(),
            }
        };
        let without_dnsflow = |to, service| {
            let mut to = destination(to, service);
            to.told.clear();
            verdict(&acls, &to).unwrap_or(Action::Allow)
        };
        let with_dnsflow = |to, service| {
            let mut to = destination(to, service);
            let found = verdict(&rules, &to);
            to.told.clear();
            let found = found.or_else(|| verdict(stale.as_slice(), &to));
            found.unwrap_or(Action::Allow)
        };
        let mut destinations: Vec<IpAddr> = (1..=8).map(web).collect();
        if cluster.dual_stack {
            destinations.extend((1..=8).map(web_v6));
        }
        let mut wrong = Vec::new();
        let looked = wait_until("the switch to judge as the rules say", PATIENT, || {
            wrong.clear();
            for to in &destinations {
                for (protocol, port) in SERVICES {
                    let expected = with_dnsflow(*to, (protocol, port));
                    let out = lab.lets_out("ns1_pod1", protocol, SocketAddr::new(*to, port))?;
                    if out != (expected == Action::Allow) {
                        wrong.push(format!("{protocol} {to} {port}: {expected:?}"));
                    }
                }
            }
            Ok(wrong.is_empty())
        });
        looked.unwrap_or_else(|error| {
            panic!(
                "round {round}: {error}\nwrong: {wrong:#?}\nrules:\n{}\nresolved: {resolved:?}\nrecords: {records:?}\ncentral: {central:?}\nflows: {:#?}",
                manifest("ns1", &acls),
                lab.dnsflow_flows()
            )
        });
        for to in &destinations {
            for service in SERVICES {
                let with = with_dnsflow(*to, service);
                let without = without_dnsflow(*to, service);
                made_to_pass += usize::from((without, with) == (Action::Deny, Action::Allow));
                made_to_drop += usize::from((without, with) == (Action::Allow, Action::Deny));
            }
        }
    }
    println!(
        "dnsflow let pass {made_to_pass} and dropped {made_to_drop} of what OVN alone would not"
    );
    assert!(
        made_to_pass > 0 && made_to_drop > 0,
        "the firewalls were too tame"
    );
}

#[test]
fn rule_order_holds_in_the_switch() {
    let lab = lab!("rules-order", agent);
    order_holds(&lab, 12);
}

#[test]
fn rule_order_holds_with_both_families_and_the_resolver_feature() {
    let cluster = Cluster {
        dual_stack: true,
        name_resolver: true,
    };
    let lab = lab!("rules-order-dual", agent, cluster);
    order_holds(&lab, 8);
}

#[test]
fn a_deny_by_name_needs_no_other_deny() {
    let lab = lab!("rules-deny-alone", agent);
    lab.set_firewall("ns1", &[RuleSpec::deny_name("example.com")])
        .expect("the rows are written");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    lab.pod("ns1_pod1")
        .resolve("www.example.com")
        .expect("the name is known");
    for (last, open) in [(2, false), (3, true)] {
        let limit = if open { PATIENT } else { BLOCKED };
        let fetched = fetch(
            &lab,
            "ns1_pod1",
            &format!("http://203.0.113.{last}/"),
            limit,
        );
        assert_eq!(fetched.is_ok(), open, "{last}: {fetched:?}");
    }
    // New connections and established ones.
    let flows = lab.dnsflow_flows().expect("the dump runs");
    assert_eq!(Lab::of_groups(&flows).count(), 2, "{flows:#?}");
    let log = agent.log().expect("the log is readable");
    assert!(!log.contains("is not understood"), "{log}");
}

#[test]
fn becoming_stateful_reinstalls() {
    let lab = lab!("rules-stateful", agent);
    lab.set_firewall(
        "ns1",
        &[RuleSpec::allow_name("example.com"), deny("0.0.0.0/0")],
    )
    .expect("the rows are written");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    // By marks, a port without an address may get its own flow with the change.
    for pod in ["ns1_pod1", "ns1_pod2"] {
        fetch(&lab, pod, "http://www.example.com/", PATIENT).expect("the rule allows it");
    }
    let stateful = lab.dnsflow_flows().expect("the dump runs");
    assert_eq!(
        Lab::of_groups(&stateful).count(),
        2,
        "new and established: {stateful:#?}"
    );

    let open = |state: &str| {
        let fetched = fetch(&lab, "ns1_pod1", "http://203.0.113.2/", PATIENT);
        fetched.unwrap_or_else(|error| panic!("{state}: {error}"));
        let fetched = fetch(&lab, "ns1_pod1", "http://203.0.113.7/", BLOCKED);
        assert!(fetched.is_err(), "{state}: {fetched:?}");
    };
    lab.make_stateless().expect("OVN is in step");
    lab.wait_flows("one flow without conntrack's hints", |flows| {
        Lab::of_groups(flows).count() == 1
    })
    .expect("it comes");
    open("stateless");
    lab.make_stateful().expect("OVN is in step");
    lab.wait_flows("the same flows as before", |flows| flows == stateful)
        .expect("they come back");
    open("stateful again");
}

#[test]
fn rule_edited_in_place() {
    let lab = lab!("rules-edit", agent);
    let name = || RuleSpec::allow_name("example.com");
    lab.set_firewall("ns1", &[name(), deny("0.0.0.0/0")])
        .expect("the rows are written");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let mut download = lab
        .pod("ns1_pod1")
        .download("www.example.com")
        .expect("curl starts");
    download.goes_on(1).expect("the rule allows it");

    // ovn-kubernetes gives the ACL of index 0 to the new rule, and that of index 1 to the name.
    let edits: [(&str, Vec<RuleSpec>); 4] = [
        (
            "priority=10999,ip,",
            vec![deny("198.51.100.0/24"), name(), deny("0.0.0.0/0")],
        ),
        (
            "priority=10999,tcp,",
            vec![
                deny("198.51.100.0/24"),
                name().ports(&[("tcp", 80), ("tcp", 443)]),
                deny("0.0.0.0/0"),
            ],
        ),
        (
            "priority=11000,tcp,",
            vec![name().ports(&[("tcp", 80)]), deny("0.0.0.0/0")],
        ),
        ("priority=11000,ip,", vec![name(), deny("0.0.0.0/0")]),
    ];
    for (place, rules) in edits {
        lab.set_firewall("ns1", &rules)
            .expect("the rows are written");
        lab.wait_flows(&format!("flows with {place}"), |flows| {
            let mut flows = Lab::of_groups(flows).peekable();
            flows.peek().is_some() && flows.all(|flow| flow.contains(place))
        })
        .expect("they move");
        for _ in 0..2 {
            download
                .goes_on(64 << 10)
                .expect("the rule still allows it");
        }
    }
    // The same name, retyped: what the pod was told is now what it may not reach.
    lab.set_firewall(
        "ns1",
        &[RuleSpec::deny_name("example.com"), allow("0.0.0.0/0")],
    )
    .expect("the rows are written");
    wait_until("the address to close", PATIENT, || {
        Ok(fetch(&lab, "ns1_pod1", "http://203.0.113.2/", BLOCKED).is_err())
    })
    .expect("it closes");
    fetch(&lab, "ns1_pod1", "http://203.0.113.7/", PATIENT).expect("the next rule allows it");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    assert!(Lab::of_groups(&flows).count() > 0, "a Deny has flows, too");
}

/// Whether ovn-controller's log has a packet to this address, as its `acl_log` writes it.
fn is_logged(lab: &Lab, to: IpAddr, decision: &str) {
    let file = lab.base().join("log/ovn-controller.log");
    let destination = format!("nw_dst={to},");
    let mut found: Vec<String> = Vec::new();
    wait_until("ovn-controller to log it", PATIENT, || {
        let log = fs::read_to_string(&file)?;
        let lines = log.lines().filter(|line| line.contains(&destination));
        found = lines.map(str::to_owned).collect();
        Ok(found.iter().any(|line| line.contains(decision)))
    })
    .unwrap_or_else(|error| panic!("{decision}: {error}: {found:#?}"));
}

#[test]
fn logged_rules_log_what_only_dnsflow_knows() {
    let lab = lab!("rules-logged", agent);
    lab.serve_dns(&[
        "www.example.com. 3600 IN A 203.0.113.2",
        "bad.example.com. 3600 IN A 203.0.113.3",
    ])
    .expect("the server starts");
    lab.set_firewall(
        "ns1",
        &[
            RuleSpec::deny_name("bad.example.com"),
            RuleSpec::allow_name("example.com"),
            deny("0.0.0.0/0"),
        ],
    )
    .expect("the rows are written");
    let severities = Severities {
        allow: "notice",
        deny: "alert",
    };
    lab.log_firewall("ns1", Some(severities))
        .expect("the rows are written");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    for name in ["www.example.com", "bad.example.com"] {
        lab.pod("ns1_pod1").resolve(name).expect("it is known");
    }
    let judged = |state: &str| {
        let fetched = fetch(&lab, "ns1_pod1", "http://203.0.113.2/", PATIENT);
        fetched.unwrap_or_else(|error| panic!("{state}: {error}"));
        let fetched = fetch(&lab, "ns1_pod1", "http://203.0.113.3/", BLOCKED);
        assert!(fetched.is_err(), "{state}: {fetched:?}");
    };
    let to_controller = |flow: &String| flow.contains("controller(userdata=");
    // OVN has made nothing of rules whose address sets are empty: there is nothing to copy.
    judged("without a log");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    assert!(!flows.iter().any(to_controller), "{flows:#?}");
    let log = agent.log().expect("a file");
    assert!(log.contains("ACL logging does not cover"), "{log}");

    for name in ["bad.example.com", "example.com"] {
        lab.resolve_centrally(name, &[web(8)])
            .expect("the set is filled");
    }
    lab.wait_flows("actions with OVN's log", |flows| {
        Lab::of_groups(flows).all(to_controller)
    })
    .expect("they are copied");
    judged("with a log");
    is_logged(
        &lab,
        web(2),
        "name=\"EF:ns1:1\", verdict=allow, severity=notice",
    );
    is_logged(
        &lab,
        web(3),
        "name=\"EF:ns1:0\", verdict=drop, severity=alert",
    );

    lab.log_firewall("ns1", None).expect("the rows are written");
    lab.wait_flows("actions without a log", |flows| {
        let mut flows = Lab::of_groups(flows).peekable();
        flows.peek().is_some() && !flows.any(to_controller)
    })
    .expect("they come");
    judged("without a log again");
    let events = agent.events().expect("a log");
    let refused: Vec<_> = events
        .iter()
        .filter(|event| event["fields"]["message"] == "the switch refused flows")
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
}

/// ovn-kubernetes takes the text of the rule into the ACL, and OVN cuts the bits off (`lex_parse_mask` in its lib/lex.c).
#[test]
fn a_network_with_bits_behind_its_prefix_denies_the_whole_network() {
    let lab = lab!("rules-bits", agent);
    lab.set_firewall("ns1", &[deny("203.0.113.9/24")])
        .expect("the rows");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    fetch(&lab, "ns1_pod1", "http://203.0.113.1/", BLOCKED).expect_err("OVN denies it");
    let explained = lab.ask_agent(&["explain", "ns1/pod1", "203.0.113.1:80"]);
    let (text, _) = explained.expect("the agent answers");
    assert!(text.contains("BLOCKED (denied_by_rule)"), "{text}");
    agent.terminate().expect("it stops");
}
