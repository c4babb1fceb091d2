//! The lab itself, without the agent: what it claims to be, it must be.

use std::time::Duration;

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::Datapath,
    ovs::{Daemon, Stop},
    process::PATIENT,
};

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

#[test]
fn a_pod_without_firewall_reaches_the_internet_by_name() {
    let lab = lab!("lab-open");
    for pod in ["ns1_pod1", "ns1_pod2", "ns2_pod1"] {
        let fetch = lab
            .pod(pod)
            .fetch("http://www.example.com/", PATIENT)
            .expect("curl runs");
        // 172.18.0.2 is the gateway router's address: the pod's own was translated.
        assert_eq!(
            fetch.result.as_deref(),
            Ok("203.0.113.2 greets 172.18.0.2"),
            "{pod}"
        );
    }
    let unknown = lab
        .pod("ns1_pod1")
        .fetch("http://www.example.org/", PATIENT)
        .expect("curl runs");
    let error = unknown.result.expect_err("the name does not exist");
    assert!(error.contains("Could not resolve host"), "{error}");
}

#[test]
fn a_firewall_opens_what_was_resolved_centrally_and_nothing_else() {
    let lab = lab!("lab-firewall");
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("www.example.com"), deny])
        .expect("the rows are written");
    let fetch = |pod: &str, limit| {
        lab.pod(pod)
            .fetch("http://www.example.com/", limit)
            .expect("curl runs")
            .result
    };

    lab.resolve_centrally(
        "www.example.com",
        &["203.0.113.2".parse().expect("an address")],
    )
    .expect("the address set is filled");
    assert_eq!(
        fetch("ns1_pod1", PATIENT).as_deref(),
        Ok("203.0.113.2 greets 172.18.0.2")
    );

    // The controller is told another address than the pod.
    lab.resolve_centrally(
        "www.example.com",
        &["203.0.113.1".parse().expect("an address")],
    )
    .expect("the address set is filled");
    let error = fetch("ns1_pod1", BLOCKED).expect_err("the pod's answer is not the controller's");
    assert!(error.contains("timed out"), "{error}");
    // An edit changes the rows in place and leaves one stale row at the end, as recorded.
    let before = lab.firewall_acls("ns1").expect("the rows");
    let deny_all = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", std::slice::from_ref(&deny_all))
        .expect("the rows are written");
    let after = lab.firewall_acls("ns1").expect("the rows");
    for (index, row) in &before {
        assert_eq!(row["_uuid"], after[index]["_uuid"], "index {index}");
    }
    assert_eq!(after.len(), 2);
    assert_eq!(after[&0]["action"], "drop");
    assert_eq!(after[&0].get("tier").is_some(), lab.has_tiers());

    assert!(fetch("ns2_pod1", PATIENT).is_ok(), "ns2 has no firewall");
    lab.set_firewall("ns1", &[]).expect("the rows are deleted");
    assert!(fetch("ns1_pod1", PATIENT).is_ok(), "ns1 has none any more");
}

#[test]
fn daemons_restart_and_pods_come_and_go() {
    let lab = lab!("lab-restart");
    let works = |pod: &str| {
        lab.pod(pod)
            .fetch("http://203.0.113.5/", PATIENT)
            .expect("curl runs")
            .result
    };
    for daemon in [Daemon::OvnController, Daemon::Northd, Daemon::Vswitchd] {
        for how in [Stop::Terminate, Stop::Kill] {
            lab.restart(daemon, how).expect("the daemon restarts");
            lab.sync().expect("OVN is in step");
            assert!(works("ns1_pod1").is_ok(), "after {daemon:?} {how:?}");
        }
    }
    let spec = dnsflow_tests::pod::PodSpec::new("ns1", "pod9", [10, 244, 0, 9].into());
    for _ in 0..2 {
        lab.add_pod(&spec).expect("the pod is created");
        lab.wait_wired("ns1_pod9").expect("OVN wires it");
        assert!(works("ns1_pod9").is_ok());
        lab.delete_pod("ns1_pod9").expect("the pod is deleted");
        assert!(!lab.pod("ns1_pod9").netns().exists());
    }
}

#[test]
fn the_bridges_are_on_the_datapath_that_was_asked_for() {
    let lab = lab!("lab-datapath");
    // `dpif_name` in lib/dpif.c of OVS: the type, and the datapath's name.
    let wanted = match lab.datapath() {
        Datapath::Netdev => "netdev@ovs-netdev:",
        Datapath::System => "system@ovs-system:",
    };
    let shown = lab.appctl(&["dpif/show"]).expect("the switch tells");
    let datapaths: Vec<_> = shown
        .lines()
        .filter(|line| line.contains('@'))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(datapaths, [wanted], "{shown}");
}

#[test]
fn the_kernel_goes_on_forwarding_without_vswitchd() {
    let lab = lab!("lab-no-vswitchd");
    let works = || {
        let fetch = lab.pod("ns1_pod1").fetch("http://203.0.113.5/", BLOCKED);
        fetch.expect("curl runs").result
    };
    // What the kernel goes on with are the flows that it has.
    for _ in 0..3 {
        works().expect("there is no firewall");
    }
    lab.stop_daemon(Daemon::Vswitchd, Stop::Kill)
        .expect("it stops");
    let without = works();
    assert_eq!(
        without.is_ok(),
        lab.datapath() == Datapath::System,
        "{without:?}"
    );
}
