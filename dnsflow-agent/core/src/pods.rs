//! The pods of the node: their ports, their budgets, and the names that concern them.

pub(crate) mod budget;
pub(crate) mod filter;
pub mod ports;
pub mod recording;
