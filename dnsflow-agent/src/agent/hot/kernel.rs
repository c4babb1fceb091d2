//! What the hot thread has of the kernel: captured frames, what is to be captured, marks, and the way back onto the
//! veths.

use std::{io, time::Duration};

use dnsflow_core::{
    Input,
    engine::Engine,
    io::input::{Frame, HeldFrame, MarkChange, MarkRefused},
    values::resolver::Resolver,
};
use tracing::{info, warn};

use crate::{
    capture::{
        DeferredAnswers, Drained, Entries, InterfaceSet, Left, NameFilter, Reading, Records,
        Releaser, Resolvers,
    },
    causes::Causes,
    clock::now,
};

/// Frames taken from the ring buffer before the other sources get their turn.
const FRAMES_PER_TURN: usize = 64;
/// No further frame is taken in a turn that has taken so long: what the turn has opened is on its way then. The cost of
/// a frame follows its length, and 64 short ones take less.
const TURN_MAX: Duration = Duration::from_millis(1);

/// The hot thread's part of the kernel.
pub(crate) struct Kernel {
    pub(crate) frames: Frames,
    pub(crate) marks: Marks,
    pub(crate) releasing: Releasing,
    pub(crate) resolvers: Resolvers,
    pub(crate) names: NameFilter,
    pub(crate) watched: InterfaceSet,
    pub(crate) recorded: InterfaceSet,
}

impl Kernel {
    /// Has the programs trust these DNS servers, and no others.
    pub(super) fn trust(&mut self, resolvers: impl IntoIterator<Item = Resolver>) {
        let resolvers: Vec<_> = resolvers
            .into_iter()
            .map(|Resolver { address, port }| (address, port))
            .collect();
        for error in self.resolvers.set(&resolvers) {
            warn!(%error, "a DNS server is not trusted");
        }
    }
}

/// The captured frames, in the ring buffer and beside it.
pub(crate) struct Frames {
    pub(crate) records: Records,
    pub(crate) deferred: DeferredAnswers,
    /// What was captured while there was no agent.
    pub(crate) left: Vec<Left>,
}

impl Frames {
    /// Waits for a frame. May be cancelled.
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.records.readable().await
    }

    /// Takes the frames of one turn.
    pub(super) fn take(&mut self, engine: &mut Engine) -> Drained {
        let Self {
            records, deferred, ..
        } = self;
        let end = now() + TURN_MAX;
        records.drain(FRAMES_PER_TURN, |frame| {
            hand_in(frame, engine, deferred);
            now() < end
        })
    }

    /// Takes all frames, at the end of the agent.
    pub(super) fn take_rest(&mut self, engine: &mut Engine) {
        let Self {
            records, deferred, ..
        } = self;
        records.drain_rest(|frame| hand_in(frame, engine, deferred));
    }

    /// Whether frames of the time without an agent wait.
    pub(super) fn have_left(&self) -> bool {
        !self.left.is_empty()
    }

    /// Takes in what was captured while there was no agent. The node is known: whose frames they are, which rules there
    /// are, and which DNS servers are trusted.
    pub(super) fn take_over(&mut self, engine: &mut Engine) {
        let Self { left, deferred, .. } = self;
        let mut frames = 0_u64;
        for left in left.drain(..) {
            left.drain(now(), |frame| {
                frames += 1;
                hand_in(frame, engine, deferred);
            });
        }
        if frames > 0 {
            info!(frames, "taken over frames captured while no agent ran");
        }
    }

    /// Has the engine look at the answers that no rule mentioned.
    pub(super) fn replay(&mut self, engine: &mut Engine) {
        let drained = self.deferred.replay(|frame| engine.replay(frame, now()));
        if let Err(error) = drained {
            warn!(%error, "deferred answers cannot be read");
        }
    }
}

/// Has the engine look at a frame, and defers an answer that no rule mentions.
fn hand_in(frame: Frame<'_>, engine: &mut Engine, deferred: &mut DeferredAnswers) {
    let defer = engine.handle_frame(frame, now());
    if defer && let Err(error) = deferred.defer(frame) {
        warn!(%error, "a deferred answer cannot be read");
    }
}

/// The marks of addresses.
pub(crate) struct Marks {
    entries: Entries,
    /// The reading of the entries that is under way.
    reading: Option<Reading>,
}

impl Marks {
    /// Those of these entries.
    pub(crate) fn of(entries: Entries) -> Self {
        Self {
            entries,
            reading: None,
        }
    }

    pub(super) fn change(&mut self, changes: Vec<MarkChange>, engine: &mut Engine) {
        let mut refused = Vec::new();
        let mut first = None;
        for change in changes {
            match change {
                MarkChange::Set {
                    ifindex,
                    address,
                    mark,
                    until,
                } => {
                    if let Err(error) = self.entries.set(ifindex, address, mark, until) {
                        refused.push(MarkRefused { ifindex, address });
                        first.get_or_insert(error);
                    }
                }
                MarkChange::Remove { ifindex, address } => {
                    if let Err(error) = self.entries.remove(ifindex, address) {
                        warn!(ifindex, %address, %error, "packets to an address stay marked until its end");
                    }
                }
            }
        }
        if let Some(error) = first {
            let addresses = refused.len();
            warn!(addresses, %error, "the kernel takes no more marks: addresses get flows");
            engine.handle(Input::MarksRefused(refused), now());
        }
    }

    /// Begins a reading of all marks.
    pub(super) fn begin_reading(&mut self) {
        self.reading = Some(Reading::default());
    }

    /// Whether a reading is under way.
    pub(super) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Hands the next marks of the reading that is under way to the engine.
    pub(super) fn read(&mut self, engine: &mut Engine) {
        let Some(reading) = &mut self.reading else {
            return;
        };
        let found = match self.entries.read(reading) {
            Ok(found) => Some(found),
            Err(error) => {
                warn!(%error, "cannot read the use of addresses");
                None
            }
        };
        let more = !reading.is_over();
        if !more {
            self.reading = None;
        }
        engine.handle(Input::Marks { found, more }, now());
    }
}

/// The way of held answers back onto their veths.
pub(crate) struct Releasing {
    releaser: Releaser,
    /// The interfaces to which answers were lost since the counters were last logged, and why.
    lost: Causes<(u32, &'static str)>,
}

impl Releasing {
    /// Through these sockets.
    pub(crate) fn by(releaser: Releaser) -> Self {
        Self {
            releaser,
            lost: Causes::default(),
        }
    }

    pub(super) fn release(&mut self, frame: &HeldFrame, engine: &Engine) {
        let HeldFrame {
            ifindex,
            bytes,
            gso_size,
        } = frame;
        if let Err(error) = self.releaser.release(*ifindex, bytes, *gso_size)
            && self.lost.is_news((*ifindex, error.reason()))
        {
            let port = engine.port_at(*ifindex).unwrap_or("unknown");
            warn!(
                ifindex,
                port,
                %error,
                "an answer that was held is lost; further ones of the same minute are only counted \
                 (dnsflow_held_answers_lost_total)"
            );
        }
    }

    /// From now on, each cause of a loss is news again.
    pub(super) fn forget_causes(&mut self) {
        self.lost.end();
    }
}
