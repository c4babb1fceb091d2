use super::*;

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Key(u32, char);

impl OfInterface for Key {
    fn ifindex(&self) -> u32 {
        self.0
    }
}

const LIMITS: Limits = Limits {
    entries: 4,
    per_interface: 3,
    bytes: 100,
    bytes_per_interface: 60,
};

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_nanos(seconds * 1_000_000_000)
}

#[test]
fn the_least_recently_used_entry_of_a_full_table_goes() {
    let mut table = Recent::new(LIMITS);
    for (ifindex, name) in [(2, 'x'), (1, 'a'), (1, 'b'), (1, 'c')] {
        assert_eq!(table.insert(Key(ifindex, name), name, at(1)), None);
    }
    assert_eq!(table.use_entry(&Key(1, 'a'), at(2)).copied(), Some('a'));
    // Not `x`, which is older: its interface has no other.
    assert_eq!(table.insert(Key(3, 'e'), 'e', at(3)), Some('b'));
    assert_eq!(table.len(), 4);
    assert_eq!(table.use_entry(&Key(1, 'b'), at(3)), None);
}

#[test]
fn an_interface_at_its_limit_pushes_out_its_own() {
    let mut table = Recent::new(LIMITS);
    table.insert(Key(1, 'a'), 'a', at(1));
    for name in ['b', 'c', 'd'] {
        assert_eq!(table.insert(Key(2, name), name, at(2)), None);
    }
    assert_eq!(table.insert(Key(2, 'e'), 'e', at(3)), Some('b'));
    assert!(table.use_entry(&Key(1, 'a'), at(3)).is_some());
}

#[test]
fn an_entry_is_replaced_without_loss_of_another() {
    let mut table = Recent::new(LIMITS);
    for name in ['a', 'b', 'c'] {
        table.insert(Key(1, name), name, at(1));
    }
    assert_eq!(table.insert(Key(1, 'a'), 'x', at(2)), None);
    assert_eq!(table.len(), 3);
    assert_eq!(table.insert(Key(1, 'd'), 'd', at(3)), Some('b'));
}

#[test]
fn bytes_are_those_of_each_interface() {
    let mut table = Recent::new(LIMITS);
    for (ifindex, name) in [(1, 'a'), (2, 'b'), (2, 'c'), (3, 'd')] {
        table.insert(Key(ifindex, name), name, at(1));
    }
    assert!(table.weigh(&Key(1, 'a'), 30).is_empty());
    assert!(table.weigh(&Key(2, 'b'), 40).is_empty());
    // More than the interface can have: the other of its entries goes.
    assert_eq!(table.weigh(&Key(2, 'c'), 41), ['b']);
    // More than all can have together: of the one that has most.
    assert_eq!(table.weigh(&Key(3, 'd'), 30), ['c']);
    assert_eq!(table.bytes(), 60);
    assert_eq!(table.weigh(&Key(3, 'd'), 61), ['d'], "by itself");
    assert_eq!(table.bytes(), 30);
    table.weigh(&Key(1, 'a'), 0);
    assert!(table.weigh(&Key(1, 'z'), 1000).is_empty(), "no such entry");
    assert_eq!(table.bytes(), 0);
}

#[test]
fn only_what_was_not_used_for_long_expires() {
    let mut table = Recent::new(LIMITS);
    table.insert(Key(1, 'a'), 'a', at(1));
    table.insert(Key(1, 'b'), 'b', at(2));
    table.use_entry(&Key(1, 'a'), at(5));
    assert_eq!(table.pop_unused_since(at(3)), Some('b'));
    assert_eq!(table.pop_unused_since(at(3)), None);
    assert_eq!(table.len(), 1);
}

#[test]
fn an_interface_takes_its_entries_along() {
    let mut table = Recent::new(LIMITS);
    for (ifindex, name) in [(1, 'a'), (2, 'b'), (1, 'c')] {
        table.insert(Key(ifindex, name), name, at(1));
    }
    table.weigh(&Key(1, 'c'), 50);
    table.remove_interface(1);
    table.remove_interface(1);
    assert_eq!((table.len(), table.bytes()), (1, 0));
    assert_eq!(table.remove(&Key(2, 'b')), Some('b'));
    assert!(table.is_empty());
    // Nothing is left behind for an interface that is gone.
    assert!(table.order.is_empty() && table.interfaces.is_empty());
}
