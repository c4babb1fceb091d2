//! When an owner of the engine's state wants to be called, and why.

use crate::Timestamp;

/// Why an owner wants to be called.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Why {
    /// A cache entry, or a name of it, expires.
    Expiry,
    /// The switch is compared with the cache.
    Comparison,
    /// The hard timeout of the sentinel flows is restarted.
    Renewal,
    /// Lost flows are put back.
    Restore,
    /// Deferred answers are replayed once more.
    Replay,
    /// The switch's datapath is asked for megaflows that drop, or is no longer waited for.
    Revalidation,
    /// A held answer goes back.
    Release,
    /// The flows that deny are counted.
    Count,
    /// Connections are looked for that OVN has blocked in a gap of our flows.
    Blocked,
    /// The pipeline's first table is looked for.
    Pipeline,
    /// OVN's flows are looked up for actions to copy.
    Copy,
    /// An EgressFirewall should have ACLs by now.
    Takeover,
}

/// A point in time, and what is due then.
pub type Deadline = (Timestamp, Why);

/// The deadline of something that may be due at some time.
pub(crate) fn at(time: Option<Timestamp>, why: Why) -> Option<Deadline> {
    Some((time?, why))
}

/// The first of some deadlines.
pub(crate) fn first(deadlines: impl IntoIterator<Item = Option<Deadline>>) -> Option<Deadline> {
    deadlines.into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_deadline_keeps_its_reason() {
        let nanos = |nanos| Some(Timestamp::from_nanos(nanos));
        let deadlines = [
            at(nanos(7), Why::Copy),
            at(None, Why::Expiry),
            at(nanos(5), Why::Renewal),
        ];
        assert_eq!(
            first(deadlines),
            Some((Timestamp::from_nanos(5), Why::Renewal))
        );
        assert_eq!(first([at(None, Why::Release)]), None);
    }
}
