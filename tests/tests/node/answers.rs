//! Which answers are seen, and which are trusted, with a DNS server that lies.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    thread,
    time::Duration,
};

use dnsflow_agent::capture::UNASKED_GRACE;
use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::Lab,
    liar::{Behaviour, FORBIDDEN, LIE},
    process::{PATIENT, wait_until},
    topology::{DNS_POD_PORT, DNS_SERVICE},
};

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

/// ns1 may reach example.com and what is below it; the liar is its DNS server.
fn start(lab: &Lab) -> Agent {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    lab.serve_liar("dns", DNS_POD_PORT).expect("it listens");
    let resolver = format!("--resolver={DNS_SERVICE}");
    let agent = lab.start_agent(&[&resolver]);
    let agent = agent.expect("the agent is ready");
    // OVN 23.03 loses one in ten of the first queries on its own.
    let unrelated = Behaviour::Honest.name(1, "example.net");
    wait_until("the liar's answer", PATIENT, || {
        Ok(lab.pod("ns1_pod1").resolve(&unrelated).is_ok())
    })
    .expect("it answers");
    // Until then, a question may have been asked before anybody could see it.
    thread::sleep(UNASKED_GRACE);
    agent
}

fn reach(lab: &Lab, address: Ipv4Addr, limit: Duration) -> Result<String, String> {
    let url = format!("http://{address}/");
    let fetch = lab.pod("ns1_pod1").fetch(&url, limit);
    fetch.expect("curl runs").result
}

/// An address that was once opened stays so for longer than a test takes.
fn is_closed(lab: &Lab, address: Ipv4Addr, why: &str) {
    let fetched = reach(lab, address, BLOCKED);
    assert!(fetched.is_err(), "{why}: {fetched:?}");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    let text = address.to_string();
    let found: Vec<_> = flows.iter().filter(|flow| flow.contains(&text)).collect();
    assert!(found.is_empty(), "{why}: {found:#?}");
}

fn opens(lab: &Lab, behaviours: &[Behaviour], tcp: bool) {
    let _agent = start(lab);
    let pod = lab.pod("ns1_pod1");
    for (behaviour, last) in behaviours.iter().zip(1..) {
        let address = Ipv4Addr::new(203, 0, 113, last);
        let before = reach(lab, address, BLOCKED);
        assert!(before.is_err(), "{behaviour:?}, unasked: {before:?}");
        let name = behaviour.name(last, "example.com");
        let told = if tcp {
            pod.resolve_tcp(&name)
        } else {
            pod.resolve(&name)
        };
        let told = told.unwrap_or_else(|error| panic!("{behaviour:?}: {error:#}"));
        assert!(told.contains(&address), "{behaviour:?}: {told:?}");
        let fetched = reach(lab, address, PATIENT);
        assert!(fetched.is_ok(), "{behaviour:?}: {fetched:?}");
    }
    is_closed(lab, LIE, "nobody was told so");
}

#[test]
fn answers_over_udp_open_what_they_say() {
    let lab = lab!("answers-udp", agent);
    opens(
        &lab,
        &[Behaviour::Honest, Behaviour::Chain, Behaviour::OtherOwner],
        false,
    );
}

#[test]
fn an_answer_in_fragments_opens_what_it_says() {
    let lab = lab!("answers-fragments", agent);
    opens(&lab, &[Behaviour::Large], false);
}

#[test]
fn answers_over_tcp_open_what_they_say() {
    let lab = lab!("answers-tcp", agent);
    opens(
        &lab,
        &[
            Behaviour::Honest,
            Behaviour::Large,
            Behaviour::Truncated,
            Behaviour::Slow,
            Behaviour::Several,
        ],
        true,
    );
}

#[test]
fn a_truncated_answer_opens_nothing_and_its_successor_over_tcp_does() {
    let lab = lab!("answers-truncated", agent);
    let _agent = start(&lab);
    // The pod's own resolver asks again over TCP.
    let url = format!("http://{}/", Behaviour::Truncated.name(3, "example.com"));
    let fetched = lab.pod("ns1_pod1").fetch(&url, PATIENT).expect("curl runs");
    let page = fetched.result.expect("the address is open");
    assert!(page.starts_with("203.0.113.3 "), "{page}");
    is_closed(&lab, LIE, "the truncated answer");
}

#[test]
fn lies_open_nothing() {
    let lab = lab!("answers-lies", agent);
    let _agent = start(&lab);
    let pod = lab.pod("ns1_pod1");
    let truth = Ipv4Addr::new(203, 0, 113, 3);
    for behaviour in Behaviour::ALL {
        // Some are no answers at all to a client that looks closely.
        let told = pod.resolve(&behaviour.name(3, "example.com"));
        let told = told.map_err(|error| format!("{error:#}"));
        if behaviour == Behaviour::Honest {
            assert_eq!(told, Ok(vec![truth]));
        }
    }
    reach(&lab, truth, PATIENT).expect("what is true is open");
    is_closed(&lab, LIE, "a lie");
}

#[test]
fn addresses_that_are_refused_stay_closed() {
    let lab = lab!("answers-refused", agent);
    let _agent = start(&lab);
    let told = lab
        .pod("ns1_pod1")
        .resolve(&Behaviour::Forbidden.name(3, "example.com"))
        .expect("an answer");
    assert_eq!(told.len(), 1 + FORBIDDEN.len());
    reach(&lab, Ipv4Addr::new(203, 0, 113, 3), PATIENT).expect("the address beside them is open");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    for address in FORBIDDEN {
        let to = format!("nw_dst={address}");
        let found: Vec<_> = flows.iter().filter(|flow| flow.contains(&to)).collect();
        assert!(found.is_empty(), "{address}: {found:#?}");
    }
}

#[test]
fn colluding_resolver_opens_nothing() {
    let lab = lab!("answers-collude", agent);
    let _agent = start(&lab);
    lab.serve_liar("ns1_pod2", 53).expect("it listens");
    let neighbour = SocketAddrV4::new([10, 244, 0, 6].into(), 53);
    let pod = lab.pod("ns1_pod1");
    let told = pod.resolve_at(neighbour, &Behaviour::Honest.name(7, "example.com"));
    assert_eq!(told.expect("an answer"), [LIE]);
    is_closed(&lab, LIE, "the neighbour says so");
    // The same question to the cluster's server opens what that says.
    pod.resolve(&Behaviour::Honest.name(3, "example.com"))
        .expect("an answer");
    reach(&lab, Ipv4Addr::new(203, 0, 113, 3), PATIENT).expect("the address is open");
}
