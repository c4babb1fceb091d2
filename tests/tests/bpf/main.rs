//! The BPF programs in this machine's kernel: by `BPF_PROG_TEST_RUN`, and on a real veth.

mod attach;
mod attempts;
mod beside_engine;
mod cost;
mod differential;
mod filter;
mod handover;
mod hold;
mod marks;
mod netns;
mod opens;
mod others;
mod release;
mod several;
mod test_run;
mod trust;

use std::{net::IpAddr, path::Path};

use aya::{
    Ebpf, TestRun as _, TestRunOptions,
    programs::{ProgramError, SchedClassifier},
};
use dnsflow_agent::capture::{
    self, Attach as _, Capture, CaptureError, Drained, EGRESS, INGRESS, Options,
};
use dnsflow_common::Reason;
use dnsflow_core::{
    io::input::{NameSetId, SourceAddresses},
    ovn::rows::MacAddress,
    values::name::DomainName,
};
use dnsflow_tests::{
    frames::{Frame, POD_MAC},
    support::{not_run, this_test},
};
use netns::{add_veth, in_new_netns};

/// "Continue": `TC_ACT_UNSPEC` and `TCX_NEXT`.
const CONTINUE: u32 = u32::MAX;
/// Taken off the wire: `TC_ACT_REDIRECT` and `TCX_REDIRECT`, to nowhere.
const TAKEN_OFF: u32 = 7;

/// The loaded programs, and the runtime that its descriptors are registered with.
struct Loaded {
    capture: Capture,
    runtime: tokio::runtime::Runtime,
    /// The interface that programs under test are run on: this namespace's loopback interface, unless
    /// another is set.
    at: u32,
    /// The element of the next class.
    element: u32,
}

/// A captured frame, taken out of the ring buffer.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Captured {
    ifindex: u32,
    captured_at_ns: u64,
    bytes: Vec<u8>,
    from_pod: bool,
    held: bool,
    opened: bool,
    left_out: u32,
}

/// The resolver that frames come from, with either family.
fn resolvers(port: u16) -> [(IpAddr, u16); 2] {
    let v4 = Frame::to_pod(Vec::new());
    let v6 = v4.clone().over_v6();
    [(v4.src.ip(), port), (v6.src.ip(), port)]
}

/// The addresses of the pod that frames go to.
fn own_addresses() -> SourceAddresses {
    let v4 = Frame::to_pod(Vec::new());
    let v6 = v4.clone().over_v6();
    SourceAddresses {
        mac: MacAddress::new(POD_MAC),
        ips: vec![v4.dst.ip(), v6.dst.ip()],
    }
}

/// Without shares: a test hands over more at once than a pod may.
fn unshared() -> Options {
    Options {
        shares: false,
        ..Options::default()
    }
}

/// Loads the programs. They trust the resolver that frames come from, and the addresses of the pod that
/// frames go to, at the loopback interface. `None`, and a word about it, where this process may not.
fn load(options: &Options) -> Option<Loaded> {
    load_kept(options, None)
}

/// The same, with a directory for what outlives the programs' agent.
fn load_kept(options: &Options, pins: Option<&Path>) -> Option<Loaded> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let guard = runtime.enter();
    let mut capture = match capture::take_over(options, runtime.handle(), pins) {
        Ok(capture) => capture,
        Err(error @ CaptureError::Permission(_)) => {
            not_run(&this_test(), error);
            return None;
        }
        Err(error) => panic!("{error}: {error:?}"),
    };
    drop(guard);
    let ports = options.ports.as_array().iter().filter(|port| **port != 0);
    let trusted: Vec<_> = ports.flat_map(|port| resolvers(*port)).collect();
    let errors = capture.resolvers.set(&trusted);
    assert!(errors.is_empty(), "{errors:?}");
    let mut loaded = Loaded {
        capture,
        runtime,
        at: 1,
        element: 0,
    };
    loaded.trust_at(1);
    Some(loaded)
}

/// Runs `test` with a veth in a network namespace of its own: `host`, whose programs are loaded, and `pod`.
fn with_veth(options: &Options, test: impl FnOnce(Loaded) + Send) {
    in_new_netns(|| {
        if let Some(program) = load(options) {
            add_veth("host", "pod", 1500);
            test(program);
        }
    });
}

impl Loaded {
    /// Lets only answers for these names and those below them leave the kernel at an interface.
    fn filter(&mut self, ifindex: u32, names: &[&str]) {
        let name_set = NameSetId(ifindex);
        let names = names.iter().map(|name| name.parse().expect("a name"));
        let names: Vec<DomainName> = names.collect();
        self.capture.names.set_names(name_set, &names);
        self.capture.names.set_name_set(ifindex, Some(name_set));
    }

    /// Trusts what comes from the pod's addresses at an interface.
    fn trust_at(&mut self, ifindex: u32) {
        let program = self.capture.attacher.attachments.program_mut();
        program.trust_sources(ifindex, &own_addresses());
    }

    fn ebpf(&mut self) -> &mut Ebpf {
        self.capture.attacher.attachments.program_mut().ebpf_mut()
    }

    fn program(&mut self, name: &str) -> &SchedClassifier {
        self.ebpf()
            .program(name)
            .expect("the program")
            .try_into()
            .expect("a classifier")
    }

    /// Runs a program on a frame, as many times as said; gives verdict and time per run.
    fn run(
        &mut self,
        program: &str,
        frame: &[u8],
        repeat: u32,
    ) -> Result<(u32, u128), ProgramError> {
        // `struct __sk_buff` up to and with `ifindex`, its eleventh word (Linux
        // include/uapi/linux/bpf.h).
        let mut context = [0u8; 44];
        context[40..].copy_from_slice(&self.at.to_ne_bytes());
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: (self.at != 1).then_some(&context[..]),
            repeat,
            ..TestRunOptions::default()
        };
        let result = self.program(program).test_run(options)?;
        Ok((result.return_value, result.duration.as_nanos()))
    }

    /// Counters of packets to the pod, then of packets from it.
    fn counters(&self) -> [Vec<(Reason, u64)>; 2] {
        let counters = &self.capture.counters;
        [
            counters.read().expect("counters"),
            counters.read_queries().expect("counters"),
        ]
    }

    /// Runs a program once; gives the one reason that was counted.
    #[track_caller]
    fn reason(&mut self, program: &str, frame: &[u8]) -> Reason {
        let before = self.counters();
        let (verdict, _) = self
            .run(program, frame, 1)
            .expect("the kernel runs the program");
        let [to_pod, from_pod] = self.counters();
        let [to_pod_before, from_pod_before] = before;
        let (counted, other) = match program {
            EGRESS => ((to_pod, to_pod_before), (from_pod, from_pod_before)),
            _ => ((from_pod, from_pod_before), (to_pod, to_pod_before)),
        };
        assert_eq!(other.0, other.1, "counted for the other program");
        let counted: Vec<_> = counted
            .0
            .into_iter()
            .zip(counted.1)
            .filter(|(now, before)| now != before)
            .collect();
        let [((reason, now), (_, before))] = counted[..] else {
            panic!("one packet, one reason, not {counted:?}");
        };
        assert_eq!(now - before, 1, "{reason}");
        let expected = if reason == Reason::Held {
            TAKEN_OFF
        } else {
            CONTINUE
        };
        assert_eq!(verdict, expected, "{reason}");
        reason
    }

    /// Has the pod send this.
    #[track_caller]
    fn ask(&mut self, frame: &[u8]) -> Reason {
        self.reason(INGRESS, frame)
    }

    /// Sends the pod this; gives the one reason that was counted, and what was captured.
    #[track_caller]
    fn run_once(&mut self, frame: &[u8]) -> (Reason, Option<Captured>) {
        let reason = self.reason(EGRESS, frame);
        let is_handed_over = matches!(
            reason,
            Reason::Captured | Reason::Held | Reason::Opened | Reason::EntriesFull
        );
        if !is_handed_over {
            return (reason, None);
        }
        // Anything else in the ring buffer comes from a packet that was counted as skipped.
        let mut captured = self.drain();
        assert_eq!(captured.len(), 1);
        (reason, captured.pop())
    }

    /// Everything in the ring buffer.
    fn drain(&mut self) -> Vec<Captured> {
        let mut found = Vec::new();
        let records = &mut self.capture.records;
        self.runtime.block_on(async {
            // Lets the runtime see what the kernel has to say.
            let wait = std::time::Duration::from_millis(1);
            while let Ok(ready) = tokio::time::timeout(wait, records.readable()).await {
                ready.expect("the runtime runs");
                let drained = records.drain(usize::MAX, |frame| {
                    found.push(Captured {
                        ifindex: frame.ifindex,
                        captured_at_ns: frame.captured_at.as_nanos(),
                        bytes: frame.bytes.to_vec(),
                        from_pod: frame.from_pod,
                        held: frame.held,
                        opened: frame.opened,
                        left_out: frame.left_out,
                    });
                    true
                });
                assert_eq!(drained, Drained::Empty);
            }
        });
        found
    }
}
