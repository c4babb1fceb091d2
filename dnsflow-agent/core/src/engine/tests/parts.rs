//! Services with many addresses, which the agent takes over in parts.

use std::net::Ipv4Addr;

use super::{
    backends::{marked, node, own},
    *,
};
use crate::{
    ovn::rows::LoadBalancer,
    tools::deadline::Why,
    values::limits::{ADDRESS_PARTS, ADDRESSES_PER_PART},
};

/// So many parts.
const PARTS: usize = 4;

fn at(number: usize) -> IpAddr {
    Ipv4Addr::from_bits(0xcb00_0000 + number as u32).into()
}

fn octets(number: usize) -> [u8; 4] {
    (0xcb00_0000 + number as u32).to_be_bytes()
}

/// A Service has these addresses from now on.
fn service(node: &mut Node, row: u128, numbers: std::ops::Range<usize>) {
    let balancer = LoadBalancer {
        service: Some("ns2/many".into()),
        addresses: numbers.map(at).collect(),
        ..LoadBalancer::default()
    };
    node.give(Input::Nb(NbUpdate {
        load_balancers: vec![(RowId::new(row), Some(balancer))],
        ..NbUpdate::default()
    }));
}

/// Takes a further part, if one is due.
fn take_part(node: &mut Node) -> bool {
    let due = node.engine.next_deadline();
    let is_due = due.is_some_and(|(at, why)| at <= node.now && why == Why::Addresses);
    if is_due {
        node.engine.handle_timeout(node.now);
        node.obey();
    }
    is_due
}

fn rules() -> [Rule; 2] {
    [allow("example.com"), deny_all()]
}

/// A node with a pod that has many addresses open, and one that has a few. One address is in both.
fn with_open() -> Node {
    let mut node = node(&rules());
    node.add_pod("p2", 2);
    for first in (0..PARTS * ADDRESSES_PER_PART).step_by(200) {
        let name = format!("n{first}.example.com");
        node.answer("p1", &name, &[octets(first), octets(first + 1)], 600);
    }
    node.answer("p2", "www.example.com", &[octets(0)], 600);
    node.pass(Duration::from_secs(30));
    node
}

/// The most that a step looks at, and the most addresses of which it tells the kernel, where a Service with so many
/// parts comes and goes.
fn most_of_a_step(parts: usize) -> [usize; 2] {
    let mut node = with_open();
    let mut most = [0; 2];
    for numbers in [0..parts * ADDRESSES_PER_PART, 0..0] {
        let mut steps = 0;
        loop {
            node.log.clear();
            let before = node.engine.told.refused.work.get();
            let is_further = match steps {
                0 => {
                    service(&mut node, 0xf0, numbers.clone());
                    true
                }
                _ => take_part(&mut node),
            };
            if !is_further {
                break;
            }
            steps += 1;
            let told = node.log.iter().map(|command| match command {
                Command::LeaveNetworks(changes) => changes.len(),
                _ => 0,
            });
            let work = node.engine.told.refused.work.get() - before;
            most = [most[0].max(work), most[1].max(told.sum())];
        }
        assert_eq!(steps, parts);
    }
    most
}

#[test]
fn of_a_service_with_many_addresses_a_step_takes_no_more_than_a_part() {
    let most = most_of_a_step(PARTS);
    assert_eq!(most[1], ADDRESSES_PER_PART);
    assert_eq!(most, most_of_a_step(2 * PARTS));
}

/// However fast further ones come, the steps together keep up with them.
#[test]
fn of_very_many_addresses_a_step_takes_the_same_share() {
    let mut node = node(&rules());
    let many = 2 * ADDRESS_PARTS * ADDRESSES_PER_PART;
    service(&mut node, 0xf0, 0..many);
    let waiting = many - many / ADDRESS_PARTS;
    assert_eq!(node.engine.policy.waiting_addresses(), waiting);
    assert!(take_part(&mut node));
    let waiting = waiting - waiting / ADDRESS_PARTS;
    assert_eq!(node.engine.policy.waiting_addresses(), waiting);
}

#[test]
fn in_parts_and_at_once_the_same_is_open_at_the_end() {
    let many = PARTS * ADDRESSES_PER_PART;
    let state = |node: &Node| (own(node), marked(node), node.kernel.networks.clone());
    let [mut in_parts, mut at_once] = [with_open(), with_open()];
    let before = state(&in_parts);
    service(&mut in_parts, 0xf0, 0..many);
    in_parts.pass(Duration::ZERO);
    for part in 0..PARTS {
        let first = part * ADDRESSES_PER_PART;
        service(
            &mut at_once,
            0x100 + part as u128,
            first..first + ADDRESSES_PER_PART,
        );
        assert!(!take_part(&mut at_once));
    }
    assert_eq!(state(&in_parts), state(&at_once));
    assert_ne!(state(&in_parts), before);
    // All of what was open was a Service's.
    assert_eq!((own(&in_parts), marked(&in_parts)), Default::default());
}

/// A pod that is told an address of the last part, before that part, gets nothing of it. Nor does it lose one that the
/// Service has no more.
#[test]
fn between_two_parts_an_answer_is_decided_by_all_rows() {
    let last = PARTS * ADDRESSES_PER_PART - 1;
    let mut node = with_open();
    node.answer("p2", "last.example.com", &[octets(last)], 600);
    node.pass(Duration::from_secs(30));
    let is_open = |node: &Node| own(node).contains(&at(last)) || marked(node).contains(&at(last));
    assert!(is_open(&node));
    service(&mut node, 0xf0, 0..last + 1);
    let translated = format!("::ffff:{}", at(last));
    let translated = translated.parse().expect("an address");
    for name in ["last.example.com", "other.example.com"] {
        node.answer("p1", name, &[octets(last)], 600);
        let ifindex = ifindex_of(node.pods["ns1_p1"]);
        let frame = crate::testing::answer_frame_of_ipv6(name, &[translated], 600);
        node.frame(ifindex, &frame);
    }
    assert!(!marked(&node).contains(&translated.into()));
    let of_first = ifindex_of(node.pods["ns1_p1"]);
    assert!(!node.marks.contains_key(&(of_first, at(last))));
    // The other pod's was open before.
    assert!(is_open(&node));
    node.pass(Duration::ZERO);
    assert!(!is_open(&node));

    service(&mut node, 0xf0, 0..0);
    node.answer("p1", "last.example.com", &[octets(last)], 600);
    assert!(is_open(&node));
    node.pass(Duration::from_secs(30));
    assert!(is_open(&node));
}

/// While parts wait, other inputs have their effect.
#[test]
fn between_two_parts_an_answer_opens_other_addresses() {
    let mut node = with_open();
    service(&mut node, 0xf0, 0..PARTS * ADDRESSES_PER_PART);
    node.answer("p2", "other.example.com", &[[198, 51, 100, 1]], 600);
    let other = IpAddr::from([198, 51, 100, 1]);
    assert!(own(&node).contains(&other) || marked(&node).contains(&other));
    assert!(take_part(&mut node));
}
