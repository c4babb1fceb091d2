#![allow(clippy::unwrap_used)]

use dnsflow_core::values::flow::{FlowBody, FlowKey};

use super::*;
use crate::openflow::{
    fixtures::{self, From},
    shards::Family,
};

/// The flow_mods of `ovs-ofctl`, in the order of the recording.
fn recorded_flow_mods() -> Vec<Vec<u8>> {
    fixtures::sent_by(From::Client, fixtures::FLOW_MODS)
}

fn encode(change: &FlowChange, table: u8) -> Vec<u8> {
    let mut output = BytesMut::new();
    put_flow_mod(&mut output, 6, change, table).unwrap();
    output.to_vec()
}

#[test]
fn additions_are_the_bytes_of_ovs_ofctl() {
    let recorded = recorded_flow_mods();
    for ((key, body), bytes) in fixtures::recorded_flows().into_iter().zip(recorded) {
        assert_eq!(encode(&FlowChange::Add(key, body), 46), bytes);
    }
}

#[test]
fn a_renewal_is_the_modification_of_ovs_ofctl_but_for_the_unused_priority() {
    let (_, body) = fixtures::recorded_flows().swap_remove(0);
    let mut recorded = recorded_flow_mods().swap_remove(12);
    // `ovs-ofctl` fills in its default, which means nothing in a modification that is not strict.
    assert_eq!(recorded[30..32], 0x8000u16.to_be_bytes());
    recorded[30..32].fill(0);
    assert_eq!(encode(&FlowChange::Renew(body), 0), recorded);
}

#[test]
fn a_deletion_is_the_strict_one_of_ovs_ofctl_but_for_the_last_bit_of_the_cookie_mask() {
    let (key, body) = fixtures::recorded_flows().swap_remove(2);
    let mut recorded = recorded_flow_mods().swap_remove(13);
    assert_eq!(recorded[16..24], u64::MAX.to_be_bytes());
    recorded[23] = 0xfe;
    assert_eq!(
        encode(&FlowChange::Delete(key, Some(body.cookie)), 46),
        recorded
    );
}

#[test]
fn a_shard_is_asked_for_as_ovs_ofctl_asks() {
    let destinations = |family| Shard::Destinations {
        family,
        bits: 1,
        mask: 3,
    };
    let shards = [
        Shard::Groups {
            bits: 0x80_1001,
            mask: 0x80_1003,
        },
        Shard::Untagged,
        Shard::Ends { table: 51 },
        destinations(Family::V4),
        destinations(Family::V6),
    ];
    let request = |shard: Shard| {
        let mut request = BytesMut::new();
        let (cookie, mask) = shard.cookies();
        put_flow_desc_request(&mut request, 2, cookie, mask, shard);
        request.to_vec()
    };
    let recorded = fixtures::sent_by(From::Client, fixtures::SHARDS);
    assert_eq!(recorded, shards.map(request));
}

#[test]
fn a_dump_is_asked_for_and_read_as_the_switch_means_it() {
    for recording in [fixtures::DUMP_3_1, fixtures::DUMP_3_5] {
        let mut request = BytesMut::new();
        put_flow_desc_request(&mut request, 6, Cookie::OURS, Cookie::OURS_MASK, Shard::All);
        assert_eq!(
            fixtures::sent_by(From::Client, recording),
            [request.to_vec()]
        );
        let reply = fixtures::sent_by(From::Switch, recording).swap_remove(0);
        let message = Message::split(&mut BytesMut::from(&reply[..]))
            .unwrap()
            .unwrap();
        let reply = MultipartReply::parse(&message.body).unwrap();
        assert!(!reply.more);
        let found: Result<Vec<_>, _> = reply.flow_descs().collect();
        let bodies = fixtures::recorded_flows().into_iter();
        let actions: Vec<_> = bodies
            .map(|(_, body)| oxm::action_list(&body.actions).unwrap())
            .collect();
        let expected = |((key, body), actions): ((FlowKey, FlowBody), _)| FlowDesc {
            table: key.table,
            priority: key.priority,
            cookie: body.cookie.bits(),
            matches: Some(key.matches),
            stats: Stats::default(),
            hard_timeout_s: body.hard_timeout_s,
            actions,
        };
        let written: Vec<_> = fixtures::recorded_flows()
            .into_iter()
            .zip(actions.iter().map(Vec::as_slice))
            .map(expected)
            .collect();
        let mut found = found.unwrap();
        // The last two, without metadata, are none of ours.
        let others = found.split_off(written.len());
        assert_eq!(found, written);
        let others: Vec<_> = others.into_iter().map(|one| one.matches).collect();
        assert_eq!(others, [None, None]);
    }
}

#[test]
fn an_aggregate_is_asked_for_and_read_as_the_switch_means_it() {
    for recording in [fixtures::AGGREGATE_3_1, fixtures::AGGREGATE_3_5] {
        let mut request = BytesMut::new();
        put_aggregate_request(&mut request, 6, 0xdead_beef);
        assert_eq!(
            fixtures::sent_by(From::Client, recording),
            [request.to_vec()]
        );
        let reply = fixtures::sent_by(From::Switch, recording).swap_remove(0);
        let message = Message::split(&mut BytesMut::from(&reply[..]))
            .unwrap()
            .unwrap();
        let reply = MultipartReply::parse(&message.body).unwrap();
        assert_eq!(reply.kind, OFPMP_AGGREGATE_STATS);
        let expected = Stats {
            flows: 2,
            packets: 3,
        };
        assert_eq!(reply.aggregate(), Ok(expected));
    }
}

#[test]
fn a_message_comes_out_when_its_last_byte_is_there() {
    let mut whole = BytesMut::new();
    put_barrier(&mut whole, 7);
    put_echo(&mut whole, OFPT_ECHO_REPLY, 8, b"ab");
    let mut input = BytesMut::new();
    let mut seen = Vec::new();
    for (at, byte) in whole.iter().enumerate() {
        input.put_u8(*byte);
        while let Some(message) = Message::split(&mut input).unwrap() {
            seen.push((at, message.kind, message.xid, message.body));
        }
    }
    assert_eq!(
        seen,
        [
            (7, OFPT_BARRIER_REQUEST, 7, Bytes::new()),
            (17, OFPT_ECHO_REPLY, 8, Bytes::from_static(b"ab")),
        ]
    );
}

#[test]
fn a_hello_is_judged_by_its_bitmap_else_by_its_version() {
    let hello = |version, body: &'static [u8]| {
        hello_accepts(&Message {
            version,
            kind: OFPT_HELLO,
            xid: 1,
            body: Bytes::from_static(body),
        })
    };
    assert_eq!(hello(6, &[]), Ok(true));
    assert_eq!(hello(4, &[]), Ok(false));
    assert_eq!(hello(4, &[0, 1, 0, 8, 0, 0, 0, 0x40]), Ok(true));
    assert_eq!(hello(6, &[0, 1, 0, 8, 0, 0, 0, 0x10]), Ok(false));
    // An element of another type, padded, in front.
    let padded = &[0, 9, 0, 5, 1, 0, 0, 0, 0, 1, 0, 8, 0, 0, 0, 0x10];
    assert_eq!(hello(6, padded), Ok(false));
    assert_eq!(
        hello(6, &[0, 1, 0, 3]),
        Err(ProtocolError::Malformed("hello"))
    );
}
