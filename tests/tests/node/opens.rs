//! Addresses that the kernel opens by itself, because the agent has told it which names the same rules match.

use std::{fs, net::Ipv4Addr, ops::RangeInclusive, time::Duration};

use anyhow::{Context as _, Result};
use dnsflow_agent::state;
use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::{Datapath, Lab},
    neighbour::syns_repeated,
    process::{PATIENT, run, wait_until},
    support::{LEFT_TO_VM, not_run, this_test},
};

const POD: &str = "ns1_pod1";
/// A connection that is not there by then is denied.
const BLOCKED: Duration = Duration::from_secs(2);
/// Names of each part of the story.
const MANY: u8 = 20;

/// The address of the name `n{number}.example.com`, a server of the "internet".
fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, number)
}

/// How many addresses the kernel has opened by itself, by the agent's account.
fn opened_by_kernel(lab: &Lab) -> Result<u64> {
    let metrics = lab.agent_metrics()?;
    let name = "dnsflow_addresses_opened_by_kernel_total ";
    let mut lines = metrics.lines();
    let count = lines.find_map(|line| line.strip_prefix(name));
    Ok(count.context("no such metric")?.parse()?)
}

/// Resolves names that nobody has asked for, and connects at once.
fn fetch(lab: &Lab, numbers: RangeInclusive<u8>) {
    let pod = lab.pod(POD);
    for number in numbers {
        let url = format!("http://n{number}.example.com/");
        let fetched = pod.fetch(&url, PATIENT).expect("curl runs");
        fetched
            .result
            .unwrap_or_else(|error| panic!("{url}: {error}"));
    }
}

fn are_marked(lab: &Lab, mut numbers: RangeInclusive<u8>) -> Result<bool> {
    let marked = lab.marked(POD)?;
    Ok(numbers.all(|number| marked.contains(&address(number).into())))
}

#[test]
fn names_below_a_rule_open_without_an_agent() {
    let lab = lab!("kernel-opens", agent);
    if lab.datapath() != Datapath::System {
        not_run(
            &this_test(),
            format!("the packets of the userspace datapath have no marks; {LEFT_TO_VM}"),
        );
        return;
    }
    let records = (1..=250).map(|number| {
        let address = address(number);
        format!("n{number}.example.com. 600 IN A {address}")
    });
    let mut records: Vec<_> = records.collect();
    records.push("deep.below.example.com. 600 IN A 198.18.1.1".to_owned());
    records.push("other.test. 600 IN A 198.18.1.2".to_owned());
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    lab.serve_dns(&records).expect("it listens");
    let mut ip = lab.pod("inet").command("ip").expect("a command");
    run(ip.args(["route", "add", "local", "198.18.0.0/15", "dev", "lo"])).expect("a route");
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny.clone()])
        .expect("the rows are written");
    let pins = lab.pins().expect("a BPF file system");
    let pins = format!("--pin-dir={}", pins.display());
    let state = lab.base().join("state");
    let state_option = format!("--state-dir={}", state.display());
    let start = || {
        lab.start_agent(&["--open-by=marks", &pins, &state_option])
            .expect("the agent is ready")
    };
    let pod = lab.pod(POD);
    let is_open = |name: &str| {
        let fetched = pod.fetch(&format!("http://{name}/"), BLOCKED);
        fetched.expect("curl runs").result.is_ok()
    };
    let syns = || {
        pod.netns()
            .run(syns_repeated)
            .expect("the kernel counts them")
    };

    let agent = start();
    let mut last = 0;
    wait_until("an address that the kernel opens", PATIENT, || {
        last += 1;
        fetch(&lab, last..=last);
        Ok(opened_by_kernel(&lab)? > 0)
    })
    .expect("a class comes to be known");
    let mut next = || {
        let first = last + 1;
        last += MANY;
        first..=last
    };

    let known = opened_by_kernel(&lab).expect("the agent tells");
    agent.freeze().expect("it can be stopped");
    let (before, frozen) = (syns(), next());
    fetch(&lab, frozen.clone());
    assert_eq!(syns(), before, "a first SYN was lost");
    assert!(are_marked(&lab, frozen.clone()).expect("the map"));
    assert!(
        !is_open("deep.below.example.com"),
        "rules may tell it apart"
    );
    assert!(!is_open("other.test"));
    agent.thaw().expect("it goes on");
    wait_until("the records of that time", PATIENT, || {
        Ok(opened_by_kernel(&lab)? >= known + u64::from(MANY))
    })
    .expect("they are read");
    assert!(are_marked(&lab, frozen.clone()).expect("the map"));

    // Without it, the next agent would not know that the rules are the same: the kind of the record, the namespace, and
    // that there is a hash.
    wait_until("a hash of the rules in the journal", PATIENT, || {
        let journal = state::find(&state).map(fs::read).transpose()?;
        let record = b"\x04\x03ns1\x01";
        let has_hash = |journal: Vec<u8>| journal.windows(record.len()).any(|part| part == record);
        Ok(journal.is_some_and(has_hash))
    })
    .expect("it is written");
    agent.kill().expect("it ends");
    let (before, killed) = (syns(), next());
    fetch(&lab, killed.clone());
    assert_eq!(syns(), before, "a first SYN was lost");
    let agent = start();
    wait_until("the names of the time without an agent", PATIENT, || {
        let (list, _) = lab.ask_agent(&["cache", "list"])?;
        let mut numbers = killed.clone();
        Ok(numbers.all(|number| list.contains(&format!("n{number}.example.com"))))
    })
    .expect("the next agent reads them");
    let log = agent.log().expect("its log");
    assert!(!log.contains("open no addresses any more"), "{log}");
    assert!(are_marked(&lab, *frozen.start()..=*killed.end()).expect("the map"));
    fetch(&lab, *frozen.start()..=*killed.end());

    lab.set_firewall("ns1", &[RuleSpec::allow_name("other.test"), deny])
        .expect("the rows are written");
    lab.sync().expect("OVN has followed");
    wait_until("the edit", PATIENT, || Ok(is_open("other.test"))).expect("it is in force");
    for number in next().take(3) {
        assert!(!is_open(&format!("n{number}.example.com")), "{number}");
    }
    drop(agent);
}
