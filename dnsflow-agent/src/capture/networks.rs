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

    /// Adds these networks (`true`), or removes them.
    ///
    /// # Errors
    ///
    /// If there is no room, or the kernel refuses. Then networks are missing, which come with a later change.
    pub fn change(&mut self, changes: &BTreeMap<IpNet, bool>) -> Result<(), MapError> {
        // First all that are to come: none is forgotten if the kernel refuses another one.
        let come = changes.iter().filter(|(_, is_there)| **is_there);
        self.missing.extend(come.map(|(network, _)| *network));
        for (network, _) in changes.iter().filter(|(_, is_there)| !**is_there) {
            if !self.missing.remove(network) {
                absent(self.trie.remove(&key(network)))?;
            }
        }
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
