//! Who shares an address that a pod was told, and how many addresses there may be.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::Lab,
    pod::{DNS, PodSpec, Transport},
};

const PATIENT: Duration = Duration::from_secs(5);
/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);
/// The agent reads the flows' counters every ten seconds.
const COUNTED: Duration = Duration::from_secs(11);
/// About what the long page brings in half a second.
const SOME: u64 = 160 << 10;

/// The namespace may reach example.com and what is below it, and nothing else.
fn firewall(lab: &Lab, namespace: &str) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall(namespace, &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
}

fn fetch(lab: &Lab, pod: &str, limit: Duration) -> Result<String, String> {
    let fetched = lab.pod(pod).fetch("http://203.0.113.2/", limit);
    fetched.expect("curl runs").result
}

#[test]
fn a_namespace_shares_what_one_of_its_pods_was_told() {
    let lab = lab!("limits-scope", agent);
    for namespace in ["ns1", "ns2"] {
        firewall(&lab, namespace);
    }
    let _agent = lab
        .start_agent(&["--scope", "namespace"])
        .expect("the agent is ready");
    let blocked = fetch(&lab, "ns1_pod2", BLOCKED);
    assert!(blocked.is_err(), "nobody has asked: {blocked:?}");
    lab.pod("ns1_pod1")
        .resolve("www.example.com")
        .expect("the name is known");
    for pod in ["ns1_pod1", "ns1_pod2"] {
        fetch(&lab, pod, PATIENT).unwrap_or_else(|error| panic!("{pod}: {error}"));
    }
    let later = PodSpec::new("ns1", "pod3", [10, 244, 0, 8].into());
    lab.add_pod(&later).expect("the pod is created");
    lab.wait_wired(&later.lsp()).expect("OVN wires it");
    fetch(&lab, "ns1_pod3", PATIENT).expect("a pod that comes later has a share");
    let blocked = fetch(&lab, "ns2_pod1", BLOCKED);
    assert!(blocked.is_err(), "another namespace: {blocked:?}");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    for (pod, expected) in [(5, 2), (6, 2), (7, 0), (8, 2)] {
        let source = format!("nw_src=10.244.0.{pod},");
        let found = flows.iter().filter(|flow| flow.contains(&source)).count();
        assert_eq!(found, expected, "of 10.244.0.{pod}: {flows:#?}");
    }
}

const PER_NAME: usize = 4;
const PER_POD: usize = 12;
/// For new and for established connections.
const FLOWS_PER_ADDRESS: usize = 2;
/// Addresses of one name, and names with one address.
const MANY: u8 = 200;

#[test]
fn caps_hold_and_spare_what_is_in_use() {
    let lab = lab!("limits-caps", agent);
    firewall(&lab, "ns1");
    let _agent = lab
        .start_agent(&[
            "--max-addresses-per-name",
            &PER_NAME.to_string(),
            "--max-leases-per-pod",
            &PER_POD.to_string(),
        ])
        .expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let mut download = pod.download("www.example.com").expect("curl starts");
    // It is in use once the agent has read the flows' counters.
    let counted = Instant::now() + COUNTED;
    while Instant::now() < counted {
        download.goes_on(SOME).expect("the rule allows it");
    }
    let flows_of = |addresses: usize, last: Ipv4Addr| {
        let to = |address: Ipv4Addr| format!("nw_dst={address} ");
        let wanted = [to(Ipv4Addr::new(203, 0, 113, 2)), to(last)];
        lab.wait_flows("the flows of so many addresses", |flows| {
            flows.len() == addresses * FLOWS_PER_ADDRESS
                && wanted
                    .iter()
                    .all(|to| flows.iter().any(|flow| flow.contains(to)))
        })
        .expect("they are there");
    };

    // 198.18.0.0/15 is for benchmarks (RFC 2544); nobody has these.
    let mut zone: Vec<String> = (1..=MANY)
        .map(|n| format!("www.example.com. 3600 IN A 198.18.0.{n}"))
        .collect();
    zone.extend((1..=MANY).map(|n| format!("n{n}.example.com. 3600 IN A 198.18.1.{n}")));
    let zone: Vec<&str> = zone.iter().map(String::as_str).collect();
    lab.serve_dns(&zone).expect("the server starts");
    let told: Vec<Ipv4Addr> = pod
        .ask(Transport::Edns, DNS, "A", &["www.example.com"])
        .expect("the name is known");
    let last = *told.last().expect("an address");
    assert_eq!(told.len(), usize::from(MANY));
    flows_of(PER_NAME, last);
    download.goes_on(SOME).expect("it is in use");

    let names: Vec<String> = (1..=MANY).map(|n| format!("n{n}.example.com")).collect();
    let told: Vec<Ipv4Addr> = pod.resolve_all("A", &names).expect("they are known");
    assert_eq!(told.len(), usize::from(MANY));
    flows_of(PER_POD, Ipv4Addr::new(198, 18, 1, MANY));
    download.goes_on(SOME).expect("it is in use");
}
