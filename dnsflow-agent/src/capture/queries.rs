//! The queries of pods that no answer has followed, for people who ask.
//!
//! The programs write the map. A look from here changes nothing in it, not even which element gives way
//! (`htab_lru_map_lookup_elem_sys` in Linux kernel/bpf/hashtab.c).

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError},
};
use dnsflow_common::key::{PENDING_PER_INTERFACE, Pending, SlotKey};
use dnsflow_core::{Timestamp, values::connection::PendingQuery};

use super::{CaptureError, absent, parts::same};

type Key = [u8; size_of::<SlotKey>()];
type Value = [u8; size_of::<Pending>()];

const NAME: &str = "PENDING";

/// The map `PENDING`.
#[derive(Debug)]
pub struct PendingQueries(HashMap<MapData, Key, Value>);

impl PendingQueries {
    pub(super) fn new(ebpf: &Ebpf) -> Result<Self, CaptureError> {
        let map = HashMap::try_from(Map::LruHashMap(same(ebpf, NAME)?));
        map.map(Self)
            .map_err(|_| CaptureError::Object { what: NAME })
    }

    /// Those of an interface, in no particular order: a look at each of its slots.
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read.
    pub fn of(&self, ifindex: u32) -> Result<Vec<PendingQuery>, MapError> {
        let found =
            slots(ifindex).filter_map(|key| match self.0.get(&zerocopy::transmute!(key), 0) {
                Ok(value) => Some(Ok(query(ifindex, value))),
                Err(MapError::KeyNotFound) => None,
                Err(error) => Some(Err(error)),
            });
        found.collect()
    }

    /// Forgets those of an interface that is gone. Else they would stay until the map is full, which then forgets
    /// queries of others: the kernel gives elements that were looked at a second chance (`bpf_lru_list_shrink` in Linux
    /// kernel/bpf/bpf_lru_list.c).
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub(super) fn forget(&mut self, ifindex: u32) -> Result<(), MapError> {
        slots(ifindex).try_for_each(|key| absent(self.0.remove(&zerocopy::transmute!(key))))
    }
}

fn slots(ifindex: u32) -> impl Iterator<Item = SlotKey> {
    (0..PENDING_PER_INTERFACE).map(move |slot| SlotKey { ifindex, slot })
}

fn query(ifindex: u32, value: Value) -> PendingQuery {
    let pending: Pending = zerocopy::transmute!(value);
    PendingQuery {
        ifindex,
        resolver: pending.query.resolver().into(),
        question: pending.question,
        at: Timestamp::from_nanos(pending.asked_at_ns),
    }
}
