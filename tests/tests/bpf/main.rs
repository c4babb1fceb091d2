//! The BPF program in this machine's kernel: by `BPF_PROG_TEST_RUN`, and on a real veth.

mod attach;
mod cost;
mod netns;
mod test_run;

use aya::{
    Ebpf, TestRun as _, TestRunOptions,
    programs::{ProgramError, SchedClassifier},
};
use dnsflow_agent::capture::{self, Capture, CaptureError, Drained, Options, PROGRAM};
use dnsflow_common::Reason;
use dnsflow_tests::support::{not_run, this_test};

/// "Continue": `TC_ACT_UNSPEC` and `TCX_NEXT`.
const CONTINUE: u32 = u32::MAX;

/// The loaded program, and the runtime that its descriptors are registered with.
struct Loaded {
    capture: Capture,
    runtime: tokio::runtime::Runtime,
}

/// A captured frame, taken out of the ring buffer.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Captured {
    ifindex: u32,
    captured_at_ns: u64,
    bytes: Vec<u8>,
    wire_len: usize,
}

/// Loads the program; `None`, and a word about it, where this process may not.
fn load(options: &Options) -> Option<Loaded> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let guard = runtime.enter();
    let capture = match capture::load(options) {
        Ok(capture) => capture,
        Err(error @ CaptureError::Permission(_)) => {
            not_run(&this_test(), error);
            return None;
        }
        Err(error) => panic!("{error}: {error:?}"),
    };
    drop(guard);
    Some(Loaded { capture, runtime })
}

impl Loaded {
    fn ebpf(&mut self) -> &mut Ebpf {
        self.capture.attachments.program_mut().ebpf_mut()
    }

    fn program(&mut self) -> &SchedClassifier {
        self.ebpf()
            .program(PROGRAM)
            .expect("the program")
            .try_into()
            .expect("a classifier")
    }

    /// Runs the program on a frame, as many times as said; gives verdict and time per run.
    fn run(&mut self, frame: &[u8], repeat: u32) -> Result<(u32, u128), ProgramError> {
        let options = TestRunOptions {
            data_in: Some(frame),
            repeat,
            ..TestRunOptions::default()
        };
        let result = self.program().test_run(options)?;
        Ok((result.return_value, result.duration.as_nanos()))
    }

    fn counters(&self) -> Vec<(Reason, u64)> {
        self.capture.counters.read().expect("counters")
    }

    /// Runs the program once; gives the one reason that was counted, and what was captured.
    #[track_caller]
    fn run_once(&mut self, frame: &[u8]) -> (Reason, Option<Captured>) {
        let before = self.counters();
        let (verdict, _) = self.run(frame, 1).expect("the kernel runs the program");
        assert_eq!(verdict, CONTINUE);
        let counted: Vec<_> = self
            .counters()
            .into_iter()
            .zip(before)
            .filter(|(now, before)| now != before)
            .collect();
        let [((reason, now), (_, before))] = counted[..] else {
            panic!("one packet, one reason, not {counted:?}");
        };
        assert_eq!(now - before, 1, "{reason}");
        if reason != Reason::Captured {
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
                        wire_len: frame.wire_len,
                    });
                });
                assert_eq!(drained, Drained::Empty);
            }
        });
        found
    }
}
