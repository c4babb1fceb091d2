//! A DNS server that is trusted.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU8,
    str::FromStr,
};

/// The port that DNS servers listen on (RFC 1035, section 4.2).
const DNS_PORT: u16 = 53;

/// Address and port of a DNS server as pods see them: the source of its answers.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Resolver {
    /// The address.
    pub address: IpAddr,
    /// The port, the same for UDP and TCP.
    pub port: u16,
}

/// Why a text names no resolver.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ResolverError {
    /// Neither an address nor an address with a port.
    #[error("`{0}` is no resolver; use IP, IP:PORT or [IPv6]:PORT")]
    Unknown(String),
    /// An address that no server can have.
    #[error("`{0}` cannot be a resolver: the address is unspecified or multicast, or the port 0")]
    Impossible(String),
}

impl FromStr for Resolver {
    type Err = ResolverError;

    fn from_str(text: &str) -> Result<Self, ResolverError> {
        let unbracketed = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .filter(|inner| inner.contains(':'))
            .unwrap_or(text);
        let address = unbracketed
            .parse::<IpAddr>()
            .map(|address| SocketAddr::new(address, DNS_PORT))
            .or_else(|_| text.parse())
            .map_err(|_| ResolverError::Unknown(text.to_owned()))?;
        // Packets carry the IPv4 address (RFC 4291, section 2.5.5.2).
        let ip = address.ip().to_canonical();
        if ip.is_unspecified() || ip.is_multicast() || address.port() == 0 {
            return Err(ResolverError::Impossible(text.to_owned()));
        }
        Ok(Self {
            address: ip,
            port: address.port(),
        })
    }
}

impl From<SocketAddr> for Resolver {
    fn from(source: SocketAddr) -> Self {
        Self {
            address: source.ip(),
            port: source.port(),
        }
    }
}

/// The number of a DNS server. A cache entry remembers it in a byte that would be padding.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ServerId(NonZeroU8);

/// The DNS servers that were trusted since the start, each with a number. There are
/// 255 numbers; the servers behind them have none.
#[derive(Debug, Default)]
pub(crate) struct Servers(Vec<Resolver>);

impl Servers {
    /// Gives numbers to those that have none.
    pub(crate) fn add<'a>(&mut self, resolvers: impl IntoIterator<Item = &'a Resolver>) {
        for resolver in resolvers {
            if self.0.len() < usize::from(u8::MAX) && !self.0.contains(resolver) {
                self.0.push(*resolver);
            }
        }
    }

    /// The number of a server. There are few: a look at each is cheaper than a hash.
    pub(crate) fn number(&self, resolver: Resolver) -> Option<ServerId> {
        let index = self.0.iter().position(|known| *known == resolver)?;
        let number = u8::try_from(index + 1).ok().and_then(NonZeroU8::new)?;
        Some(ServerId(number))
    }

    /// The server with a number.
    pub(crate) fn get(&self, ServerId(number): ServerId) -> Option<Resolver> {
        self.0.get(usize::from(number.get()) - 1).copied()
    }
}

impl fmt::Display for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.address, self.port).fmt(f)
    }
}

#[cfg(test)]
mod tests;
