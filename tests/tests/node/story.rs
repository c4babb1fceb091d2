//! What dnsflow is for: a pod reaches what its firewall names, and nothing more.

use std::{net::SocketAddrV4, time::Duration};

use anyhow::{Result, ensure};
use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    lab,
    lab::Lab,
    pod::Fetch,
    scenes::{Actor, Goal, STILL_OPEN, Stage, WITH_DNSFLOW, WITHOUT_DNSFLOW, play},
};

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
    // The packet meets a flow of a group, not OVN's. The flow that turns a mark into a tag is met by each.
    let cookie = |flow: &String| Some(flow.strip_prefix("cookie=")?.split(',').next()?.to_owned());
    let cookies: Vec<String> = Lab::of_groups(&flows).filter_map(cookie).collect();
    for (last, ours) in [(2, true), (7, false)] {
        let to = SocketAddrV4::new([203, 0, 113, last].into(), 80);
        let trace = lab.trace("ns1_pod1", to).expect("the trace runs");
        let meets = cookies.iter().any(|cookie| trace.contains(cookie));
        assert_eq!(meets, ours, "{to}: {trace}");
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
