//! What OVN says about an EgressFirewall rule: database rows, and the flow template read from them.

pub mod rows;
