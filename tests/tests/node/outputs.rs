//! What the subcommands print for people is what was reviewed (`snapshots/`), in the situations in which
//! people ask. `docs/asking.md` shows nothing else.

use std::{
    net::{SocketAddrV4, UdpSocket},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use crate::snapshots::{self, Snapshots};
use dnsflow_tests::{
    agent,
    firewall::RuleSpec,
    frames::query,
    lab,
    lab::Lab,
    ovs::{Daemon, Stop},
    pod::DNS,
    process::{PATIENT, wait_until},
    topology::{DNS_POD, DNS_POD_PORT},
};
use serde_json::Value;

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

fn rules() -> Vec<RuleSpec> {
    vec![
        RuleSpec::allow_name("mail.example.net").ports(&[("tcp", 25)]),
        RuleSpec::deny("203.0.113.4/32").expect("a CIDR"),
        RuleSpec::allow("203.0.113.5/32").expect("a CIDR"),
        RuleSpec::allow_name("example.com"),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ]
}

const RECORDS: &[&str] = &[
    "www.example.com. 300 IN A 203.0.113.2",
    "mail.example.net. 300 IN A 203.0.113.3",
    "denied.example.com. 300 IN A 203.0.113.4",
    "cdn.example.org. 300 IN A 203.0.113.6",
    "short.example.com. 1 IN A 203.0.113.7",
    "metadata.example.com. 300 IN A 169.254.169.254",
];

fn ask(lab: &Lab, arguments: &[&str]) -> (String, Option<i32>) {
    lab.ask_agent(arguments).expect("the program runs")
}

/// Asks, and adds the answer to a snapshot.
fn show(snapshots: &mut Snapshots, name: &'static str, lab: &Lab, arguments: &[&str]) {
    let (output, code) = ask(lab, arguments);
    let command = format!("dnsflow {}", arguments.join(" "));
    snapshots.add(name, &command, &output, code);
}

/// Explains a connection of pod1 in ns1, adds the answer, and compares the reason.
fn explain(snapshots: &mut Snapshots, lab: &Lab, target: &str, expected: &str) {
    explain_pod(snapshots, lab, "ns1/pod1", target, expected);
}

fn explain_pod(snapshots: &mut Snapshots, lab: &Lab, pod: &str, target: &str, expected: &str) {
    assert_eq!(reason(lab, pod, target), expected, "{pod} {target}");
    show(snapshots, "explain", lab, &["explain", pod, target]);
}

fn reason(lab: &Lab, pod: &str, target: &str) -> String {
    let (text, _) = ask(lab, &["explain", pod, target, "-o", "json"]);
    let explained: Value = serde_json::from_str(&text).expect("a list");
    let reason = &explained[0]["addresses"][0]["reason"];
    reason.as_str().unwrap_or_default().to_owned()
}

fn fetches(lab: &Lab, pod: &str, address: &str, limit: Duration) -> bool {
    let url = format!("http://{address}/");
    let fetched = lab.pod(pod).fetch(&url, limit);
    fetched.expect("curl runs").result.is_ok()
}

/// A subcommand with the lab agent's options.
fn with_options(lab: &Lab, subcommand: &str, other: &[(&str, &str)]) -> Command {
    let binary = agent::binary().expect("it is built");
    let agent = lab.agent_command(&binary).expect("a command");
    let arguments = agent.get_args().map(|argument| {
        let text = argument.to_str().expect("text").to_owned();
        if text == "agent" {
            subcommand.to_owned()
        } else {
            text
        }
    });
    let mut arguments: Vec<String> = arguments.collect();
    for (option, value) in other {
        let at = arguments.iter().position(|argument| argument == option);
        arguments[at.expect("the agent has it") + 1] = (*value).to_owned();
    }
    let mut command = Command::new(binary);
    command.args(arguments);
    lab.node().enter(&mut command).expect("a namespace");
    command
}

#[test]
fn answers_are_printed_as_reviewed() {
    let lab = lab!("outputs", agent);
    lab.set_firewall("ns1", &rules())
        .expect("the rows are written");
    lab.serve_dns(RECORDS).expect("the server starts");
    let options = [
        "--max-addresses-per-name=1",
        "--min-ttl=1s",
        "--idle-grace=1s",
        // What is printed shows flows to addresses.
        "--open-by=flows",
    ];
    let _agent = lab.start_agent(&options).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    for name in [
        "www.example.com",
        "mail.example.net",
        "denied.example.com",
        "metadata.example.com",
    ] {
        pod.resolve(name).expect("the name is known");
    }
    let mut snapshots = Snapshots::default();
    let all = &mut snapshots;
    let observe = |event| ["observe", "--event", event];
    show(all, "observe", &lab, &observe("opened"));
    show(all, "observe", &lab, &observe("address_refused"));

    for name in ["cdn.example.org", "short.example.com"] {
        pod.resolve(name).expect("the name is known");
    }
    assert!(fetches(&lab, "ns1_pod1", "203.0.113.2", PATIENT));
    for (address, denied) in [("203.0.113.6", 1), ("203.0.113.3", 2), ("203.0.113.8", 3)] {
        assert!(!fetches(&lab, "ns1_pod1", address, BLOCKED), "{address}");
        wait_until("the denial", PATIENT, || {
            Ok(ask(&lab, &observe("denied")).0.lines().count() == denied)
        })
        .expect("it is told of");
    }
    show(all, "observe", &lab, &observe("denied"));
    // The switch has told of the packets, and that nobody uses what has expired.
    wait_until("the counters", PATIENT, || {
        let is_expired = reason(&lab, "ns1/pod1", "203.0.113.7") == "expired";
        // Those to a port that no rule opens count, too.
        let are_counted = ["203.0.113.2", "203.0.113.3"].into_iter().all(|address| {
            let (text, _) = ask(&lab, &["explain", "ns1/pod1", address, "-o", "json"]);
            let explained: Value = serde_json::from_str(&text).expect("a list");
            explained[0]["addresses"][0]["entry"]["packets"].as_u64() > Some(0)
        });
        Ok(is_expired && are_counted)
    })
    .expect("they come");

    explain(all, &lab, "203.0.113.2:80", "allowed_by_name");
    explain(all, &lab, "203.0.113.5:80", "allowed_by_network");
    explain_pod(all, &lab, "ns2/pod1", "203.0.113.6:80", "no_firewall");
    // What only ovn-kubernetes has resolved, only OVN lets pass.
    assert!(!fetches(&lab, "ns1_pod1", "203.0.113.1", BLOCKED));
    lab.resolve_centrally("example.com", &[[203, 0, 113, 1].into()])
        .expect("the row is written");
    assert!(fetches(&lab, "ns1_pod1", "203.0.113.1", PATIENT));
    explain(all, &lab, "203.0.113.1:80", "allowed_by_ovn");
    // Thirteen situations in which something is blocked; the last five are in the other test.
    explain(all, &lab, "cdn.example.org:443", "denied_by_rule");
    explain(all, &lab, "203.0.113.6:443", "denied_by_rule");
    explain(all, &lab, "api.example.com", "depends_on_address");
    explain(all, &lab, "mail.example.net:80", "wrong_port");
    explain(all, &lab, "denied.example.com", "denied_by_earlier_rule");
    explain(all, &lab, "short.example.com", "expired");
    explain(all, &lab, "metadata.example.com", "address_refused");
    explain_pod(all, &lab, "ns1/pod2", "203.0.113.2:80", "told_to_other_pod");

    show(all, "cache-list", &lab, &["cache", "list"]);
    show(all, "flows-list", &lab, &["flows", "list"]);
    show(all, "log-level", &lab, &["log-level"]);
    show(all, "log-level", &lab, &["log-level", "debug"]);
    show(all, "status", &lab, &["status"]);

    // A second address of a name is one too many.
    lab.serve_dns(&["www.example.com. 300 IN A 203.0.113.1"])
        .expect("the server starts");
    pod.resolve("www.example.com").expect("the name is known");
    explain(all, &lab, "203.0.113.2:443", "limit_reached");

    let socket = lab.socket("br-int.mgmt").display().to_string();
    let cleanup = ["cleanup", "--openflow-socket", &socket, "--dry-run"];
    let (output, code) = ask(&lab, &cleanup);
    // The switch has them in no order.
    let output = snapshots::stated(&output);
    let mut lines: Vec<&str> = output.lines().collect();
    let count = lines.pop().expect("the number of flows");
    lines.sort_unstable();
    // How many sentinel flows there are depends on OVN's release.
    lines.dedup();
    lines.push(count);
    let output: String = lines.iter().map(|line| format!("{line}\n")).collect();
    all.add(
        "cleanup-dry-run",
        "dnsflow cleanup --dry-run",
        &output,
        code,
    );

    let mut check = with_options(&lab, "check", &[]);
    let output = check.arg("--open-by=flows").output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let text = text.replace(&lab.base().display().to_string(), "<lab>");
    all.add("check", "dnsflow check", &text, output.status.code());

    let learning = ["learn", "--namespace", "ns1", "--for", "3s"];
    let (manifest, code) = thread::scope(|scope| {
        let learning = scope.spawn(|| ask(&lab, &learning));
        // The recording does not begin at once.
        while !learning.is_finished() {
            pod.resolve("www.example.com").expect("the name is known");
            thread::sleep(Duration::from_millis(200));
        }
        learning.join().expect("no panic")
    });
    all.add(
        "learn",
        "dnsflow learn --namespace ns1 --for 3s",
        &manifest,
        code,
    );

    let mut tar = Command::new("tar");
    let mut bundle = with_options(&lab, "bundle", &[]);
    let mut bundle = bundle.stdout(Stdio::piped()).spawn().expect("it runs");
    let archive = bundle.stdout.take().expect("a pipe");
    let listed = tar.args(["--list", "--gzip"]).stdin(archive).output();
    let listed = String::from_utf8(listed.expect("tar runs").stdout).expect("text");
    let code = bundle.wait().expect("it ends").code();
    all.add(
        "bundle",
        "dnsflow bundle | tar --list --gzip",
        &listed,
        code,
    );

    snapshots.check();
}

#[test]
fn what_keeps_an_agent_from_knowing_is_explained_as_reviewed() {
    let lab = lab!("outputs-unknown", agent);
    lab.set_firewall("ns1", &rules())
        .expect("the rows are written");
    lab.serve_dns(RECORDS).expect("the server starts");
    let mut snapshots = Snapshots::default();
    let all = &mut snapshots;

    // Nobody has named a DNS server.
    let binary = agent::binary().expect("it is built");
    let trusting = lab.agent_command(&binary).expect("a command");
    let mut arguments = trusting.get_args();
    let mut untrusting = Command::new(&binary);
    while let Some(argument) = arguments.next() {
        match argument == "--resolver" {
            true => _ = arguments.next(),
            false => _ = untrusting.arg(argument),
        }
    }
    lab.node().enter(&mut untrusting).expect("there is one");
    let agent = lab.spawn_agent_command(untrusting).expect("it starts");
    let agent = agent.wait_ready().expect("it is ready");
    unknown(all, &lab, "www.example.com:80", "no_resolver_trusted");
    agent.terminate().expect("it stops");

    // The agent has just started: a database of OVN's does not answer yet.
    lab.stop_daemon(Daemon::NbDb, Stop::Terminate)
        .expect("it stops");
    let agent = lab.spawn_agent(&[]).expect("it starts");
    wait_until("the agent to answer", PATIENT, || {
        Ok(lab.control_socket().exists() && ask(&lab, &["status"]).1 == Some(0))
    })
    .expect("it answers");
    wait_until("the programs to be attached", PATIENT, || {
        Ok(ask(&lab, &["status"]).0.contains("4 of 4 attached"))
    })
    .expect("they are");
    unknown(all, &lab, "203.0.113.2:80", "agent_starting");
    show(all, "status-starting", &lab, &["status"]);
    lab.start_daemon(Daemon::NbDb).expect("it starts");
    let agent = agent.wait_ready().expect("it is ready");

    // The pod asks a server that is not trusted: itself, and not by the address of the Service.
    let pod = lab.pod("ns1_pod1");
    let server = SocketAddrV4::new(DNS_POD, DNS_POD_PORT);
    pod.resolve_at(server, "www.example.com")
        .expect("the name is known");
    unknown(all, &lab, "203.0.113.2:80", "not_resolved");

    // The DNS server does not answer.
    let by_name = RuleSpec::allow_name("example.com");
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[by_name, deny])
        .expect("the rows are written");
    lab.stop_dns().expect("it stops");
    let asked = query(1, "www.example.com");
    // A query is remembered for a while.
    comes_to_be(all, &lab, "www.example.com:80", "not_answered", |_| {
        let sent = pod
            .netns()
            .run(|| Ok(UdpSocket::bind("0.0.0.0:0")?.send_to(&asked, DNS)?));
        sent.expect("it is sent");
    });
    lab.serve_dns(RECORDS).expect("the server starts");
    lab.set_firewall("ns1", &rules())
        .expect("the rows are written");
    wait_until("the agent to read the rules", PATIENT, || {
        Ok(reason(&lab, "ns1/pod1", "203.0.113.5:80") == "allowed_by_network")
    })
    .expect("it reads them");

    // ovn-kubernetes has not written the ACL of a new rule, and never does.
    let former = rules();
    let mut rules = rules();
    rules.insert(0, RuleSpec::allow_name("*.example.org"));
    lab.write_manifest("ns1", &rules).expect("a file");
    pod.resolve("cdn.example.org").expect("the name is known");
    let late = "firewall_not_taken_over";
    let mut is_there = true;
    comes_to_be(all, &lab, "203.0.113.6:80", "acl_missing", |before| {
        // The time that ovn-kubernetes has went by between two looks: it begins anew with a new edit.
        if before.contains(late) == is_there {
            is_there = !is_there;
            let rules = if is_there { &rules } else { &former };
            lab.write_manifest("ns1", rules).expect("a file");
        }
    });
    comes_to_be(all, &lab, "203.0.113.6:80", late, |_| {});
    show(all, "status-problem", &lab, &["status"]);
    agent.terminate().expect("it stops");
    snapshots.check();
}

fn unknown(snapshots: &mut Snapshots, lab: &Lab, target: &str, expected: &str) {
    assert_eq!(reason(lab, "ns1/pod1", target), expected, "{target}");
    show(
        snapshots,
        "explain-unknown",
        lab,
        &["explain", "ns1/pod1", target],
    );
}

/// Waits until this is the reason, and adds the explanation that has it: a further one may have another reason. Before
/// each look, `prepare` gets the explanation before.
fn comes_to_be(
    snapshots: &mut Snapshots,
    lab: &Lab,
    target: &str,
    expected: &str,
    mut prepare: impl FnMut(&str),
) {
    let arguments = ["explain", "ns1/pod1", target];
    let mut explained = (String::new(), None);
    wait_until(expected, PATIENT, || {
        prepare(&explained.0);
        explained = ask(lab, &arguments);
        Ok(explained.0.contains(&format!("({expected})")))
    })
    .expect("it comes to be the reason");
    let command = format!("dnsflow {}", arguments.join(" "));
    let (output, code) = explained;
    snapshots.add("explain-unknown", &command, &output, code);
}
