//! The flows survive restarts of what they live in: the agent puts them back.

mod container;

use std::{
    collections::BTreeSet,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use anyhow::Result;
use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::Lab,
    ovs::{Daemon, Stop},
    pod::PodSpec,
    process::{PATIENT, run, wait_until},
    standstill::{play, unexplained},
};

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);
/// The address of ns1_pod1.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 5);

/// Restarts the daemon in both ways, and expects each time the same flows as before and an open address without another
/// DNS answer. What passes meanwhile, the tests of faults say.
fn flows_come_back(lab: &Lab, daemon: Daemon) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let fetch_all = |host: &str| {
        for pod in ["ns1_pod1", "ns1_pod2"] {
            let fetch = lab.pod(pod).fetch(&format!("http://{host}/"), PATIENT);
            let result = fetch.expect("curl runs").result;
            result.unwrap_or_else(|error| panic!("{pod} to {host}: {error}"));
        }
    };
    fetch_all("www.example.com");
    let before = lab.dnsflow_flows().expect("the dump runs");
    assert!(!before.is_empty());
    for how in [Stop::Terminate, Stop::Kill] {
        lab.restart(daemon, how).expect("the daemon restarts");
        lab.sync().expect("OVN is in step");
        lab.wait_flows(&format!("the same flows, {how:?}"), |flows| flows == before)
            .expect("they come back");
        fetch_all("203.0.113.2");
    }
}

#[test]
fn ovn_controller_stopped_and_killed() {
    let lab = lab!("restart-controller", agent);
    flows_come_back(&lab, Daemon::OvnController);
}

#[test]
fn vswitchd_stopped_and_killed() {
    let lab = lab!("restart-vswitchd", agent);
    flows_come_back(&lab, Daemon::Vswitchd);
}

/// The hard timeouts that Open vSwitch shows: those of the agent's sentinel flows.
fn timeouts(lab: &Lab) -> BTreeSet<String> {
    let dump = lab.ofctl(&["dump-flows", "br-int"]).expect("the dump runs");
    let words = dump.split([' ', ',']);
    let timeouts = words.filter_map(|word| word.strip_prefix("hard_timeout="));
    timeouts.map(str::to_owned).collect()
}

#[test]
fn without_an_agent_flows_stay_as_long_as_the_last_one_was_told() {
    play(without_an_agent);
}

fn without_an_agent() {
    let lab = lab!("restart-agent-keep", agent);
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let agent = lab.start_agent(&["--keep-flows=1h"]);
    let agent = agent.expect("the agent is ready");
    let fetch = |url, limit| {
        let fetch = lab.pod("ns1_pod1").fetch(url, limit);
        fetch.expect("curl runs").result
    };
    fetch("http://www.example.com/", PATIENT).expect("the rule allows it");
    // By marks, a port without an address may get its own flow with the restart.
    let told = lab.pod("ns1_pod2").resolve("www.example.com");
    told.expect("the name is known");
    assert_eq!(timeouts(&lab), BTreeSet::from(["3600".to_owned()]));
    let before = lab.dnsflow_flows().expect("the dump runs");
    agent.kill().expect("it is killed");

    let agent = lab.start_agent(&["--keep-flows=30s"]);
    let agent = agent.expect("the agent is ready");
    wait_until("the new time", PATIENT, || {
        Ok(timeouts(&lab) == BTreeSet::from(["30".to_owned()]))
    })
    .expect("the sentinel flows are written again");
    assert_eq!(lab.dnsflow_flows().expect("the dump runs"), before);
    fetch("http://203.0.113.2/", PATIENT).expect("the address is open");
    agent.kill().expect("it is killed");
    let killed = Instant::now();
    wait_until("the end of the flows", PATIENT, || {
        Ok(lab.dnsflow_flow_count()? == 0)
    })
    .expect("they end");
    let kept = killed.elapsed();
    println!("without an agent, the flows stayed for {kept:.1?}");
    // The flows were renewed ten seconds before at most, unless the machine did not let the agent do so.
    if kept <= Duration::from_secs(19) {
        unexplained(format!("the flows stayed for {kept:?}"));
    }
    fetch("http://203.0.113.2/", BLOCKED).expect_err("the address is closed");
}

/// A pod has gone while no agent ran, and another one has come at its address: OVN knows both by the same keys. The
/// witness is the pod beside, whose flows stay.
#[test]
fn a_pod_takes_over_no_flow_of_the_pod_before_it() {
    let lab = lab!("restart-agent-pod", agent);
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    let (spec, beside) = (PodSpec::new("ns1", "pod1", ADDRESS), "ns1_pod2");
    let anew = spec.lsp();
    let with_same_key = || {
        let key = [
            "set",
            "Logical_Switch_Port",
            &anew,
            "options:requested-tnl-key=77",
        ];
        lab.nbctl(&key).expect("its row is changed");
        lab.sync().expect("OVN is in step");
    };
    with_same_key();
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    let fetch = |pod: &str, url, limit| {
        let fetch = lab.pod(pod).fetch(url, limit);
        fetch.expect("curl runs").result
    };
    for pod in [&anew, beside] {
        fetch(pod, "http://www.example.com/", PATIENT).expect("the rule allows it");
    }
    let is_of_pod = |flow: &&String| flow.contains(&format!("nw_src={ADDRESS},"));
    let before = lab.dnsflow_flows().expect("the dump runs");
    let flows_of_pod = before.iter().filter(is_of_pod).count();
    assert!(
        flows_of_pod > 0 && flows_of_pod < before.len(),
        "{before:#?}"
    );
    agent.kill().expect("it is killed");

    lab.delete_pod(&anew).expect("it goes");
    lab.add_pod(&spec).expect("another one comes");
    with_same_key();
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let after = lab.wait_flows("the flows of the pod beside", |flows| {
        flows.iter().filter(is_of_pod).count() == 0
    });
    let mut expected = before;
    expected.retain(|flow| !is_of_pod(&flow));
    assert_eq!(after.expect("the others are removed"), expected);
    fetch(beside, "http://203.0.113.2/", PATIENT).expect("the address is open");
    fetch(&anew, "http://203.0.113.2/", BLOCKED).expect_err("the address is closed");
    fetch(&anew, "http://www.example.com/", PATIENT).expect("it opens again");
}

/// How often the agent is killed; more by hand (`DNSFLOW_KILLS`).
const KILLS: usize = 4;

/// The agent is killed right behind two answers, and the rules are edited while no agent runs. The next one does what
/// the rules of now say of both names, without a further question.
#[test]
fn what_is_told_right_before_a_kill_is_known() {
    let lab = lab!("restart-killed", agent);
    let pins = lab.pins().expect("a BPF file system");
    let pins = format!("--pin-dir={}", pins.display());
    kill_right_behind_answers(&lab, || lab.start_agent(&[&pins]));
}

/// The same with another Pod each time: what one container has of its own, the next one does not see.
#[test]
fn what_is_told_right_before_the_pod_is_replaced_is_known() {
    let lab = lab!("restart-replaced", agent);
    kill_right_behind_answers(&lab, || {
        let agent = lab.spawn_agent_command(container::command(&lab)?)?;
        agent.wait_ready()
    });
}

fn kill_right_behind_answers(lab: &Lab, start: impl Fn() -> Result<Agent>) {
    let kills = std::env::var("DNSFLOW_KILLS").map_or(Ok(KILLS), |kills| kills.parse());
    let kills: usize = kills.expect("a number");
    let start = || start().expect("the agent is ready");
    let host = |number: usize| Ipv4Addr::from(0xc612_0000 + number as u32);
    let name = |number: usize, of: &str| format!("n{number}.{of}.example.com");
    let told = |kill: usize| [(2 * kill + 1, "a"), (2 * kill + 2, "b")];
    let records = (0..kills).flat_map(told).map(|(number, of)| {
        let (name, host) = (name(number, of), host(number));
        format!("{name}. 600 IN A {host}")
    });
    let records: Vec<String> = records.collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    lab.serve_dns(&records).expect("it listens");
    let mut ip = lab.pod("inet").command("ip").expect("a command");
    run(ip.args(["route", "add", "local", "198.18.0.0/15", "dev", "lo"])).expect("a route");
    let (a, b) = ("a.example.com", "b.example.com");
    let all = "0.0.0.0/0";
    let [deny, allow] =
        [RuleSpec::deny(all), RuleSpec::allow(all)].map(|rule| rule.expect("a CIDR"));
    let versions = [
        [
            RuleSpec::allow_name(a),
            RuleSpec::deny_name(b),
            deny.clone(),
        ],
        [
            RuleSpec::deny_name(a),
            RuleSpec::allow_name(b),
            deny.clone(),
        ],
        [RuleSpec::deny_name(a), RuleSpec::allow_name(b), allow],
        [RuleSpec::allow_name(b), RuleSpec::allow_name(a), deny],
    ];
    // By the rules of each version.
    let allowed: [&[&str]; 4] = [&["a"], &["b"], &["b"], &["a", "b"]];
    let set = |version: usize| {
        lab.set_firewall("ns1", &versions[version % versions.len()])
            .expect("the rows are written");
    };
    let pod = lab.pod("ns1_pod1");
    set(0);
    let mut agent = start();
    let (mut open, mut closed) = (Vec::new(), Vec::new());
    for kill in 0..kills {
        for (number, of) in told(kill) {
            pod.resolve(&name(number, of)).expect("the name is known");
        }
        agent.kill().expect("it is killed");
        set(kill + 1);
        agent = start();
        for (number, of) in told(kill) {
            let is_allowed = allowed[(kill + 1) % allowed.len()].contains(&of);
            let limit = if is_allowed { PATIENT } else { BLOCKED };
            let url = format!("http://{}/", host(number));
            let is_open = pod.fetch(&url, limit).expect("curl runs").result.is_ok();
            match (is_open, is_allowed) {
                (true, false) => open.push((kill, of)),
                (false, true) => closed.push((kill, of)),
                (true, true) | (false, false) => {}
            }
        }
    }
    println!("{kills} kills: wrongly open {open:?}, wrongly closed {closed:?}");
    assert!(open.is_empty() && closed.is_empty());
}
