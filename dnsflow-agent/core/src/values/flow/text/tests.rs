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
         metadata=0x3,nw_src=10.244.0.5,nw_dst=203.0.113.1,tp_dst=443 \
         actions=set_field:0x10000/0x10000->reg8,resubmit(,59)"
    );
}

#[test]
fn a_flow_without_actions_drops() {
    assert_eq!(
        flow(&key(None, "fd00::5", "2001:db8::1"), &body(vec![])),
        "cookie=0x444e5346000000fe, table=58, priority=10999,ipv6,reg0=0/0x80,reg14=0x2,\
         metadata=0x3,ipv6_src=fd00::5,ipv6_dst=2001:db8::1 actions=drop"
    );
}
