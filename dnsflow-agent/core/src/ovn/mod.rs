//! OVN's data about an EgressFirewall rule: database rows, and the ACL templates read from them.

pub mod acl;
pub mod hash;
pub mod room;
pub mod rows;
pub mod template;
pub mod view;
