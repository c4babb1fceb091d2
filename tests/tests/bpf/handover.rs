//! The programs of an earlier agent, as the next agent finds them.

use std::{fs, net::Ipv4Addr, num::NonZeroU32, path::Path, thread, time::Duration};

use dnsflow_agent::{
    capture::{Attach as _, Drained, Options},
    clock::now,
};
use dnsflow_common::{question::Depth, record::LAYOUT, walk::Version};
use dnsflow_core::{Input, Timestamp};

use dnsflow_tests::support::{LEFT_TO_OTHERS, not_run, this_test};

use crate::{
    Loaded,
    attach::{exchange, is_tcx, with_pins},
    load_kept,
    marks::marking,
    netns::{Wire, add_veth_at, ifindex, remove_link},
    opens::{A, answer, at, wire},
    test_run,
};

const NAME: &str = "www.example.com";

/// Runs `test` behind the end of an agent, whose programs go on. It has had the class of names below `example.com`, and has
/// said that it was well until then.
fn with_programs_of(options: &Options, well_until: Timestamp, test: impl FnOnce(&Path) + Send) {
    with_agent(options, |dir, mut ended| {
        let heartbeat = &mut ended.capture.heartbeat;
        heartbeat.capture_until(well_until).expect("it is set");
        drop(ended);
        test(dir);
    });
}

/// The same beside the agent.
fn with_agent(options: &Options, test: impl FnOnce(&Path, Loaded) + Send) {
    with_pins(|dir| {
        let Some(mut agent) = load_kept(options, Some(dir)) else {
            return;
        };
        agent.attached("host");
        if !is_tcx(&agent) {
            return;
        }
        agent.at = ifindex("host");
        agent.filter(agent.at, &["example.com"]);
        agent.open_class("example.com", Depth::Child, Version::V4);
        test(dir, agent);
    });
}

fn later() -> Timestamp {
    now() + Duration::from_secs(300)
}

fn start(options: &Options, dir: &Path) -> Loaded {
    load_kept(options, Some(dir)).expect("as before")
}

/// Whether the programs of an earlier agent go on beside this one, which has not taken their place yet.
fn go_on(program: &mut Loaded) -> bool {
    let program = program.capture.attacher.attachments.program_mut();
    program.let_go_on(ifindex("host"))
}

/// The pod asks for this address of the name, and is answered.
fn ask(address: Ipv4Addr) {
    let answer = answer(&wire(NAME), A, &[at(address)]);
    exchange(&Wire::open("host"), &Wire::open("pod"), &answer);
}

fn address(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, last)
}

/// How many frames wait that were captured without an agent.
fn left(program: &mut Loaded) -> usize {
    let mut frames = 0;
    for mut left in program.capture.left.drain(..) {
        let drained = left.drain(usize::MAX, now(), |_| {
            frames += 1;
            true
        });
        assert_eq!(drained, Drained::Empty);
        left.remove();
    }
    frames
}

/// An agent that ends between two turns has taken the frames of the first one.
#[test]
fn what_was_captured_without_an_agent_is_read_in_turns() {
    with_programs_of(&marking(), later(), |dir| {
        for number in 0..5 {
            ask(address(number));
        }
        let take = |limit, most| {
            let mut program = start(&marking(), dir);
            let mut frames = 0;
            let [left] = &mut program.capture.left[..] else {
                panic!("{} ring buffers", program.capture.left.len());
            };
            let drained = left.drain(limit, now(), |_| {
                frames += 1;
                frames < most
            });
            (frames, drained)
        };
        assert_eq!(take(2, usize::MAX), (2, Drained::Limit));
        assert_eq!(take(usize::MAX, 1), (1, Drained::Limit));
        assert_eq!(left(&mut start(&marking(), dir)), 2);
        assert!(start(&marking(), dir).capture.left.is_empty());
    });
}

/// As a container does that is started again and again.
#[test]
fn agents_that_do_not_come_to_know_their_node_leave_what_others_have_captured() {
    with_programs_of(&marking(), later(), |dir| {
        for round in 0..5 {
            ask(address(round));
            let mut program = start(&marking(), dir);
            let found = program.attach("host");
            assert!(matches!(found, Input::Attached { .. }), "{found:?}");
        }
        let mut program = start(&marking(), dir);
        assert!(go_on(&mut program));
        assert_eq!(left(&mut program), 5);
    });
}

/// An agent that has ended before it knew its node has left its map.
#[test]
fn programs_do_not_go_on_that_mark_by_another_map() {
    let other = Options {
        mark_mask: NonZeroU32::new(0x00ff_0000),
        ..marking()
    };
    for (options, between) in [(Options::default(), marking()), (marking(), other)] {
        with_programs_of(&options, later(), |dir| {
            drop(start(&between, dir));
            let mut program = start(&marking(), dir);
            assert!(!go_on(&mut program), "{options:?}, {between:?}");
        });
    }
}

#[test]
fn programs_do_not_go_on_that_have_stopped_to_capture() {
    with_programs_of(&marking(), now(), |dir| {
        assert!(!go_on(&mut start(&marking(), dir)));
    });
}

/// They would stop soon, and an agent that has started does not know the rules yet.
#[test]
fn programs_that_go_on_capture_until_their_place_is_taken() {
    with_agent(&marking(), |dir, mut ended| {
        let mut program = start(&marking(), dir);
        let well_until = now() + Duration::from_secs(1);
        let heartbeat = &mut ended.capture.heartbeat;
        heartbeat.capture_until(well_until).expect("it is set");
        if !go_on(&mut program) {
            let why = "the machine stood still for a second";
            not_run(&this_test(), format!("{why}; {LEFT_TO_OTHERS}"));
            return;
        }
        thread::sleep(well_until.since(now()));
        ask(address(1));
        assert_eq!(left(&mut program), 1);
    });
}

/// Of another layout: nobody reads it.
#[test]
fn programs_do_not_go_on_whose_ring_buffer_is_gone() {
    with_programs_of(&marking(), later(), |dir| {
        let other = format!("records-{}-0", LAYOUT + 1);
        let renamed = fs::rename(dir.join(format!("records-{LAYOUT}-0")), dir.join(other));
        renamed.expect("it was there");
        assert!(!go_on(&mut start(&marking(), dir)));
    });
}

/// An interface has come with the index of the one that the programs were on.
#[test]
fn programs_do_not_go_on_at_another_interface() {
    with_programs_of(&marking(), later(), |dir| {
        let before = ifindex("host");
        remove_link("host");
        add_veth_at(before, "host", "pod", 1500);
        assert_eq!(ifindex("host"), before);
        let mut program = start(&marking(), dir);
        assert!(!go_on(&mut program));
        program.attached("host");
        exchange(&Wire::open("host"), &Wire::open("pod"), &test_run::answer());
        assert_eq!(program.drain().len(), 1);
    });
}

#[test]
fn programs_that_go_on_open_addresses_until_they_are_told_not_to() {
    with_programs_of(&marking(), later(), |dir| {
        let mut program = start(&marking(), dir);
        program.at = ifindex("host");
        ask(address(1));
        assert!(program.open().contains_key(&address(1).into()));
        for left in &program.capture.left {
            // A second time nothing is there.
            for _ in 0..2 {
                left.end_opening().expect("it is there");
            }
        }
        ask(address(2));
        assert!(!program.open().contains_key(&address(2).into()));
        assert_eq!(left(&mut program), 2);
    });
}
