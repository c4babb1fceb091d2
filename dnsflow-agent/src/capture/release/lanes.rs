//! Which socket a frame to an interface leaves through.

/// Interfaces that can have frames on their way at a time, each with a socket of its own. Beyond them, interfaces share
/// sockets. All are open from the start on, as the agent gives up CAP_NET_RAW. They are few, because the kernel waits for
/// all CPUs whenever one is closed (`synchronize_net` in `packet_release`, Linux net/packet/af_packet.c). With 64 of them,
/// a killed agent went on to exist for 0.7 s, and the next one waited.
pub(super) const LANES: usize = 8;

/// The sockets by their numbers, and whose they are.
#[derive(Debug)]
pub(super) struct Lanes {
    /// The interface that was given each lane last.
    owners: [u32; LANES],
    /// Where the search for an empty lane begins.
    next: usize,
}

impl Default for Lanes {
    fn default() -> Self {
        Self {
            // The index of no interface.
            owners: [0; LANES],
            next: 0,
        }
    }
}

impl Lanes {
    /// The lane for the next frame to an interface: its own one; else one through which nothing is on its way, which is
    /// then its own; else one that the interface shares with others. So an interface fills its own lane alone, unless
    /// frames of more than [`LANES`] interfaces are on their way.
    pub(super) fn of(&mut self, ifindex: u32, is_empty: impl Fn(usize) -> bool) -> usize {
        if let Some(own) = self.owners.iter().position(|owner| *owner == ifindex) {
            return own;
        }
        let mut lanes = (0..LANES).map(|lane| (self.next + lane) % LANES);
        match lanes.find(|lane| is_empty(*lane)) {
            Some(empty) => {
                self.owners[empty] = ifindex;
                self.next = empty + 1;
                empty
            }
            None => ifindex as usize % LANES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: u32 = LANES as u32;

    #[test]
    fn an_interface_keeps_its_lane_as_long_as_others_find_empty_ones() {
        let mut lanes = Lanes::default();
        let own = lanes.of(7, |_| true);
        for ifindex in 100..100 + LAST - 1 {
            assert_ne!(lanes.of(ifindex, |_| true), own, "{ifindex}");
        }
        assert_eq!(lanes.of(7, |_| false), own, "even if it is full");
    }

    #[test]
    fn a_lane_with_frames_on_their_way_is_given_to_nobody_else() {
        let mut lanes = Lanes::default();
        let busy = lanes.of(7, |_| true);
        for ifindex in 100..100 + 3 * LAST {
            assert_ne!(lanes.of(ifindex, |lane| lane != busy), busy, "{ifindex}");
        }
        assert_eq!(lanes.of(7, |_| false), busy);
    }

    #[test]
    fn without_an_empty_lane_an_interface_shares_one_until_it_finds_its_own() {
        let mut lanes = Lanes::default();
        for ifindex in 1..=LAST {
            lanes.of(ifindex, |_| true);
        }
        let shared = lanes.of(1000, |_| false);
        assert_eq!(lanes.of(1000, |_| false), shared);
        let empty = (shared + 1) % LANES;
        assert_eq!(lanes.of(1000, |lane| lane == empty), empty);
        assert_eq!(lanes.of(1000, |_| false), empty, "it is its own now");
    }
}
