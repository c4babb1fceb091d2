//! The addresses that pods may reach by a verdict, and the marks that their packets get.
//!
//! The map can outlive the agent: it is pinned beside the links (`capture/pins.rs`), with its layout in the
//! name of its file. The next agent goes on with it.

use std::{fmt, net::IpAddr};

use aya::maps::{HashMap, Map, MapData, MapError};
use dnsflow_common::key::{Entry, EntryKey};
use dnsflow_core::Timestamp;

use super::{CaptureError, absent};

type Key = [u8; size_of::<EntryKey>()];
type Value = [u8; size_of::<Entry>()];

/// The map `ENTRIES`.
pub struct Entries(HashMap<MapData, Key, Value>);

impl fmt::Debug for Entries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entries").finish_non_exhaustive()
    }
}

/// An entry that was read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Read {
    /// The pod's interface.
    pub ifindex: u32,
    /// The address.
    pub address: IpAddr,
    /// The bits of the mark.
    pub mark: u32,
    /// The entry counts until then.
    pub until: Timestamp,
    /// When a packet was last marked; `None` if none was.
    pub used_at: Option<Timestamp>,
}

impl Entries {
    pub(super) fn new(map: Map) -> Result<Self, CaptureError> {
        let map = HashMap::try_from(map).map_err(|_| CaptureError::Object { what: "ENTRIES" })?;
        Ok(Self(map))
    }

    /// Marks packets to an address until then. The time of use stays, if there is one.
    ///
    /// # Errors
    ///
    /// If the map is full, or the kernel refuses. Then packets to the address are not marked.
    pub fn set(
        &mut self,
        ifindex: u32,
        address: IpAddr,
        mark: u32,
        until: Timestamp,
    ) -> Result<(), MapError> {
        let key = key(ifindex, address);
        let mut entry = Entry::new(mark, until.as_nanos());
        if let Ok(before) = self.0.get(&key, 0) {
            let before: Entry = zerocopy::transmute!(before);
            entry.used_ns = before.used_ns;
        }
        let value: Value = zerocopy::transmute!(entry);
        self.0.insert(key, value, 0)
    }

    /// Marks packets to an address no longer.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then the entry ends by its time.
    pub fn remove(&mut self, ifindex: u32, address: IpAddr) -> Result<(), MapError> {
        absent(self.0.remove(&key(ifindex, address)))
    }

    /// Every entry. An entry that comes or goes meanwhile may be left out.
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read.
    pub fn read(&self) -> Result<Vec<Read>, MapError> {
        let read = |entry: Result<(Key, Value), MapError>| {
            let (key, value) = entry?;
            let key: EntryKey = zerocopy::transmute!(key);
            let entry: Entry = zerocopy::transmute!(value);
            Ok(Read {
                ifindex: key.ifindex,
                address: key.address(),
                mark: entry.mark,
                until: Timestamp::from_nanos(entry.until_ns),
                used_at: (entry.used_ns != 0).then(|| Timestamp::from_nanos(entry.used_ns)),
            })
        };
        self.0.iter().map(read).collect()
    }
}

fn key(ifindex: u32, address: IpAddr) -> Key {
    zerocopy::transmute!(EntryKey::new(ifindex, address))
}
