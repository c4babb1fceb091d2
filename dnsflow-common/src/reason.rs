//! The reasons for which a packet is skipped or lost. A reason has one name everywhere: it gives the index
//! of the counter in the kernel, the label of the metric, and the name of the test.

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
    /// The frame was taken off the wire and handed to the agent, which puts it back.
    Held = "held",
    /// The program has opened the addresses of the answer, and handed the frame to the agent.
    Opened = "opened",
    /// The same, but the agent, which is not well, was handed nothing.
    OpenedUntold = "opened_untold",
    /// The program would open the addresses of the answer, and the map had no room. The agent was handed the frame.
    EntriesFull = "entries_full",
    /// The agent has put the frame back.
    Released = "released",
    /// The frame ends within its Ethernet header.
    TruncatedEthernet = "truncated_ethernet",
    /// The frame ends within a VLAN tag.
    TruncatedVlan = "truncated_vlan",
    /// There are more VLAN tags than two.
    TooManyTags = "too_many_tags",
    /// The EtherType is neither IPv4 nor IPv6.
    NotIp = "not_ip",
    /// The frame ends within its IPv4 header or options.
    TruncatedIpv4 = "truncated_ipv4",
    /// The version is not 4, or a length in the IPv4 header contradicts itself.
    InvalidIpv4 = "invalid_ipv4",
    /// The frame ends within its IPv6 header.
    TruncatedIpv6 = "truncated_ipv6",
    /// The version is not 6, an extension header is longer than the packet, or there are two
    /// fragment headers.
    InvalidIpv6 = "invalid_ipv6",
    /// The frame ends within an IPv6 extension header.
    TruncatedExtension = "truncated_extension",
    /// There are more IPv6 extension headers than are walked.
    TooManyExtensions = "too_many_extensions",
    /// The IP payload is neither UDP nor TCP.
    OtherProtocol = "other_protocol",
    /// The packet is a fragment of TCP, which sizes its segments to fit.
    FragmentedTcp = "fragmented_tcp",
    /// The packet from a pod is a fragment of UDP.
    FragmentedQuery = "fragmented_query",
    /// A later fragment whose first one was not captured just before.
    UnexpectedFragment = "unexpected_fragment",
    /// The frame ends within its UDP header.
    TruncatedUdp = "truncated_udp",
    /// The server's port is not one that DNS servers answer from.
    OtherPort = "other_port",
    /// The length in the UDP header is shorter than the header, or does not fit the packet.
    InvalidUdp = "invalid_udp",
    /// The frame ends within its TCP header or options.
    TruncatedTcp = "truncated_tcp",
    /// The header length in the TCP header is shorter than the header or longer than the packet.
    InvalidTcp = "invalid_tcp",
    /// A TCP segment without data that neither begins nor ends a stream.
    TcpWithoutData = "tcp_without_data",
    /// The UDP payload or the frame ends within the DNS header.
    TruncatedDns = "truncated_dns",
    /// The QR bit is clear: a query.
    NotResponse = "not_response",
    /// The QR bit is set, in what a pod sent: a pod that answers.
    NotQuery = "not_query",
    /// The opcode is not QUERY.
    Opcode = "opcode",
    /// The response code is not NOERROR.
    Rcode = "rcode",
    /// The answer section is empty.
    NoAnswers = "no_answers",
    /// There is not exactly one question.
    Questions = "questions",
    /// The message or the frame ends within the question.
    TruncatedQuestion = "truncated_question",
    /// The question's name is compressed, longer than 255 bytes, or has a label of an unknown
    /// type.
    InvalidQuestion = "invalid_question",
    /// The server's address and port are not those of a trusted resolver.
    UntrustedResolver = "untrusted_resolver",
    /// The pod has no query pending that this could answer.
    NotAsked = "not_asked",
    /// The pod's query has another question.
    OtherQuestion = "other_question",
    /// The pod's query is too old.
    TooOld = "too_old",
    /// No rule of the pod's namespace mentions the name. Of UDP, the answer is deferred for a rule that may come.
    NoRule = "no_rule",
    /// No rule of the pod's namespace mentions the name, and the answer is not deferred for a rule that may
    /// come: it is too long, the pod has used up its share of what is deferred, or the queue took nothing.
    NotDeferred = "not_deferred",
    /// The pod's MAC or IP address in the packet is not one of its port's. The switch drops such packets
    /// of a pod. A port has no addresses that count if it is not on the network of the resolvers, or if
    /// its Interface row names none.
    ForeignAddress = "foreign_address",
    /// The packet from a pod has a VLAN tag. The switch drops such packets.
    Tagged = "tagged",
    /// The pod's query is remembered.
    QueryRecorded = "query_recorded",
    /// The pod's query is remembered in place of an older query of the same pod, which nobody has answered.
    /// The pod has as many queries pending as are remembered.
    QueryDisplaced = "query_displaced",
    /// The pod's query could not be remembered.
    QueryLost = "query_lost",
    /// A pod behind an EgressFirewall may begin a connection: the agent is told.
    Attempt = "attempt",
    /// The same, where the agent was told lately of one to this address, protocol and port.
    AttemptKnown = "attempt_known",
    /// The same, and the pod has used up its share of what the agent is told of attempts.
    AttemptOverShare = "attempt_over_share",
    /// The same, and the ring buffer for attempts had no room. To a pod: an answer that no rule mentions was
    /// deferred, and that ring buffer had no room for its copy.
    AttemptLost = "attempt_lost",
    /// No agent has been there for longer than flows stay in the switch.
    Unattended = "unattended",
    /// The pod has used up its share of the ring buffer.
    OverShare = "over_share",
    /// The ring buffer had no room: the agent does not keep up.
    RingFull = "ring_full",
    /// The program could not copy the frame out of the packet buffer.
    CopyFailed = "copy_failed",
    /// The agent found a record that the program cannot have written (counted in user space).
    InvalidRecord = "invalid_record",
}

impl Reason {
    /// How many reasons there are: the length of the counter array.
    pub const COUNT: u32 = Self::ALL.len() as u32;

    /// Whether the agent may not know of a TCP segment for this reason: the packet was to be handed to the agent, or it
    /// was one whose ports nobody could read.
    pub const fn leaves_segments_out(self) -> bool {
        matches!(
            self,
            Self::FragmentedTcp
                | Self::TooManyExtensions
                | Self::TruncatedExtension
                | Self::TruncatedIpv4
                | Self::TruncatedIpv6
                | Self::InvalidIpv4
                | Self::InvalidIpv6
                | Self::TruncatedTcp
                | Self::InvalidTcp
                | Self::Unattended
                | Self::OverShare
                | Self::RingFull
                | Self::CopyFailed
        )
    }

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
