//! `OFPT_ERROR` as text for people.

use std::fmt::{self, Write};

use super::{ProtocolError, wire::Reader};

/// An `OFPT_ERROR` message (section 7.5.4 of the OpenFlow Switch Specification 1.5.1).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct SwitchError<'a> {
    kind: u16,
    code: u16,
    /// The beginning of the refused message; for `OFPET_HELLO_FAILED`, a text.
    data: &'a [u8],
}

/// `OFPET_HELLO_FAILED` (section 7.5.4).
const OFPET_HELLO_FAILED: u16 = 0x0000;

/// At most this much of a text from the switch is passed on.
const TEXT_MAX: usize = 200;

impl<'a> SwitchError<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new("error", body);
        Ok(Self {
            kind: reader.u16()?,
            code: reader.u16()?,
            data: reader.rest(),
        })
    }
}

impl fmt::Display for SwitchError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match KINDS.iter().find(|kind| kind.number == self.kind) {
            None => write!(f, "error type {}, code {}", self.kind, self.code),
            Some(kind) => match kind.codes.get(usize::from(self.code)) {
                Some(code) => write!(f, "{} ({}{code})", kind.name, kind.prefix),
                None => write!(f, "{} (code {})", kind.name, self.code),
            },
        }?;
        if self.kind == OFPET_HELLO_FAILED {
            f.write_str(": ")?;
            String::from_utf8_lossy(&self.data[..self.data.len().min(TEXT_MAX)])
                .chars()
                .filter(|c| !c.is_control())
                .try_for_each(|c| f.write_char(c))?;
        }
        Ok(())
    }
}

/// An error type with its codes, which are numbered from zero.
struct Kind {
    number: u16,
    name: &'static str,
    prefix: &'static str,
    codes: &'static [&'static str],
}

/// The types that our messages can meet (`enum ofp_error_type` and the enumerations of codes,
/// section 7.5.4).
const KINDS: &[Kind] = &[
    Kind {
        number: OFPET_HELLO_FAILED,
        name: "OFPET_HELLO_FAILED",
        prefix: "OFPHFC_",
        codes: &["INCOMPATIBLE", "EPERM"],
    },
    Kind {
        number: 0x0001,
        name: "OFPET_BAD_REQUEST",
        prefix: "OFPBRC_",
        codes: &[
            "BAD_VERSION",
            "BAD_TYPE",
            "BAD_MULTIPART",
            "BAD_EXPERIMENTER",
            "BAD_EXP_TYPE",
            "EPERM",
            "BAD_LEN",
            "BUFFER_EMPTY",
            "BUFFER_UNKNOWN",
            "BAD_TABLE_ID",
            "IS_SLAVE",
            "BAD_PORT",
            "BAD_PACKET",
            "MULTIPART_BUFFER_OVERFLOW",
            "MULTIPART_REQUEST_TIMEOUT",
            "MULTIPART_REPLY_TIMEOUT",
        ],
    },
    Kind {
        number: 0x0002,
        name: "OFPET_BAD_ACTION",
        prefix: "OFPBAC_",
        codes: &[
            "BAD_TYPE",
            "BAD_LEN",
            "BAD_EXPERIMENTER",
            "BAD_EXP_TYPE",
            "BAD_OUT_PORT",
            "BAD_ARGUMENT",
            "EPERM",
            "TOO_MANY",
            "BAD_QUEUE",
            "BAD_OUT_GROUP",
            "MATCH_INCONSISTENT",
            "UNSUPPORTED_ORDER",
            "BAD_TAG",
            "BAD_SET_TYPE",
            "BAD_SET_LEN",
            "BAD_SET_ARGUMENT",
            "BAD_SET_MASK",
            "BAD_METER",
        ],
    },
    Kind {
        number: 0x0003,
        name: "OFPET_BAD_INSTRUCTION",
        prefix: "OFPBIC_",
        codes: &["UNKNOWN_INST", "UNSUP_INST", "BAD_TABLE_ID"],
    },
    Kind {
        number: 0x0004,
        name: "OFPET_BAD_MATCH",
        prefix: "OFPBMC_",
        codes: &[
            "BAD_TYPE",
            "BAD_LEN",
            "BAD_TAG",
            "BAD_DL_ADDR_MASK",
            "BAD_NW_ADDR_MASK",
            "BAD_WILDCARDS",
            "BAD_FIELD",
            "BAD_VALUE",
            "BAD_MASK",
            "BAD_PREREQ",
            "DUP_FIELD",
            "EPERM",
        ],
    },
    Kind {
        number: 0x0005,
        name: "OFPET_FLOW_MOD_FAILED",
        prefix: "OFPFMFC_",
        codes: &[
            "UNKNOWN",
            "TABLE_FULL",
            "BAD_TABLE_ID",
            "OVERLAP",
            "EPERM",
            "BAD_TIMEOUT",
            "BAD_COMMAND",
            "BAD_FLAGS",
        ],
    },
    Kind {
        number: 0x0010,
        name: "OFPET_FLOW_MONITOR_FAILED",
        prefix: "OFPMOFC_",
        codes: &[
            "UNKNOWN",
            "MONITOR_EXISTS",
            "INVALID_MONITOR",
            "UNKNOWN_MONITOR",
            "BAD_COMMAND",
            "BAD_FLAGS",
            "BAD_TABLE_ID",
            "BAD_OUT",
        ],
    },
    Kind {
        number: 0x0011,
        name: "OFPET_BUNDLE_FAILED",
        prefix: "OFPBFC_",
        codes: &[
            "UNKNOWN",
            "EPERM",
            "BAD_ID",
            "BUNDLE_EXIST",
            "BUNDLE_CLOSED",
            "OUT_OF_BUNDLES",
            "BAD_TYPE",
            "BAD_FLAGS",
            "MSG_BAD_LEN",
            "MSG_BAD_XID",
            "MSG_UNSUP",
            "MSG_CONFLICT",
            "MSG_TOO_MANY",
            "MSG_FAILED",
            "TIMEOUT",
            "BUNDLE_IN_PROGRESS",
        ],
    },
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn text(body: &[u8]) -> String {
        SwitchError::parse(body).unwrap().to_string()
    }

    #[test]
    fn errors_have_the_names_of_the_specification() {
        assert_eq!(
            text(&[0, 5, 0, 1, 0xff]),
            "OFPET_FLOW_MOD_FAILED (OFPFMFC_TABLE_FULL)"
        );
        assert_eq!(
            text(&[0, 17, 0, 13]),
            "OFPET_BUNDLE_FAILED (OFPBFC_MSG_FAILED)"
        );
        assert_eq!(
            text(&[0, 16, 0, 5]),
            "OFPET_FLOW_MONITOR_FAILED (OFPMOFC_BAD_FLAGS)"
        );
    }

    #[test]
    fn unknown_numbers_stay_numbers() {
        assert_eq!(text(&[0, 5, 0, 99]), "OFPET_FLOW_MOD_FAILED (code 99)");
        assert_eq!(text(&[0xff, 0xff, 0, 7]), "error type 65535, code 7");
    }

    #[test]
    fn the_text_of_a_failed_hello_is_cleaned() {
        assert_eq!(
            text(b"\0\0\0\0we support\n version\x1b 0x04"),
            "OFPET_HELLO_FAILED (OFPHFC_INCOMPATIBLE): we support version 0x04"
        );
    }
}
