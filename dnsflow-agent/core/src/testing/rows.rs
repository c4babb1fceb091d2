//! What the sources of a node say: rules, rows and frames.

use std::net::{Ipv4Addr, Ipv6Addr};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, AAAA, CNAME},
    },
};

use ipnet::IpNet;

use super::DATAPATH;
use crate::{
    Input, Timestamp,
    io::input::Frame,
    ovn::{
        acl::of_ports,
        hash::{Family, address_set_hashes},
        rows::{Acl, Interface, LogicalFlow, MacAddress, Pipeline, PortBinding, RowId},
    },
    policy::rules::ACL_PRIORITY_OFFSET,
    values::firewall::{Destination, Firewall, FirewallId, FirewallUpdate, Rule, RuleAction},
};

/// The port group of ns1: ovn-kubernetes' hash of
/// `default-network-controller:Namespace:ns1`.
pub const GROUP: &str = "a9633447981174624809";
/// The most rules that OVN has rows for here.
const ROWS: u32 = 20;

/// The interface index of the veth of an `Interface` row: the last digits of its id.
pub fn ifindex_of(row: RowId) -> u32 {
    row.to_string()[30..].parse().unwrap_or(1)
}

/// An `Interface` row for this logical port, of a pod with this UID at 10.244.0.`host`.
pub fn interface(port: &str, host: u8, uid: &str) -> Interface {
    Interface {
        name: format!("veth-{port}").into(),
        iface_id: port.into(),
        iface_id_ver: Some(uid.into()),
        addresses: vec![Ipv4Addr::new(10, 244, 0, host).into()],
        mac: MacAddress::new([0x0a, 0x58, 10, 244, 0, host]),
        network: None,
        sandbox: Some(format!("sandbox-{uid}")),
        ifindex: None,
        policing_kbps: 0,
    }
}

/// A `Port_Binding` row of a pod of ns1 at 10.244.0.`host`.
pub fn port_binding(port: &str, host: u8) -> PortBinding {
    PortBinding {
        logical_port: port.into(),
        datapath: DATAPATH,
        tunnel_key: u32::from(host),
        namespace: Some("ns1".into()),
    }
}

/// An EgressFirewall with these rules.
pub fn firewall(rules: &[Rule]) -> Firewall {
    Firewall {
        rules: rules.into(),
        ..Firewall::default()
    }
}

/// The EgressFirewall of ns1 is this one now, or is gone; `reset`: it is the only one.
pub fn firewalls(reset: bool, firewall: Option<Firewall>) -> Input {
    let id = FirewallId {
        namespace: "ns1".into(),
        name: "default".into(),
    };
    Input::Firewalls(FirewallUpdate {
        reset,
        firewalls: vec![(id, firewall)],
    })
}

/// A rule that allows a name.
pub fn allow(name: &str) -> Rule {
    of_name(RuleAction::Allow, name)
}

/// A rule that denies a name.
pub fn deny(name: &str) -> Rule {
    of_name(RuleAction::Deny, name)
}

fn of_name(action: RuleAction, name: &str) -> Rule {
    Rule {
        action,
        destination: Destination::Name(name.parse().expect("a name")),
        ports: vec![],
    }
}

/// A rule that denies all of IPv4.
pub fn deny_all() -> Rule {
    Rule {
        action: RuleAction::Deny,
        destination: Destination::Cidr("0.0.0.0/0".parse().expect("a network")),
        ports: vec![],
    }
}

/// The row of a rule's ACL.
pub fn acl_row(index: u32) -> RowId {
    RowId::new((0xac1_0000 + u128::from(index)) << 96)
}

/// The ACL of a rule of ns1; `None` where there is no such rule.
pub fn acl(index: u32, rules: &[Rule]) -> Option<Acl> {
    let rule = rules.get(index as usize)?;
    let to = match &rule.destination {
        Destination::Name(name) => {
            format!("ip4.dst == $a{}", address_set_hashes(name, Family::V4)[0])
        }
        Destination::Cidr(network @ IpNet::V6(_)) => format!("ip6.dst == {network}"),
        Destination::Cidr(network @ IpNet::V4(_)) => format!("ip4.dst == {network}"),
        _ => "ip4.dst == 0.0.0.0/0".into(),
    };
    let ports = of_ports(&rule.ports);
    Some(Acl {
        namespace: "ns1".into(),
        rule_index: index,
        priority: 10_000 - index as u16,
        matches: format!("({to}) && inport == @{GROUP}{ports}"),
        action: match rule.action {
            RuleAction::Allow => "allow".into(),
            RuleAction::Deny => "drop".into(),
        },
    })
}

/// The row of a rule's logical flow.
pub fn logical_flow_row(index: u32) -> RowId {
    RowId::new((0xf00 + u128::from(index)) << 96)
}

/// The logical flow of a rule of ns1; `None` where there is no such rule.
pub fn logical_flow(index: u32, rules: &[Rule]) -> Option<LogicalFlow> {
    let acl = acl(index, rules)?;
    Some(LogicalFlow {
        pipeline: Pipeline::Egress,
        table_id: 4,
        priority: acl.priority + ACL_PRIORITY_OFFSET,
        matches: format!("reg0[8] == 1 && ({})", acl.matches),
        actions: "next;".into(),
        stage_hint: Some(acl_row(index).prefix()),
    })
}

/// The rows of all ACLs that there can be: those of these rules, and no others.
pub fn acls(rules: &[Rule]) -> Vec<(RowId, Option<Acl>)> {
    let rows = 0..ROWS;
    rows.map(|i| (acl_row(i), acl(i, rules))).collect()
}

/// The same for the logical flows.
pub fn logical_flows(rules: &[Rule]) -> Vec<(RowId, Option<LogicalFlow>)> {
    let rows = 0..ROWS;
    rows.map(|i| (logical_flow_row(i), logical_flow(i, rules)))
        .collect()
}

/// A frame as the kernel copies it, for a pod.
pub fn frame(ifindex: u32, captured_at: Timestamp, bytes: &[u8]) -> Frame<'_> {
    Frame {
        ifindex,
        captured_at,
        bytes,
        from_pod: false,
        held: false,
        opened: false,
        gso_size: 0,
        left_out: 0,
    }
}

/// The DNS server that answers come from.
pub const SERVER: [u8; 4] = [10, 96, 0, 10];

/// Ethernet, IPv4 and UDP around a DNS answer of [`SERVER`] to the pod at 10.244.0.5.
pub fn answer_frame(name: &str, addresses: &[[u8; 4]], ttl: u32) -> Vec<u8> {
    let addresses = addresses.iter();
    let answers = addresses.map(|address| RData::A(A((*address).into())));
    answer_frame_with(name, RecordType::A, answers, ttl)
}

/// The same with addresses of IPv6 in the answer.
pub fn answer_frame_of_ipv6(name: &str, addresses: &[Ipv6Addr], ttl: u32) -> Vec<u8> {
    let answers = addresses.iter().map(|address| RData::AAAA(AAAA(*address)));
    answer_frame_with(name, RecordType::AAAA, answers, ttl)
}

/// The same with nothing but a CNAME that leads to another name, asked for IPv4 or IPv6.
pub fn alias_frame(name: &str, target: &str, is_ipv6: bool) -> Vec<u8> {
    let target = Name::from_ascii(format!("{target}.")).expect("a name");
    let asked = match is_ipv6 {
        true => RecordType::AAAA,
        false => RecordType::A,
    };
    answer_frame_with(name, asked, [RData::CNAME(CNAME(target))].into_iter(), 60)
}

fn answer_frame_with(
    name: &str,
    asked: RecordType,
    answers: impl Iterator<Item = RData>,
    ttl: u32,
) -> Vec<u8> {
    let name = Name::from_ascii(format!("{name}.")).expect("a name");
    let mut message = Message::new(7, MessageType::Response, OpCode::Query);
    message.queries = vec![Query::query(name.clone(), asked)];
    message.answers = answers
        .map(|answer| Record::from_rdata(name.clone(), ttl, answer))
        .collect();
    udp_frame(&message.to_vec().expect("encodes"))
}

/// The same around any payload.
pub fn udp_frame(payload: &[u8]) -> Vec<u8> {
    let udp_len = (8 + payload.len()) as u16;
    let mut frame = vec![0; 12];
    frame.extend([0x08, 0x00, 0x45, 0]);
    frame.extend((20 + udp_len).to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    frame.extend(SERVER);
    frame.extend([10, 244, 0, 5]);
    frame.extend([0, 53, 0x90, 0]);
    frame.extend(udp_len.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    frame
}
