//! What the edit of a rule closes stays closed, although an agent before this one opened it. The witnesses are the
//! pod's own connection and the flows in the switch.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use dnsflow_tests::{
    agent::Agent,
    counts::Share,
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
/// The second SYN of a connection leaves after a second (RFC 6298, section 2.1).
const LATE: Duration = Duration::from_millis(500);
/// Between two connections, and between two edits.
const PAUSE: Duration = Duration::from_millis(20);
const EDIT_EVERY: Duration = Duration::from_millis(200);
const NAME: &str = "www.example.com";
/// No rule mentions it.
const UNRULED: &str = "www.network.test";
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

/// The connections of a pod with an address, until told to stop: how many were late, of how many. The pod asks for the
/// name before each.
fn late_connections(lab: &Lab, name: &str, address: Ipv4Addr, stop: &AtomicBool) -> Result<Share> {
    let pod = lab.pod("ns1_pod1");
    let to = SocketAddr::from((address, 80));
    let mut share = Share { count: 0, of: 0 };
    while !stop.load(Ordering::Relaxed) {
        share.of += 1;
        let Ok(told) = pod.resolve(name) else {
            // A lost answer makes a connection late.
            share.count += 1;
            continue;
        };
        ensure!(told == [address], "{name} leads to {told:?}");
        let in_time = pod.netns().run(|| {
            let start = Instant::now();
            let connected = TcpStream::connect_timeout(&to, LATE).is_ok();
            Ok(connected && start.elapsed() <= LATE)
        })?;
        share.count += usize::from(!in_time);
        thread::sleep(PAUSE);
    }
    Ok(share)
}

/// Each edit moves all rules. OVN's own rule by CIDR, which every version has as well, moves with them.
#[test]
fn edits_cost_an_allowed_name_no_more_connections_than_an_allowed_network() {
    let lab = lab!("edits-many", agent);
    let edits = std::env::var("DNSFLOW_EDITS").map_or(60, |edits| edits.parse().expect("a number"));
    let [of_name, of_network] = [2, 3].map(|last| Ipv4Addr::new(203, 0, 113, last));
    let rules = [
        RuleSpec::allow_name("example.com"),
        RuleSpec::allow(&format!("{of_network}/32")).expect("a CIDR"),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ];
    let moved = [&[RuleSpec::allow_name("other.test")][..], &rules].concat();
    lab.set_firewall("ns1", &rules).expect("the rows");
    let records = [(NAME, of_name), (UNRULED, of_network)];
    let records = records.map(|(name, address)| format!("{name}. 600 IN A {address}"));
    lab.serve_dns(&records.each_ref().map(String::as_str))
        .expect("it listens");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    assert!(connects(&lab, NAME, PATIENT), "the rule allows it");
    let stop = AtomicBool::new(false);
    let (name, network) = thread::scope(|scope| {
        let name = scope.spawn(|| late_connections(&lab, NAME, of_name, &stop));
        let network = scope.spawn(|| late_connections(&lab, UNRULED, of_network, &stop));
        let edited = (0..edits).try_for_each(|edit| {
            thread::sleep(EDIT_EVERY);
            let rules = if edit % 2 == 0 { &moved[..] } else { &rules };
            lab.write_manifest("ns1", rules)?;
            lab.write_firewall_rows("ns1", rules)
        });
        stop.store(true, Ordering::Relaxed);
        edited.expect("the rows are written");
        [name, network]
            .map(|thread| thread.join().expect("no panic").expect("connections"))
            .into()
    });
    println!("{edits} edits: of the name {name:?} late, of the network {network:?}");
    assert!(!name.is_more_than(network), "{name:?} and {network:?}");
}
