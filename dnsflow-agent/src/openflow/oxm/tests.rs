#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use proptest::prelude::*;

use super::*;

/// A match of these fields, as bytes.
fn read(fields: &[u8]) -> Result<Option<Match>, ProtocolError> {
    let mut bytes = Vec::new();
    bytes.put_u16(OFPMT_OXM);
    bytes.put_u16(4 + fields.len() as u16);
    bytes.put_slice(fields);
    bytes.put_bytes(0, bytes.len().next_multiple_of(8) - bytes.len());
    let mut reader = Reader::new("match", &bytes);
    let matches = read_match(&mut reader);
    if matches.is_ok() {
        assert!(reader.is_empty());
    }
    matches
}

/// The fields of a match for one address: metadata, eth_type, two addresses, and no tag.
const ADDRESSES: &[u8] = &[
    0x80, 0x00, 0x04, 0x08, 0, 0, 0, 0, 0, 0, 0, 3, // metadata
    0x80, 0x00, 0x0a, 0x02, 0x08, 0x00, // eth_type
    0x80, 0x00, 0x16, 0x04, 10, 0, 0, 1, // ipv4_src
    0x80, 0x00, 0x18, 0x04, 10, 0, 0, 2, // ipv4_dst
    0x80, 0x00, 0x4c, 0x08, 0, 0, 0, 0, 0, 0, 0, 0, // tunnel_id
];

fn with(field: &[u8]) -> Result<Option<Match>, ProtocolError> {
    read(&[ADDRESSES, field].concat())
}

#[test]
fn registers_of_every_width_come_out_as_32_bit_ones() {
    let nxm_reg14 = with(&[0, 1, 0x1c, 4, 0, 0, 0, 5]);
    let xreg7 = with(&[
        0x80, 1, 0x0f, 0x10, 0, 0, 0, 5, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0,
    ]);
    let mut xxreg3 = vec![0, 1, 0xe5, 0x20];
    for words in [[0u32, 0, 5, 0], [0, 0, u32::MAX, 0]] {
        words.iter().for_each(|word| xxreg3.put_u32(*word));
    }
    let expected = Arc::new(BTreeMap::from([(14, Masked::new(5, u32::MAX))]));
    for found in [nxm_reg14, xreg7, with(&xxreg3)] {
        assert_eq!(found.unwrap().unwrap().registers, expected);
    }
}

#[test]
fn what_we_never_write_is_no_match_of_ours() {
    assert!(with(&[]).unwrap().is_some());
    for foreign in [
        // A VLAN.
        &[0x80, 0, 0x0c, 2, 0x10, 5][..],
        // Masked metadata, masked port.
        &[
            0x80, 0, 0x05, 0x10, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1,
        ],
        &[0x80, 0, 0x14, 1, 6, 0x80, 0, 0x1d, 4, 0, 80, 0, 0xff],
        // ICMP; a UDP port in a TCP flow; a port without a protocol; the NXM mark.
        &[0x80, 0, 0x14, 1, 1],
        &[0x80, 0, 0x14, 1, 6, 0x80, 0, 0x20, 2, 0, 53],
        &[0x80, 0, 0x20, 2, 0, 53],
        &[0, 1, 0x42, 4, 0, 0, 0, 1],
        // An experimenter's field.
        &[0xff, 0xff, 0, 6, 0, 0, 0x23, 0x20, 0, 1],
    ] {
        assert_eq!(with(foreign), Ok(None), "{foreign:x?}");
    }
    let without_destination = [&ADDRESSES[..26], &ADDRESSES[34..]].concat();
    assert_eq!(read(&without_destination), Ok(None));
    assert_eq!(read(&ADDRESSES[..34]), Ok(None), "no tunnel key");
    assert_eq!(read(&ADDRESSES[12..]), Ok(None), "no metadata");
    let without_type = [&ADDRESSES[..12], &ADDRESSES[18..]].concat();
    assert_eq!(read(&without_type), Ok(None));
}

#[test]
fn only_our_tunnel_keys_and_marks_are_those_of_a_match_of_ours() {
    const METADATA: &[u8] = &[0x80, 0, 0x04, 8, 0, 0, 0, 0, 0, 0, 0, 3];
    const IPV4: &[u8] = &[0x80, 0, 0x0a, 2, 8, 0];
    const UNTRANSLATED: &[u8] = &[0, 1, 0xd3, 8, 0, 0, 0, 0, 0, 0, 0, 0x80];
    let tunnel = |key: u64| [&[0x80, 0, 0x4c, 8][..], &key.to_be_bytes()].concat();
    let masked = |key: u64, mask: u64| {
        let bytes = [key.to_be_bytes(), mask.to_be_bytes()].concat();
        [&[0x80, 0, 0x4d, 16][..], &bytes].concat()
    };
    let mark = |value: u32, mask: u32| {
        let bytes = [value.to_be_bytes(), mask.to_be_bytes()].concat();
        [&[0, 1, 0x43, 8][..], &bytes].concat()
    };
    let tcp: &[u8] = &[0x80, 0, 0x14, 1, 6];
    let tag = u64::from(Tag::new(3, 7).bits());
    let guard = u64::from(Tag::GUARD);
    let ends = |fields: &[&[u8]]| {
        let found = read(&[METADATA, &fields.concat()].concat()).unwrap();
        found.map(|found| found.ends)
    };
    let tagged = Ends::Tagged {
        tag: Tag::new(3, 7),
        is_ipv6: false,
    };
    assert_eq!(ends(&[IPV4, &tunnel(tag)]), Some(tagged));
    assert_eq!(ends(&[&tunnel(0), UNTRANSLATED]), Some(Ends::Untranslated));
    assert_eq!(ends(&[&masked(guard, guard)]), Some(Ends::AnyTag));
    let marked = Some(Ends::Marked { bit: 4 });
    assert_eq!(ends(&[&mark(4, 4)]), marked);
    for foreign in [
        &[IPV4, &tunnel(tag ^ guard)][..],
        &[IPV4, &tunnel(tag | 1 << 22)],
        &[IPV4, &tunnel(tag | 1 << 32)],
        &[IPV4, &tunnel(0)],
        &[IPV4, &masked(guard, guard)],
        &[IPV4, &tunnel(tag), &mark(4, 4)],
        &[IPV4, &tunnel(tag), UNTRANSLATED],
        &[IPV4, &tunnel(0), UNTRANSLATED],
        &[&tunnel(tag)],
        &[&tunnel(0)],
        &[UNTRANSLATED],
        &[&tunnel(0), UNTRANSLATED, tcp],
        &[&masked(tag, guard | 0xfff)],
        &[&masked(0, guard)],
        &[&masked(guard, guard), tcp],
        &[&mark(0, 4)],
        &[&mark(12, 12)],
        &[&tunnel(0), &mark(4, 4)],
    ] {
        assert_eq!(ends(foreign), None, "{foreign:x?}");
    }
}

#[test]
fn a_field_longer_than_the_match_is_malformed() {
    assert_eq!(
        with(&[0x80, 0, 0x04, 8, 1]),
        Err(ProtocolError::Malformed("match"))
    );
}

#[test]
fn impossible_flows_are_refused_before_they_are_sent() {
    let load = |register| Action::SetRegister {
        register,
        bits: Masked::new(1, 1),
    };
    assert!(action_list(&[load(15)]).is_ok());
    assert_eq!(
        action_list(&[load(16)]),
        Err(EncodeError::NoSuchRegister(16))
    );
    assert_eq!(
        action_list(&[Action::Copied(vec![0; 12])]),
        Err(EncodeError::PartialAction(12))
    );
    let long = vec![Action::Copied(vec![0; 32 << 10]); 2];
    assert_eq!(action_list(&long), Err(EncodeError::TooLong(64 << 10)));
}

#[test]
fn a_whole_register_is_set_without_mask_and_a_copy_stays_as_it_is() {
    let copied = vec![0xff, 0xff, 0, 8, 1, 2, 3, 4];
    let bytes = action_list(&[
        Action::SetRegister {
            register: 3,
            bits: Masked::new(7, u32::MAX),
        },
        Action::Copied(copied.clone()),
    ])
    .unwrap();
    let set = [0, 0x19, 0, 16, 0, 1, 6, 4, 0, 0, 0, 7, 0, 0, 0, 0];
    assert_eq!(bytes, [&set[..], &copied].concat());
}

fn any_match() -> impl Strategy<Value = Match> {
    let tag = (0..=Tag::SCOPE_MAX, 0..=Tag::NUMBER_MAX)
        .prop_map(|(scope, number)| Tag::new(scope, number));
    let of_version = prop_oneof![
        any::<(Ipv4Addr, Ipv4Addr)>().prop_map(|(src, dst)| Addresses::V4 { src, dst }.into()),
        any::<(Ipv6Addr, Ipv6Addr)>().prop_map(|(src, dst)| Addresses::V6 { src, dst }.into()),
        any::<(Ipv4Addr, Ipv4Addr)>()
            .prop_map(|(src, dst)| Ends::Established(Addresses::V4 { src, dst })),
        any::<(Ipv6Addr, Ipv6Addr)>()
            .prop_map(|(src, dst)| Ends::Established(Addresses::V6 { src, dst })),
        (tag, any::<bool>()).prop_map(|(tag, is_ipv6)| Ends::Tagged { tag, is_ipv6 }),
    ];
    let of_any = prop_oneof![
        Just(Ends::Untranslated),
        Just(Ends::AnyTag),
        (0..u32::BITS).prop_map(|bit| Ends::Marked { bit: 1 << bit }),
    ];
    let protocol = prop_oneof![
        Just(Protocol::Tcp),
        Just(Protocol::Udp),
        Just(Protocol::Sctp)
    ];
    let transport =
        (protocol, any::<Option<u16>>()).prop_map(|(protocol, port)| Transport { protocol, port });
    let ends = prop_oneof![
        (of_version, prop::option::of(transport)),
        (of_any, Just(None)),
    ];
    let bits = (any::<u32>(), 1..=u32::MAX).prop_map(|(value, mask)| Masked::new(value, mask));
    let registers = prop::collection::btree_map(0..REGISTERS, bits, 0..=16);
    (any::<u64>(), registers, ends).prop_map(|(metadata, registers, (ends, transport))| Match {
        metadata,
        registers: registers.into(),
        ends,
        transport,
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(matches in any_match()) {
        let mut bytes = BytesMut::new();
        put_match(&mut bytes, Some(&matches));
        prop_assert_eq!(bytes.len() % 8, 0);
        let mut reader = Reader::new("match", &bytes);
        prop_assert_eq!(read_match(&mut reader), Ok(Some(matches)));
        prop_assert!(reader.is_empty());
    }
}
