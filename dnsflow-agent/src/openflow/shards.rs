//! How a dump is cut into shards.
//!
//! ovs-vswitchd answers a question for flows without a pause, on the thread that also takes flows
//! (`handle_flow_stats_request` in Open vSwitch's `ofproto/ofproto.c`): messages on other connections wait until the
//! answer is done. So if there are many flows, a question is only for destinations, or for tags, that end in certain
//! bits, and the next question comes some time after the answer. Open vSwitch then goes through the flows with such a
//! match only, not through all of OVN's. Further questions are for the flows that are for no destination and no single
//! tag.

use std::{collections::BTreeSet, time::Duration};

use dnsflow_core::values::flow::{Addresses, Cookie, Ends, InstalledFlow, Tag};

/// The size of a shard, about. Smaller shards would not shorten the wait much, because each
/// question also goes through the flows of the other shards.
pub(super) const SHARD_FLOWS: usize = 4096;
/// The pause between two shards. While ovs-vswitchd answers one shard, for about 20 ms, it takes no
/// more than 50 messages from any other connection (`ofconn_run` in Open vSwitch's
/// `ofproto/connmgr.c`).
pub(super) const SHARD_PAUSE: Duration = Duration::from_millis(50);
/// At most this many shards for each address family, and for groups.
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
    /// The flows that give tags, of one family, whose destination, as a number, has these last bits.
    Destinations {
        family: Family,
        bits: u16,
        mask: u16,
    },
    /// The flows of groups whose tags have these bits.
    Groups {
        bits: u32,
        mask: u32,
    },
    /// The flows for packets without a tag that give none by a destination: those of ports, and sentinel flows.
    Untagged,
    /// The flows of this table in which tags end.
    Ends {
        table: u8,
    },
}

impl Shard {
    /// The cookies of its flows, and the bits of them that count.
    pub(super) fn cookies(self) -> (u64, u64) {
        let has_tag = u64::from(Cookie::HAS_TAG);
        let of_kind = Cookie::OURS_MASK | has_tag;
        match self {
            Self::All => (Cookie::OURS, Cookie::OURS_MASK),
            Self::Destinations { .. } => (Cookie::OURS | has_tag, of_kind),
            Self::Groups { .. } | Self::Untagged | Self::Ends { .. } => (Cookie::OURS, of_kind),
        }
    }
}

/// How many flows a dump has shown.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Shown {
    pub(super) v4: usize,
    pub(super) v6: usize,
    pub(super) groups: usize,
}

impl Shown {
    pub(super) fn count(&mut self, flows: &[InstalledFlow]) {
        for flow in flows {
            match flow.key.matches.ends {
                Ends::Addresses(addresses) | Ends::Established(addresses) => match addresses {
                    Addresses::V4 { .. } => self.v4 += 1,
                    Addresses::V6 { .. } => self.v6 += 1,
                },
                Ends::Tagged { .. } => self.groups += 1,
                Ends::Untranslated | Ends::AnyTag | Ends::Marked { .. } => {}
            }
        }
    }
}

/// The shards of the next dump, by the size of the last one and the tables in which tags end. Each flow is in exactly
/// one shard.
pub(super) fn shards(shown: Shown, ends: &BTreeSet<u8>) -> Vec<Shard> {
    let Shown { v4, v6, groups } = shown;
    if v4 + v6 + groups <= SHARD_FLOWS {
        return vec![Shard::All];
    }
    let families = [(Family::V4, v4), (Family::V6, v6)];
    let of_addresses = families.into_iter().flat_map(|(family, flows)| {
        let shards = shards_of(flows);
        (0..shards).map(move |bits| Shard::Destinations {
            family,
            bits,
            mask: shards - 1,
        })
    });
    // Without a bit of its number, a match would be one for the flows in which tags end, too.
    let shards = shards_of(groups).max(2);
    let mask = Tag::GUARD | spread(shards - 1);
    let of_groups = (0..shards).map(|bits| Shard::Groups {
        bits: Tag::GUARD | spread(bits),
        mask,
    });
    // No flow of a group is in such a table: the rules are enforced before.
    let ends = ends.iter().map(|table| Shard::Ends { table: *table });
    of_addresses
        .chain(of_groups)
        .chain([Shard::Untagged])
        .chain(ends)
        .collect()
}

fn shards_of(flows: usize) -> u16 {
    let shards = flows.div_ceil(SHARD_FLOWS).next_power_of_two();
    // A power of two that 16 bits hold.
    shards.min(SHARDS_MAX) as u16
}

/// These bits by turns at the lower end of a tag's number and of its scope, of which the lowest are in use: one
/// namespace may have most of the groups, or each may have few.
fn spread(bits: u16) -> u32 {
    let places = (0..u16::BITS).filter(|place| bits & 1 << place != 0);
    let spread = places.map(|place| match place % 2 {
        0 => Tag::new(0, 1 << (place / 2)),
        _ => Tag::new(1 << (place / 2), 0),
    });
    spread.fold(0, |all, one| all | one.bits() & !Tag::GUARD)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in which tags end.
    const END: u8 = 51;

    fn shards_for(shown: Shown) -> Vec<Shard> {
        shards(shown, &[END].into())
    }

    #[test]
    fn few_flows_are_asked_for_at_once() {
        assert_eq!(shards_for(Shown::default()), [Shard::All]);
        let shown = Shown {
            v4: SHARD_FLOWS - 2,
            v6: 1,
            groups: 1,
        };
        assert_eq!(shards_for(shown), [Shard::All]);
    }

    #[test]
    fn each_destination_is_in_one_part() {
        for (v4, v6) in [(SHARD_FLOWS, 1), (5 * SHARD_FLOWS, 0), (0, usize::MAX / 2)] {
            let shown = Shown {
                v4,
                v6,
                ..Shown::default()
            };
            let shards = shards_for(shown);
            for wanted in [Family::V4, Family::V6] {
                for destination in [0, 1, 0x7fff, 0xaaaa, u16::MAX] {
                    let holds = |shard: &&Shard| match **shard {
                        Shard::Destinations { family, bits, mask } => {
                            family == wanted && destination & mask == bits
                        }
                        _ => false,
                    };
                    assert_eq!(shards.iter().filter(holds).count(), 1);
                }
            }
        }
    }

    /// How many groups of so many namespaces with so many groups each are in the largest shard.
    fn largest(flows: usize, scopes: u16, numbers: u16) -> usize {
        let shown = Shown {
            groups: flows,
            ..Shown::default()
        };
        let shards = shards_for(shown);
        let mut found = vec![0; shards.len()];
        for scope in 1..=scopes {
            for number in 1..=numbers {
                let tag = Tag::new(scope, number).bits();
                let holds = |shard: &Shard| match *shard {
                    Shard::Groups { bits, mask } => tag & mask == bits,
                    _ => false,
                };
                let holding = (0..shards.len()).filter(|at| holds(&shards[*at]));
                let holding: Vec<usize> = holding.collect();
                assert_eq!(holding.len(), 1, "{scope}, {number}");
                found[holding[0]] += 1;
            }
        }
        found.into_iter().max().unwrap_or_default()
    }

    #[test]
    fn each_group_is_in_one_part_and_the_parts_are_about_equal() {
        // Bits by turns: of the six bits, three are of the number and three of the scope.
        let flows = 64 * SHARD_FLOWS;
        assert_eq!(largest(flows, 64, 64), 64);
        assert_eq!(largest(flows, 1, 4096 - 2), 4096 / 8);
        assert_eq!(largest(flows, 1022, 1), 1024 / 8);
        assert_eq!(largest(SHARD_FLOWS + 1, 2, 128), 128);
    }

    #[test]
    fn flows_without_a_destination_or_a_single_tag_have_questions_of_their_own() {
        let shown = Shown {
            groups: SHARD_FLOWS + 1,
            ..Shown::default()
        };
        let shards = shards_for(shown);
        let of = |shard: Shard| shards.iter().filter(|one| **one == shard).count();
        assert_eq!(of(Shard::Untagged), 1);
        assert_eq!(of(Shard::Ends { table: END }), 1);
        assert_eq!(of(Shard::All), 0);
        // The flows in which tags end match the guard alone.
        let few = shards_for(Shown {
            v4: SHARD_FLOWS + 1,
            ..Shown::default()
        });
        let is_for_ends =
            |shard: &Shard| matches!(shard, Shard::Groups { mask, .. } if *mask == Tag::GUARD);
        assert!(!few.iter().any(is_for_ends), "{few:?}");
    }
}
