use std::net::{Ipv4Addr, Ipv6Addr};

use super::*;
use dnsflow_core::values::flow::Addresses;

fn to(interface: &str, dst: [u8; 4]) -> Path {
    Path {
        interface: interface.into(),
        addresses: Addresses::V4 {
            src: Ipv4Addr::new(10, 244, 0, 5),
            dst: dst.into(),
        },
    }
}

fn to_v6(last: u16) -> Path {
    Path {
        interface: "p1".into(),
        addresses: Addresses::V6 {
            src: Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 5),
            dst: Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last),
        },
    }
}

/// As Open vSwitch 4.0 printed them beside OVN 26.03, but for the names of ports.
const RECORDED: &str = "\
flow-dump from the main thread:
recirc_id(0),in_port(p1),packet_type(ns=0,id=0),eth(src=0a:58:0a:f4:00:05,dst=0a:58:0a:f4:00:01),eth_type(0x0800),ipv4(src=10.244.0.5,dst=198.18.46.44/224.0.0.0,proto=17,frag=no),udp(src=36315/0x8000), packets:3210, bytes:138030, used:0.002s, actions:ct(zone=15,nat),recirc(0x1)
recirc_id(0x1),in_port(p1),ct_state(+new-est-rel-rpl-inv+trk),ct_mark(0/0x43),ct_tuple4(proto=17,tp_dst=9),packet_type(ns=0,id=0),eth(src=0a:58:0a:f4:00:05,dst=0a:58:0a:f4:00:01),eth_type(0x0800),ipv4(src=10.244.0.5/255.255.255.252,dst=198.18.46.44/128.0.0.0,frag=no), packets:3210, bytes:138030, used:0.002s, actions:ct(commit,zone=15,mark=0/0x41,label=0/0xffff00000000000001fe0080,nat(src))
recirc_id(0x1),in_port(p1),ct_state(-new+est-rel-rpl-inv+trk),ct_mark(0/0x43),packet_type(ns=0,id=0),eth(src=0a:58:0a:f4:00:05,dst=0a:58:0a:f4:00:01),eth_type(0x0800),ipv4(src=10.244.0.5,dst=98.18.3.20,proto=6,ttl=64,frag=no), packets:3, bytes:174, used:1.650s, flags:FR., actions:ct_clear,set(eth(src=0a:58:64:40:00:01,dst=0a:58:64:40:00:02)),set(ipv4(ttl=63)),ct(zone=6,nat),recirc(0x14)
";

#[test]
fn a_recorded_dump_is_read() {
    let covered = to("p1", [203, 0, 113, 1]);
    let paths = [
        covered.clone(),
        // Of another pod, in the other half of all addresses, and one that goes through.
        to("p2", [203, 0, 113, 1]),
        to("p1", [100, 64, 0, 1]),
        to("p1", [98, 18, 3, 20]),
    ];
    assert_eq!(dropping(RECORDED, &paths), [covered]);
    assert_eq!(dropping("", &paths), []);
}

/// As Open vSwitch 4.0 prints the key of a packet behind the end of its connection.
#[test]
fn what_drops_only_invalid_packets_does_not_drop_on_a_path() {
    let line = |state: &str| {
        format!("in_port(p1),ct_state({state}+trk),eth_type(0x0800),ipv4(frag=no), actions:drop")
    };
    let path = [to("p1", [203, 0, 113, 1])];
    assert_eq!(dropping(&line("-new-est-rel-rpl+inv"), &path), []);
    assert_eq!(dropping(&line("+new-est-rel-rpl-inv"), &path), path);
}

#[test]
fn masks_of_both_families_are_read() {
    let v6 = |addresses: &str| {
        let line = format!("in_port(p1),eth_type(0x86dd),ipv6({addresses}), actions:drop");
        dropping(&line, &[to_v6(7)]).len()
    };
    assert_eq!(v6("src=fd00:10:244:1::5,dst=2001:db8::7,frag=no"), 1);
    assert_eq!(v6("dst=2001:db8::8"), 0);
    assert_eq!(v6("dst=2001:db8::/ffff:ffff::,label=0"), 1);
    assert_eq!(v6("dst=2001:db8::/32"), 1);
    assert_eq!(v6("dst=2001:db9::/32"), 0);
    assert_eq!(v6("dst=2001:db9::/0"), 1);
    assert_eq!(v6("frag=no"), 1, "no field is no condition");
    assert_eq!(v6("dst=?"), 1, "what cannot be read covers all");
    let v4 = "in_port(p1),eth_type(0x0800),ipv4(frag=no), actions:drop";
    assert_eq!(dropping(v4, &[to_v6(7)]), []);
}

#[test]
fn what_sends_a_packet_on_does_not_drop() {
    for actions in [
        "3",
        "ovn-k8s-mp0",
        "ct(commit,zone=1),recirc(0x1)",
        "clone(ct(commit),3)",
        "set(ipv4(ttl=63)),3",
        "tnl_push(header(size=50))",
        "check_pkt_len(size=1500,gt(drop),le(3))",
    ] {
        assert!(forwards(actions), "{actions}");
    }
    for actions in [
        "drop",
        "drop\n",
        "ct(commit,zone=15,mark=0x1/0x1,nat(src))",
        "userspace(pid=1,controller(reason=1)),ct_clear",
        "sample(sample=100.0%,actions(userspace(pid=1),3))",
        "push_vlan(vid=1,pcp=0),meter(3)",
    ] {
        assert!(!forwards(actions), "{actions}");
    }
}

#[test]
fn a_filter_names_what_all_paths_have_in_common() {
    let one = to("p1", [203, 0, 113, 1]);
    let other = to("p1", [203, 0, 113, 2]);
    let of_another = to("p2", [203, 0, 113, 1]);
    let strange = to("p1,ip", [203, 0, 113, 1]);
    let digits = to("165262004280907", [203, 0, 113, 1]);
    let filter = |paths: &[&Path]| {
        let paths: Vec<Path> = paths.iter().map(|path| (*path).clone()).collect();
        super::filter(&paths)
    };
    let v6 = filter(&[&to_v6(1)]);
    assert_eq!(v6.as_deref(), Some("ipv6,in_port=p1,ipv6_dst=2001:db8::1"));
    let v4 = filter(&[&one]);
    assert_eq!(v4.as_deref(), Some("ip,in_port=p1,nw_dst=203.0.113.1"));
    assert_eq!(filter(&[&one, &other]).as_deref(), Some("ip,in_port=p1"));
    let to_one = Some("ip,nw_dst=203.0.113.1");
    assert_eq!(filter(&[&one, &of_another]).as_deref(), to_one);
    assert_eq!(filter(&[&strange]).as_deref(), to_one);
    assert_eq!(filter(&[&digits]).as_deref(), to_one);
    assert_eq!(filter(&[&one, &to_v6(1)]), None);
    assert_eq!(filter(&[]), None);
}
