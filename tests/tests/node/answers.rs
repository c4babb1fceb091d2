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

/// What a segment holds is up to the server. Other answers over TCP come from a real one (`transports.rs`).
#[test]
fn an_answer_in_odd_segments_opens_what_it_says() {
    let lab = lab!("answers-tcp", agent);
    let _agent = start(&lab);
    for (behaviour, last) in [(Behaviour::Slow, 1), (Behaviour::Several, 2)] {
        let address = Ipv4Addr::new(203, 0, 113, last);
        let before = reach(&lab, address, BLOCKED);
        assert!(before.is_err(), "{behaviour:?}, unasked: {before:?}");
        let name = behaviour.name(last, "example.com");
        let told = lab.pod("ns1_pod1").resolve_tcp(&name);
        let told = told.unwrap_or_else(|error| panic!("{behaviour:?}: {error:#}"));
        assert_eq!(told, [address], "{behaviour:?}");
        let fetched = reach(&lab, address, PATIENT);
        assert!(fetched.is_ok(), "{behaviour:?}: {fetched:?}");
    }
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
        match behaviour {
            Behaviour::Honest => assert_eq!(told, Ok(vec![truth])),
            Behaviour::Forbidden => {
                assert_eq!(told.map(|told| told.len()), Ok(1 + FORBIDDEN.len()))
            }
            _ => {}
        }
    }
    // A neighbour that answers like the cluster's DNS server is not trusted.
    lab.serve_liar("ns1_pod2", 53).expect("it listens");
    let neighbour = SocketAddrV4::new([10, 244, 0, 6].into(), 53);
    let told = pod.resolve_at(neighbour, &Behaviour::Honest.name(7, "example.com"));
    assert_eq!(told.expect("an answer"), [LIE]);

    reach(&lab, truth, PATIENT).expect("what is true is open");
    let fetched = reach(&lab, LIE, BLOCKED);
    assert!(fetched.is_err(), "a lie: {fetched:?}");
    // An address that was once opened stays so for longer than a test takes.
    let flows = lab.dnsflow_flows().expect("the dump runs");
    for closed in FORBIDDEN.iter().chain([&LIE]) {
        let to = format!("nw_dst={closed}");
        let found: Vec<_> = flows.iter().filter(|flow| flow.contains(&to)).collect();
        assert!(found.is_empty(), "{closed}: {found:#?}");
    }
}
