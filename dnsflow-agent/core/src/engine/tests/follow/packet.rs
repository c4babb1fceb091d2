//! A packet on its way through the flows of dnsflow, as Open vSwitch looks them up.

use std::net::IpAddr;

use crate::{
    testing::Node,
    values::flow::{Action, Cookie, Ends, FlowKey, Match, Tag, Transport},
};

/// A pod's packet, where OVN enforces the rules.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    /// The pod's interface, whose program marks packets.
    pub(super) ifindex: u32,
    /// The tunnel key of the pod's port.
    pub(super) port: u32,
    pub(super) src: IpAddr,
    pub(super) dst: IpAddr,
    pub(super) transport: Transport,
    /// Whether a load balancer has sent it to the destination, behind the program that marks. It has the mark of the
    /// address in front: that of the destination, which is the worst one.
    pub(super) is_translated: bool,
    /// Whether it is one of a connection that has had packets of both sides.
    pub(super) is_established: bool,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::engine::tests) enum Verdict {
    /// A flow of a rule with this priority lets it pass.
    Passes(u16),
    /// A flow of ours with this priority drops it.
    Dropped(u16),
    /// Only OVN's own flows decide.
    Left,
}

/// The fields of a packet that flows of ours change.
#[derive(Clone, Copy, Debug)]
struct Fields {
    tunnel: u32,
    mark: u32,
}

/// More lookups than any packet needs.
const LOOKUPS_MAX: usize = 16;

impl Packet {
    /// What the flows of ours do with it in the table in which rules are enforced.
    pub(super) fn follow(self, node: &Node) -> Verdict {
        let mut fields = self.fields(node);
        self.lookup(node, node.ovn_table, &mut fields)
    }

    /// The tag and our bits of the mark, behind the table in which both end.
    pub(super) fn leaves_with(self, node: &Node) -> (u32, u32) {
        let mut fields = self.fields(node);
        self.lookup(node, node.ovn_table, &mut fields);
        self.lookup(node, node.tags_end, &mut fields);
        let ours = node.engine.mark_mask().unwrap_or_default();
        (fields.tunnel, fields.mark & ours)
    }

    fn fields(self, node: &Node) -> Fields {
        let mark = node.marks.get(&(self.ifindex, self.dst));
        let mark = mark.filter(|(_, until, _)| *until > node.now);
        Fields {
            tunnel: 0,
            mark: mark.map_or(0, |(mark, ..)| *mark),
        }
    }

    fn lookup(self, node: &Node, table: u8, fields: &mut Fields) -> Verdict {
        for _ in 0..LOOKUPS_MAX {
            let Some((key, cookie)) = self.first(node, table, *fields) else {
                return Verdict::Left;
            };
            let actions = &node.actions[&cookie];
            let mut next = None;
            for action in actions.iter() {
                match action {
                    Action::SetTunnel(tunnel) => fields.tunnel = *tunnel,
                    Action::SetMark(bits) => {
                        fields.mark = fields.mark & !bits.mask() | bits.value();
                    }
                    Action::MoveMark { mask } => {
                        let low = mask >> mask.trailing_zeros();
                        let bits = (fields.mark & mask) >> mask.trailing_zeros();
                        fields.tunnel = fields.tunnel & !low | bits;
                    }
                    Action::Resubmit { table } => next = Some(*table),
                    Action::SetRegister { .. } | Action::Copied(_) => {}
                    Action::DeleteLearned(_) => panic!("a packet meets a sentinel flow"),
                }
            }
            match next {
                None => return Verdict::Dropped(key.priority),
                Some(next) if next != table => return Verdict::Passes(key.priority),
                Some(_) => {}
            }
        }
        panic!("{self:?} goes round: {fields:?}");
    }

    /// The flow that Open vSwitch chooses.
    fn first(self, node: &Node, table: u8, fields: Fields) -> Option<(&FlowKey, Cookie)> {
        let flows = node.switch.iter();
        let flows = flows.map(|(key, (cookie, _))| (key, *cookie));
        let met = flows.filter(|(key, _)| key.table == table && self.meets(&key.matches, fields));
        met.max_by_key(|(key, _)| key.priority)
    }

    fn meets(self, matches: &Match, fields: Fields) -> bool {
        // The other registers are those that OVN sets for all packets at a rule.
        let port = matches.registers.get(&14);
        let is_at_port = port.is_none_or(|port| self.port & port.mask() == port.value());
        let has_ends = match matches.ends {
            Ends::Addresses(addresses) => {
                fields.tunnel == 0 && addresses.src() == self.src && addresses.dst() == self.dst
            }
            Ends::Established(addresses) => {
                self.is_established
                    && fields.tunnel == 0
                    && addresses.src() == self.src
                    && addresses.dst() == self.dst
            }
            Ends::Tagged { tag, is_ipv6 } => {
                fields.tunnel == tag.bits() && is_ipv6 == self.dst.is_ipv6()
            }
            Ends::Untranslated => fields.tunnel == 0 && !self.is_translated,
            Ends::AnyTag => fields.tunnel & Tag::GUARD != 0,
            Ends::Marked { bit } => fields.mark & bit != 0,
        };
        let is_for_transport = |wanted: Transport| wanted.is_for(self.transport);
        is_at_port
            && matches.metadata == 3
            && has_ends
            && matches.transport.is_none_or(is_for_transport)
    }
}
