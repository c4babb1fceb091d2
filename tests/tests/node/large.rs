//! As many rules as an EgressFirewall may have, and names as a node may have.

use std::net::SocketAddr;

use dnsflow_tests::{firewall::RuleSpec, lab, lab::Lab, process::PATIENT};

/// The most rules in an EgressFirewall.
const RULES: usize = 8_000;
/// The names in all rules on the node.
const NAMES: usize = 10_000;

fn opens(lab: &Lab, pod: &str, name: &str) {
    let fetched = lab.pod(pod).fetch(&format!("http://{name}/"), PATIENT);
    let fetched = fetched.expect("curl runs").result;
    fetched.unwrap_or_else(|error| panic!("{pod} to {name}: {error}"));
}

fn is_closed(lab: &Lab, last: u8, why: &str) {
    let to = SocketAddr::from(([203, 0, 113, last], 80));
    let out = lab.lets_out("ns1_pod1", "tcp", to).expect("a trace");
    assert!(!out, "{to}: {why}");
}

/// Whether the flows of 203.0.113.`last`'s group are there, all of them at this priority.
fn are_at(flows: &[String], last: u8, priority: usize) -> bool {
    let flows = Lab::of_groups_of(flows, [203, 0, 113, last].into());
    let place = format!("priority={priority},");
    !flows.is_empty() && flows.iter().all(|flow| flow.contains(&place))
}

#[test]
fn the_first_and_the_last_of_8000_rules_hold() {
    let lab = lab!("large", agent);
    lab.serve_dns(&[
        "first.test. 3600 IN A 203.0.113.1",
        "last.test. 3600 IN A 203.0.113.2",
        "neighbour.test. 3600 IN A 203.0.113.3",
    ])
    .expect("the server starts");
    let deny = || RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    let allow = |n: usize| RuleSpec::allow_name(&format!("n{n}.test"));
    // Each of them, and the neighbour, ends with a rule without name.
    let mut rules = vec![RuleSpec::allow_name("first.test")];
    rules.extend((1..RULES - 2).map(allow));
    rules.extend([RuleSpec::allow_name("last.test"), deny()]);
    assert_eq!(rules.len(), RULES);
    let mut neighbour: Vec<_> = (RULES - 1..NAMES - 1).map(allow).collect();
    neighbour.extend([RuleSpec::allow_name("neighbour.test"), deny()]);
    assert_eq!(rules.len() - 1 + neighbour.len() - 1, NAMES);
    for (namespace, rules) in [("ns1", &rules), ("ns2", &neighbour)] {
        lab.write_manifest(namespace, rules).expect("a file");
        lab.write_firewall_rows(namespace, rules)
            .expect("the rows are written");
    }
    lab.sync().expect("OVN is in step");

    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    opens(&lab, "ns1_pod1", "first.test");
    is_closed(&lab, 2, "nobody has asked for it");
    opens(&lab, "ns1_pod1", "last.test");
    opens(&lab, "ns2_pod1", "neighbour.test");
    lab.pod("ns1_pod1")
        .resolve("neighbour.test")
        .expect("the name is known");
    is_closed(&lab, 3, "no rule of ns1 is for it");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    // OVN puts the rule of index N at 11000 - N.
    assert!(are_at(&flows, 1, 11_000), "{flows:#?}");
    assert!(are_at(&flows, 2, 11_000 - (RULES - 2)), "{flows:#?}");

    // Without the first rule, ovn-kubernetes rewrites every row.
    lab.set_firewall("ns1", &rules[1..])
        .expect("the rows are written");
    lab.wait_flows("the rules to move up", |flows| {
        let gone = !flows
            .iter()
            .any(|flow| flow.contains("nw_dst=203.0.113.1 "));
        gone && are_at(flows, 2, 11_001 - (RULES - 2))
    })
    .expect("they move");
    opens(&lab, "ns1_pod1", "last.test");
    is_closed(&lab, 1, "no rule is for it any more");
}
