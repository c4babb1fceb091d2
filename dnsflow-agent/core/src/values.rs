//! The values that everything else is said in.

pub mod class;
pub mod connection;
pub mod firewall;
pub mod flow;
pub mod ids;
pub mod limits;
pub mod name;
pub mod resolver;
pub mod verdict;
