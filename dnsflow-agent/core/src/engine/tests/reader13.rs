//! A hostile reading: the one judge, networks of Services. Each finding has a control that passes.

use super::{starts::is_open, *};
use crate::{
    ask::view::{Beside, ExplainedAddress, Explanation, Judged, Target, Verdict},
    values::connection::Attempt,
};

const TARGET: &str = "203.0.113.1:443";

fn trusting(mut node: Node) -> Node {
    let resolver = "10.96.0.10:53".parse().expect("a resolver");
    node.give(Input::Resolvers([resolver].into()));
    node
}

fn explain(node: &Node, target: &str) -> Explanation {
    let target: Target = target.parse().expect("a target");
    let beside = Beside {
        sets: Some(BTreeMap::new()),
        ..Beside::default()
    };
    let view = node.engine.view();
    let explained = view.explain("ns1_p1", &target, &beside, node.now);
    explained.expect("the pod is there")
}

fn address(explained: Explanation) -> ExplainedAddress {
    let [address] = <[_; 1]>::try_from(explained.addresses).expect("one address");
    address
}

fn judge(node: &Node, to: [u8; 4], port: u16) -> Judged {
    let attempt = Attempt {
        ifindex: ifindex_of(node.pods["ns1_p1"]),
        protocol: Protocol::Tcp,
        address: to.into(),
        port,
        at: node.now,
    };
    node.engine.view().judge_attempt(&attempt, &[], node.now)
}

fn port(rule: Rule, port: u16) -> Rule {
    Rule {
        ports: vec![Transport {
            protocol: Protocol::Tcp,
            port: Some(port),
        }],
        ..rule
    }
}

fn cidr(action: RuleAction, network: &str) -> Rule {
    Rule {
        action,
        destination: Destination::Cidr(network.parse().expect("a network")),
        ports: vec![],
    }
}

// One judge.

/// Two names lead to one address, one batch behind the other. The switch refuses the flow in the first one, or takes it.
/// Returns the verdicts at many moments until the next comparison.
fn verdicts_over_the_first_of_two_batches(is_refused: bool) -> BTreeSet<String> {
    let rules = [
        port(allow("a.test"), 443),
        port(allow("b.test"), 80),
        deny_all(),
    ];
    let mut other = Node::with(&rules);
    other.answer("p1", "a.test", &[ADDRESS], 600);
    let key = other.of_rules().next().expect("a flow").clone();
    let mut node = trusting(Node::with(&rules));
    if is_refused {
        node.refused.insert(key);
    }
    node.answer("p1", "a.test", &[ADDRESS], 600);
    node.answer("p1", "b.test", &[ADDRESS], 600);
    let mut verdicts = BTreeSet::new();
    for _ in 0..9 {
        assert_eq!(is_open(&node, ADDRESS, 0), !is_refused);
        verdicts.insert(format!("{:?}", explain(&node, TARGET).verdict));
        node.pass(Duration::from_millis(500));
    }
    verdicts
}

/// Only the last batch of an address counts as refused.
#[test]
fn what_the_switch_refuses_is_not_said_to_be_allowed_because_another_batch_follows() {
    let verdicts = verdicts_over_the_first_of_two_batches(true);
    assert!(!verdicts.contains("Allowed"), "{verdicts:?}");
}

#[test]
fn control_what_the_switch_takes_is_allowed() {
    let verdicts = verdicts_over_the_first_of_two_batches(false);
    assert_eq!(verdicts, ["Allowed".to_owned()].into());
}

/// An agent starts, while ovn-kubernetes has not taken over an EgressFirewall, and enforces the one before. `was_there`: an
/// agent that has known that one goes on. Returns the verdict over an address outside the network of the former one, which
/// OVN lets pass, and whether an attempt there is reported as denied.
fn verdict_over_what_ovn_has_not_taken_over(was_there: bool) -> (Verdict, bool) {
    let former = [allow("a.test"), cidr(RuleAction::Deny, "198.51.100.0/24")];
    let latest = [allow("*.b.test"), deny_all()];
    let mut node = Node::bare();
    node.read_sources();
    if was_there {
        node.set_firewall(&former);
    }
    node.set_ovn(&former);
    let row = Acl {
        matches: format!("(ip4.dst == 198.51.100.0/24) && inport == @{GROUP}"),
        ..acl(1, &former).expect("a rule")
    };
    node.give(Input::Nb(NbUpdate {
        acls: vec![(acl_row(1), Some(row))],
        ..NbUpdate::default()
    }));
    node.set_firewall(&latest);
    node.pass(Duration::from_secs(60));
    let node = trusting(node);
    let is_denied = matches!(judge(&node, ADDRESS, 443), Judged::Denied(..));
    (address(explain(&node, TARGET)).verdict, is_denied)
}

/// A rule without a name counts by its place and its action, whatever the network of its ACL.
#[test]
fn a_network_that_ovn_has_not_taken_over_is_not_said_to_deny() {
    let (verdict, is_denied) = verdict_over_what_ovn_has_not_taken_over(false);
    assert!(
        !matches!(verdict, Verdict::Blocked | Verdict::NotYet) && !is_denied,
        "{verdict:?}, reported as denied: {is_denied}"
    );
}

#[test]
fn control_a_network_that_ovn_has_not_taken_over_is_not_said_to_deny() {
    let (verdict, is_denied) = verdict_over_what_ovn_has_not_taken_over(true);
    assert!(
        !matches!(verdict, Verdict::Blocked | Verdict::NotYet) && !is_denied,
        "{verdict:?}, reported as denied: {is_denied}"
    );
}

/// The verdict over an address of the network of Services that no Service has, or over one outside. OVN balances no load
/// there, and its ACL denies.
fn verdict_over_an_address_of_the_service_network(network: &str) -> Verdict {
    let mut node = trusting(Node::with(&[allow("example.com"), deny_all()]));
    let network = network.parse().expect("a network");
    node.give(Input::ServiceNetworks([network].into()));
    address(explain(&node, "10.96.7.7:443")).verdict
}

#[test]
fn an_address_of_the_service_network_without_a_service_is_not_said_to_be_allowed() {
    let verdict = verdict_over_an_address_of_the_service_network("10.96.0.0/16");
    assert!(verdict != Verdict::Allowed, "{verdict:?}");
}

#[test]
fn control_an_address_without_a_service_is_not_said_to_be_allowed() {
    let verdict = verdict_over_an_address_of_the_service_network("10.97.0.0/16");
    assert!(verdict != Verdict::Allowed, "{verdict:?}");
}

/// What a tenant reads of a denied connection to an address. A pod of another namespace was told the address, or was not.
fn text_of_a_denial(other_was_told: bool) -> String {
    let mut node = trusting(Node::with(&[allow("example.com"), deny_all()]));
    let id = FirewallId {
        namespace: "ns2".into(),
        name: "default".into(),
    };
    node.give(Input::Firewalls(FirewallUpdate {
        reset: false,
        firewalls: vec![(id, Some(firewall(&[allow("bank.test")])))],
    }));
    let row = RowId::new(0x109);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(row, Some(interface("ns2_payroll", 9, "uid-payroll")))],
    }));
    node.give(Input::Sb(SbUpdate {
        port_bindings: vec![(
            row,
            Some(PortBinding {
                namespace: Some("ns2".into()),
                ..port_binding("ns2_payroll", 9)
            }),
        )],
        ..SbUpdate::default()
    }));
    if other_was_told {
        let ifindex = ifindex_of(row);
        let bytes = node.to_pod(ifindex, answer_frame("bank.test", &[ADDRESS], 600));
        node.frame(ifindex, &bytes);
        assert_eq!(node.engine.view().addresses("ns2_payroll").len(), 1);
    }
    match judge(&node, ADDRESS, 443) {
        Judged::Denied(_, denied) => denied.to_string(),
        other => panic!("{other:?}"),
    }
}

/// A tenant that tries an address learns from the Event whether a pod of another namespace uses it.
#[test]
fn what_pods_of_other_namespaces_were_told_changes_nothing_that_a_tenant_reads() {
    assert_eq!(text_of_a_denial(true), text_of_a_denial(false));
}

#[test]
fn control_a_tenant_reads_why_its_connection_is_denied() {
    assert!(text_of_a_denial(false).contains("rule 1"));
}

/// Two names lead to one address, of which the pod has asked for one. ovn-kubernetes has resolved the other one, which a
/// rule before allows. Returns the text of the reported denial.
fn denial_beside_a_name_of_ovn(is_allowed_before: bool) -> Option<String> {
    let mut rules = vec![deny("told.test"), deny_all()];
    if is_allowed_before {
        rules.insert(0, allow("resolved.test"));
    }
    let mut node = trusting(Node::with(&rules));
    node.answer("p1", "told.test", &[ADDRESS], 600);
    match judge(&node, ADDRESS, 443) {
        Judged::Denied(_, denied) => Some(denied.to_string()),
        Judged::Allowed(_) | Judged::NotJudged => None,
    }
}

/// The documents promise that the text of a report says so.
#[test]
fn a_denial_says_that_ovn_may_have_resolved_a_name_that_is_allowed_before() {
    let text = denial_beside_a_name_of_ovn(true);
    assert!(
        text.as_ref().is_none_or(|text| text.contains("resolved")),
        "{text:?}"
    );
}

#[test]
fn control_without_a_rule_before_it_is_denied() {
    assert!(denial_beside_a_name_of_ovn(false).is_some());
}

/// How long the judgement of an attempt takes, with so many rules of one name or each with its own.
fn time_of_a_judgement(rules: u16, have_one_name: bool) -> Duration {
    let name = |at: u16| match have_one_name || at == 1 {
        true => "example.com".to_owned(),
        false => format!("n{at}.test"),
    };
    let mut all: Vec<Rule> = (1..=rules).map(|at| port(allow(&name(at)), at)).collect();
    all.push(deny_all());
    let mut node = Node::bare();
    node.read_sources();
    node.set_firewall(&all);
    let rows = || 0..u32::from(rules) + 1;
    node.give(Input::Nb(NbUpdate {
        acls: rows().map(|at| (acl_row(at), acl(at, &all))).collect(),
        ..NbUpdate::default()
    }));
    let flows = rows().map(|at| (logical_flow_row(at), logical_flow(at, &all)));
    node.give(Input::Sb(SbUpdate {
        logical_flows: flows.collect(),
        ..SbUpdate::default()
    }));
    let mut node = trusting(node);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    assert!(is_open(&node, ADDRESS, 0));
    let times = (0..3).map(|_| {
        let begin = std::time::Instant::now();
        assert!(matches!(judge(&node, ADDRESS, 1), Judged::Allowed(_)));
        begin.elapsed()
    });
    times.min().expect("one")
}

/// Each rule of the name looks through all rules of the name and all flows of the address, on the thread that opens
/// addresses for all pods.
#[test]
fn an_attempt_costs_little_more_where_all_rules_have_its_name() {
    let [one_name, names] = [true, false].map(|one| time_of_a_judgement(1600, one));
    assert!(one_name < 50 * names, "{one_name:?}, not {names:?}");
}

#[test]
fn control_an_attempt_costs_no_more_than_its_rules() {
    let [few, many] = [100, 1600].map(|rules| time_of_a_judgement(rules, false));
    assert!(many < 50 * few, "{many:?}, not {few:?}");
}
