use std::collections::BTreeMap;

use super::*;

/// Tables with room for so much, that count what is written.
#[derive(Debug, Default)]
struct Plain {
    interfaces: BTreeMap<u32, NameSetId>,
    empty: BTreeSet<u32>,
    unheld: BTreeSet<u32>,
    names: BTreeSet<(NameSetId, NameHash)>,
    room: usize,
    writes: usize,
}

impl Tables for Plain {
    fn put_interface(&mut self, ifindex: u32, put: PutNameSet) -> io::Result<()> {
        self.writes += 1;
        self.interfaces.insert(ifindex, put.name_set);
        match put.empty {
            true => self.empty.insert(ifindex),
            false => self.empty.remove(&ifindex),
        };
        match put.unheld {
            true => self.unheld.insert(ifindex),
            false => self.unheld.remove(&ifindex),
        };
        Ok(())
    }

    fn take_interface(&mut self, ifindex: u32) -> io::Result<()> {
        self.writes += 1;
        self.interfaces.remove(&ifindex);
        Ok(())
    }

    fn put_name(&mut self, name_set: NameSetId, name: NameHash) -> io::Result<()> {
        self.writes += 1;
        if self.names.len() >= self.room {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.names.insert((name_set, name));
        Ok(())
    }

    fn take_name(&mut self, name_set: NameSetId, name: NameHash) -> io::Result<()> {
        self.writes += 1;
        self.names.remove(&(name_set, name));
        Ok(())
    }
}

const ONE: NameSetId = NameSetId(1);
const TWO: NameSetId = NameSetId(2);

fn filter(room: usize) -> NameFilter<Plain> {
    NameFilter::new(Plain {
        room,
        ..Plain::default()
    })
}

fn names(names: &[&str]) -> Vec<DomainName> {
    names
        .iter()
        .map(|name| name.parse().expect("a name"))
        .collect()
}

impl NameFilter<Plain> {
    /// The name set that the kernel has of an interface.
    fn kernel(&self, ifindex: u32) -> Option<NameSetId> {
        self.tables.interfaces.get(&ifindex).copied()
    }

    fn writes(&mut self) -> usize {
        std::mem::take(&mut self.tables.writes)
    }
}

#[test]
fn an_interface_is_filtered_once_the_names_are_there() {
    let mut filter = filter(9);
    filter.set_name_set(5, Some(ONE));
    assert_eq!(filter.kernel(5), None);
    assert_eq!(filter.state().unfiltered_interfaces, 1);
    filter.set_names(ONE, &names(&["a.example"]));
    assert_eq!(filter.kernel(5), Some(ONE));
    // The other way round too.
    filter.set_names(TWO, &[]);
    filter.set_name_set(6, Some(TWO));
    assert_eq!(filter.kernel(6), Some(TWO));
    assert_eq!(filter.state(), FilterState::default());
}

#[test]
fn only_what_changes_is_written() {
    let mut filter = filter(9);
    filter.set_name_set(5, Some(ONE));
    filter.set_names(ONE, &names(&["a.example", "b.example"]));
    assert_eq!(filter.writes(), 3);
    filter.set_names(ONE, &names(&["b.example", "A.EXAMPLE", "a.example"]));
    filter.set_name_set(5, Some(ONE));
    assert_eq!(filter.writes(), 0);
    filter.set_names(ONE, &names(&["b.example", "c.example"]));
    assert_eq!(filter.writes(), 2);
    assert_eq!(filter.tables.names.len(), 2);
}

#[test]
fn names_that_do_not_fit_open_the_name_set_and_no_other() {
    let mut filter = filter(2);
    filter.set_name_set(5, Some(ONE));
    filter.set_name_set(6, Some(TWO));
    filter.set_names(TWO, &names(&["a.example"]));
    filter.set_names(ONE, &names(&["b.example"]));
    filter.set_names(ONE, &names(&["b.example", "c.example"]));
    assert_eq!((filter.kernel(5), filter.kernel(6)), (None, Some(TWO)));
    assert_eq!(
        filter.state(),
        FilterState {
            unfiltered_interfaces: 1,
            failures: 1
        }
    );
    // There is room again, and nobody has to edit the names.
    filter.remove_name_set(TWO);
    assert_eq!((filter.kernel(5), filter.kernel(6)), (Some(ONE), None));
}

#[test]
fn an_interface_may_change_its_name_set_and_go() {
    let mut filter = filter(9);
    filter.set_names(ONE, &names(&["a.example"]));
    filter.set_name_set(5, Some(ONE));
    // The next name set has no names yet: rather none than the wrong one.
    filter.set_name_set(5, Some(TWO));
    assert_eq!(filter.kernel(5), None);
    filter.set_names(TWO, &[]);
    assert_eq!(filter.kernel(5), Some(TWO));
    filter.set_name_set(5, None);
    assert_eq!(filter.kernel(5), None);
    assert_eq!(filter.state(), FilterState::default());
}

#[test]
fn a_name_set_that_goes_takes_its_names_along() {
    let mut filter = filter(9);
    filter.set_name_set(5, Some(ONE));
    filter.set_names(ONE, &names(&["a.example"]));
    filter.remove_name_set(ONE);
    assert_eq!(filter.kernel(5), None);
    assert!(filter.tables.names.is_empty());
}

#[test]
fn a_name_set_says_whether_it_has_names() {
    let mut filter = filter(10);
    filter.set_name_set(7, Some(ONE));
    filter.set_names(ONE, []);
    assert!(filter.tables.empty.contains(&7));
    filter.set_names(ONE, &names(&["example.com"]));
    assert!(!filter.tables.empty.contains(&7));
    filter.set_names(ONE, []);
    assert!(filter.tables.empty.contains(&7));
}

#[test]
fn a_name_set_says_whether_answers_are_held() {
    let mut filter = filter(10);
    filter.set_name_set(7, Some(ONE));
    filter.set_names(ONE, &names(&["example.com"]));
    assert!(filter.tables.unheld.is_empty());
    filter.set_held(ONE, false);
    assert!(filter.tables.unheld.contains(&7));
    filter.set_name_set(8, Some(ONE));
    assert!(filter.tables.unheld.contains(&8));
    filter.set_held(ONE, true);
    assert!(filter.tables.unheld.is_empty());
}
