use super::*;

fn message(kind: u16, ifindex: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut body = vec![0; IFINFOMSG_LEN];
    body[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    for (kind, value) in attributes {
        body.extend(((4 + value.len()) as u16).to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(*value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let mut message = ((netlink::HEADER_LEN + body.len()) as u32)
        .to_ne_bytes()
        .to_vec();
    message.extend(kind.to_ne_bytes());
    message.resize(netlink::HEADER_LEN, 0);
    message.extend(body);
    message
}

fn events(datagram: &[u8]) -> Vec<LinkEvent> {
    let mut found = Vec::new();
    parse(datagram, &mut |event| found.push(event));
    found
}

fn two_messages() -> Vec<u8> {
    let mut datagram = message(RTM_NEWLINK, 7, &[(1, b"abcde"), (IFLA_IFNAME, b"veth0\0")]);
    datagram.extend(message(RTM_DELLINK, 6, &[(IFLA_IFNAME, b"old\0")]));
    datagram
}

#[test]
fn messages_of_a_datagram_are_read_in_order() {
    assert_eq!(
        events(&two_messages()),
        [
            LinkEvent::Present {
                name: "veth0".into(),
                ifindex: 7
            },
            LinkEvent::Gone { ifindex: 6 },
        ]
    );
}

#[test]
fn other_messages_are_passed_over() {
    let mut datagram = message(3, 1, &[]);
    datagram.extend(message(RTM_DELLINK, 6, &[]));
    assert_eq!(events(&datagram), [LinkEvent::Gone { ifindex: 6 }]);
}

#[test]
fn broken_lengths_end_the_reading() {
    let whole = two_messages();
    for len in 0..whole.len() {
        let _ = events(&whole[..len]);
    }
    for at in 0..whole.len() {
        for value in [0, 1, 0xff] {
            let mut broken = whole.clone();
            broken[at] = value;
            let _ = events(&broken);
        }
    }
    assert_eq!(events(&[0; 64]), []);
}
