//! The classes of names whose addresses the program opens without the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, MapData, MapError},
};
use dnsflow_common::{
    key::{Class, ClassKey},
    question::{BASE_MAX, NameHash},
    walk::Version,
};
use dnsflow_core::values::class::NameClass;

use super::{CaptureError, absent, program::take_map};

type Key = [u8; size_of::<ClassKey>()];
type Value = [u8; size_of::<Class>()];

/// The maps `CLASS_PLACES` and `CLASSES`.
pub struct Classes {
    places: HashMap<MapData, Key, u32>,
    classes: Array<MapData, Value>,
    /// Where each class is that has a key.
    known: BTreeMap<ClassKey, u32>,
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
        })
    }

    /// Lets the addresses of a class be opened: packets to them get this mark. `base` is the name that its key has the
    /// hash of. No program reads this element of the array.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then the agent opens the addresses, as before.
    pub fn set(
        &mut self,
        element: u32,
        key: ClassKey,
        base: &[u8],
        mark: u32,
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
        let value: Value = zerocopy::transmute!(class);
        self.classes.set(element, value, 0)?;
        self.places.insert(bytes_of(key), element, 0)?;
        self.known.insert(key, element);
        Ok(())
    }

    /// Lets the addresses of a class be opened no longer.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove(&mut self, key: ClassKey) -> Result<(), MapError> {
        absent(self.places.remove(&bytes_of(key)))?;
        self.known.remove(&key);
        Ok(())
    }

    /// Lets the addresses of all classes be opened no longer. Returns the elements that have none any more, and what the
    /// kernel has refused.
    pub fn clear(&mut self) -> (BTreeSet<u32>, Vec<MapError>) {
        let before: Vec<_> = self
            .known
            .iter()
            .map(|(key, element)| (*key, *element))
            .collect();
        let mut refused = Vec::new();
        let mut gone = BTreeSet::new();
        for (key, element) in before {
            match self.remove(key) {
                Ok(()) => drop(gone.insert(element)),
                Err(error) => refused.push(error),
            }
        }
        (gone, refused)
    }
}

fn bytes_of(key: ClassKey) -> Key {
    zerocopy::transmute!(key)
}
