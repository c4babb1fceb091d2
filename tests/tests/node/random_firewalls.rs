//! Random firewalls and real connections against a first-match oracle.
//!
//! `DNSFLOW_SEED` repeats a run; `DNSFLOW_FIREWALLS` says how many firewalls are tried.

use dnsflow_tests::{
    hunt::{Hunt, HuntOptions},
    lab,
    lab::{Cluster, Lab},
    random::Random,
};

/// The environment variable for a longer run.
const FIREWALLS_VARIABLE: &str = "DNSFLOW_FIREWALLS";
const FIREWALLS: usize = 2;
/// Questions to `explain` about addresses behind each edit; there are some by name beside.
const QUESTIONS: usize = 10;

fn hunt(lab: &Lab) {
    let random = Random::from_environment().expect("a seed");
    let count = std::env::var(FIREWALLS_VARIABLE);
    let options = HuntOptions {
        explains_slow: count.is_ok(),
        questions: QUESTIONS,
        ..HuntOptions::default()
    };
    let firewalls = count.map_or(FIREWALLS, |count| {
        count.parse().expect("DNSFLOW_FIREWALLS is a number")
    });
    Hunt::start(lab, random, options).run(firewalls);
}

#[test]
fn connections_are_judged_as_the_oracle_says() {
    hunt(&lab!("random-one", agent));
}

#[test]
fn connections_of_both_families_are_judged_as_the_oracle_says() {
    let cluster = Cluster {
        dual_stack: true,
        name_resolver: true,
    };
    hunt(&lab!("random-both", agent, cluster));
}
