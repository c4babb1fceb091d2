//! The conversations recorded with Open vSwitch, played again.

use std::{collections::BTreeMap, net::Ipv4Addr, sync::Arc};

use dnsflow_core::values::flow::{Addresses, Match};

use super::*;

/// The flows of the live tests, in which the conversations were recorded.
fn key(table: u8, last_octet: u8) -> FlowKey {
    FlowKey {
        table,
        priority: 10_999,
        matches: Match {
            metadata: 3,
            registers: Arc::new(BTreeMap::from([
                (0, Masked::new(0x100, 0x100)),
                (8, Masked::new(0x8000_0000, 0xc000_0000)),
                (14, Masked::new(5, u32::MAX)),
            ])),
            ends: Addresses::V4 {
                src: Ipv4Addr::new(10, 244, 0, 5),
                dst: Ipv4Addr::new(203, 0, 113, last_octet),
            }
            .into(),
            transport: None,
        },
    }
}

fn body() -> FlowBody {
    FlowBody {
        cookie: Cookie::new(1),
        hard_timeout_s: 300,
        actions: Arc::new([
            Action::SetRegister {
                register: 8,
                bits: Masked::new(1 << 16, 1 << 16),
            },
            Action::Resubmit { table: 47 },
        ]),
    }
}

fn add(key: FlowKey) -> FlowChange {
    FlowChange::Add(key, body())
}

fn delete(key: FlowKey) -> FlowChange {
    FlowChange::Delete(key, Some(Cookie::new(1)))
}

fn installed(key: FlowKey) -> InstalledFlow {
    InstalledFlow {
        key,
        cookie: Cookie::new(1),
        packets: 0,
        hard_timeout_s: body().hard_timeout_s,
    }
}

#[test]
fn a_refused_bundle() {
    let refused = FlowBody {
        actions: Arc::new([Action::Copied(vec![0x77, 0x77, 0, 8, 0, 0, 0, 0])]),
        ..body()
    };
    let act = |session: &mut Session, act: usize| match act {
        0 => session.apply(BatchId(1), false, vec![add(key(46, 1))], Vec::new()),
        1 => {
            let changes = vec![
                add(key(46, 2)),
                add(key(46, 3)),
                delete(key(46, 1)),
                FlowChange::Add(key(46, 99), refused.clone()),
            ];
            session.apply(BatchId(2), true, changes, Vec::new());
        }
        _ => session.ask(PLAIN),
    };
    let text = "OFPET_BAD_ACTION (OFPBAC_BAD_TYPE)";
    assert_eq!(
        replay(fixtures::BUNDLE_REFUSED, usize::MAX, act),
        [
            Event::Up,
            ok(1),
            failed(2, 3, text),
            Event::Reply(FlowReply::Flows {
                number: 1,
                flows: vec![installed(key(46, 1))],
                more: false
            })
        ]
    );
}

#[test]
fn a_bundle_that_fails_when_it_is_committed() {
    let act = |session: &mut Session, act: usize| match act {
        0 => session.apply(
            BatchId(1),
            true,
            vec![add(key(46, 1)), add(key(46, 2))],
            Vec::new(),
        ),
        _ => session.ask(PLAIN),
    };
    assert_eq!(
        replay(fixtures::BUNDLE_COMMIT_FAILS, usize::MAX, act),
        [
            Event::Up,
            failed(1, 1, TABLE_FULL),
            Event::Reply(FlowReply::Flows {
                number: 1,
                flows: Vec::new(),
                more: false
            })
        ]
    );
}

/// In chunks of every length, so that reads end at every byte of every message.
#[test]
fn the_flow_monitor() {
    for chunk in (1..200).chain([usize::MAX]) {
        let act = |session: &mut Session, act: usize| match act {
            0 => session.monitor_tables(BTreeSet::from([46])),
            1 => session.apply(
                BatchId(1),
                true,
                (1..=4).map(|n| add(key(46, n))).collect(),
                Vec::new(),
            ),
            2 => session.apply(BatchId(2), false, vec![add(key(47, 1))], Vec::new()),
            3 => session.apply(
                BatchId(3),
                false,
                vec![FlowChange::Renew(body())],
                Vec::new(),
            ),
            4 => session.apply(BatchId(4), false, vec![delete(key(46, 1))], Vec::new()),
            5 | 6 | 9 => session.ask(PLAIN),
            7 => session.monitor_tables(BTreeSet::from([47])),
            8 => session.apply(BatchId(5), false, vec![add(key(47, 9))], Vec::new()),
            other => panic!("act {other}"),
        };
        let lost = |key, reason| Event::FlowLost {
            key,
            cookie: Cookie::new(1),
            reason,
        };
        let mut seen = replay(fixtures::MONITOR, chunk, act);
        seen.retain(|event| !matches!(event, Event::Reply(FlowReply::Flows { .. })));
        assert_eq!(
            seen,
            [
                Event::Up,
                ok(1),
                ok(2),
                ok(3),
                ok(4),
                lost(key(46, 2), LostReason::Deleted),
                Event::ForeignFlow {
                    key: key(46, 3),
                    cookie: 0x77
                },
                lost(key(46, 4), LostReason::Modified),
                ok(5),
                lost(key(47, 9), LostReason::Deleted),
            ]
        );
    }
}
