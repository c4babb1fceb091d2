//! Which resolvers the programs trust.
//!
//! Only resolvers that were given are trusted. As long as none is given, no answer counts.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use aya::{
    Ebpf,
    maps::{HashMap, MapData, MapError},
};
use dnsflow_common::{
    key::{RESOLVERS_MAX, ResolverKey},
    walk::{Ports, ServerPorts as _},
};

use super::{CaptureError, absent, program::take_map};

type Key = [u8; size_of::<ResolverKey>()];

/// The trusted resolvers, as the pods see them.
pub struct Resolvers {
    map: HashMap<MapData, Key, u8>,
    ports: Ports,
    trusted: BTreeSet<(IpAddr, u16)>,
}

/// Why a resolver is not trusted, or still is.
#[derive(Debug, thiserror::Error)]
pub enum ResolverError {
    /// The programs do not look at its port.
    #[error("the resolver {resolver} is not trusted: --dns-port does not have its port")]
    Port {
        /// The resolver.
        resolver: SocketAddr,
    },
    /// There are too many.
    #[error("the resolver {resolver} is not trusted: there are more than {RESOLVERS_MAX}")]
    TooMany {
        /// The resolver.
        resolver: SocketAddr,
    },
    /// The kernel refuses.
    #[error("cannot change the trust in the resolver {resolver}")]
    Map {
        /// The resolver.
        resolver: SocketAddr,
        /// Why.
        #[source]
        source: MapError,
    },
}

impl Resolvers {
    pub(super) fn new(ebpf: &mut Ebpf, ports: Ports) -> Result<Self, CaptureError> {
        Ok(Self {
            map: take_map(ebpf, "RESOLVERS")?,
            ports,
            trusted: BTreeSet::new(),
        })
    }

    /// Trusts these resolvers and no others. Returns the errors; the rest is done.
    #[must_use = "a resolver that is not trusted opens nothing"]
    pub fn set(&mut self, resolvers: &[(IpAddr, u16)]) -> Vec<ResolverError> {
        let mut errors = Vec::new();
        let mut wanted = BTreeSet::new();
        for &(address, port) in resolvers {
            let resolver = SocketAddr::new(address, port);
            if !self.ports.contains(port) {
                errors.push(ResolverError::Port { resolver });
            } else if wanted.len() >= RESOLVERS_MAX as usize && !wanted.contains(&(address, port)) {
                errors.push(ResolverError::TooMany { resolver });
            } else {
                wanted.insert((address, port));
            }
        }
        // Old resolvers go first, to make room.
        let old: Vec<_> = self.trusted.difference(&wanted).copied().collect();
        for (address, port) in old {
            match absent(self.map.remove(&key(address, port))) {
                Ok(()) => {
                    self.trusted.remove(&(address, port));
                }
                Err(source) => errors.push(ResolverError::Map {
                    resolver: SocketAddr::new(address, port),
                    source,
                }),
            }
        }
        let new: Vec<_> = wanted.difference(&self.trusted).copied().collect();
        for (address, port) in new {
            match self.map.insert(key(address, port), 1, 0) {
                Ok(()) => {
                    self.trusted.insert((address, port));
                }
                Err(source) => errors.push(ResolverError::Map {
                    resolver: SocketAddr::new(address, port),
                    source,
                }),
            }
        }
        errors
    }
}

fn key(address: IpAddr, port: u16) -> Key {
    zerocopy::transmute!(ResolverKey::new(address, port))
}
