//! The classes of names whose addresses the program opens without the agent.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    time::Duration,
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, MapData, MapError},
};
use dnsflow_common::{
    key::{CLASSES_MAX, Class, ClassKey},
    question::{BASE_MAX, NameHash},
    walk::Version,
};
use dnsflow_core::{Timestamp, values::class::NameClass};

use super::{CaptureError, absent, program::take_map};

type Key = [u8; size_of::<ClassKey>()];
type Value = [u8; size_of::<Class>()];

/// For so long after the last key has led there, an element is not written again: longer than any program runs.
const RESTS: Duration = Duration::from_secs(10);

/// The maps `CLASS_PLACES` and `CLASSES`.
pub struct Classes {
    places: HashMap<MapData, Key, u32>,
    classes: Array<MapData, Value>,
    /// Where each class is that has a key.
    known: BTreeMap<ClassKey, u32>,
    /// The elements that no key leads to any more, and since when, the oldest first.
    resting: VecDeque<(Timestamp, u32)>,
    /// The first element that was never used.
    next: u32,
}

impl fmt::Debug for Classes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Classes").finish_non_exhaustive()
    }
}

/// The key of a class of names at an interface.
pub fn class_key(ifindex: u32, class: &NameClass) -> ClassKey {
    let version = match class.is_ipv6 {
        false => Version::V4,
        true => Version::V6,
    };
    let base = NameHash::of(class.base.wire());
    ClassKey::new(ifindex, base, class.depth, version)
}

impl Classes {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        Ok(Self {
            places: take_map(ebpf, "CLASS_PLACES")?,
            classes: take_map(ebpf, "CLASSES")?,
            known: BTreeMap::new(),
            resting: VecDeque::new(),
            next: 0,
        })
    }

    /// Lets the addresses of a class be opened: packets to them get this mark. `base` is the name that its key has the
    /// hash of.
    ///
    /// # Errors
    ///
    /// If there is no room, or the kernel refuses. Then the agent opens the addresses, as before.
    pub fn set(
        &mut self,
        key: ClassKey,
        base: &[u8],
        mark: u32,
        now: Timestamp,
    ) -> Result<(), MapError> {
        let mut class = Class {
            key,
            mark,
            base_len: base.len() as u32,
            base: [0; BASE_MAX as usize],
        };
        let Some(bytes) = class.base.get_mut(..base.len()) else {
            return Ok(());
        };
        bytes.copy_from_slice(base);
        let place = self.place(now).ok_or(MapError::OutOfBounds {
            index: self.next,
            max_entries: CLASSES_MAX,
        })?;
        let value: Value = zerocopy::transmute!(class);
        let set = self.classes.set(place, value, 0);
        let set = set.and_then(|()| self.places.insert(bytes_of(key), place, 0));
        let unused = match set {
            Ok(()) => self.known.insert(key, place),
            Err(_) => Some(place),
        };
        self.resting.extend(unused.map(|place| (now, place)));
        set
    }

    /// Lets the addresses of a class be opened no longer.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove(&mut self, key: ClassKey, now: Timestamp) -> Result<(), MapError> {
        absent(self.places.remove(&bytes_of(key)))?;
        let unused = self.known.remove(&key);
        self.resting.extend(unused.map(|place| (now, place)));
        Ok(())
    }

    /// Lets the addresses of all classes be opened no longer. Returns what the kernel has refused.
    pub fn clear(&mut self, now: Timestamp) -> Vec<MapError> {
        let known: Vec<_> = self.known.keys().copied().collect();
        let removed = known.into_iter().map(|key| self.remove(key, now));
        removed.filter_map(Result::err).collect()
    }

    /// An element that no program reads.
    fn place(&mut self, now: Timestamp) -> Option<u32> {
        let rested = self
            .resting
            .front()
            .filter(|(since, _)| *since + RESTS <= now);
        if rested.is_some() {
            return self.resting.pop_front().map(|(_, place)| place);
        }
        let next = (self.next < CLASSES_MAX).then_some(self.next)?;
        self.next += 1;
        Some(next)
    }
}

fn bytes_of(key: ClassKey) -> Key {
    zerocopy::transmute!(key)
}
