//! The inputs of the engine, and its outputs: commands, reports and counters.

pub mod counters;
pub mod input;
pub(crate) mod output;
pub mod report;
