//! Denied connections have names. The witness is what becomes of the pods' own connections, and for UDP
//! what the switch would do with the datagram.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::Lab,
    process::{PATIENT, wait_until},
};
use serde_json::Value;

use crate::snapshots::Snapshots;

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);
const METRICS: &str = "127.0.0.1:9473";
/// No place that the pods try has a name, and no answer leads there.
const NAMELESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 6);

fn firewall(lab: &Lab, namespace: &str, rules: &[RuleSpec]) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    let rules: Vec<_> = rules.iter().cloned().chain([deny]).collect();
    lab.set_firewall(namespace, &rules)
        .expect("the rows are written");
}

/// What `dnsflow observe` says of denied connections: pod, target, name, reason, rule.
fn denied(lab: &Lab) -> Vec<[String; 5]> {
    let (text, code) = lab
        .ask_agent(&["observe", "--event", "denied", "-o", "json"])
        .expect("the program runs");
    assert_eq!(code, Some(0), "{text}");
    let text_of = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    text.lines()
        .map(|line| {
            let event: Value = serde_json::from_str(line).expect("an object");
            let pod = format!(
                "{}/{}",
                text_of(&event["namespace"]),
                text_of(&event["pod"])
            );
            let rest = [&event["target"], &event["name"], &event["reason"]].map(text_of);
            let [target, name, reason] = rest;
            [pod, target, name, reason, text_of(&event["rules"][0])]
        })
        .collect()
}

fn wait_denied(lab: &Lab, expected: &[[&str; 5]]) {
    let mut seen = Vec::new();
    let found = wait_until("the denials", PATIENT, || {
        seen = denied(lab);
        Ok(seen.len() >= expected.len())
    });
    assert_eq!(seen, expected, "{found:?}");
}

fn fetches(lab: &Lab, pod: &str, address: &str, limit: Duration) -> bool {
    let url = format!("http://{address}/");
    let fetched = lab.pod(pod).fetch(&url, limit);
    fetched.expect("curl runs").result.is_ok()
}

/// A pod sends a datagram to a place. Returns whether the switch lets such a one out.
fn sends(lab: &Lab, pod: &str, to: SocketAddr) -> bool {
    let send = || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        Ok(socket.send_to(b"dnsflow", to)?)
    };
    lab.pod(pod).netns().run(send).expect("a socket");
    lab.lets_out(pod, "udp", to).expect("the trace runs")
}

/// What the agent's metrics are.
fn metrics(lab: &Lab) -> String {
    let scrape = || {
        let mut stream = TcpStream::connect(METRICS)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    lab.node().run(scrape).expect("the agent answers")
}

#[test]
fn a_pod_that_tries_everything_hides_no_denial_of_another() {
    let lab = lab!("denied-flood", agent);
    firewall(&lab, "ns1", &[RuleSpec::allow_name("example.com")]);
    let listen = format!("--listen={METRICS}");
    let _agent = lab.start_agent(&[&listen]).expect("the agent is ready");
    let flood = |ports: std::ops::Range<u16>| {
        let scan = || {
            for port in ports {
                let to = SocketAddr::new(NAMELESS.into(), port);
                // Not longer than it takes to send the SYN.
                let _refused = TcpStream::connect_timeout(&to, Duration::from_millis(1));
            }
            Ok(())
        };
        lab.pod("ns1_pod1").netns().run(scan).expect("a thread");
    };
    flood(1000..2000);
    assert!(!fetches(&lab, "ns1_pod2", "203.0.113.4", BLOCKED));
    let to = SocketAddr::from(([203, 0, 113, 5], 8080));
    assert!(!sends(&lab, "ns1_pod2", to));
    let of_other = |seen: &[[String; 5]]| -> Vec<String> {
        let of_other = seen.iter().filter(|[pod, ..]| pod == "ns1/pod2");
        of_other.map(|[_, target, ..]| target.clone()).collect()
    };
    let expected = ["203.0.113.4:80", "203.0.113.5:8080/udp"];
    let mut seen = Vec::new();
    wait_until("the other pod's denials", PATIENT, || {
        seen = denied(&lab);
        Ok(of_other(&seen) == expected)
    })
    .unwrap_or_else(|error| panic!("{error}: {:?}", of_other(&seen)));
    // Of the flood, as many as a pod may have reported at once, and one each two seconds.
    let of_flood = seen.len() - expected.len();
    assert!((32..200).contains(&of_flood), "{of_flood}");
    let metrics = metrics(&lab);
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        let value = line.and_then(|rest| rest.trim().parse().ok());
        value.unwrap_or_else(|| panic!("{name} in {metrics}"))
    };
    let lost = value("dnsflow_packets_from_pods_total{reason=\"attempt_over_share\"}");
    assert!(lost > 500.0, "{lost}");
    assert_eq!(
        value("dnsflow_packets_from_pods_total{reason=\"attempt_lost\"}"),
        0.0
    );
    assert!(value("dnsflow_denials_left_out_total{reason=\"over_budget\"}") > 50.0);
    let counted = value(
        "dnsflow_denied_connections_total{egressfirewall_namespace=\"ns1\",rule=\"1\",reason=\"not_asked\"}",
    );
    assert!(counted > 100.0, "{counted}");
}

#[test]
fn a_dry_run_installs_nothing_and_says_what_it_would_do() {
    let lab = lab!("denied-dry-run", agent);
    firewall(&lab, "ns1", &[RuleSpec::allow_name("example.com")]);
    let _agent = lab.start_agent(&["--dry-run"]).expect("the agent is ready");
    lab.pod("ns1_pod1")
        .resolve("www.example.com")
        .expect("the name is known");
    assert!(!fetches(&lab, "ns1_pod1", "203.0.113.2", BLOCKED));
    wait_denied(
        &lab,
        &[[
            "ns1/pod1",
            "203.0.113.2:80",
            "www.example.com",
            "dry_run",
            "1",
        ]],
    );
    let mut snapshots = Snapshots::default();
    for command in ["observe --event would_open", "status"] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let (text, code) = lab.ask_agent(&arguments).expect("the program runs");
        snapshots.add("dry-run", &format!("dnsflow {command}"), &text, code);
    }
    snapshots.check();
    assert_eq!(lab.dnsflow_flow_count().expect("the switch answers"), 0);
}
