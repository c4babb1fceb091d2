//! A moment without our flows must not cost a connection: in the gap, OVN's Deny commits
//! `ct_mark.blocked` for it, and from then on OVN drops the replies, also when our flows are back.

use dnsflow_tests::{
    agent::Agent,
    download::Download,
    firewall::{PortSpec, RuleSpec},
    lab,
    lab::{Datapath, Lab},
    ovs::{Daemon, Stop},
    process::{PATIENT, wait_until},
    support::{LEFT_TO_VM, not_run, this_test},
};

/// Two pieces of the long page.
const SOME: u64 = 32 << 10;
/// The address that only dnsflow opens.
const OPENED: &str = "203.0.113.2";
const RESTARTS: usize = 4;
/// More, if a comparison came into the midst of each of the first ones.
const RESTARTS_MAX: usize = 12;
/// What the agent says when it has restored flows, and when a comparison with the switch has found some missing.
const RESTORED: &str = "restored missing flows";
const COMPARED: &str = "corrected the flows of the switch";
/// What the agent says when it has searched for blocked connections.
const LOOKED: &str = "searched for blocked connections";

fn firewall(lab: &Lab) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
}

/// A download through the address, which goes on.
fn start_download(lab: &Lab) -> Download {
    let pod = lab.pod("ns1_pod1");
    let mut download = pod.download("www.example.com").expect("curl starts");
    download.goes_on(SOME).expect("the rule allows it");
    download
}

/// Whether OVN has blocked a connection of this pod to the address.
fn is_blocked(lab: &Lab) -> anyhow::Result<bool> {
    let to = format!("dst={OPENED},");
    Ok(lab.blocked_connections()?.iter().any(|c| c.contains(&to)))
}

/// Opens a gap in our flows with `make_gap` while the agent cannot fill it, waits until OVN has
/// blocked the connection in it, and lets the agent go on.
fn gap(lab: &Lab, agent: &Agent, make_gap: impl FnOnce()) {
    agent.freeze().expect("it is stopped");
    make_gap();
    wait_until("the connection to be blocked", PATIENT, || is_blocked(lab))
        .expect("the gap does what it is for");
    agent.thaw().expect("it goes on");
}

/// Waits until the agent has searched for blocked connections so many times more.
fn wait_looks(agent: &Agent, count: usize) {
    let looks = || -> anyhow::Result<usize> {
        let events = agent.events()?.into_iter();
        let looks = events.filter(|event| event["fields"]["message"] == LOOKED);
        Ok(looks.count())
    };
    let before = looks().expect("the log is readable");
    wait_until("a look for blocked connections", PATIENT, || {
        Ok(looks()? >= before + count)
    })
    .expect("it looks");
}

/// The rules under which everything goes on, and those under which the download does not.
fn rules(ports: &[PortSpec]) -> [RuleSpec; 2] {
    let allow = RuleSpec::allow_name("example.com").ports(ports);
    [allow, RuleSpec::deny("0.0.0.0/0").expect("a CIDR")]
}

#[test]
fn a_connection_that_the_rules_deny_stays_blocked_until_they_allow_it() {
    let lab = lab!("blocked-rightly", agent);
    firewall(&lab);
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let mut download = start_download(&lab);
    // The address is still open, on another port.
    lab.set_firewall("ns1", &rules(&[("tcp", 8080)]))
        .expect("the rows are written");
    wait_until("the connection to be blocked", PATIENT, || is_blocked(&lab)).expect("it is denied");
    for _ in 0..2 {
        lab.restart(Daemon::OvnController, Stop::Kill)
            .expect("it starts again");
        wait_looks(&agent, 1);
        let received = download.received();
        wait_looks(&agent, 1);
        assert!(is_blocked(&lab).expect("the dump runs"));
        assert_eq!(download.received(), received);
    }
    lab.set_firewall("ns1", &rules(&[]))
        .expect("the rows are written");
    download.goes_on(SOME).expect("it is allowed again");
}

#[test]
fn a_restart_of_vswitchd_does_not_end_a_download() {
    let lab = lab!("blocked-vswitchd", agent);
    if lab.datapath() == Datapath::Netdev {
        let why = "connections end with an ovs-vswitchd that tracks them";
        not_run(&this_test(), format!("{why}; {LEFT_TO_VM}"));
        return;
    }
    firewall(&lab);
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let mut download = start_download(&lab);
    for how in [Stop::Terminate, Stop::Kill] {
        gap(&lab, &agent, || {
            lab.restart(Daemon::Vswitchd, how).expect("it starts again");
        });
        let result = download.goes_on(SOME);
        result.unwrap_or_else(|error| panic!("{how:?}: {error:#}"));
    }
}

#[test]
fn a_restart_of_ovn_controller_does_not_end_a_download() {
    let lab = lab!("blocked-controller", agent);
    firewall(&lab);
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let mut download = start_download(&lab);
    for restart in 0..RESTARTS {
        lab.stop_daemon(Daemon::OvnController, Stop::Kill)
            .expect("it stops");
        if restart % 2 == 1 {
            // Without it the flows stay, and so does the connection.
            download.goes_on(SOME).expect("it goes on");
        }
        gap(&lab, &agent, || {
            lab.start_daemon(Daemon::OvnController).expect("it starts");
        });
        let result = download.goes_on(SOME);
        result.unwrap_or_else(|error| panic!("restart {restart}: {error:#}"));
    }
    wait_until("no connection to be blocked", PATIENT, || {
        Ok(!is_blocked(&lab)?)
    })
    .expect("no mark stays");
}

#[test]
fn connections_go_on_through_restarts_of_ovn_controller_as_they_happen() {
    let lab = lab!("blocked-restarts", agent);
    firewall(&lab);
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let mut download = start_download(&lab);
    let pod = lab.pod("ns1_pod1");
    for restart in 0..RESTARTS_MAX {
        lab.restart(Daemon::OvnController, Stop::Kill)
            .expect("it starts again");
        for fetch in 0..20 {
            let fetched = pod.fetch(&format!("http://{OPENED}/"), PATIENT);
            let result = fetched.expect("curl runs").result;
            result.unwrap_or_else(|error| panic!("restart {restart}, {fetch}: {error}"));
        }
        lab.sync().expect("OVN is in step");
        let result = download.goes_on(SOME);
        result.unwrap_or_else(|error| panic!("restart {restart}: {error:#}"));
        if restart + 1 >= RESTARTS && restores_before_a_comparison(&agent) {
            return;
        }
    }
    panic!("only comparisons have restored flows, which come each ten seconds");
}

/// Whether the agent has restored flows that no comparison with the switch had to find.
fn restores_before_a_comparison(agent: &Agent) -> bool {
    let events = agent.events().expect("its log");
    let sum = |message: &str, field: &str| -> u64 {
        let fields = events.iter().map(|event| &event["fields"]);
        let of_message = fields.filter(|fields| fields["message"] == message);
        of_message.filter_map(|fields| fields[field].as_u64()).sum()
    };
    sum(RESTORED, "flows") > sum(COMPARED, "added")
}
