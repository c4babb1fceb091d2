//! Pods on a network of their user's.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::Lab,
    pod::PodSpec,
    process::PATIENT,
    udn::{Topology, UserNetwork},
};

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);

fn deny(cidr: &str) -> RuleSpec {
    RuleSpec::deny(cidr).expect("a CIDR")
}

fn fetch(lab: &Lab, pod: &str, url: &str, limit: Duration) -> Result<String, String> {
    lab.pod(pod).fetch(url, limit).expect("curl runs").result
}

/// A namespace whose firewall is enforced on a network of its own: names are asked for on one
/// port of the pod, and lead to connections on the other.
fn names_open_on(lab: &Lab, network: &UserNetwork) {
    let namespace = &network.namespace;
    lab.add_network(network).expect("the rows are written");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let mut addresses: Vec<IpAddr> = Vec::new();
    for (name, last) in [("p1", 21), ("p2", 22)] {
        let spec = PodSpec::new(namespace, name, [10, 244, 0, last].into());
        lab.add_pod(&spec).expect("the pod is created");
        lab.wait_wired(&spec.lsp()).expect("OVN wires it");
        addresses.push(lab.join_network(&spec, network).expect("it joins").into());
    }
    let (asker, other) = (format!("{namespace}_p1"), format!("{namespace}_p2"));
    let greets = |from: u8| format!("203.0.113.{from} greets {}", network.topology.outside());
    assert_eq!(
        fetch(lab, &asker, "http://203.0.113.7/", PATIENT),
        Ok(greets(7)),
        "the network works, and has no firewall yet"
    );
    lab.set_firewall(
        namespace,
        &[RuleSpec::allow_name("example.com"), deny("0.0.0.0/0")],
    )
    .expect("the rows are written");
    assert_eq!(
        fetch(lab, &asker, "http://www.example.com/", PATIENT),
        Ok(greets(2))
    );
    for (pod, url) in [
        (&asker, "http://203.0.113.7/"),
        (&asker, "http://www.example.net/"),
        (&other, "http://203.0.113.2/"),
    ] {
        let fetched = fetch(lab, pod, url, BLOCKED);
        assert!(fetched.is_err(), "{pod} {url}: {fetched:?}");
    }
    // On the network where the firewall is enforced, and nowhere else.
    let flows = lab.dnsflow_flows().expect("the dump runs");
    let source = format!("nw_src={},", addresses[0]);
    let switch = |flow: &str| {
        let mut fields = flow.split([',', ' ']);
        fields.find_map(|field| Some(field.strip_prefix("metadata=")?.to_owned()))
    };
    let to_addresses = flows.iter().filter(|flow| flow.contains("nw_dst="));
    let switches: BTreeSet<_> = to_addresses
        .map(|flow| {
            assert!(flow.contains(&source), "{flow}");
            switch(flow)
        })
        .collect();
    assert_eq!(switches.len(), 1, "{flows:#?}");
    for flow in &flows {
        assert!(switches.contains(&switch(flow)), "{flow}");
    }
    lab.delete_pod(&asker).expect("the pod is deleted");
    // Those of groups stay a while.
    lab.wait_flows("the pod's flows to go", |flows| {
        !flows.iter().any(|flow| flow.contains(&source))
    })
    .expect("they go");
}

#[test]
fn user_defined_network() {
    let lab = lab!("networks-udn", agent);
    names_open_on(&lab, &UserNetwork::new("cudn5", "ns5", Topology::Layer2));
}

#[test]
fn user_defined_network_of_layer_3() {
    let lab = lab!("networks-udn3", agent);
    names_open_on(&lab, &UserNetwork::new("udn3", "ns3", Topology::Layer3));
}
