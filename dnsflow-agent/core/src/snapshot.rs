//! The names behind the flows that the agent leaves in the switch: they outlive the agent.
//!
//! The next agent finds the flows in the switch by their cookie. The switch does not know for which
//! names the flows were opened, and until when; the snapshot does.

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

/// A name, and the time for which it still counts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedName {
    /// The name.
    pub name: DomainName,
    /// The time that is left for the name.
    pub rest: Duration,
    /// The least time that is left if a rule denies the name.
    pub deny_rest: Duration,
}
