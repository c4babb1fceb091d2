use std::{collections::BTreeMap, sync::Arc};

use super::*;
use crate::values::flow::{Cookie, Protocol, Transport};

fn key(transport: Option<Transport>, src: &str, dst: &str) -> FlowKey {
    let address = |text: &str| text.parse().expect("an address");
    FlowKey {
        table: 58,
        priority: 10_999,
        matches: Match {
            metadata: 3,
            registers: Arc::new(BTreeMap::from([
                (0, Masked::new(0, 0x80)),
                (14, Masked::new(2, u32::MAX)),
            ])),
            ends: Addresses::between(address(src), address(dst))
                .expect("one family")
                .into(),
            transport,
        },
    }
}

fn body(actions: Vec<Action>) -> FlowBody {
    FlowBody {
        cookie: Cookie::new(0xfe),
        hard_timeout_s: 0,
        actions: actions.into(),
    }
}

#[test]
fn a_flow_is_written_as_ovs_ofctl_writes_it() {
    let tcp = Transport {
        protocol: Protocol::Tcp,
        port: Some(443),
    };
    let actions = vec![
        Action::SetRegister {
            register: 8,
            bits: Masked::new(1 << 16, 1 << 16),
        },
        Action::Resubmit { table: 59 },
    ];
    assert_eq!(
        flow(&key(Some(tcp), "10.244.0.5", "203.0.113.1"), &body(actions)),
        "cookie=0x444e5346000000fe, table=58, priority=10999,tcp,reg0=0/0x80,reg14=0x2,\
         tun_id=0,metadata=0x3,nw_src=10.244.0.5,nw_dst=203.0.113.1,tp_dst=443 \
         actions=set_field:0x10000/0x10000->reg8,resubmit(,59)"
    );
}

#[test]
fn a_flow_without_actions_drops() {
    assert_eq!(
        flow(&key(None, "fd00::5", "2001:db8::1"), &body(vec![])),
        "cookie=0x444e5346000000fe, table=58, priority=10999,ipv6,reg0=0/0x80,reg14=0x2,\
         tun_id=0,metadata=0x3,ipv6_src=fd00::5,ipv6_dst=2001:db8::1 actions=drop"
    );
}

#[test]
fn tags_and_marks_are_written_as_ovs_ofctl_writes_them() {
    let mask = 0xffe0_0000;
    let tag = Tag::new(3, 7);
    let drop_all = body(vec![]);
    let of = |ends| {
        let mut key = key(None, "10.244.0.5", "203.0.113.1");
        key.matches.ends = ends;
        flow(&key, &drop_all)
    };
    let written = |state: &str, version: &str, tunnel: &str| {
        format!(
            "cookie=0x444e5346000000fe, table=58, priority=10999{state}{version},reg0=0/0x80,reg14=0x2{tunnel},\
             metadata=0x3 actions=drop"
        )
    };
    for (is_ipv6, version) in [(false, ",ip"), (true, ",ipv6")] {
        let ends = Ends::Tagged { tag, is_ipv6 };
        assert_eq!(of(ends), written("", version, ",tun_id=0x803007"));
    }
    let untranslated = written(",ct_state=-dnat", "", ",tun_id=0");
    assert_eq!(of(Ends::Untranslated), untranslated);
    let established = Addresses::V4 {
        src: [10, 244, 0, 5].into(),
        dst: [203, 0, 113, 1].into(),
    };
    let with_addresses = written(",ct_state=+est+trk", ",ip", ",tun_id=0").replace(
        "metadata=0x3",
        "metadata=0x3,nw_src=10.244.0.5,nw_dst=203.0.113.1",
    );
    assert_eq!(of(Ends::Established(established)), with_addresses);
    let any_tag = written("", "", ",tun_id=0x800000/0x800000");
    assert_eq!(of(Ends::AnyTag), any_tag);
    let marked = written(",pkt_mark=0x200000/0x200000", "", "");
    assert_eq!(of(Ends::Marked { bit: 1 << 21 }), marked);
    let actions = vec![
        Action::SetTunnel(tag.bits()),
        Action::SetTunnel(0),
        Action::MoveMark { mask },
        Action::MoveMark { mask: 1 << 4 },
        Action::MoveMark { mask: u32::MAX },
        Action::SetMark(Masked::new(0, mask)),
    ];
    let text = flow(&key(None, "10.244.0.5", "203.0.113.1"), &body(actions));
    assert_eq!(
        text.split_once(" actions=").expect("actions").1,
        "set_field:0x803007->tun_id,set_field:0->tun_id,\
         move:NXM_NX_PKT_MARK[21..31]->NXM_NX_TUN_ID[0..10],move:NXM_NX_PKT_MARK[4]->NXM_NX_TUN_ID[0],\
         move:NXM_NX_PKT_MARK[]->NXM_NX_TUN_ID[0..31],set_field:0/0xffe00000->pkt_mark"
    );
}
