//! Time, counters, tables, limits of rate and memory: nothing in here knows dnsflow.

pub mod counter_vec;
pub mod deadline;
pub(crate) mod rate;
pub mod recent;
pub(crate) mod shares;
pub mod table;
pub mod time;
