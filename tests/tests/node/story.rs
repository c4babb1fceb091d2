//! What dnsflow is for: a pod reaches what its firewall names, and nothing more.

use std::{fs, net::SocketAddrV4, time::Duration};

use anyhow::{Result, ensure};
use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::Lab,
    ovs::{Daemon, Stop},
    pod::Fetch,
    process::{ONE_TRY, PATIENT, wait_until},
    scenes::{Actor, BLOCKED, Goal, STILL_OPEN, Stage, WITH_DNSFLOW, WITHOUT_DNSFLOW, play},
};

fn fetch(lab: &Lab, pod: &str, url: &str, limit: Duration) -> Result<String, String> {
    lab.pod(pod).fetch(url, limit).expect("curl runs").result
}

/// ns1 may reach example.com and nothing else, ns2 nothing; the controller was told another
/// address than the pods will be.
fn firewalls(lab: &Lab) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", &[RuleSpec::allow_name("example.com"), deny.clone()])
        .expect("the rows are written");
    lab.set_firewall("ns2", &[deny])
        .expect("the rows are written");
    lab.resolve_centrally("example.com", &["203.0.113.8".parse().expect("an address")])
        .expect("the address set is filled");
}

/// The scenes in the lab.
struct Node<'a>(&'a Lab);

impl Stage for Node<'_> {
    fn fetch(&self, actor: Actor, goal: Goal, limit: Duration) -> Result<Fetch> {
        let pod = match actor {
            Actor::Pod => "ns1_pod1",
            Actor::Neighbour => "ns1_pod2",
            Actor::Stranger => "ns2_pod1",
        };
        let host = match goal {
            Goal::Name => "example.com",
            Goal::Subdomain => "www.example.com",
            Goal::SubdomainAddress => "203.0.113.2",
            Goal::NeverResolved => "203.0.113.7",
            Goal::NameWithoutRule => "www.example.net",
        };
        let fetch = self.0.pod(pod).fetch(&format!("http://{host}/"), limit)?;
        if let Ok(page) = &fetch.result {
            let expected = match goal {
                Goal::Name => "203.0.113.1 greets 172.18.0.2",
                _ => "203.0.113.2 greets 172.18.0.2",
            };
            ensure!(page == expected, "{goal:?} is not {page}");
        }
        Ok(fetch)
    }
}

fn start(lab: &Lab) -> Agent {
    lab.start_agent(&[]).expect("the agent is ready")
}

#[test]
fn a_pod_reaches_what_its_firewall_names_and_nothing_more() {
    let lab = lab!("story", agent);
    firewalls(&lab);
    for scene in WITHOUT_DNSFLOW {
        play(&Node(&lab), scene).expect(scene.shows);
    }
    let agent = start(&lab);
    for scene in WITH_DNSFLOW {
        play(&Node(&lab), scene).expect(scene.shows);
    }
    let flows = lab.dnsflow_flows().expect("the dump runs");
    for address in ["203.0.113.1", "203.0.113.2"] {
        let count = flows.iter().filter(|flow| flow.contains(address)).count();
        assert!(count > 0, "no flow for {address}: {flows:#?}");
    }
    // The packet meets dnsflow's flow (the upper half of its cookie is "DNSF"), not OVN's.
    for (last, ours) in [(2, true), (7, false)] {
        let to = SocketAddrV4::new([203, 0, 113, last].into(), 80);
        let trace = lab.trace("ns1_pod1", to).expect("the trace runs");
        assert_eq!(trace.contains("cookie 0x444e5346"), ours, "{to}: {trace}");
    }

    let status = agent.terminate().expect("it stops");
    assert!(status.success(), "{status}");
    let still_open = |lab: &Lab| {
        for scene in STILL_OPEN {
            play(&Node(lab), scene).expect(scene.shows);
        }
    };
    still_open(&lab);
    let _agent = start(&lab);
    still_open(&lab);
}

#[test]
fn a_rule_that_goes_takes_its_flows_along_and_comes_back() {
    let lab = lab!("story-rule", agent);
    firewalls(&lab);
    let _agent = start(&lab);
    fetch(&lab, "ns1_pod1", "http://www.example.com/", PATIENT).expect("the rule allows it");

    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall("ns1", std::slice::from_ref(&deny))
        .expect("the rows are written");
    lab.wait_flows("the rule's flows to go", <[String]>::is_empty)
        .expect("they go");
    let fetched = fetch(&lab, "ns1_pod1", "http://www.example.com/", BLOCKED);
    assert!(fetched.is_err(), "the rule is gone: {fetched:?}");

    // Not at index 0 any more: the ACL of index 0 now stands for another rule.
    let net = RuleSpec::allow_name("example.net");
    lab.set_firewall("ns1", &[net, RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    wait_until("the new rules to work", PATIENT, || {
        Ok(
            fetch(&lab, "ns1_pod1", "http://www.example.com/", ONE_TRY).is_ok()
                && fetch(&lab, "ns1_pod1", "http://www.example.net/", ONE_TRY).is_ok(),
        )
    })
    .expect("they work");
}

#[test]
fn a_manifest_that_does_not_parse_is_named_and_harms_no_other() {
    let lab = lab!("story-bad-manifest", agent);
    firewalls(&lab);
    fs::write(lab.manifests().join("broken.yaml"), "spec: [egress\n").expect("a file");
    let agent = start(&lab);
    let named = agent.events().expect("the log").into_iter().any(|event| {
        ["WARN", "ERROR"].contains(&event["level"].as_str().unwrap_or_default())
            && event.to_string().contains("broken.yaml")
    });
    assert!(named, "{}", agent.log().expect("the log"));
    fetch(&lab, "ns1_pod1", "http://www.example.com/", PATIENT).expect("the others work");
}

#[test]
fn a_switch_that_is_not_there_yet_is_waited_for_and_named() {
    let lab = lab!("story-no-switch", agent);
    firewalls(&lab);
    lab.stop_daemon(Daemon::Vswitchd, Stop::Terminate)
        .expect("it stops");
    let agent = lab.spawn_agent(&[]).expect("the agent starts");
    wait_until("a message about the socket", PATIENT, || {
        Ok(agent.log()?.contains("br-int.mgmt"))
    })
    .expect("the agent says what it lacks");
    lab.restart(Daemon::Vswitchd, Stop::Terminate)
        .expect("it starts");
    lab.sync().expect("OVN is in step");
    let _agent = agent.wait_ready().expect("the agent connects");
    fetch(&lab, "ns1_pod1", "http://www.example.com/", PATIENT).expect("it works");
}

#[test]
fn sigterm_stops_it_cleanly_and_dns_goes_on() {
    let lab = lab!("story-sigterm", agent);
    firewalls(&lab);
    let agent = start(&lab);
    fetch(&lab, "ns1_pod1", "http://www.example.com/", PATIENT).expect("it works");
    let status = agent.terminate().expect("it stops");
    assert!(status.success(), "{status}");
    let addresses = lab.pod("ns1_pod1").resolve("www.example.com");
    assert_eq!(
        addresses.expect("DNS does not need the agent"),
        [std::net::Ipv4Addr::new(203, 0, 113, 2)]
    );
    // An agent that starts again works as the first did.
    let _agent = start(&lab);
    fetch(&lab, "ns1_pod2", "http://www.example.com/", PATIENT).expect("it works again");
}
