//! The queries of pods that no answer has followed, for people who ask.
//!
//! The programs write the map. A look from here changes nothing in it, not even which element gives way
//! (`htab_lru_map_lookup_elem_sys` in Linux kernel/bpf/hashtab.c).

use std::os::fd::AsFd as _;

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError},
};
use dnsflow_common::key::{PENDING_PER_INTERFACE, Pending, SlotKey};
use dnsflow_core::{Timestamp, values::connection::PendingQuery};

use super::CaptureError;

type Key = [u8; size_of::<SlotKey>()];
type Value = [u8; size_of::<Pending>()];

const NAME: &str = "PENDING";

/// The map `PENDING`.
#[derive(Debug)]
pub struct PendingQueries(HashMap<MapData, Key, Value>);

impl PendingQueries {
    /// With a descriptor of its own: the map stays in the object, where tests change it.
    pub(super) fn new(ebpf: &Ebpf) -> Result<Self, CaptureError> {
        let broken = || CaptureError::Object { what: NAME };
        let Some(Map::LruHashMap(data)) = ebpf.map(NAME) else {
            return Err(broken());
        };
        let fd = data.fd().as_fd().try_clone_to_owned();
        let data = MapData::from_fd(fd.map_err(|_| broken())?).map_err(|_| broken())?;
        let map = HashMap::try_from(Map::LruHashMap(data));
        map.map(Self).map_err(|_| broken())
    }

    /// Those of an interface, in no particular order: a look at each of its slots.
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read.
    pub fn of(&self, ifindex: u32) -> Result<Vec<PendingQuery>, MapError> {
        let slots = (0..PENDING_PER_INTERFACE).map(|slot| SlotKey { ifindex, slot });
        let found = slots.filter_map(|key| match self.0.get(&zerocopy::transmute!(key), 0) {
            Ok(value) => Some(Ok(query(ifindex, value))),
            Err(MapError::KeyNotFound) => None,
            Err(error) => Some(Err(error)),
        });
        found.collect()
    }
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
