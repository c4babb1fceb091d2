//! What a pod only seems to have asked: questions that the switch drops, connections that were never made,
//! and a neighbour on a second network that speaks as the cluster's DNS.

use std::{
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use dnsflow_agent::capture::UNASKED_GRACE;
use dnsflow_common::walk::{TCP_ACK, TCP_SYN};
use dnsflow_tests::{
    agent::Agent,
    firewall::RuleSpec,
    frames::{Answer, Frame, Transport, query},
    lab,
    lab::Lab,
    pod::PodSpec,
    process::{PATIENT, wait_until},
    udn::{Topology, UserNetwork},
    wire::Wire,
};

/// What the agent opens is in the switch long before.
const OPENED: Duration = Duration::from_millis(500);
/// Nobody's true answer leads here.
const FORGED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
/// The gateway router's Ethernet address outside.
const GATEWAY_MAC: [u8; 6] = [0x0a, 0x58, 0xac, 0x12, 0, 2];

/// The pods of this namespace may reach example.com and what is below it.
fn start(lab: &Lab, namespace: &str) -> Agent {
    lab.serve_dns(&["www.example.com. 30 IN A 203.0.113.2"])
        .expect("the server starts");
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    lab.set_firewall(namespace, &[RuleSpec::allow_name("example.com"), deny])
        .expect("the rows are written");
    lab.start_agent(&[]).expect("the agent is ready")
}

fn send(lab: &Lab, pod: &str, interface: &str, frame: &Frame) {
    let bytes = frame.build();
    let sent = lab.pod(pod).netns().run(|| {
        Wire::open(interface).send(&bytes);
        Ok(())
    });
    sent.expect("the namespace is there");
}

/// Sends a frame from the "internet" to a pod, in the name of its DNS server; returns when it is there.
fn forge(lab: &Lab, pod: &str, frame: &Frame) {
    let wire = lab.pod(pod).netns().run(|| Ok(Wire::open("eth0")));
    let wire = wire.expect("the namespace is there");
    let forged = Frame {
        mac_dst: GATEWAY_MAC,
        ..frame.clone()
    };
    send(lab, "inet", "eth0", &forged);
    // On the way, only addresses and counts in the headers of the link and of IP change.
    let bytes = frame.build();
    wire.expect_that(|found| found.get(34..) == bytes.get(34..));
}

/// Whether a flow leads to the forged address.
fn opened(lab: &Lab) -> bool {
    let flows = lab.dnsflow_flows().expect("the dump runs");
    flows.iter().any(|flow| flow.contains(&FORGED.to_string()))
}

#[track_caller]
fn stays_closed(lab: &Lab, why: &str) {
    thread::sleep(OPENED);
    assert!(!opened(lab), "{why}");
}

fn answer(id: u16, name: &str) -> Vec<u8> {
    Answer {
        id,
        ..Answer::new(name, &[FORGED])
    }
    .build()
}

#[test]
fn what_the_switch_drops_was_not_asked() {
    let lab = lab!("asked-udp", agent);
    let _agent = start(&lab, "ns1");
    let fetched = lab
        .pod("ns1_pod1")
        .fetch("http://www.example.com/", PATIENT);
    fetched
        .expect("curl runs")
        .result
        .expect("the name opens its address");
    thread::sleep(UNASKED_GRACE);
    let name = "unknown.example.com";
    let other = |last| SocketAddr::from(([10, 244, 0, last], 40_000));
    let asked = |id| Frame::from_pod(query(id, name));
    for (why, id, question) in [
        (
            "another MAC address",
            1,
            Frame {
                mac_src: [0x0a, 0x58, 0x0a, 0xf4, 0, 6],
                ..asked(1)
            },
        ),
        (
            "another IP address",
            2,
            Frame {
                src: other(6),
                ..asked(2)
            },
        ),
    ] {
        send(&lab, "ns1_pod1", "eth0", &question);
        forge(&lab, "ns1_pod1", &Frame::to_pod(answer(id, name)));
        stays_closed(&lab, why);
    }
    // The same answer is believed where the pod has truly asked: whoever can send in the name of the
    // pod's DNS server is trusted as it is.
    send(&lab, "ns1_pod1", "eth0", &asked(3));
    forge(&lab, "ns1_pod1", &Frame::to_pod(answer(3, name)));
    wait_until("the flow", PATIENT, || Ok(opened(&lab))).expect("the frames get there");
}

#[test]
fn a_connection_that_the_pod_has_not_made_opens_nothing() {
    let lab = lab!("asked-tcp", agent);
    let _agent = start(&lab, "ns1");
    // A switch that tracks connections lets no SYN-ACK through without a SYN.
    lab.make_stateless().expect("OVN is in step");
    thread::sleep(UNASKED_GRACE);
    let message = answer(1, "www.example.com");
    let mut stream = (message.len() as u16).to_be_bytes().to_vec();
    stream.extend(message);
    for (seq, flags, payload) in [
        (1000, TCP_SYN | TCP_ACK, Vec::new()),
        (1001, TCP_ACK, stream),
    ] {
        let transport = Transport::Tcp {
            seq,
            ack: 1,
            flags,
            options: 0,
        };
        let segment = Frame {
            transport,
            ..Frame::to_pod(payload)
        };
        forge(&lab, "ns1_pod1", &segment);
    }
    stays_closed(&lab, "two forged segments");
}

#[test]
fn a_neighbour_on_a_secondary_network_is_not_the_clusters_dns() {
    let lab = lab!("asked-secondary", agent);
    let network = UserNetwork::new("blue", "ns5", Topology::Layer2);
    lab.add_network(&network).expect("the rows are written");
    let switch = network.switch();
    lab.nbctl(&[
        "set",
        "Logical_Switch",
        &switch,
        "external_ids:k8s.ovn.org/role=secondary",
    ])
    .expect("the role is another");
    let mut addresses = Vec::new();
    for (name, last) in [("p1", 21), ("p2", 22)] {
        let spec = PodSpec::new("ns5", name, [10, 244, 0, last].into());
        lab.add_pod(&spec).expect("the pod is created");
        lab.wait_wired(&spec.lsp()).expect("OVN wires it");
        addresses.push(lab.join_network(&spec, &network).expect("it joins"));
        // As without IPAM: the MAC address alone.
        let own = PodSpec::new("", "", addresses[addresses.len() - 1]);
        let port = format!("ns5.blue_ns5_{name}");
        lab.nbctl(&["--wait=hv", "lsp-set-port-security", &port, &own.mac()])
            .expect("the port is there");
    }
    let _agent = start(&lab, "ns5");
    thread::sleep(UNASKED_GRACE);
    let mac = |address: Ipv4Addr| {
        let [a, b, c, d] = address.octets();
        [0x0a, 0x58, a, b, c, d]
    };
    let name = "www.example.com";
    let asked = Frame {
        mac_src: mac(addresses[0]),
        mac_dst: mac(addresses[1]),
        src: (addresses[0], 40_000).into(),
        ..Frame::from_pod(query(1, name))
    };
    let wire = |pod: &str| {
        let wire = lab.pod(pod).netns().run(|| Ok(Wire::open("ovn-udn1")));
        wire.expect("the namespace is there")
    };
    let (asker, neighbour) = (wire("ns5_p1"), wire("ns5_p2"));
    asker.send(&asked.build());
    neighbour.expect(&asked.build());
    let answered = Frame {
        payload: answer(1, name),
        ..asked.turned()
    };
    neighbour.send(&answered.build());
    asker.expect(&answered.build());
    stays_closed(&lab, "a neighbour says so");
}
