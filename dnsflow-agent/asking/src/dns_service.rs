//! Which Services are the cluster's DNS.

use std::{fmt, str::FromStr};

/// Which Services are the cluster's DNS: `NAMESPACE/NAME` or `NAMESPACE/LABEL=VALUE`.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct DnsService {
    /// `metadata.namespace`.
    pub namespace: String,
    /// Which ones in it.
    pub selection: Selection,
}

/// Which Services of a namespace.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Selection {
    /// The one of this name.
    Name(String),
    /// Those with this label.
    Label {
        /// The label's key.
        key: String,
        /// The label's value.
        value: String,
    },
}

/// Why a text names no Service.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{0}` names no Service; write NAMESPACE/NAME or NAMESPACE/LABEL=VALUE")]
pub struct DnsServiceError(String);

impl FromStr for DnsService {
    type Err = DnsServiceError;

    fn from_str(text: &str) -> Result<Self, DnsServiceError> {
        let error = || DnsServiceError(text.to_owned());
        // A label's key may hold a slash, a namespace's name may not.
        let (namespace, rest) = text.split_once('/').ok_or_else(error)?;
        let plain = |text: &str| {
            let octets = text.bytes();
            let allowed = |octet: u8| octet.is_ascii_alphanumeric() || b"-._".contains(&octet);
            !text.is_empty() && octets.into_iter().all(allowed)
        };
        let selection = match rest.split_once('=') {
            None => Selection::Name(rest.to_owned()),
            Some((key, value)) => Selection::Label {
                key: key.to_owned(),
                value: value.to_owned(),
            },
        };
        let sound = plain(namespace)
            && match &selection {
                Selection::Name(name) => plain(name),
                Selection::Label { key, value } => key.split('/').all(plain) && plain(value),
            };
        let namespace = namespace.to_owned();
        sound
            .then_some(Self {
                namespace,
                selection,
            })
            .ok_or_else(error)
    }
}

impl fmt::Display for DnsService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.selection {
            Selection::Name(name) => write!(f, "{}/{name}", self.namespace),
            Selection::Label { key, value } => write!(f, "{}/{key}={value}", self.namespace),
        }
    }
}
