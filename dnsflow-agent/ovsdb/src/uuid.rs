//! The identities of rows.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The identity of a row (`_uuid`; RFC 7047, section 3.1).
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct Uuid(u128);

/// Where hyphens stand in the usual form (RFC 9562, section 4).
const HYPHENS: [usize; 4] = [8, 13, 18, 23];
/// The length of this form.
const LENGTH: usize = 36;

impl Uuid {
    /// The identity with these bits.
    pub const fn new(bits: u128) -> Self {
        Self(bits)
    }

    /// Parses the usual form with hyphens.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        if bytes.len() != LENGTH {
            return None;
        }
        let mut bits = 0;
        for (at, byte) in bytes.iter().enumerate() {
            match HYPHENS.contains(&at) {
                true if *byte == b'-' => {}
                true => return None,
                false => bits = bits << 4 | u128::from(char::from(*byte).to_digit(16)?),
            }
        }
        Some(Self(bits))
    }

    /// The bits.
    pub const fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{:032x}", self.0);
        let mut from = 0;
        for to in [8, 12, 16, 20] {
            write!(f, "{}-", &digits[from..to])?;
            from = to;
        }
        f.write_str(&digits[from..])
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_read_as_it_is_written() {
        let text = "26f8710d-96ec-42d8-9b8f-8fa63f3c4605";
        let id = Uuid::parse(text).expect("an identity");
        assert_eq!(id.bits(), 0x26f8_710d_96ec_42d8_9b8f_8fa6_3f3c_4605);
        assert_eq!(id.to_string(), text);
        let upper = text.to_uppercase();
        assert_eq!(Uuid::parse(&upper), Some(id));
        for bad in [
            "",
            "26f8710d-96ec-42d8-9b8f-8fa63f3c460",
            "26f8710d-96ec-42d8-9b8f-8fa63f3c46050",
            "26f8710d096ec-42d8-9b8f-8fa63f3c4605",
            "26f8710-d96ec-42d8-9b8f-8fa63f3c4605",
            "26f8710d-96ec-42d8-9b8f-8fa63f3c460g",
        ] {
            assert_eq!(Uuid::parse(bad), None, "{bad}");
        }
    }
}
