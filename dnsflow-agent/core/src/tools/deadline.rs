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
    /// Lost flows are restored.
    Restore,
    /// Deferred answers are replayed once more.
    Replay,
    /// The datapath is asked for megaflows that drop, or the wait for revalidation ends.
    Revalidation,
    /// A held answer is released.
    Release,
    /// The flows that deny are counted.
    Count,
    /// The agent looks for connections that OVN has blocked in a gap of our flows.
    Blocked,
    /// The agent looks for the pipeline's first table.
    Pipeline,
    /// The agent looks in OVN's flows for actions to copy.
    Copy,
    /// An EgressFirewall should have ACLs by now.
    Takeover,
    /// The programs should be attached to an interface by now.
    Attachment,
    /// A recording ends.
    Recording,
    /// Further addresses of the cluster are taken over from OVN's rows.
    Addresses,
}

/// A point in time, and the work that is due then.
pub type Deadline = (Timestamp, Why);

/// A deadline, if there is a time.
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
