//! What a pod was given stays: while it is in use over changed records, and thousands of flows over a restart of
//! ovn-controller.

use std::{collections::BTreeSet, net::Ipv4Addr, time::Instant};

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::Lab,
    ovs::{Daemon, Stop},
    process::{PATIENT, wait_until},
    support::is_by_marks,
};

/// About what the long page brings in half a second.
const SOME: u64 = 160 << 10;

fn firewall(lab: &Lab) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
}

/// Whether new connections to the address pass.
fn leads_to(flows: &[String], address: &str) -> bool {
    let destination = format!("nw_dst={address} ");
    let mut flows = flows.iter().filter(|flow| flow.contains(&destination));
    flows.any(|flow| !flow.contains("+est"))
}

#[test]
fn record_change_keeps_the_old_address_in_use() {
    let lab = lab!("entries-record", agent);
    firewall(&lab);
    lab.serve_dns(&[
        "www.example.com. 1 IN A 203.0.113.2",
        "idle.example.com. 1 IN A 203.0.113.4",
    ])
    .expect("the server starts");
    let _agent = lab
        .start_agent(&["--min-ttl", "1s", "--idle-grace", "2s"])
        .expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let mut download = pod.download("www.example.com").expect("curl starts");
    download.goes_on(1).expect("the rule allows it");

    lab.serve_dns(&["www.example.com. 3600 IN A 203.0.113.3"])
        .expect("the server starts");
    let fetched = pod.fetch("http://www.example.com/", PATIENT);
    let fetched = fetched.expect("curl runs").result;
    assert_eq!(fetched.as_deref(), Ok("203.0.113.3 greets 172.18.0.2"));

    // Another cache entry, as old, but not in use, comes and goes meanwhile.
    lab.serve_dns(&["idle.example.com. 1 IN A 203.0.113.4"])
        .expect("the server starts");
    pod.resolve("idle.example.com").expect("the name is known");
    lab.wait_flows("the idle address to open", |flows| {
        leads_to(flows, "203.0.113.4")
    })
    .expect("it opens");
    let waited = wait_until("the idle address to close", PATIENT, || {
        download.goes_on(SOME)?;
        Ok(!leads_to(&lab.dnsflow_flows()?, "203.0.113.4"))
    });
    waited.expect("it closes, and the download goes on");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    assert!(leads_to(&flows, "203.0.113.2"), "in use: {flows:#?}");
    assert!(
        leads_to(&flows, "203.0.113.3"),
        "within its TTL: {flows:#?}"
    );

    drop(download);
    wait_until("the old address to close", PATIENT, || {
        Ok(!leads_to(&lab.dnsflow_flows()?, "203.0.113.2"))
    })
    .expect("it closes once it is out of use");
    let flows = lab.dnsflow_flows().expect("the dump runs");
    assert!(
        leads_to(&flows, "203.0.113.3"),
        "within its TTL: {flows:#?}"
    );
}

/// Names with this many addresses each fit into an answer without EDNS (RFC 1035, section 4.2.1).
const ADDRESSES: usize = 28;
const NAMES: usize = 90;

#[test]
fn ovn_controller_restart_loses_nothing() {
    let lab = lab!("entries-wipe", agent);
    firewall(&lab);
    // 198.18.0.0/15 is for benchmarks (RFC 2544).
    let mut zone = Vec::new();
    let names: Vec<String> = (0..NAMES).map(|n| format!("n{n}.example.com")).collect();
    let mut addresses = BTreeSet::new();
    for (n, name) in names.iter().enumerate() {
        for k in 0..ADDRESSES {
            let at = n * ADDRESSES + k;
            let address = Ipv4Addr::new(198, 18, (at / 250) as u8, 1 + (at % 250) as u8);
            addresses.insert(address);
            zone.push(format!("{name}. 3600 IN A {address}"));
        }
    }
    zone.push("www.example.com. 3600 IN A 203.0.113.2".into());
    let zone: Vec<&str> = zone.iter().map(String::as_str).collect();
    lab.serve_dns(&zone).expect("the server starts");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    for pod in ["ns1_pod1", "ns1_pod2"] {
        let told: Vec<Ipv4Addr> = lab
            .pod(pod)
            .resolve_all("A", &names)
            .expect("the names are known");
        assert_eq!(told.len(), addresses.len(), "{pod}");
        lab.pod(pod)
            .resolve("www.example.com")
            .expect("it is known");
    }
    // For each pod, one for each address; for all, the end of tags, and two for the rule: new and established
    // connections. By marks, one for each pod, too, and one for the end of each bit.
    let of_marks = if is_by_marks() { 2 + 11 } else { 0 };
    let all = 2 * (addresses.len() + 1) + 1 + 2 + of_marks;
    wait_until(
        "all flows",
        PATIENT,
        || Ok(lab.dnsflow_flow_count()? == all),
    )
    .expect("they come");
    let before = lab.dnsflow_flows().expect("the dump runs");
    assert!(all >= 5_000, "{all}");
    let count = || lab.dnsflow_flow_count_as_they_are();
    let all = count().expect("the switch answers");
    let watch = lab.watch_flows().expect("the monitor runs");

    // One sample after the other, from before the restart to long after it.
    let mut samples: Vec<(Instant, usize)> = Vec::new();
    let mut restarted = false;
    wait_until("all flows to come back", PATIENT, || {
        if !restarted {
            restarted = true;
            lab.stop_daemon(Daemon::OvnController, Stop::Kill)?;
            lab.start_daemon(Daemon::OvnController)?;
        }
        let flows = count()?;
        samples.push((Instant::now(), flows));
        // Few flows come back between two samples.
        let wiped = samples.iter().any(|(_, flows)| *flows < all) || watch.has_deleted()?;
        Ok(wiped && flows == all)
    })
    .expect("they come back");
    let fewest = samples.iter().map(|(_, flows)| *flows).min();
    let wiped = samples
        .iter()
        .rposition(|(_, flows)| Some(*flows) == fewest);
    if let (Some(wiped), Some((back, _))) = (wiped, samples.last()) {
        println!(
            "{all} flows, at the fewest {fewest:?} of them; all back {:?} after that",
            back.duration_since(samples[wiped].0)
        );
    }
    lab.sync().expect("OVN is in step");
    lab.wait_flows("the same flows as before", |flows| flows == before)
        .expect("the same");
    for pod in ["ns1_pod1", "ns1_pod2"] {
        let fetched = lab.pod(pod).fetch("http://203.0.113.2/", PATIENT);
        fetched
            .expect("curl runs")
            .result
            .expect("the address is open");
    }
}
