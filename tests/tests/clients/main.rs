//! The agent's clients, each with the real program or kernel that it speaks to.

mod conntrack;
mod openflow;
mod ovsdb;
mod vswitchd;
