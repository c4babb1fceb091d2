//! Clusters of other shapes: IPv6 beside IPv4, and pods on a network of their user's.

use std::{net::IpAddr, time::Duration};

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::{Cluster, Lab},
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

fn fetch_v6(lab: &Lab, pod: &str, url: &str, limit: Duration) -> Result<String, String> {
    lab.pod(pod).fetch_v6(url, limit).expect("curl runs").result
}

/// A name with addresses of both families, below a rule, in a cluster that has both.
fn both_families(lab: &Lab) {
    lab.serve_dns(&[
        "www.example.com. 30 IN A 203.0.113.2",
        "www.example.com. 30 IN AAAA 2001:db8::2",
    ])
    .expect("the server starts");
    lab.set_firewall(
        "ns1",
        &[
            RuleSpec::allow_name("Example.com"),
            deny("0.0.0.0/0"),
            deny("::/0"),
        ],
    )
    .expect("the rows are written");
    lab.resolve_centrally(
        "Example.com",
        &["203.0.113.8", "2001:db8::8"].map(|address| address.parse().expect("an address")),
    )
    .expect("the sets are filled");
    let url = "http://www.example.com/";
    for (pod, open) in [("ns1_pod1", false), ("ns2_pod1", true)] {
        let fetched = fetch_v6(lab, pod, url, BLOCKED);
        assert_eq!(fetched.is_ok(), open, "without dnsflow: {pod}: {fetched:?}");
    }
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    // An answer with one family only: curl would ask for both.
    lab.pod("ns1_pod1")
        .resolve_all::<IpAddr>("AAAA", &["www.example.com"])
        .expect("the name is known");
    assert_eq!(
        fetch_v6(lab, "ns1_pod1", "http://[2001:db8::2]/", PATIENT).as_deref(),
        Ok("2001:db8::2 greets fd00:172:18::2")
    );
    let fetched = fetch(lab, "ns1_pod1", "http://203.0.113.2/", BLOCKED);
    assert!(fetched.is_err(), "not asked for yet: {fetched:?}");
    assert_eq!(
        fetch(lab, "ns1_pod1", url, PATIENT).as_deref(),
        Ok("203.0.113.2 greets 172.18.0.2")
    );
    for (pod, url) in [
        ("ns1_pod1", "http://[2001:db8::7]/"),
        ("ns1_pod2", "http://[2001:db8::2]/"),
    ] {
        let fetched = fetch_v6(lab, pod, url, BLOCKED);
        assert!(fetched.is_err(), "{pod} {url}: {fetched:?}");
    }
    fetch_v6(lab, "ns1_pod1", "http://[2001:db8::8]/", PATIENT).expect("OVN opens it");
}

#[test]
fn ipv6_is_opened_as_ipv4_is() {
    let cluster = Cluster {
        dual_stack: true,
        ..Cluster::default()
    };
    let lab = lab!("networks-dual", agent, cluster);
    both_families(&lab);
}

#[test]
fn address_sets_of_the_resolver_feature_are_known() {
    let cluster = Cluster {
        dual_stack: true,
        name_resolver: true,
    };
    let lab = lab!("networks-resolver", agent, cluster);
    both_families(&lab);
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
    assert!(!flows.is_empty());
    for flow in &flows {
        assert!(flow.contains(&source), "{flow}");
    }
    lab.delete_pod(&asker).expect("the pod is deleted");
    lab.wait_flows("the pod's flows to go", <[String]>::is_empty)
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
