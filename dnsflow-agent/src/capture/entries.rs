//! The addresses that pods may reach by a group, and the marks that their packets get.
//!
//! The map can outlive the agent: it is pinned beside the links (`capture/pins.rs`), with its layout in the
//! name of its file. The next agent goes on with it.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError},
};
use dnsflow_common::key::{Entry, EntryKey};
use dnsflow_core::{Timestamp, io::input::MarkFound};
use zerocopy::{FromBytes, IntoBytes};

use super::{CaptureError, absent, bpf, program::take_map, room::Room};

type Key = [u8; size_of::<EntryKey>()];
type Value = [u8; size_of::<Entry>()];

/// How many entries are read at a time. An answer may have to wait for them.
const READ_MAX: usize = 256;

/// The element must not be there (Linux include/uapi/linux/bpf.h).
const BPF_NOEXIST: u64 = 1;

/// The map `ENTRIES`.
pub struct Entries {
    map: HashMap<MapData, Key, Value>,
    /// The same map, for what aya does not do with it.
    fd: OwnedFd,
    /// How many more the programs may add.
    room: Room,
}

/// How far the entries were read. One reading is for one pass over the map.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    /// Where the kernel goes on: the number of a bucket (`__htab_map_lookup_and_delete_batch` in Linux'
    /// kernel/bpf/hashtab.c). `None` at the beginning.
    next: Option<u32>,
    is_over: bool,
}

impl Reading {
    /// Whether all entries are read.
    pub fn is_over(&self) -> bool {
        self.is_over
    }
}

/// What `BPF_MAP_LOOKUP_BATCH` takes: `batch` in `union bpf_attr`.
#[repr(C)]
#[derive(FromBytes, IntoBytes)]
struct LookUpBatch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

impl Entries {
    pub(super) fn new(ebpf: &mut Ebpf, of_interface_max: u64) -> Result<Self, CaptureError> {
        let map: Map = take_map(ebpf, "ENTRIES")?;
        let broken = || CaptureError::Object { what: "ENTRIES" };
        let Map::HashMap(data) = &map else {
            return Err(broken());
        };
        let fd = data.fd().as_fd().try_clone_to_owned();
        let fd = fd.map_err(|_| broken())?;
        let map = HashMap::try_from(map).map_err(|_| broken())?;
        let room = Room::new(ebpf, of_interface_max)?;
        Ok(Self { map, fd, room })
    }

    /// Lets the programs add entries at an interface (`true`), as far as there is room, or no longer.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then the programs leave the interface to the agent.
    pub fn share(&mut self, ifindex: u32, is_there: bool) -> Result<(), MapError> {
        match is_there {
            true => self.room.open(ifindex),
            false => self.room.close(ifindex),
        }
    }

    /// Has the programs add none before the next reading: the kernel has refused an entry, and what the programs find
    /// no room for they would not leave to the agent in time.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn leave_no_room(&mut self) -> Result<(), MapError> {
        self.room.end();
        self.room.tell()
    }

    /// Tells the programs of the room that a reading has found, or that changes of entries have left.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. The next reading tells of it again.
    pub fn tell_room(&mut self) -> Result<(), MapError> {
        self.room.tell()
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
        let key = EntryKey::new(ifindex, address);
        let mut entry = Entry::new(&key, mark, until.as_nanos());
        let key: Key = zerocopy::transmute!(key);
        // Mostly there is none.
        let value: Value = zerocopy::transmute!(entry);
        let is_new = self.map.insert(key, value, BPF_NOEXIST);
        if !is_there_already(&is_new) {
            if is_new.is_ok() {
                self.room.added(ifindex);
            }
            return is_new;
        }
        if let Ok(before) = self.map.get(&key, 0) {
            let before: Entry = zerocopy::transmute!(before);
            entry.used_ns = before.used_ns;
        }
        let value: Value = zerocopy::transmute!(entry);
        self.map.insert(key, value, 0)
    }

    /// Marks packets to an address no longer.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then the entry ends by its time.
    pub fn remove(&mut self, ifindex: u32, address: IpAddr) -> Result<(), MapError> {
        let removed = self.map.remove(&key(ifindex, address));
        if removed.is_ok() {
            self.room.removed(ifindex);
        }
        absent(removed)
    }

    /// The next entries of a reading, some hundreds at most, until the reading is over. An entry that comes or goes
    /// meanwhile may be left out; each other one is read once. Behind the last one, the programs are to be told of the
    /// room ([`Entries::tell_room`]).
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read. Then the reading is over.
    pub fn read(&mut self, reading: &mut Reading) -> io::Result<Vec<MarkFound>> {
        if reading.next.is_none() {
            self.room.begin_count();
        }
        let mut keys = [Key::default(); READ_MAX];
        let mut values = [[0; size_of::<Entry>()]; READ_MAX];
        let mut behind = 0_u32;
        let first = reading
            .next
            .as_ref()
            .map_or(0, |next| (&raw const *next).expose_provenance());
        let mut attributes = LookUpBatch {
            in_batch: first as u64,
            out_batch: (&raw mut behind).expose_provenance() as u64,
            keys: keys.as_mut_ptr().expose_provenance() as u64,
            values: values.as_mut_ptr().expose_provenance() as u64,
            count: READ_MAX as u32,
            map_fd: self.fd.as_raw_fd().cast_unsigned(),
            elem_flags: 0,
            flags: 0,
        };
        // SAFETY: the kernel reads `reading.next`, and writes `behind` and READ_MAX keys and values at most, which are
        // as long as the map was made with. All are bytes or numbers.
        if let Err(error) = unsafe { bpf::call(bpf::Command::MapLookupBatch, &mut attributes) } {
            reading.is_over = true;
            // The end of the map. What came before it counts.
            if error.raw_os_error() != Some(libc::ENOENT) {
                return Err(error);
            }
        }
        reading.next = Some(behind);
        let read = keys.into_iter().zip(values).take(attributes.count as usize);
        let read: Vec<_> = read.map(|(key, value)| found(key, value)).collect();
        for found in &read {
            self.room.count(found.ifindex);
        }
        if reading.is_over {
            self.room.end_count();
        }
        Ok(read)
    }
}

/// An entry that was read.
fn found(key: Key, value: Value) -> MarkFound {
    let key: EntryKey = zerocopy::transmute!(key);
    let entry: Entry = zerocopy::transmute!(value);
    MarkFound {
        ifindex: key.ifindex,
        address: key.address(),
        mark: entry.mark.mark(),
        until: Timestamp::from_nanos(entry.until_ns),
        used_at: (entry.used_ns != 0).then(|| Timestamp::from_nanos(entry.used_ns)),
    }
}

/// Whether an insertion found the key in the map (`htab_map_update_elem` in Linux kernel/bpf/hashtab.c).
fn is_there_already(insertion: &Result<(), MapError>) -> bool {
    matches!(insertion, Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::EEXIST))
}

fn key(ifindex: u32, address: IpAddr) -> Key {
    zerocopy::transmute!(EntryKey::new(ifindex, address))
}
