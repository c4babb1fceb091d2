//! A node with real OVN, Open vSwitch, pods and the agent. One file has the tests of one subject.

mod alone;
mod answers;
mod asked;
#[path = "../../bench/mod.rs"]
mod bench;
mod benchmark;
mod blocked;
mod check;
mod control;
mod denied;
mod edits;
mod entries;
mod established;
mod explained;
mod faults;
mod first_packet;
mod handover;
mod history;
mod hold;
mod lab;
mod large;
mod limits;
#[path = "../manifests/mod.rs"]
mod manifests;
mod marks;
mod networks;
mod opens;
mod others;
mod outputs;
mod random_firewalls;
mod report;
mod restarts;
mod rights;
mod rules;
mod scale;
#[path = "../snapshots/mod.rs"]
mod snapshots;
mod story;
mod transports;
mod tutorial;
mod ways;
