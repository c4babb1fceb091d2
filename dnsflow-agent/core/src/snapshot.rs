//! What outlives the agent: the names behind the flows that it leaves in the switch.
//!
//! The flows themselves are in the switch and are found there by their cookie. What the switch cannot
//! say is which names they were opened for, and until when.

use std::{net::IpAddr, time::Duration};

use super::name::DomainName;

/// The names of one open address of one port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedEntry {
    /// The logical port (`iface-id`).
    pub port: String,
    /// The pod's UID (`iface-id-ver`): another pod under the same name inherits nothing.
    pub pod: Option<String>,
    /// The address.
    pub address: IpAddr,
    /// The names that lead to it.
    pub names: Vec<SavedName>,
}

/// A name, and for how much longer it counts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedName {
    /// The name.
    pub name: DomainName,
    /// The time that is left.
    pub rest: Duration,
    /// The time that is left at least where a rule denies the name.
    pub deny_rest: Duration,
}
