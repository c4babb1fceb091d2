//! Every reason why a packet was skipped or lost, under one name: the index of its kernel
//! counter, the label of its metric and the name of its test.

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $label:literal,)+) => {
        /// What became of a packet.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[repr(u32)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Reason {
            /// All reasons, in the order of their counters.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// The label of the metric, in snake case.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)+
                }
            }
        }
    };
}

reasons! {
    /// The frame was handed to the agent.
    Captured = "captured",
    /// The frame ends within its Ethernet header.
    TruncatedEthernet = "truncated_ethernet",
    /// The EtherType is not IPv4.
    NotIpv4 = "not_ipv4",
    /// The frame ends within its IPv4 header or options.
    TruncatedIpv4 = "truncated_ipv4",
    /// The version is not 4, or a length in the IPv4 header contradicts itself.
    InvalidIpv4 = "invalid_ipv4",
    /// The IP protocol is not UDP.
    NotUdp = "not_udp",
    /// The packet is a fragment: its first one is incomplete, a later one has no UDP header.
    Fragment = "fragment",
    /// The frame ends within its UDP header.
    TruncatedUdp = "truncated_udp",
    /// The source port is not one that DNS servers answer from.
    OtherPort = "other_port",
    /// The length in the UDP header is shorter than the header or longer than the IP payload.
    InvalidUdp = "invalid_udp",
    /// The UDP payload or the frame ends within the DNS header.
    TruncatedDns = "truncated_dns",
    /// The QR bit is clear: a query.
    NotResponse = "not_response",
    /// The opcode is not QUERY.
    Opcode = "opcode",
    /// The response code is not NOERROR.
    Rcode = "rcode",
    /// The answer section is empty.
    NoAnswers = "no_answers",
    /// The ring buffer had no room: the agent does not keep up.
    RingFull = "ring_full",
    /// The program could not copy the frame out of the packet buffer.
    CopyFailed = "copy_failed",
    /// The agent found a record that it could not have been sent (counted in user space).
    InvalidRecord = "invalid_record",
}

impl Reason {
    /// How many reasons there are: the length of the counter array.
    pub const COUNT: u32 = Self::ALL.len() as u32;

    /// The index of the reason's counter.
    pub const fn index(self) -> u32 {
        self as u32
    }
}

impl core::fmt::Display for Reason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn index_is_the_place_in_the_list() {
        for (at, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(reason.index() as usize, at, "{reason}");
        }
    }

    #[test]
    fn labels_are_distinct_metric_labels() {
        let labels: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(labels.len(), Reason::ALL.len());
        for label in labels {
            assert!(
                label
                    .bytes()
                    .all(|byte| byte == b'_' || byte.is_ascii_lowercase() || byte.is_ascii_digit()),
                "{label}"
            );
        }
    }
}
