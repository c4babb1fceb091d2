//! Faults, with traffic that runs through them: what each may cost is stated, and what it has cost is printed.
//!
//! `docs/internals/reliability.md` has the promises and what was measured.

mod agent;
mod daemons;
mod node;
mod pods;
mod state;
mod traffic;
mod two_agents;
