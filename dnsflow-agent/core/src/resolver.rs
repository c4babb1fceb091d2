//! A DNS server that is trusted.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
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

impl fmt::Display for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.address, self.port).fmt(f)
    }
}

#[cfg(test)]
mod tests;
