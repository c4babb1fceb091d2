//! The classes of many ports, around a kernel that has so many elements.

use std::time::Duration;

use dnsflow_common::{key::CLASSES_MAX, question::Depth};
use proptest::prelude::*;

use super::*;
use crate::{
    testing::ClassElements,
    values::limits::{CLASS_RESTS, CLASSES_PER_PORT_MAX},
};

const MASK: u32 = 0xffe0_0000;
/// The bit of the first number.
const FIRST: u32 = 1 << 21;

/// The classes of ports, whose ids are their interface indices, too.
struct Side {
    classes: Classes,
    groups: Groups,
    now: Timestamp,
    /// The mark of each class, as the kernel has it.
    kernel: BTreeMap<(u32, NameClass), u32>,
    elements: ClassElements,
    /// How long it takes to carry a command out.
    delay: Duration,
}

fn class(number: usize) -> NameClass {
    NameClass {
        base: format!("n{number}.test").parse().expect("a name"),
        depth: Depth::Child,
        is_ipv6: false,
    }
}

impl Side {
    /// With so many elements, and so many of them for a port.
    fn of(count: u32, per_port_max: usize) -> Self {
        Self {
            classes: Classes {
                elements: Elements::new(count, per_port_max),
                ..Classes::default()
            },
            groups: Groups::new(Some(MASK)),
            now: Timestamp::from_nanos(1_000_000_000_000),
            kernel: BTreeMap::new(),
            elements: ClassElements::default(),
            delay: Duration::ZERO,
        }
    }

    /// As an agent has them.
    fn whole() -> Self {
        Self::of(CLASSES_MAX, CLASSES_PER_PORT_MAX)
    }

    /// A port's class gets a group.
    fn open(&mut self, port: u32, number: usize, group: u32) {
        let id = PortId(port);
        self.groups.attached(id, port, self.now);
        let tag = Tag::new(1, group as u16);
        let class = (id, class(number));
        self.classes.open(class, tag, &self.groups, self.now);
        self.carry_out();
    }

    /// All classes of a port ask.
    fn open_all(&mut self, port: u32) {
        for number in 0..CLASSES_PER_PORT_MAX {
            self.open(port, number, 1);
        }
    }

    /// The rules of a port are edited.
    fn edit(&mut self, port: u32) {
        let beside = self.classes.forget(PortId(port));
        assert!(beside.is_empty());
        self.carry_out();
    }

    /// Carries out the commands. As the agent does: until there are no further ones.
    fn carry_out(&mut self) {
        let mut out = Output::at(self.now);
        self.classes.give_out(&mut out);
        loop {
            self.classes.commands_taken(self.now);
            self.now = self.now + self.delay;
            if out.commands.is_empty() {
                break;
            }
            for command in out.commands.drain(..) {
                let Command::ChangeClasses(changes) = command else {
                    continue;
                };
                for change in changes {
                    self.change(change);
                }
            }
        }
    }

    fn change(&mut self, change: ClassChange) {
        match change {
            ClassChange::Set {
                ifindex,
                class,
                mark,
                element,
            } => {
                self.elements
                    .set(element, (ifindex, class.clone()), self.now);
                self.kernel.insert((ifindex, class), mark);
            }
            ClassChange::Remove { ifindex, class } => {
                self.elements.remove(&(ifindex, class.clone()), self.now);
                let removed = self.kernel.remove(&(ifindex, class));
                assert!(removed.is_some(), "nothing is removed twice");
            }
        }
    }

    /// How many classes a port has in the kernel.
    fn count(&self, port: u32) -> usize {
        let of_port = self.kernel.keys().filter(|(ifindex, _)| *ifindex == port);
        of_port.count()
    }
}

#[test]
fn pods_with_all_of_their_classes_leave_another_one_its_own() {
    let mut side = Side::whole();
    for port in 1..=32 {
        side.open_all(port);
        assert_eq!(side.count(port), CLASSES_PER_PORT_MAX);
    }
    side.open_all(33);
    assert_eq!(side.count(33), CLASSES_PER_PORT_MAX);
}

#[test]
fn edits_of_some_pods_leave_another_one_its_classes() {
    let mut side = Side::whole();
    for _ in 0..40 {
        for port in 1..=4 {
            side.open_all(port);
            side.edit(port);
        }
    }
    side.open_all(5);
    assert_eq!(side.count(5), CLASSES_PER_PORT_MAX);
    // A pod waits for its own elements.
    side.open_all(1);
    assert_eq!(side.count(1), 0);
    side.now = side.now + CLASS_RESTS;
    side.open_all(1);
    assert_eq!(side.count(1), CLASSES_PER_PORT_MAX);
}

/// Each that comes has classes at the latest when elements have rested, and all come to have alike.
#[test]
fn pods_that_have_most_give_classes_back_to_those_that_come() {
    let mut side = Side::of(64, 16);
    for port in 1..=12 {
        for number in 0..16 {
            side.open(port, number, 1);
        }
        if side.count(port) == 0 {
            side.now = side.now + CLASS_RESTS;
            side.open(port, 0, 1);
        }
        assert!(side.count(port) > 0, "{port}");
    }
    for _ in 0..4 {
        side.now = side.now + CLASS_RESTS;
        for port in 1..=12 {
            for number in 0..16 {
                side.open(port, number, 1);
            }
        }
    }
    let counts: Vec<_> = (1..=12).map(|port| side.count(port)).collect();
    // A share is four: a quarter of the elements stays free.
    assert!(
        counts.iter().all(|count| (3..=6).contains(count)),
        "{counts:?}"
    );
    let before = side.kernel.clone();
    for port in 1..=12 {
        for number in 0..16 {
            side.open(port, number, 1);
        }
    }
    assert_eq!(side.kernel, before, "the shares are alike");
}

#[test]
fn a_class_with_another_group_has_another_element() {
    let mut side = Side::of(64, 2);
    side.open(1, 0, 1);
    side.open(1, 0, 2);
    assert_eq!(
        side.kernel.values().copied().collect::<Vec<_>>(),
        [2 * FIRST]
    );
    // The former one rests, and nothing is open by the former group.
    side.open(1, 0, 3);
    assert_eq!(side.kernel, BTreeMap::new());
    side.now = side.now + CLASS_RESTS;
    side.open(1, 0, 3);
    assert_eq!(
        side.kernel.values().copied().collect::<Vec<_>>(),
        [3 * FIRST]
    );
}

/// An event at a port.
#[derive(Clone, Debug)]
enum Step {
    /// A class of a port has a group, which is in force.
    Open(u32, usize, u32),
    /// All classes of a port have.
    OpenAll(u32),
    /// Its rules are edited, and it takes so many milliseconds to tell the kernel.
    Edit(u32, u64),
    /// The kernel refuses what it has in these elements.
    Refuse(BTreeSet<u32>),
    /// Time passes, in milliseconds.
    Pass(u64),
}

const PORTS: u32 = 12;
const ELEMENTS: u32 = 64;
const PER_PORT: usize = 8;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let port = || 1..=PORTS;
    let refused = prop::collection::btree_set(0..ELEMENTS, 1..4);
    let step = prop_oneof![
        4 => (port(), 0..2 * PER_PORT, 1..3_u32).prop_map(|(port, class, group)| Step::Open(port, class, group)),
        6 => port().prop_map(Step::OpenAll),
        3 => (port(), 0..4_000_u64).prop_map(|(port, ms)| Step::Edit(port, ms)),
        1 => refused.prop_map(Step::Refuse),
        2 => (0..12_000_u64).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    /// Whatever happens, no element is written before it has rested (`ClassElements::set`), no port has more than its
    /// limit, and one without classes gets one.
    #[test]
    fn a_pod_gets_a_class_whatever_others_do(steps in steps()) {
        let mut side = Side::of(ELEMENTS, PER_PORT);
        for step in steps {
            match step {
                Step::Open(port, number, group) => side.open(port, number, group),
                Step::OpenAll(port) => {
                    for number in 0..2 * PER_PORT {
                        side.open(port, number, 1);
                    }
                }
                Step::Edit(port, ms) => {
                    side.delay = Duration::from_millis(ms);
                    side.edit(port);
                    side.delay = Duration::ZERO;
                }
                Step::Refuse(elements) => {
                    side.classes.refused(&elements);
                    side.carry_out();
                }
                Step::Pass(ms) => side.now = side.now + Duration::from_millis(ms),
            }
            for port in 1..=PORTS {
                prop_assert!(side.count(port) <= PER_PORT);
            }
        }
        let newcomer = PORTS + 1;
        side.open(newcomer, 0, 1);
        if side.count(newcomer) == 0 {
            side.now = side.now + CLASS_RESTS;
            side.open(newcomer, 0, 1);
        }
        prop_assert_eq!(side.count(newcomer), 1);
    }
}
