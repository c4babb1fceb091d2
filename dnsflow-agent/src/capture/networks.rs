//! The networks whose addresses the program does not open: the agent decides over them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use aya::{
    Ebpf,
    maps::{Array, LpmTrie, MapData, MapError, lpm_trie::Key},
};
use dnsflow_common::key::{AddressBit, NetworkKey};
use ipnet::IpNet;

use super::{CaptureError, absent, program::take_map};

type Data = [u8; size_of::<NetworkKey>()];

/// The maps `NETWORKS` and `ADDRESSES`.
pub struct Networks {
    trie: LpmTrie<MapData, Data, u8>,
    words: Array<MapData, u64>,
    /// The single addresses, in the order of their bits.
    addresses: BTreeSet<(AddressBit, IpAddr)>,
    /// The networks that the trie should have and does not.
    missing: BTreeSet<IpNet>,
    /// The words to be written. A program that reads one meanwhile may find some of its bits as before.
    changed: BTreeSet<u32>,
}

impl fmt::Debug for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Networks").finish_non_exhaustive()
    }
}

impl Networks {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        Ok(Self {
            trie: take_map(ebpf, "NETWORKS")?,
            words: take_map(ebpf, "ADDRESSES")?,
            addresses: BTreeSet::new(),
            missing: BTreeSet::new(),
            changed: BTreeSet::new(),
        })
    }

    /// Adds these networks (`true`), or removes them. An address in networks of both kinds is in one of them at any
    /// time: the program opens it in between no more than before.
    ///
    /// # Errors
    ///
    /// If there is no room, or the kernel refuses. Then networks are missing, which come with a later change.
    pub fn change(&mut self, changes: &BTreeMap<IpNet, bool>) -> Result<(), MapError> {
        let of = |is_coming| {
            let changes = changes.iter();
            let changes = changes.filter(move |(_, is_there)| **is_there == is_coming);
            changes.map(|(network, _)| *network)
        };
        for network in of(true) {
            match single(&network) {
                Some((bit, address)) => {
                    self.addresses.insert((bit, address));
                    self.changed.insert(bit.word);
                }
                None => {
                    self.missing.insert(network);
                }
            }
        }
        // If there is no room, those that go may leave some.
        let _ = self.add();
        for network in of(false) {
            match single(&network) {
                Some((bit, address)) => {
                    self.addresses.remove(&(bit, address));
                    self.changed.insert(bit.word);
                }
                None if self.missing.remove(&network) => {}
                None => absent(self.trie.remove(&key(&network)))?,
            }
        }
        self.add()
    }

    /// Adds the networks that are missing, and writes the words that have changed.
    fn add(&mut self) -> Result<(), MapError> {
        while let Some(word) = self.changed.first().copied() {
            let first = AddressBit { word, mask: 0 };
            let bits = self.addresses.range((first, IpAddr::V4(0.into()))..);
            let bits = bits.take_while(|(bit, _)| bit.word == word);
            let value = bits.fold(0, |value, (bit, _)| value | bit.mask);
            self.words.set(word, value, 0)?;
            self.changed.pop_first();
        }
        while let Some(network) = self.missing.first() {
            self.trie.insert(&key(network), 1, 0)?;
            self.missing.pop_first();
        }
        Ok(())
    }

    /// Whether it has all networks.
    pub fn has_all(&self) -> bool {
        self.missing.is_empty() && self.changed.is_empty()
    }
}

/// The bit and the address of a network of one address.
fn single(network: &IpNet) -> Option<(AddressBit, IpAddr)> {
    let is_single = network.prefix_len() == network.max_prefix_len();
    is_single.then(|| (AddressBit::new(network.addr()), network.addr()))
}

fn key(network: &IpNet) -> Key<Data> {
    let (bits, key) = NetworkKey::new(network.network(), network.prefix_len());
    Key::new(bits, zerocopy::transmute!(key))
}
