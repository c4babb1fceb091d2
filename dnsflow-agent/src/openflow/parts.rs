//! How a dump is cut into parts.
//!
//! ovs-vswitchd answers a question for flows in one go, on the thread that also takes flows
//! (`handle_flow_stats_request` in Open vSwitch's `ofproto/ofproto.c`): whatever comes on another
//! connection waits until it is done. So with many flows a question is only for those whose
//! destinations end in certain bits, and the next one is asked some time after it is answered. Open
//! vSwitch goes through the flows with such a match only, not through all of OVN's.

use std::time::Duration;

use dnsflow_core::flow::{Addresses, InstalledFlow};

/// About so many flows are asked for at a time: fewer would not wait much shorter, because each
/// question also goes through those of the other parts.
pub(super) const PART_FLOWS: usize = 4096;
/// Between two parts: while ovs-vswitchd answers one, which takes it about 20 ms, it takes no more than
/// 50 messages from any other connection (`ofconn_run` in Open vSwitch's `ofproto/connmgr.c`).
pub(super) const PART_PAUSE: Duration = Duration::from_millis(50);
/// A dump has at most so many parts for each address family.
const PARTS_MAX: usize = 1 << 10;

/// An address family.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Family {
    V4,
    V6,
}

/// Which flows a question is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Part {
    All,
    /// Those of one family whose destination, as a number, has these last bits.
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
}

impl Shown {
    pub(super) fn count(&mut self, flows: &[InstalledFlow]) {
        for flow in flows {
            match flow.key.matches.addresses {
                Addresses::V4 { .. } => self.v4 += 1,
                Addresses::V6 { .. } => self.v6 += 1,
            }
        }
    }
}

/// The parts of the next dump, by what the last one has shown: each flow is in exactly one.
pub(super) fn parts(shown: Shown) -> Vec<Part> {
    let Shown { v4, v6 } = shown;
    if v4 + v6 <= PART_FLOWS {
        return vec![Part::All];
    }
    let families = [(Family::V4, v4), (Family::V6, v6)];
    let parts = families.into_iter().flat_map(|(family, flows)| {
        let parts = flows.div_ceil(PART_FLOWS).next_power_of_two();
        // A power of two that 16 bits hold.
        let parts = parts.min(PARTS_MAX) as u16;
        (0..parts).map(move |bits| Part::Destinations {
            family,
            bits,
            mask: parts - 1,
        })
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_flows_are_asked_for_at_once() {
        assert_eq!(parts(Shown::default()), [Part::All]);
        let shown = Shown {
            v4: PART_FLOWS - 1,
            v6: 1,
        };
        assert_eq!(parts(shown), [Part::All]);
    }

    #[test]
    fn each_destination_is_in_one_part() {
        for (v4, v6) in [(PART_FLOWS, 1), (5 * PART_FLOWS, 0), (0, usize::MAX)] {
            let parts = parts(Shown { v4, v6 });
            for wanted in [Family::V4, Family::V6] {
                for destination in [0, 1, 0x7fff, 0xaaaa, u16::MAX] {
                    let holds = |part: &&Part| match **part {
                        Part::All => true,
                        Part::Destinations { family, bits, mask } => {
                            family == wanted && destination & mask == bits
                        }
                    };
                    assert_eq!(parts.iter().filter(holds).count(), 1);
                }
            }
        }
    }
}
