//! Rules on a bridge without OVN, where an option says.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use dnsflow_tests::{
    bridge::STATIC_FLOW,
    firewall::RuleSpec,
    lab::Lab,
    pod::Transport,
    process::{PATIENT, wait_until},
    support::test_bridge,
    topology::{DNS_POD, DNS_POD_PORT},
};

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

/// The pod reaches the web server on 203.0.113.`last`, or does not.
fn reaches(lab: &Lab, pod: &str, last: u8, expected: bool, why: &str) {
    let limit = if expected { PATIENT } else { BLOCKED };
    let url = format!("http://203.0.113.{last}/");
    let fetched = lab.pod(pod).fetch(&url, limit).expect("curl runs").result;
    assert_eq!(
        fetched.is_ok(),
        expected,
        "{pod} to {last}, {why}: {fetched:?}"
    );
}

fn ask(lab: &Lab, pod: &str, transport: Transport, name: &str) {
    let server = SocketAddr::new(DNS_POD.into(), DNS_POD_PORT);
    let told: Vec<Ipv4Addr> = lab
        .pod(pod)
        .ask(transport, server, "A", &[name])
        .expect("the name is known");
    assert!(!told.is_empty());
}

#[test]
fn names_open_without_ovn() {
    let Some(lab) = test_bridge("plain-ovs") else {
        return;
    };
    for pod in ["ns1_pod1", "ns1_pod2", "ns2_pod1"] {
        reaches(&lab, pod, 1, true, "nothing guards it");
        lab.guard(pod).expect("the flow is written");
    }
    lab.serve_dns(&[
        "www.example.com. 30 IN A 203.0.113.2",
        "tcp.example.com. 30 IN A 203.0.113.3",
        "bad.example.com. 30 IN A 203.0.113.4",
        "good.example.com. 30 IN A 203.0.113.4",
    ])
    .expect("the server starts");
    let rules = [
        RuleSpec::deny_name("bad.example.com"),
        RuleSpec::allow_name("example.com").ports(&[("tcp", 80)]),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ];
    lab.write_manifest("ns1", &rules).expect("a file");
    let resolver = format!("--resolver={DNS_POD}:{DNS_POD_PORT}");
    let port = format!("--dns-port={DNS_POD_PORT}");
    let _agent = lab
        .start_agent(&["--static-flow", STATIC_FLOW, &resolver, &port])
        .expect("the agent is ready");

    ask(&lab, "ns1_pod1", Transport::Udp, "www.example.com");
    ask(&lab, "ns2_pod1", Transport::Udp, "www.example.com");
    ask(&lab, "ns1_pod1", Transport::Tcp, "tcp.example.com");
    ask(&lab, "ns1_pod1", Transport::Udp, "good.example.com");
    for last in [2, 3, 4] {
        reaches(&lab, "ns1_pod1", last, true, "it asked");
    }
    ask(&lab, "ns1_pod1", Transport::Udp, "bad.example.com");
    let port = lab.openflow_port("ns1_pod1").expect("a port");
    let of_pod = |place: &str, to: &str| {
        format!(
            "table=44, {place},reg0=0x100/0x100,in_port={port},nw_src=10.244.0.5,nw_dst=203.0.113.{to}"
        )
    };
    let allow = ",tp_dst=80 actions=set_field:0/0x100->reg0,resubmit(,45)";
    let expected: BTreeSet<String> = [
        of_pod("priority=9999,tcp", &format!("2{allow}")),
        of_pod("priority=9999,tcp", &format!("3{allow}")),
        of_pod("priority=9999,tcp", &format!("4{allow}")),
        of_pod("priority=10000,ip", "4 actions=drop"),
    ]
    .into();
    let mut found = BTreeSet::new();
    wait_until("the flows of the rules", PATIENT, || {
        let flows = lab.dnsflow_flows()?;
        let without_cookie = flows.iter().filter_map(|flow| flow.split_once(", "));
        found = without_cookie.map(|(_, flow)| flow.to_owned()).collect();
        Ok(found == expected)
    })
    .unwrap_or_else(|error| panic!("{error}: {found:#?} instead of {expected:#?}"));
    thread::scope(|scope| {
        for (pod, last, why) in [
            ("ns1_pod1", 4, "it is denied before it is allowed"),
            ("ns1_pod1", 7, "no name led there"),
            ("ns1_pod2", 2, "another pod asked"),
            ("ns2_pod1", 2, "its namespace has no rule"),
        ] {
            let lab = &lab;
            scope.spawn(move || reaches(lab, pod, last, false, why));
        }
    });

    lab.delete_pod("ns1_pod1").expect("the pod is deleted");
    lab.wait_flows("the pod's flows to go", <[String]>::is_empty)
        .expect("they go");
}
