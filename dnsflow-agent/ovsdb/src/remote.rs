//! Addresses of database servers, in OVS's form (ovsdb(7), "Connection Methods").

use std::{fmt, net::Ipv6Addr, path::PathBuf, str::FromStr};

/// The port of a `tcp:` remote without a port (RFC 7047, section 7).
const DEFAULT_PORT: u16 = 6640;
/// The most addresses in one option.
pub const REMOTES_MAX: usize = 16;

/// One address.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Remote {
    /// `unix:/path`
    Unix(PathBuf),
    /// `tcp:host:port`
    Tcp {
        /// A name or an address, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

/// Why an address is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RemoteError {
    /// `ssl:`
    #[error("`{0}`: TLS connections to OVSDB are not supported; use unix:PATH or tcp:HOST:PORT")]
    Tls(String),
    /// `punix:`, `ptcp:`, `pssl:`
    #[error("`{0}` is an address to listen on; use unix:PATH or tcp:HOST:PORT")]
    Passive(String),
    /// Anything else.
    #[error("`{0}` is not an OVSDB remote; use unix:PATH or tcp:HOST:PORT")]
    Unknown(String),
    /// No address at all.
    #[error("no OVSDB remote given; use unix:PATH or tcp:HOST:PORT")]
    Empty,
    /// More than [`REMOTES_MAX`].
    #[error("more than {REMOTES_MAX} OVSDB remotes given")]
    TooMany,
}

impl FromStr for Remote {
    type Err = RemoteError;

    fn from_str(text: &str) -> Result<Self, RemoteError> {
        let unknown = || RemoteError::Unknown(text.to_owned());
        let (method, rest) = text.split_once(':').ok_or_else(unknown)?;
        match method {
            "unix" if !rest.is_empty() => Ok(Self::Unix(rest.into())),
            "tcp" => {
                let (host, port) = split_port(rest).ok_or_else(unknown)?;
                Ok(Self::Tcp {
                    host: host.to_owned(),
                    port,
                })
            }
            "ssl" => Err(RemoteError::Tls(text.to_owned())),
            "punix" | "ptcp" | "pssl" => Err(RemoteError::Passive(text.to_owned())),
            _ => Err(unknown()),
        }
    }
}

/// Splits `host:port`, `host`, `[v6]:port` and `[v6]`.
fn split_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(bracketed) => {
            let (host, port) = bracketed.split_once(']')?;
            host.parse::<Ipv6Addr>().ok()?;
            (host, port)
        }
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let port = match port.strip_prefix(':') {
        Some(digits) => digits.parse().ok().filter(|port| *port != 0)?,
        None if port.is_empty() => DEFAULT_PORT,
        None => return None,
    };
    let plausible = !host.is_empty() && !host.contains(['[', ']']);
    plausible.then_some((host, port))
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

/// One or more addresses of the same database, tried in their order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Remotes(Vec<Remote>);

impl Remotes {
    /// Unix sockets at these paths.
    pub fn unix(paths: &[&str]) -> Self {
        Self(paths.iter().map(|path| Remote::Unix(path.into())).collect())
    }

    /// The addresses.
    pub fn iter(&self) -> impl Iterator<Item = &Remote> {
        self.0.iter()
    }
}

impl FromStr for Remotes {
    type Err = RemoteError;

    /// Reads addresses separated by commas.
    fn from_str(text: &str) -> Result<Self, RemoteError> {
        let parts = text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty());
        let remotes: Vec<Remote> = parts.map(str::parse).collect::<Result<_, _>>()?;
        match remotes.len() {
            0 => Err(RemoteError::Empty),
            count if count > REMOTES_MAX => Err(RemoteError::TooMany),
            _ => Ok(Self(remotes)),
        }
    }
}

#[cfg(test)]
mod tests;
