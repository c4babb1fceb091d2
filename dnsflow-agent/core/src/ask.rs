//! The answers to questions of people. Nothing in here decides over an address.

pub mod attempts;
pub mod history;
mod judge;
pub mod trial;
pub mod view;
