//! How many addresses there may be.

use std::net::Ipv4Addr;

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    pod::{DNS, Transport},
    process::{PATIENT, wait_until},
};

/// About what the long page brings in half a second.
const SOME: u64 = 160 << 10;

fn leads_to(flows: &[String], address: Ipv4Addr) -> bool {
    let destination = format!("nw_dst={address} ");
    flows.iter().any(|flow| flow.contains(&destination))
}

const PER_NAME: usize = 4;
const PER_POD: usize = 12;
/// Addresses of one name, and names with one address.
const MANY: u8 = 200;

#[test]
fn caps_hold_and_spare_what_is_in_use() {
    let lab = lab!("limits-caps", agent);
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let _agent = lab
        .start_agent(&[
            "--max-addresses-per-name",
            &PER_NAME.to_string(),
            "--max-addresses-per-pod",
            &PER_POD.to_string(),
        ])
        .expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    // Nobody has counted its packets when the caps are reached.
    let mut download = pod.download("www.example.com").expect("curl starts");
    download.goes_on(1).expect("the rule allows it");
    let in_use = Ipv4Addr::new(203, 0, 113, 2);
    let holds = |addresses: usize| {
        lab.wait_flows("the flows of so many addresses", |flows| {
            let to_addresses = flows.iter().filter(|flow| flow.contains("nw_dst="));
            to_addresses.count() == addresses && leads_to(flows, in_use)
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
    assert_eq!(told.len(), usize::from(MANY));
    holds(PER_NAME);
    let names: Vec<String> = (1..=MANY).map(|n| format!("n{n}.example.com")).collect();
    let told: Vec<Ipv4Addr> = pod.resolve_all("A", &names).expect("they are known");
    assert_eq!(told.len(), usize::from(MANY));
    holds(PER_POD);
    download.goes_on(SOME).expect("it is in use");

    // Once the agent knows which are out of use, one of those makes room.
    let last = Ipv4Addr::new(198, 18, 1, MANY);
    wait_until("room for one more", PATIENT, || {
        let is_told = pod.resolve(&format!("n{MANY}.example.com")).is_ok();
        Ok(is_told && leads_to(&lab.dnsflow_flows()?, last))
    })
    .expect("it opens");
    holds(PER_POD);
    download.goes_on(SOME).expect("it is in use");
}
