//! What operators ask `explain`. In each scene the connection is tried, the remedy is applied as it is printed, and the
//! connection is tried again.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use dnsflow_agent::{capture::UNASKED_GRACE, denied_connections::CATCH_UP_MAX};
use dnsflow_tests::{
    firewall::RuleSpec,
    frames::query,
    lab,
    lab::Lab,
    liar::Behaviour,
    process::{PATIENT, wait_until},
    topology::{DNS_POD_PORT, DNS_SERVICE, NODE},
};
use serde_json::Value;

use crate::control::applied;

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

/// An explanation: exit code, and what is printed as JSON.
struct Said {
    code: Option<i32>,
    explained: Value,
}

impl Said {
    fn of(lab: &Lab, target: &str) -> Self {
        let arguments = ["explain", "ns1/pod1", target, "-o", "json"];
        let (text, code) = lab.ask_agent(&arguments).expect("the program runs");
        let explained: Value = serde_json::from_str(&text).unwrap_or_default();
        let explained = explained[0].clone();
        Self { code, explained }
    }

    fn first(&self, key: &str) -> &str {
        let value = &self.explained["addresses"][0][key];
        value.as_str().unwrap_or_default()
    }

    fn has_hint(&self, part: &str) -> bool {
        let hints = self.explained["hints"].as_array().into_iter().flatten();
        hints
            .filter_map(Value::as_str)
            .any(|hint| hint.contains(part))
    }
}

fn set(lab: &Lab, rules: &[RuleSpec]) {
    lab.set_firewall("ns1", rules)
        .expect("the rows are written");
}

fn deny_all() -> RuleSpec {
    RuleSpec::deny("0.0.0.0/0").expect("a CIDR")
}

fn fetches(lab: &Lab, host: &str, limit: Duration) -> bool {
    let fetched = lab.pod("ns1_pod1").fetch(&format!("http://{host}/"), limit);
    fetched.expect("curl runs").result.is_ok()
}

/// Waits until an explanation has this exit code and reason. What the pod was told comes to the agent beside the
/// question.
fn comes_to_be(lab: &Lab, target: &str, code: i32, reason: &str) -> Said {
    let mut said = Said::of(lab, target);
    wait_until("the explanation", PATIENT, || {
        said = Said::of(lab, target);
        Ok(said.code == Some(code) && said.first("reason") == reason)
    })
    .unwrap_or_else(|error| panic!("{target}: {error}: {:?} {}", said.code, said.explained));
    said
}

/// Servers that answer by errors, by nothing, or without an address. The remedy is to mend the DNS server.
#[test]
fn what_came_in_place_of_an_address_is_told() {
    let lab = lab!("explained-failures", agent);
    set(&lab, &[RuleSpec::allow_name("example.com"), deny_all()]);
    lab.serve_liar("dns", DNS_POD_PORT).expect("it listens");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    thread::sleep(UNASKED_GRACE);
    let pod = lab.pod("ns1_pod1");
    let of = |behaviour: Behaviour| (behaviour.name(2, "example.com"), behaviour);
    let with_error = "answered_with_error";
    for behaviour in Behaviour::FAILURES {
        let (name, _) = of(behaviour);
        let target = format!("{name}:80");
        let not_yet = Said::of(&lab, &target);
        let is_not_yet = not_yet.code == Some(0) && not_yet.first("reason") == "not_resolved";
        assert!(
            is_not_yet,
            "{name}: {:?} {}",
            not_yet.code, not_yet.explained
        );
        let (reason, text) = match behaviour {
            Behaviour::ServFail | Behaviour::TcpServFail => (with_error, "was told SERVFAIL"),
            Behaviour::Refused => (with_error, "was told REFUSED"),
            Behaviour::NoData => (with_error, "was told that it has no IPv4 address"),
            Behaviour::Alias => (
                with_error,
                "was told that it is an alias (CNAME) of nowhere.cdn.test, which has no IPv4 address",
            ),
            Behaviour::TcpClosed => (
                "not_answered",
                "over TCP, and the server closed the connection without an answer",
            ),
            _ => ("not_answered", "and has no answer"),
        };
        if behaviour == Behaviour::Silent {
            let to = SocketAddr::from((DNS_SERVICE, 53));
            let asked = pod.netns().run(|| {
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
                Ok(socket.send_to(&query(1, &name), to)?)
            });
            asked.expect("it is sent");
        } else {
            // An alias alone is an answer, too.
            let told = pod.resolve(&name).unwrap_or_default();
            assert!(told.is_empty(), "{name}: {told:?}");
        }
        if matches!(behaviour, Behaviour::TcpServFail | Behaviour::TcpClosed) {
            let truncated = comes_to_be(&lab, &target, 3, "not_answered");
            let text = "was truncated: the pod has to ask over TCP, and has no answer over TCP";
            assert!(
                truncated.first("text").ends_with(text),
                "{}",
                truncated.explained
            );
            pod.resolve_tcp(&name).expect_err("there is no answer");
        }
        let mut said = comes_to_be(&lab, &target, 3, reason);
        wait_until("the text", PATIENT, || {
            said = Said::of(&lab, &target);
            Ok(said.first("text").ends_with(text))
        })
        .unwrap_or_else(|error| panic!("{name}: {error}: {}", said.explained));
        assert_eq!(said.code, Some(3), "{name}");
        assert!(
            !said.has_hint("DNS over HTTPS"),
            "it has asked: {}",
            said.explained
        );
        assert!(!fetches(&lab, &name, BLOCKED), "{name}");
    }
    let names = Behaviour::FAILURES.map(|behaviour| of(behaviour).0);
    let records = names
        .each_ref()
        .map(|name| format!("{name}. 30 IN A 203.0.113.2"));
    lab.serve_dns(&records.each_ref().map(String::as_str))
        .expect("it listens");
    for name in &names {
        wait_until("the connection", PATIENT, || {
            Ok(fetches(&lab, name, BLOCKED))
        })
        .unwrap_or_else(|error| panic!("{name}: {error}"));
        comes_to_be(&lab, &format!("{name}:80"), 0, "allowed_by_name");
    }
}

/// A Service that leads to this address outside.
fn add_service(lab: &Lab, front: &str, behind: &str) {
    let name = "Service_ns1/outside_TCP_cluster";
    lab.nbctl(&["lb-add", name, front, behind, "tcp"])
        .expect("a load balancer");
    lab.nbctl(&["ls-lb-add", NODE, name])
        .expect("on the pods' switch");
    // As ovn-kubernetes has it.
    let ids = [
        "external_ids:k8s.ovn.org/kind=Service",
        "external_ids:k8s.ovn.org/owner=ns1/outside",
    ];
    lab.nbctl(&["set", "Load_Balancer", name, ids[0], ids[1]])
        .expect("a Service's");
    lab.sync().expect("OVN has followed");
}

#[test]
fn what_people_ask_is_answered_as_it_is() {
    let lab = lab!("explained-scenes", agent);
    let rules = vec![
        RuleSpec::allow_name("example.com"),
        RuleSpec::allow_name("xn--mnchen-3ya.example.org"),
        deny_all(),
    ];
    set(&lab, &rules);
    let fresh = |at: usize| format!("fresh{at}.example.net");
    let outside = "outside.ns1.svc.cluster.local";
    let mut records = vec![
        "xn--mnchen-3ya.example.org. 30 IN A 203.0.113.1".to_owned(),
        "alias.example.net. 30 IN CNAME cdn.example.net.".to_owned(),
        "cdn.example.net. 30 IN A 203.0.113.3".to_owned(),
        "git.corp.example.net. 30 IN A 203.0.113.4".to_owned(),
        format!("{outside}. 30 IN A 10.96.7.1"),
    ];
    records.extend((0..FRESH).map(|at| format!("{}. 30 IN A 203.0.113.8", fresh(at))));
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    lab.serve_dns(&records).expect("the server starts");
    add_service(&lab, "10.96.7.1:80", "203.0.113.5:80");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let resolve = |name: &str| pod.resolve(name).expect("the name is known");

    // What the pod was told an instant ago is known, by name and by address. An answer that took longer than the wait for
    // it may do without.
    let mut in_time = 0;
    for at in 0..FRESH {
        let name = fresh(at);
        resolve(&name);
        let target = match at % 2 {
            0 => "203.0.113.8:80".to_owned(),
            _ => format!("{name}:80"),
        };
        let asked_at = Instant::now();
        let said = Said::of(&lab, &target);
        if asked_at.elapsed() >= CATCH_UP_MAX {
            continue;
        }
        in_time += 1;
        assert_eq!(said.code, Some(3), "{target}");
        let heard = said.explained["addresses"][0]["heard"].as_array();
        let mut heard = heard.into_iter().flatten();
        assert!(
            heard.any(|one| one["name"] == *name),
            "{target}: {}",
            said.explained
        );
    }
    println!("{in_time} of {FRESH} answers came in time to be judged");

    // A name in another script, as people write it.
    resolve("xn--mnchen-3ya.example.org");
    comes_to_be(&lab, "münchen.example.org:80", 0, "allowed_by_name");
    assert!(fetches(&lab, "203.0.113.1", PATIENT));

    // Of an alias, the name of the question counts. Without a name, the remedy is the address. Behind a Service that leads
    // outside, it is the endpoint.
    resolve("alias.example.net");
    resolve(outside);
    for (target, host, by, again) in [
        (
            "203.0.113.3:80",
            "203.0.113.3",
            "`dnsName: alias.example.net`",
            "alias.example.net",
        ),
        (
            "203.0.113.7:80",
            "203.0.113.7",
            "`cidrSelector: 203.0.113.7/32`",
            "",
        ),
        (
            &*format!("{outside}:80"),
            outside,
            "`cidrSelector: 203.0.113.5/32`",
            "",
        ),
        (
            "10.96.7.1:80",
            "10.96.7.1",
            "`cidrSelector: 203.0.113.5/32`",
            "",
        ),
    ] {
        set(&lab, &rules);
        let mut said = Said::of(&lab, target);
        wait_until("the remedy", PATIENT, || {
            said = Said::of(&lab, target);
            // The rules before may still be in force.
            let remedy = said.first("remedy");
            Ok(said.code == Some(3) && remedy.contains("before rule 2") && remedy.contains(by))
        })
        .unwrap_or_else(|error| panic!("{target}: {error}: {:?} {}", said.code, said.explained));
        assert!(!fetches(&lab, host, BLOCKED), "{target}");
        set(&lab, &applied(rules.clone(), said.first("remedy")));
        wait_until("the connection", PATIENT, || {
            if !again.is_empty() {
                resolve(again);
            }
            Ok(fetches(&lab, host, BLOCKED) && Said::of(&lab, target).code == Some(0))
        })
        .unwrap_or_else(|error| panic!("{target}, {}: {error}", said.first("remedy")));
    }
    set(&lab, &rules);

    // A Service has ports: without one, nobody knows. At another one, the rules decide.
    comes_to_be(&lab, "10.96.0.10", 4, "depends_on_port");
    comes_to_be(&lab, "10.96.0.10:80", 3, "address_refused");
    assert!(!fetches(&lab, "10.96.0.10", BLOCKED));
    // OVN's own addresses are no part of the cluster for a rule that denies all.
    let own = Said::of(&lab, "100.64.0.1:80");
    assert_eq!(own.code, Some(3), "{}", own.explained);
    assert!(!fetches(&lab, "100.64.0.1", BLOCKED));
    // What a DNS server says that filters names.
    let filtered = Said::of(&lab, "0.0.0.0:80");
    assert!(
        filtered.code == Some(0) && filtered.first("text").contains("filters names"),
        "{}",
        filtered.explained
    );
    // A name of one label stands for one that a search domain makes of it.
    resolve("git.corp.example.net");
    let short = Said::of(&lab, "git:80");
    assert_eq!(short.code, Some(4), "{}", short.explained);
    assert!(
        short.has_hint("the pod was told git.corp.example.net"),
        "{}",
        short.explained
    );
    let wildcard = Said::of(&lab, "*.example.com:80");
    assert_eq!(wildcard.code, Some(2), "{}", wildcard.explained);
}

/// Names that are asked about just behind their answers.
const FRESH: usize = 8;
