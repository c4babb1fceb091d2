//! How a dump is cut into shards.
//!
//! ovs-vswitchd answers a question for flows without a pause, on the thread that also takes flows
//! (`handle_flow_stats_request` in Open vSwitch's `ofproto/ofproto.c`): messages on other connections wait until the
//! answer is done. So if there are many flows, a question is only for destinations that end in certain bits, and the
//! next question comes some time after the answer. Open vSwitch then goes through the flows with such a match only,
//! not through all of OVN's.

use std::time::Duration;

use dnsflow_core::values::flow::{Addresses, Ends, InstalledFlow};

/// The size of a shard, about. Smaller shards would not shorten the wait much, because each
/// question also goes through the flows of the other shards.
pub(super) const SHARD_FLOWS: usize = 4096;
/// The pause between two shards. While ovs-vswitchd answers one shard, for about 20 ms, it takes no
/// more than 50 messages from any other connection (`ofconn_run` in Open vSwitch's
/// `ofproto/connmgr.c`).
pub(super) const SHARD_PAUSE: Duration = Duration::from_millis(50);
/// At most this many shards for each address family.
const SHARDS_MAX: usize = 1 << 10;

/// An address family.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Family {
    V4,
    V6,
}

/// Which flows a question is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Shard {
    All,
    /// The flows of one family whose destination, as a number, has these last bits.
    Destinations {
        family: Family,
        bits: u16,
        mask: u16,
    },
}

/// How many flows a dump has shown.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Shown {
    pub(super) v4: usize,
    pub(super) v6: usize,
    /// Flows of groups, which have no destination.
    pub(super) groups: usize,
}

impl Shown {
    pub(super) fn count(&mut self, flows: &[InstalledFlow]) {
        for flow in flows {
            match flow.key.matches.ends {
                Ends::Addresses(Addresses::V4 { .. }) => self.v4 += 1,
                Ends::Addresses(Addresses::V6 { .. }) => self.v6 += 1,
                Ends::Group { .. } => self.groups += 1,
            }
        }
    }
}

/// The shards of the next dump, by the size of the last one. Each flow is in exactly one shard. No question by
/// destination is for flows of groups, so that a switch that has some is asked for everything at once.
pub(super) fn shards(shown: Shown) -> Vec<Shard> {
    let Shown { v4, v6, groups } = shown;
    if v4 + v6 <= SHARD_FLOWS || groups > 0 {
        return vec![Shard::All];
    }
    let families = [(Family::V4, v4), (Family::V6, v6)];
    let shards = families.into_iter().flat_map(|(family, flows)| {
        let shards = flows.div_ceil(SHARD_FLOWS).next_power_of_two();
        // A power of two that 16 bits hold.
        let shards = shards.min(SHARDS_MAX) as u16;
        (0..shards).map(move |bits| Shard::Destinations {
            family,
            bits,
            mask: shards - 1,
        })
    });
    shards.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_flows_are_asked_for_at_once() {
        assert_eq!(shards(Shown::default()), [Shard::All]);
        let shown = Shown {
            v4: SHARD_FLOWS - 1,
            v6: 1,
            groups: 0,
        };
        assert_eq!(shards(shown), [Shard::All]);
    }

    #[test]
    fn flows_of_groups_are_in_a_dump() {
        let shown = Shown {
            v4: 5 * SHARD_FLOWS,
            v6: 0,
            groups: 1,
        };
        assert_eq!(shards(shown), [Shard::All]);
    }

    #[test]
    fn each_destination_is_in_one_part() {
        for (v4, v6) in [(SHARD_FLOWS, 1), (5 * SHARD_FLOWS, 0), (0, usize::MAX)] {
            let shards = shards(Shown { v4, v6, groups: 0 });
            for wanted in [Family::V4, Family::V6] {
                for destination in [0, 1, 0x7fff, 0xaaaa, u16::MAX] {
                    let holds = |shard: &&Shard| match **shard {
                        Shard::All => true,
                        Shard::Destinations { family, bits, mask } => {
                            family == wanted && destination & mask == bits
                        }
                    };
                    assert_eq!(shards.iter().filter(holds).count(), 1);
                }
            }
        }
    }
}
