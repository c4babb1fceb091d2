//! Recorded messages for the tests: `tests/fixtures/openflow/*.hex`.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use dnsflow_core::values::flow::{
    Action, Addresses, Cookie, Ends, FlowBody, FlowKey, Masked, Match, Protocol, Tag, Transport,
};

pub(super) const FLOW_MODS: &str = include_str!("../../../tests/fixtures/openflow/flow-mods.hex");
pub(super) const DUMP_3_1: &str = include_str!("../../../tests/fixtures/openflow/dump-3.1.0.hex");
pub(super) const DUMP_3_5: &str = include_str!("../../../tests/fixtures/openflow/dump-3.5.0.hex");
pub(super) const SHARDS: &str = include_str!("../../../tests/fixtures/openflow/shards.hex");
pub(super) const AGGREGATE_3_1: &str =
    include_str!("../../../tests/fixtures/openflow/aggregate-3.1.0.hex");
pub(super) const AGGREGATE_3_5: &str =
    include_str!("../../../tests/fixtures/openflow/aggregate-3.5.0.hex");
pub(super) const BUNDLE_REFUSED: &str =
    include_str!("../../../tests/fixtures/openflow/bundle-refused.hex");
pub(super) const BUNDLE_COMMIT_FAILS: &str =
    include_str!("../../../tests/fixtures/openflow/bundle-commit-fails.hex");
pub(super) const MONITOR: &str = include_str!("../../../tests/fixtures/openflow/monitor.hex");
pub(super) const MONITOR_GAP: &str =
    include_str!("../../../tests/fixtures/openflow/monitor-gap.hex");

/// Who sent a recorded message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum From {
    Client,
    Switch,
}

/// The messages of a recording.
pub(super) fn messages(recording: &str) -> Vec<(From, Vec<u8>)> {
    recording
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (mark, hex) = line.split_once(' ').expect("a mark and a message");
            let from = match mark {
                ">" => From::Client,
                "<" => From::Switch,
                other => panic!("mark {other}"),
            };
            let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
            (from, (0..hex.len()).step_by(2).map(byte).collect())
        })
        .collect()
}

/// The messages of a recording that one side sent.
pub(super) fn sent_by(from: From, recording: &str) -> Vec<Vec<u8>> {
    messages(recording)
        .into_iter()
        .filter_map(|(by, message)| (by == from).then_some(message))
        .collect()
}

fn transport(protocol: Protocol, port: Option<u16>) -> Option<Transport> {
    Some(Transport { protocol, port })
}

/// The first nine flows of `flow-mods.hex`. Two more carry our cookie, and match no datapath of OVN: such flows are not
/// written.
pub(super) fn recorded_flows() -> Vec<(FlowKey, FlowBody)> {
    let v4 = Addresses::V4 {
        src: Ipv4Addr::new(10, 244, 0, 5),
        dst: Ipv4Addr::new(203, 0, 113, 1),
    };
    let v6 = Addresses::V6 {
        src: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 5),
        dst: Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1),
    };
    let registers = |list: &[(u8, u32, u32)]| {
        let register = |&(number, value, mask)| (number, Masked::new(value, mask));
        Arc::new(list.iter().map(register).collect())
    };
    let all = u32::MAX;
    let load = |register, value, mask| Action::SetRegister {
        register,
        bits: Masked::new(value, mask),
    };
    let next = Action::Resubmit { table: 47 };
    let flows = [
        (
            300,
            Match {
                metadata: 3,
                registers: registers(&[(0, 0x100, 0x100), (14, 5, all)]),
                ends: v4.into(),
                transport: None,
            },
            vec![load(8, 0x10000, 0x10000), load(0, 2, 2), next.clone()],
        ),
        (
            300,
            Match {
                metadata: 3,
                registers: registers(&[
                    (0, 0x100, 0x100),
                    (8, 0x8000_0000, 0xc000_0000),
                    (14, 5, all),
                ]),
                ends: v4.into(),
                transport: transport(Protocol::Tcp, Some(443)),
            },
            vec![next.clone()],
        ),
        (
            0,
            Match {
                metadata: 3,
                registers: registers(&[(3, 7, all), (15, 9, all)]),
                ends: v6.into(),
                transport: transport(Protocol::Udp, Some(53)),
            },
            vec![next.clone()],
        ),
        (
            0,
            Match {
                metadata: 3,
                registers: registers(&[
                    (4, 1, all),
                    (5, 2, all),
                    (6, 3, all),
                    (7, 4, all),
                    (14, 5, all),
                ]),
                ends: v4.into(),
                transport: transport(Protocol::Sctp, Some(99)),
            },
            vec![],
        ),
        (
            0,
            Match {
                metadata: 3,
                registers: registers(&[(0, 0x100, 0x100)]),
                ends: Ends::Tagged {
                    tag: Tag::new(1, 7),
                    is_ipv6: false,
                },
                transport: transport(Protocol::Tcp, Some(443)),
            },
            vec![Action::SetTunnel(0), next.clone()],
        ),
        (
            0,
            Match {
                metadata: 3,
                registers: registers(&[]),
                ends: Ends::Tagged {
                    tag: Tag::new(Tag::SCOPE_MAX, Tag::NUMBER_MAX),
                    is_ipv6: true,
                },
                transport: None,
            },
            vec![],
        ),
        (
            0,
            Match {
                metadata: 3,
                registers: registers(&[(14, 5, all)]),
                ends: Ends::Untranslated,
                transport: None,
            },
            vec![
                Action::SetTunnel(Tag::new(3, 0).bits()),
                Action::MoveMark { mask: 0xffe0_0000 },
                Action::SetMark(Masked::new(0, 0xffe0_0000)),
                next.clone(),
            ],
        ),
        (
            0,
            Match {
                metadata: 3,
                registers: registers(&[]),
                ends: Ends::AnyTag,
                transport: None,
            },
            vec![Action::SetTunnel(0), next.clone()],
        ),
        (
            0,
            Match {
                metadata: 3,
                registers: registers(&[]),
                ends: Ends::Marked { bit: 1 << 21 },
                transport: None,
            },
            vec![Action::SetMark(Masked::new(0, 0xffe0_0000)), next],
        ),
    ];
    let flow = |(tag, (hard_timeout_s, matches, actions))| {
        let key = FlowKey {
            table: 46,
            priority: 10_999,
            matches,
        };
        let body = FlowBody {
            cookie: Cookie::new(tag),
            hard_timeout_s,
            actions: Arc::from(actions),
        };
        (key, body)
    };
    (1..).zip(flows).map(flow).collect()
}
