//! What edits of rules cost the connections of a pod. The witness is OVN's own rule by CIDR.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use dnsflow_tests::{counts::Share, firewall::RuleSpec, lab, lab::Lab, process::PATIENT};

/// The second SYN of a connection leaves after a second (RFC 6298, section 2.1).
const LATE: Duration = Duration::from_millis(500);
/// Between two connections, and between two edits.
const PAUSE: Duration = Duration::from_millis(20);
const EDIT_EVERY: Duration = Duration::from_millis(200);
const NAME: &str = "www.example.com";
/// No rule mentions it.
const UNRULED: &str = "www.network.test";

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
    let fetched = lab
        .pod("ns1_pod1")
        .fetch(&format!("http://{NAME}/"), PATIENT);
    let result = fetched.expect("curl runs").result;
    result.expect("the rule allows it");
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
