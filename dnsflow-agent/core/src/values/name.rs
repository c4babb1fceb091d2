//! Domain names in the one form in which the core compares them.

use std::{
    borrow::{Borrow, Cow},
    cmp::Ordering,
    fmt,
    hash::Hash,
    str::FromStr,
    sync::Arc,
};

/// The longest name in wire format, root label included (RFC 1035, section 3.1).
const MAX_NAME_LEN: usize = 255;
/// The longest label (RFC 1035, section 3.1).
pub const MAX_LABEL_LEN: usize = 63;

/// Why a text or a sequence of labels is no domain name.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NameError {
    /// The text is empty, or only a dot.
    #[error("the name is empty")]
    Empty,
    /// Two dots in a row, or one in front.
    #[error("the name has an empty label")]
    EmptyLabel,
    /// A label is longer than 63 octets.
    #[error("the label `{0}` is longer than 63 characters")]
    LabelTooLong(String),
    /// The wire format is longer than 255 octets.
    #[error("the name is longer than 253 characters")]
    TooLong,
    /// A character that the EgressFirewall resource does not allow in `dnsName`.
    #[error("the character `{0}` cannot stand in a dnsName")]
    BadCharacter(char),
    /// A `*` anywhere but as the whole first label.
    #[error("`*` can only stand alone as the first label, as in `*.example.com`")]
    Wildcard,
}

/// A domain name: lower case, uncompressed wire format without the root label.
///
/// Each label is its length octet followed by its octets, so that every suffix of the name at a
/// label boundary is a suffix of the bytes. `www.example.com` is `3www7example3com`. A clone
/// shares the bytes.
#[derive(Clone, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct DomainName(Arc<[u8]>);

impl DomainName {
    /// Builds a name from its labels, first label first. Octets may be anything; ASCII letters
    /// are folded to lower case (RFC 4343).
    pub fn from_labels<'a>(labels: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, NameError> {
        let mut wire = Vec::with_capacity(64);
        for label in labels {
            if label.is_empty() {
                return Err(NameError::EmptyLabel);
            }
            let length = u8::try_from(label.len()).unwrap_or(u8::MAX);
            if usize::from(length) > MAX_LABEL_LEN {
                return Err(NameError::LabelTooLong(
                    String::from_utf8_lossy(label).into_owned(),
                ));
            }
            wire.push(length);
            wire.extend(label.iter().map(u8::to_ascii_lowercase));
        }
        // The root label takes the last of the 255 octets.
        match wire.len() {
            0 => Err(NameError::Empty),
            length if length >= MAX_NAME_LEN => Err(NameError::TooLong),
            _ => Ok(Self(wire.into())),
        }
    }

    /// Reads the presentation format (RFC 1035, section 5.1), in which a [`DomainName`] is
    /// displayed, with or without the final dot.
    pub fn from_presentation(text: &str) -> Result<Self, NameError> {
        let mut labels: Vec<Vec<u8>> = vec![Vec::new()];
        let mut rest = text.bytes();
        while let Some(octet) = rest.next() {
            let octet = match octet {
                b'.' => {
                    labels.push(Vec::new());
                    continue;
                }
                b'\\' => escaped(&mut rest).ok_or(NameError::BadCharacter('\\'))?,
                octet => octet,
            };
            if let Some(label) = labels.last_mut() {
                label.push(octet);
            }
        }
        if labels.len() > 1 {
            // Behind the final dot is the root's label.
            labels.pop_if(|last| last.is_empty());
        }
        Self::from_labels(labels.iter().map(Vec::as_slice))
    }

    /// The bytes: lower case, a length octet before each label, no root label.
    pub fn wire(&self) -> &[u8] {
        &self.0
    }

    /// The labels, first label first.
    pub fn labels(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.wire();
        std::iter::from_fn(move || {
            let (length, tail) = rest.split_first()?;
            let (label, tail) = tail.split_at(usize::from(*length));
            rest = tail;
            Some(label)
        })
    }

    /// The wire form of this name, then of each of its ancestors, longest first.
    pub fn suffixes(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.wire();
        std::iter::from_fn(move || {
            let current = rest;
            let (length, tail) = current.split_first()?;
            rest = &tail[usize::from(*length)..];
            Some(current)
        })
    }
}

/// The octet behind a backslash: three decimal digits, or the octet itself.
fn escaped(rest: &mut std::str::Bytes<'_>) -> Option<u8> {
    let first = rest.next()?;
    if !first.is_ascii_digit() {
        return Some(first);
    }
    let mut value = u32::from(first - b'0');
    for _ in 0..2 {
        value = value * 10 + char::from(rest.next()?).to_digit(10)?;
    }
    u8::try_from(value).ok()
}

impl Borrow<[u8]> for DomainName {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl FromStr for DomainName {
    type Err = NameError;

    /// Parses a host name as an EgressFirewall's `dnsName` may hold it: letters, digits, hyphens
    /// and dots; a final dot is dropped. An underscore is allowed too, for names of services.
    fn from_str(text: &str) -> Result<Self, NameError> {
        let trimmed = text.strip_suffix('.').unwrap_or(text);
        if trimmed.is_empty() {
            return Err(NameError::Empty);
        }
        if let Some(bad) = trimmed
            .chars()
            .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | '*')))
        {
            return Err(NameError::BadCharacter(bad));
        }
        if trimmed.contains('*') {
            return Err(NameError::Wildcard);
        }
        Self::from_labels(trimmed.split('.').map(str::as_bytes))
    }
}

impl fmt::Display for DomainName {
    /// Presentation format without the final dot (RFC 1035, section 5.1).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, label) in self.labels().enumerate() {
            if index > 0 {
                f.write_str(".")?;
            }
            for &octet in label {
                match octet {
                    b'.' | b'\\' => write!(f, "\\{}", octet as char)?,
                    0x21..=0x7e => write!(f, "{}", octet as char)?,
                    _ => write!(f, "\\{octet:03}")?,
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DomainName({self})")
    }
}

/// A name that is ordered by its wire form from the end, so that the names below a name follow it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct FromEnd(pub(crate) DomainName);

impl FromEnd {
    /// Whether this is `name`, or may be a name below it. The bytes of a label can look like labels: some other names
    /// count, too.
    pub(crate) fn may_be_below(&self, name: &DomainName) -> bool {
        self.0.wire().ends_with(name.wire())
    }
}

impl Ord for FromEnd {
    fn cmp(&self, other: &Self) -> Ordering {
        let [one, other] = [&self.0, &other.0].map(|name| name.wire().iter().rev());
        one.cmp(other)
    }
}

impl PartialOrd for FromEnd {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A rule's `dnsName`: as written, and in the form that is compared.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct DnsName {
    /// The text, where the name does not say it: there are many rules.
    written: Option<Box<str>>,
    name: DomainName,
    wildcard: bool,
}

impl DnsName {
    /// The text of the resource, case and final dot kept: ovn-kubernetes hashes it.
    pub fn written(&self) -> Cow<'_, str> {
        match &self.written {
            Some(text) => Cow::Borrowed(text),
            None => Cow::Owned(usual_text(&self.name, self.wildcard)),
        }
    }

    /// The name, without `*.` if it is a wildcard.
    pub fn name(&self) -> &DomainName {
        &self.name
    }

    /// Whether the text began with `*.`, which stands for exactly one label.
    pub fn is_wildcard(&self) -> bool {
        self.wildcard
    }

    /// The meaning of the text, which does not depend on case or on a final dot.
    pub fn meaning(&self) -> (&DomainName, bool) {
        (&self.name, self.wildcard)
    }
}

impl FromStr for DnsName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (wildcard, rest) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let name = rest.parse()?;
        let is_usual = usual_text(&name, wildcard) == text;
        Ok(Self {
            written: (!is_usual).then(|| text.into()),
            name,
            wildcard,
        })
    }
}

/// The text of a `dnsName` in lower case and without final dot.
fn usual_text(name: &DomainName, wildcard: bool) -> String {
    match wildcard {
        true => format!("*.{name}"),
        false => name.to_string(),
    }
}

#[cfg(test)]
mod tests;
