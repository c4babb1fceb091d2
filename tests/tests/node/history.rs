//! What the agent remembers of connections, and what people learn from it. The witness is what becomes of
//! the pods' own connections.

use std::{fs, process::Command, time::Duration};

use crate::snapshots::Snapshots;
use dnsflow_tests::{
    agent,
    firewall::{self, RuleSpec},
    lab,
    lab::Lab,
    process::{PATIENT, wait_until},
    support,
};
use serde_json::Value;

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

/// These rules, and behind them one that denies all else.
fn and_deny(rules: &[RuleSpec]) -> Vec<RuleSpec> {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    rules.iter().cloned().chain([deny]).collect()
}

fn fetches(lab: &Lab, pod: &str, address: &str, limit: Duration) -> bool {
    let url = format!("http://{address}/");
    let fetched = lab.pod(pod).fetch(&url, limit);
    fetched.expect("curl runs").result.is_ok()
}

fn ask(lab: &Lab, arguments: &[&str]) -> (String, Option<i32>) {
    lab.ask_agent(arguments).expect("the program runs")
}

/// Asks until the answer is about so many connections: the agent hears of them a little later.
fn ask_about(
    lab: &Lab,
    arguments: &[&str],
    count: impl Fn(&Value) -> usize,
    wanted: usize,
) -> Value {
    let mut answer = Value::Null;
    let heard = wait_until("the connections", PATIENT, || {
        let (text, _) = ask(lab, &[arguments, &["-o", "json"]].concat());
        answer = serde_json::from_str(&text)?;
        Ok(count(&answer) == wanted)
    });
    assert!(heard.is_ok(), "{answer:#}");
    answer
}

/// What `dnsflow try` says becomes of each target.
fn changes(answer: &Value) -> Vec<(String, String)> {
    let changed = answer["changed"].as_array().expect("a list").iter();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let changes = changed.map(|one| (text(&one["target"]), text(&one["change"])));
    changes.collect()
}

#[test]
fn what_a_firewall_would_have_done_is_what_it_does_once_applied() {
    let lab = lab!("history-try", agent);
    let present = and_deny(&[
        RuleSpec::allow_name("example.com"),
        RuleSpec::allow("203.0.113.5/32").expect("a CIDR"),
    ]);
    lab.set_firewall("ns1", &present)
        .expect("the rows are written");
    let names = [
        ("www.example.com", "203.0.113.2"),
        ("mail.example.net", "203.0.113.3"),
        ("cdn.example.org", "203.0.113.4"),
    ];
    let records = names.map(|(name, address)| format!("{name}. 30 IN A {address}"));
    lab.serve_dns(&records.each_ref().map(String::as_str))
        .expect("the server starts");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let addresses = ["2", "3", "4", "5", "6"].map(|last| format!("203.0.113.{last}"));
    let try_all = || {
        for (name, _) in names {
            pod.resolve(name).expect("the name is known");
        }
        addresses
            .each_ref()
            .map(|address| fetches(&lab, "ns1_pod1", address, BLOCKED))
    };
    assert_eq!(try_all(), [true, false, false, true, false]);

    let other = and_deny(&[
        RuleSpec::allow_name("mail.example.net").ports(&[("tcp", 80)]),
        RuleSpec::allow_name("example.org").ports(&[("tcp", 443)]),
        RuleSpec::allow("203.0.113.5/32").expect("a CIDR"),
    ]);
    let file = lab.base().join("tried.yaml");
    fs::write(&file, firewall::manifest("ns1", &other)).expect("there is room");
    let file = file.to_str().expect("text");
    let stay = |answer: &Value| {
        let counts = ["stay_allowed", "stay_denied"].map(|key| answer[key].as_u64());
        counts.map(|count| count.expect("a number"))
    };
    let seen = |answer: &Value| changes(answer).len() + stay(answer).iter().sum::<u64>() as usize;
    let answer = ask_about(&lab, &["try", "-f", file], seen, addresses.len());
    let expected = [
        ("203.0.113.2:80", "would_deny"),
        ("203.0.113.3:80", "would_allow"),
    ];
    assert_eq!(
        changes(&answer),
        expected.map(|(target, change)| (target.to_owned(), change.to_owned()))
    );
    assert_eq!(stay(&answer), [1, 2]);
    let (text, code) = ask(&lab, &["try", "-f", file]);
    assert_eq!(code, Some(3));
    let mut snapshots = Snapshots::default();
    snapshots.add("try", "dnsflow try -f other.yaml", &text, code);
    snapshots.check();

    // What is there changes nothing.
    let same = lab.manifests().join("ns1.yaml");
    let (text, code) = ask(&lab, &["try", "-f", same.to_str().expect("text")]);
    assert_eq!(code, Some(0), "{text}");
    // Pods without an EgressFirewall are not watched.
    let nobody = lab.base().join("unwatched.yaml");
    fs::write(&nobody, firewall::manifest("ns2", &other)).expect("there is room");
    let (text, code) = ask(&lab, &["try", "-f", nobody.to_str().expect("text")]);
    assert_eq!(code, Some(4), "{text}");

    lab.set_firewall("ns1", &other)
        .expect("the rows are written");
    assert_eq!(try_all(), [false, true, false, true, false]);
}

#[test]
fn what_nobody_uses_and_what_ovn_alone_would_deny_is_said() {
    let lab = lab!("history-unused", agent);
    let rules = and_deny(&[
        RuleSpec::allow_name("example.com"),
        RuleSpec::allow_name("www.example.net"),
        RuleSpec::allow("203.0.113.5/32").expect("a CIDR"),
    ]);
    lab.set_firewall("ns1", &rules)
        .expect("the rows are written");
    lab.serve_dns(&[
        "www.example.com. 30 IN A 203.0.113.2",
        "api.example.com. 30 IN A 203.0.113.3",
    ])
    .expect("the server starts");
    let agent = lab.start_agent(&[]).expect("the agent is ready");
    for name in ["www.example.com", "api.example.com"] {
        let known = lab.pod("ns1_pod1").resolve(name);
        known.expect("the name is known");
    }
    let central = [203, 0, 113, 3].into();
    lab.resolve_centrally("example.com", &[central])
        .expect("OVN takes it");
    assert!(fetches(&lab, "ns1_pod1", "203.0.113.2", PATIENT));
    assert!(fetches(&lab, "ns1_pod1", "203.0.113.3", PATIENT));
    assert!(!fetches(&lab, "ns1_pod1", "203.0.113.9", BLOCKED));

    let nb = format!("unix:{}", lab.socket("ovnnb_db.sock").display());
    let unused = ["unused", "-n", "ns1", "--ovn-nb", &nb];
    let places = |answer: &Value| {
        let rules = answer["rules"].as_array().expect("a list").iter();
        let places = rules.map(|rule| rule["places"].as_u64().expect("a number") as usize);
        places.sum()
    };
    let answer = ask_about(&lab, &unused, places, 3);
    let rules = answer["rules"].as_array().expect("a list").iter();
    let used: Vec<_> = rules.map(|rule| rule["used"].as_str()).collect();
    let used: Vec<_> = used.into_iter().flatten().collect();
    assert_eq!(used, ["connected", "never", "never", "connected"]);
    let only = answer["only_by_answer"].as_array().expect("it was asked");
    let only: Vec<_> = only.iter().map(|one| &one["target"]).collect();
    assert_eq!(only, ["203.0.113.2:80"]);
    let (text, code) = ask(&lab, &unused);
    assert_eq!(code, Some(0));
    let mut snapshots = Snapshots::default();
    snapshots.add("unused", "dnsflow unused --namespace ns1", &text, code);
    snapshots.check();
    let (text, code) = ask(&lab, &["unused", "-n", "ns1", "--ovn-nb", "unix:/nowhere"]);
    assert_eq!(code, Some(4), "{text}");
    let (text, code) = ask(&lab, &["unused", "-n", "ns2"]);
    assert_eq!((&*text, code), ("", Some(1)));

    // Without the agent's flows, OVN is alone.
    agent.terminate().expect("it stops");
    let socket = lab.socket("br-int.mgmt");
    let socket = socket.to_str().expect("text");
    let (text, code) = ask(&lab, &["cleanup", "--openflow-socket", socket]);
    assert_eq!(code, Some(0), "{text}");
    assert!(!fetches(&lab, "ns1_pod1", "203.0.113.2", BLOCKED));
    assert!(fetches(&lab, "ns1_pod1", "203.0.113.3", PATIENT));
}

/// The capture was made in a pod of a lab; unit tests of the agent say what is in it.
#[test]
fn a_capture_is_replayed_without_an_agent() {
    let workspace = support::workspace().expect("a workspace");
    let mut snapshots = Snapshots::default();
    let arguments = [
        "replay",
        "eth.pcap",
        "--manifests",
        "manifests",
        "--resolver",
        "10.96.0.10",
        "--cluster-networks",
        "10.244.0.0/16",
    ];
    let output = Command::new(agent::binary().expect("it is built"))
        .args(arguments)
        .current_dir(workspace.join("dnsflow-agent/src/replay/tests"))
        .output()
        .expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let command = format!("dnsflow {}", arguments.join(" "));
    snapshots.add("replay", &command, &text, output.status.code());
    snapshots.check();
}
