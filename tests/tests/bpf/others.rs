//! Programs of others at the hooks of an interface, in front of this agent's and behind.

use std::{net::Ipv4Addr, num::NonZeroU32, os::fd::OwnedFd};

use dnsflow_agent::{
    capture::{AttachKind, Options, Releaser, survey},
    clock::now,
};
use dnsflow_common::Reason;
use dnsflow_core::Input;
use dnsflow_tests::{
    frames::{Answer, Frame},
    process::{PATIENT, wait_until},
    raw_program::{RawProgram, count_runs},
    support::{not_run, this_test},
};

use crate::{
    Loaded,
    attach::{by, is_tcx, with_pins},
    load, load_kept,
    netns::{
        FilterPlace, Wire, add_foreign_filter, add_foreign_program, add_qdisc_at_ingress, add_veth,
        ifindex, in_new_netns, remove_clsact,
    },
    test_run::query_of,
    with_veth,
};

/// `TC_ACT_UNSPEC`, `TCX_NEXT`: the next program.
const NEXT: i32 = -1;
/// `TC_ACT_OK`, `TCX_PASS`: no program behind runs.
const PASS: i32 = 0;
/// `TC_ACT_SHOT`, `TCX_DROP`.
const DROP: i32 = 2;
/// `TC_ACT_REDIRECT`, `TCX_REDIRECT`: to where `bpf_redirect` has said, here nowhere.
const REDIRECT: i32 = 7;

fn answer() -> Frame {
    Frame::to_pod(Answer::new("www.example.com", &[Ipv4Addr::new(192, 0, 2, 1)]).build())
}

/// A program of somebody else's at both hooks of `host`.
struct Other {
    program: RawProgram,
    _links: Vec<OwnedFd>,
}

impl Other {
    /// Behind those that are there by TCX.
    fn last(verdict: i32) -> Self {
        let program = RawProgram::returning(verdict);
        let at = ifindex("host");
        let links = [program.attach_to_ingress(at), program.attach_to_egress(at)];
        Self {
            program,
            _links: links.map(|link| link.expect("TCX")).into(),
        }
    }

    /// In front of those that are there by TCX.
    fn first(verdict: i32) -> Self {
        let program = RawProgram::returning(verdict);
        let links = program.attach_first(ifindex("host")).expect("TCX");
        Self {
            program,
            _links: links.into(),
        }
    }

    /// As filters of clsact.
    fn filter(verdict: i32, priority: u32) -> Self {
        let program = RawProgram::returning(verdict);
        for is_egress in [false, true] {
            let place = FilterPlace {
                is_egress,
                ..FilterPlace::egress(priority)
            };
            add_foreign_program(ifindex("host"), place, program.fd());
        }
        Self {
            program,
            _links: Vec::new(),
        }
    }
}

impl Loaded {
    /// The pod's question and the answer to it are seen, whatever becomes of them.
    #[track_caller]
    fn sees(&mut self) {
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        let (questions, captured) = (self.questions(), self.captured());
        let answer = answer();
        pod.send(&query_of(&answer).build());
        wait_until("the question", PATIENT, || Ok(self.questions() > questions))
            .expect("it is seen");
        // A program behind may drop it, of which the socket is told.
        host.offer(&answer.build());
        assert_eq!(self.captured(), captured + 1);
    }

    /// The programs see nothing of what passes.
    #[track_caller]
    fn is_deaf(&mut self) {
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        let before = self.counters();
        pod.send(&query_of(&answer()).build());
        host.offer(&answer().build());
        assert_eq!(self.counters(), before);
    }

    fn questions(&self) -> u64 {
        let [_, from_pod] = self.counters();
        let recorded = from_pod
            .iter()
            .find(|(reason, _)| *reason == Reason::QueryRecorded);
        recorded.expect("it is counted").1
    }

    /// Looks at the places, and attaches what is to be attached.
    fn look(&mut self) -> Vec<Input> {
        let mut told = self.capture.attacher.attachments.look_at_places(now());
        told.extend(self.work());
        // The kernel takes a pinned link off its interface in a work queue, a moment after the link's file is gone.
        wait_until("the programs to be attached", PATIENT, || {
            let attachments = &mut self.capture.attacher.attachments;
            let Some(retry_at) = attachments.next_deadline() else {
                return Ok(true);
            };
            attachments.handle_timeout(retry_at);
            told.extend(self.work());
            Ok(false)
        })
        .expect("the first place is free");
        told
    }

    fn has_tcx(&mut self) -> bool {
        let program = self.capture.attacher.attachments.program_mut();
        let has_tcx = program.kernel_has_tcx().expect("known");
        if !has_tcx {
            not_run(&this_test(), "this kernel has no TCX");
        }
        has_tcx
    }
}

#[track_caller]
fn assert_attached(told: &[Input]) {
    assert!(
        matches!(told.last(), Some(Input::Attached { .. })),
        "{told:?}"
    );
}

/// The reason for which the programs do not see every packet.
#[track_caller]
fn reason(told: &[Input]) -> &str {
    match told {
        [Input::AttachFailed { reason, .. }] => reason,
        told => panic!("{told:?}"),
    }
}

#[test]
fn others_with_tcx_keep_nothing_from_the_programs() {
    for verdict in [NEXT, PASS, DROP, REDIRECT] {
        with_veth(&Options::default(), |mut program| {
            if !program.has_tcx() {
                return;
            }
            let before = Other::last(verdict);
            program.attached_for_a_while("host");
            let after = Other::last(verdict);
            let counting = count_runs();
            program.sees();
            drop(counting);
            // Those behind see it, too, as far as they let each other.
            let seen = [&before, &after].map(|other| other.program.runs() > 0);
            assert_eq!(seen, [true, verdict == NEXT], "{verdict}");
            assert!(program.look().is_empty());
        });
    }
}

#[test]
fn others_with_clsact_keep_nothing_from_the_programs() {
    for verdict in [NEXT, PASS, DROP, REDIRECT] {
        with_veth(&by(Some(AttachKind::Clsact)), |mut program| {
            add_qdisc_at_ingress(ifindex("host"), "clsact");
            // The newest filter of a priority comes first.
            let _before = Other::filter(verdict, 1);
            program.attached_for_a_while("host");
            let _after = Other::filter(verdict, 2);
            program.sees();
            assert!(program.look().is_empty());
        });
    }
}

/// What is held and put back is one packet to the others.
#[test]
fn a_program_of_others_sees_a_held_answer_once() {
    let mark = NonZeroU32::new(0x00c0_ffee);
    let options = Options {
        release_mark: mark,
        ..Options::default()
    };
    with_veth(&options, |mut program| {
        if !program.has_tcx() {
            return;
        }
        let other = RawProgram::returning(NEXT);
        let _link = other.attach_to_egress(ifindex("host")).expect("TCX");
        program.filter(ifindex("host"), &["example.com"]);
        program.attached("host");
        program.beat_for_long();
        let _counting = count_runs();
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        let answer = answer().build();
        host.send(&answer);
        let records = program.drain();
        assert!(records.len() == 1 && records[0].held);
        assert_eq!(other.runs(), 0, "it was taken off");
        let releaser = Releaser::open(mark.map_or(0, NonZeroU32::get)).expect("a packet socket");
        let released = releaser.release(ifindex("host"), &answer, 0);
        released.expect("the veth takes it");
        pod.expect(&answer);
        assert_eq!(other.runs(), 1);
    });
}

#[test]
fn the_programs_take_the_first_place_again_and_name_those_who_take_it_from_them() {
    with_pins(|dir| {
        let Some(mut program) = load_kept(&Options::default(), Some(dir)) else {
            return;
        };
        program.attached_for_a_while("host");
        if !is_tcx(&program) {
            return;
        }
        let in_front = || survey::in_front(ifindex("host"), Some(dir)).expect("an answer");
        let _other = Other::first(PASS);
        program.is_deaf();
        assert_eq!(in_front().len(), 2);
        assert_attached(&program.look());
        program.sees();
        assert_eq!(in_front(), [""; 0]);

        let again = Other::first(PASS);
        let id = again.program.id();
        let told = program.look();
        let named = format!("program {id} at ingress, program {id} at egress");
        assert!(reason(&told).contains(&named), "{told:?}");
        assert_eq!(in_front().join(", "), named);
        drop(again);
        assert_attached(&program.look());
        assert_eq!(in_front(), [""; 0]);
    });
}

#[test]
fn filters_take_the_first_place_again() {
    with_veth(&by(Some(AttachKind::Clsact)), |mut program| {
        program.attached_for_a_while("host");
        let other = Other::filter(PASS, 1);
        program.is_deaf();
        let id = other.program.id();
        let in_front = survey::in_front(ifindex("host"), None).expect("an answer");
        let [ingress, egress] =
            ["ingress", "egress"].map(|hook| format!("program {id} (theirs) at {hook}"));
        assert_eq!(in_front, [ingress, egress]);
        assert_attached(&program.look());
        program.sees();
        assert!(program.look().is_empty());
    });
}

/// As an agent does that puts a clsact of its own in place of the one that it finds.
#[test]
fn filters_come_back_that_others_have_removed() {
    with_veth(&by(Some(AttachKind::Clsact)), |mut program| {
        program.attached_for_a_while("host");
        remove_clsact(ifindex("host"));
        add_qdisc_at_ingress(ifindex("host"), "clsact");
        let _other = Other::filter(PASS, 1);
        program.is_deaf();
        assert_attached(&program.look());
        program.sees();

        // However short a time after they have moved.
        let _again = Other::filter(PASS, 1);
        assert_attached(&program.look());
        remove_clsact(ifindex("host"));
        program.is_deaf();
        assert_attached(&program.look());
        program.sees();
    });
}

/// The first priority is another protocol's.
#[test]
fn filters_have_a_second_place_where_the_next_agent_finds_them() {
    in_new_netns(|| {
        let clsact = by(Some(AttachKind::Clsact));
        let (Some(mut killed), Some(mut program)) = (load(&clsact), load(&clsact)) else {
            return;
        };
        add_veth("host", "pod", 1500);
        add_qdisc_at_ingress(ifindex("host"), "clsact");
        for is_egress in [false, true] {
            let ipv4 = FilterPlace {
                is_egress,
                priority: 1,
                protocol: 0x0800,
            };
            add_foreign_filter(ifindex("host"), ipv4);
        }
        killed.attached_for_a_while("host");
        killed.sees();
        program.attached_for_a_while("host");
        program.sees();
        assert_eq!(killed.captured(), 1);

        assert_attached(&program.look());
        let told = program.look();
        let named = "filter of the kind bpf at ingress, filter of the kind bpf at egress";
        assert!(reason(&told).contains(named), "{told:?}");
        program.sees();
    });
}
