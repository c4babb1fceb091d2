//! The networks whose addresses the program does not open: the agent decides over them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use aya::{
    Ebpf,
    maps::{LpmTrie, MapData, MapError, lpm_trie::Key},
};
use dnsflow_common::key::NetworkKey;
use ipnet::IpNet;

use super::{CaptureError, absent, program::take_map};

type Data = [u8; size_of::<NetworkKey>()];

/// The map `NETWORKS`.
pub struct Networks {
    trie: LpmTrie<MapData, Data, u8>,
    /// The networks that it should have and does not.
    missing: BTreeSet<IpNet>,
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
            missing: BTreeSet::new(),
        })
    }

    /// Adds these networks (`true`), or removes them. An address in networks of both kinds is in one of them at any
    /// time: the program opens it in between no more than before.
    ///
    /// # Errors
    ///
    /// If there is no room, or the kernel refuses. Then networks are missing, which come with a later change.
    pub fn change(&mut self, changes: &BTreeMap<IpNet, bool>) -> Result<(), MapError> {
        let come = changes.iter().filter(|(_, is_there)| **is_there);
        self.missing.extend(come.map(|(network, _)| *network));
        let gone = changes.iter().filter(|(_, is_there)| !**is_there);
        let gone: Vec<&IpNet> = gone
            .map(|(network, _)| network)
            .filter(|network| !self.missing.remove(network))
            .collect();
        let added = self.add();
        for network in gone {
            absent(self.trie.remove(&key(network)))?;
        }
        // Those that go may have left room.
        added.or_else(|_| self.add())
    }

    /// Adds the networks that are missing.
    fn add(&mut self) -> Result<(), MapError> {
        while let Some(network) = self.missing.first() {
            self.trie.insert(&key(network), 1, 0)?;
            self.missing.pop_first();
        }
        Ok(())
    }

    /// Whether it has all networks.
    pub fn has_all(&self) -> bool {
        self.missing.is_empty()
    }
}

fn key(network: &IpNet) -> Key<Data> {
    let (bits, key) = NetworkKey::new(network.network(), network.prefix_len());
    Key::new(bits, zerocopy::transmute!(key))
}
