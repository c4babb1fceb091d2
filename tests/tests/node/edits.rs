//! What the edit of a rule closes stays closed, although an agent before this one opened it. The witnesses are the
//! pod's own connection and the flows in the switch.

use std::{thread, time::Duration};

use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::Lab,
    process::{PATIENT, wait_until},
};

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);
/// The agent compares the switch with its cache every ten seconds. On a slow machine it may do so later, and the test
/// then sees less.
const COMPARED: Duration = Duration::from_secs(12);
const NAME: &str = "www.example.com";
const ADDRESS: &str = "203.0.113.2";

fn allow(lab: &Lab, name: &str) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name(name), deny])
        .expect("the rows are written");
}

/// Whether the pod reaches a name or an address.
fn connects(lab: &Lab, host: &str, limit: Duration) -> bool {
    let fetched = lab.pod("ns1_pod1").fetch(&format!("http://{host}/"), limit);
    fetched.expect("curl runs").result.is_ok()
}

fn has_flow(lab: &Lab) -> bool {
    let flows = lab.dnsflow_flows().expect("the dump runs");
    flows
        .iter()
        .any(|flow| flow.contains(&format!("nw_dst={ADDRESS} ")))
}

/// An agent opens the address and is killed. The next one, which knows no names, takes the flows over.
fn taken_over(lab: &Lab) -> Agent {
    allow(lab, "example.com");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    assert!(connects(lab, NAME, PATIENT), "the rule allows it");
    agent.kill().expect("it is killed");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    assert!(connects(lab, ADDRESS, PATIENT), "what was open stays open");
    agent
}

/// Another name takes the place of the rule, and the address closes.
fn edit_away(lab: &Lab) {
    allow(lab, "other.test");
    wait_until("the address to close", PATIENT, || Ok(!has_flow(lab))).expect("it closes");
}

#[test]
fn what_an_edit_closes_stays_closed_behind_a_killed_agent() {
    let lab = lab!("edits-close", agent);
    let _agent = taken_over(&lab);
    edit_away(&lab);
    thread::sleep(COMPARED);
    assert!(!has_flow(&lab), "another name vouches for the flow");
    assert!(!connects(&lab, ADDRESS, BLOCKED));
}

#[test]
fn what_an_edit_closed_opens_with_the_next_answer_behind_a_killed_agent() {
    let lab = lab!("edits-open", agent);
    let agent = taken_over(&lab);
    edit_away(&lab);
    allow(&lab, "example.com");
    assert!(connects(&lab, NAME, PATIENT), "the rule allows it");
    let log = agent.log().expect("its log");
    assert!(
        !log.contains("flows that had vanished were restored"),
        "{log}"
    );
}
