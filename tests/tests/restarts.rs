//! The flows survive restarts of what they live in: the agent puts them back.

use std::time::Duration;

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::Lab,
    ovs::{Daemon, Stop},
};

const PATIENT: Duration = Duration::from_secs(5);

/// Opens an address, restarts the daemon, and expects the same flows and an open address
/// without another DNS answer.
fn flows_come_back(lab: &Lab, daemon: Daemon, how: Stop) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    for pod in ["ns1_pod1", "ns1_pod2"] {
        let fetch = lab.pod(pod).fetch("http://www.example.com/", PATIENT);
        fetch
            .expect("curl runs")
            .result
            .expect("the rule allows it");
    }
    let before = lab.dnsflow_flows().expect("the dump runs");
    assert!(!before.is_empty());

    lab.restart(daemon, how).expect("the daemon restarts");
    lab.sync().expect("OVN is in step");
    lab.wait_flows("the same flows as before", |flows| flows == before)
        .expect("they come back");
    for pod in ["ns1_pod1", "ns1_pod2"] {
        let fetch = lab.pod(pod).fetch("http://203.0.113.2/", PATIENT);
        fetch
            .expect("curl runs")
            .result
            .expect("the address is open");
    }
}

#[test]
fn ovn_controller_stopped_and_started() {
    let lab = lab!("restart-controller", agent);
    flows_come_back(&lab, Daemon::OvnController, Stop::Terminate);
}

#[test]
fn ovn_controller_killed() {
    let lab = lab!("restart-controller-kill", agent);
    flows_come_back(&lab, Daemon::OvnController, Stop::Kill);
}

#[test]
fn vswitchd_stopped_and_started() {
    let lab = lab!("restart-vswitchd", agent);
    flows_come_back(&lab, Daemon::Vswitchd, Stop::Terminate);
}

#[test]
fn vswitchd_killed() {
    let lab = lab!("restart-vswitchd-kill", agent);
    flows_come_back(&lab, Daemon::Vswitchd, Stop::Kill);
}
