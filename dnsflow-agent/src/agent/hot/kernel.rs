//! What the hot thread has of the kernel: captured frames, what is to be captured, marks, and the way back onto the
//! veths.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    time::Duration,
};

use aya::maps::MapError;
use dnsflow_core::{
    Input, Timestamp,
    engine::Engine,
    io::input::{ClassChange, Frame, HeldFrame, MarkChange, MarkFound, MarkRefused},
    values::resolver::Resolver,
};
use ipnet::IpNet;
use tracing::{info, warn};

use crate::{
    agent::hot::Recorder,
    capture::{
        Classes, DeferredAnswers, Drained, Entries, InterfaceSet, Left, NameFilter, Networks,
        Reading, Records, Releaser, Resolvers, class_key,
    },
    causes::Causes,
    clock::now,
};

/// Frames taken from the ring buffer before the other sources get their turn.
const FRAMES_PER_TURN: usize = 64;
/// The same of those that were captured while there was no agent. Pods wait for the new ones.
const LEFT_PER_TURN: usize = 16;
/// No further frame is taken in a turn that has taken so long: what the turn has opened is on its way then. The cost of
/// a frame follows its length, and 64 short ones take less.
pub(super) const TURN_MAX: Duration = Duration::from_millis(1);

/// The hot thread's part of the kernel.
pub(crate) struct Kernel {
    pub(crate) frames: Frames,
    pub(crate) marks: Marks,
    pub(crate) opening: Opening,
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
            warn!(%error, "cannot update the trusted DNS servers");
        }
    }
}

/// The captured frames, in the ring buffer and beside it.
pub(crate) struct Frames {
    pub(crate) records: Records,
    pub(crate) deferred: DeferredAnswers,
    pub(crate) left: LeftFrames,
}

/// What was captured while there was no agent, oldest first.
pub(crate) struct LeftFrames {
    rings: VecDeque<Left>,
    /// How many frames were taken, and in how many turns.
    frames: u64,
    turns: u64,
}

impl LeftFrames {
    /// Those in these ring buffers.
    pub(crate) fn of(rings: Vec<Left>) -> Self {
        Self {
            rings: rings.into(),
            frames: 0,
            turns: 0,
        }
    }
}

impl Frames {
    /// Waits for a frame. May be cancelled.
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.records.readable().await
    }

    /// Takes the frames of one turn.
    pub(super) fn take(&mut self, engine: &mut Engine, journal: &mut Recorder) -> Drained {
        let Self {
            records, deferred, ..
        } = self;
        let end = now() + TURN_MAX;
        records.drain(FRAMES_PER_TURN, |frame| {
            hand_in(frame, engine, (deferred, journal));
            now() < end
        })
    }

    /// Takes the frames of one turn, also those that the runtime has not noticed. Says whether all are taken that were
    /// handed over before this time.
    pub(super) fn take_until(
        &mut self,
        before: Timestamp,
        engine: &mut Engine,
        journal: &mut Recorder,
    ) -> bool {
        let Self {
            records, deferred, ..
        } = self;
        let end = now() + TURN_MAX;
        let mut are_taken = false;
        let drained = records.drain_now(FRAMES_PER_TURN, |frame| {
            are_taken |= frame.captured_at >= before;
            hand_in(frame, engine, (deferred, journal));
            now() < end
        });
        are_taken || drained == Drained::Empty
    }

    /// Takes all frames, at the end of the agent.
    pub(super) fn take_rest(&mut self, engine: &mut Engine, journal: &mut Recorder) {
        let Self {
            records, deferred, ..
        } = self;
        records.drain_rest(|frame| hand_in(frame, engine, (deferred, journal)));
    }

    /// Whether frames of the time without an agent wait.
    pub(super) fn have_left(&self) -> bool {
        !self.left.rings.is_empty()
    }

    /// Has the programs of earlier agents open no address from now on.
    pub(super) fn end_earlier_opening(&self) {
        for left in &self.left.rings {
            match left.end_opening() {
                Ok(()) => info!(
                    "the programs of an earlier agent open no addresses any more: rules, or numbers of marks, have changed"
                ),
                Err(error) => {
                    warn!(%error, "cannot stop the programs of an earlier agent from opening addresses");
                }
            }
        }
    }

    /// Takes the frames of one turn that were captured while there was no agent. The node is known: whose frames they
    /// are, which rules there are, and which DNS servers are trusted.
    pub(super) fn take_left(&mut self, engine: &mut Engine, journal: &mut Recorder) {
        let Self { left, deferred, .. } = self;
        let LeftFrames {
            rings,
            frames,
            turns,
        } = left;
        let Some(oldest) = rings.front_mut() else {
            return;
        };
        let begin = now();
        let taken_before = *frames;
        let drained = oldest.drain(LEFT_PER_TURN, begin, |frame| {
            *frames += 1;
            hand_in(frame, engine, (deferred, journal));
            now() < begin + TURN_MAX
        });
        *turns += u64::from(*frames > taken_before);
        if drained == Drained::Empty
            && let Some(read) = rings.pop_front()
        {
            read.remove();
        }
        if rings.is_empty() && *frames > 0 {
            let (frames, turns) = (*frames, *turns);
            info!(
                frames,
                turns, "took over the frames captured without an agent"
            );
        }
    }

    /// Takes answers that no rule mentioned out of the kernel, before one pod can fill its queue.
    pub(super) fn collect_deferred(&mut self) {
        if let Err(error) = self.deferred.collect() {
            warn!(%error, "deferred answers cannot be read");
        }
    }

    /// Forgets the answers that no rule mentioned of an interface that is gone.
    pub(super) fn forget_deferred(&mut self, ifindex: u32) {
        if let Err(error) = self.deferred.forget_interface(ifindex) {
            warn!(ifindex, %error, "deferred answers cannot be read");
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
fn hand_in(
    frame: Frame<'_>,
    engine: &mut Engine,
    (deferred, journal): (&mut DeferredAnswers, &mut Recorder),
) {
    if look_at(frame, engine, journal, now()) {
        deferred.defer(frame);
    }
}

/// Has the engine look at a frame. If the kernel has opened its addresses, their names are recorded before the frame is
/// given back: else nobody would know them behind the end of this agent. Returns whether to defer the frame.
pub(super) fn look_at(
    frame: Frame<'_>,
    engine: &mut Engine,
    journal: &mut Recorder,
    now: Timestamp,
) -> bool {
    let is_to_wait = engine.handle_frame(frame, now);
    if frame.opened {
        journal.write(engine, now);
    }
    is_to_wait
}

/// The marks of addresses.
pub(crate) struct Marks {
    entries: Entries,
    /// The reading of the entries that is under way.
    reading: Option<Reading>,
    /// What was read last and the engine does not know yet.
    part: Option<Part>,
}

impl Marks {
    /// Those of these entries.
    pub(crate) fn of(entries: Entries) -> Self {
        Self {
            entries,
            reading: None,
            part: None,
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
                        warn!(ifindex, %address, %error, "cannot remove a mark: the address stays open until its end");
                    }
                }
            }
        }
        let told = match first {
            None => self.entries.tell_room(),
            Some(_) => self.entries.leave_no_room(),
        };
        log_untold(told);
        if let Some(error) = first {
            let addresses = refused.len();
            warn!(addresses, %error, "the kernel refused marks: opening these addresses by flows");
            engine.handle(Input::MarksRefused(refused), now());
        }
    }

    /// Lets the programs mark addresses of an interface by themselves, or no longer.
    pub(super) fn share(&mut self, ifindex: u32, is_there: bool) {
        log_untold(self.entries.share(ifindex, is_there));
    }

    /// Begins a reading of all marks.
    pub(super) fn begin_reading(&mut self) {
        self.reading = Some(Reading::default());
        self.part = None;
    }

    /// Whether a reading is under way.
    pub(super) fn is_reading(&self) -> bool {
        self.reading.is_some() || self.part.is_some()
    }

    /// Hands the next marks of the reading that is under way to the engine. The frames whose addresses the programs
    /// have opened before come first: else nobody would know whose these marks are.
    pub(super) fn read(
        &mut self,
        frames: &mut Frames,
        engine: &mut Engine,
        journal: &mut Recorder,
    ) {
        let Some(part) = self.part.take().or_else(|| self.read_part()) else {
            return;
        };
        if frames.take_until(part.read_at, engine, journal) {
            let Part { found, more, .. } = part;
            let marks = Input::Marks {
                found,
                more,
                records_wait: frames.have_left(),
            };
            engine.handle(marks, now());
        } else {
            self.part = Some(part);
        }
    }

    /// Reads some marks.
    fn read_part(&mut self) -> Option<Part> {
        let reading = self.reading.as_mut()?;
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
            log_untold(self.entries.tell_room());
        }
        Some(Part {
            found,
            more,
            read_at: now(),
        })
    }
}

/// Logs that the programs were not told how many addresses they may mark.
fn log_untold(told: Result<(), MapError>) {
    if let Err(error) = told {
        warn!(%error, "cannot tell the programs how many addresses they may open: told again in ten seconds");
    }
}

/// A part of a reading of the marks.
struct Part {
    /// `None`: the kernel has refused it.
    found: Option<Vec<MarkFound>>,
    /// Whether it is not the last one.
    more: bool,
    read_at: Timestamp,
}

/// What the programs open without the agent.
pub(crate) struct Opening {
    classes: Classes,
    networks: Networks,
    /// Whether a refused class was logged since the counters were.
    is_refusal_logged: bool,
}

impl Opening {
    /// Nothing yet.
    pub(crate) fn of(classes: Classes, networks: Networks) -> Self {
        Self {
            classes,
            networks,
            is_refusal_logged: false,
        }
    }

    /// Changes the classes of names whose addresses the programs open.
    pub(super) fn change(&mut self, changes: Vec<ClassChange>, engine: &mut Engine) {
        let mut refused = BTreeSet::new();
        for change in changes {
            match change {
                // That the networks are missing was said.
                ClassChange::Set { element, .. } if !self.networks.has_all() => {
                    refused.insert(element);
                }
                ClassChange::Set {
                    ifindex,
                    class,
                    mark,
                    element,
                } => {
                    let key = class_key(ifindex, &class);
                    let set = self.classes.set(element, key, class.base.wire(), mark);
                    if let Err(error) = set {
                        refused.insert(element);
                        if !std::mem::replace(&mut self.is_refusal_logged, true) {
                            warn!(
                                ifindex, base = %class.base, %error,
                                "the kernel refused a class of names: the agent opens their addresses; further \
                                 refusals of the same minute are not logged"
                            );
                        }
                    }
                }
                ClassChange::Remove { ifindex, class } => {
                    let removed = self.classes.remove(class_key(ifindex, &class));
                    if let Err(error) = removed {
                        warn!(ifindex, base = %class.base, %error, "cannot stop the kernel from opening addresses");
                    }
                }
            }
        }
        if !refused.is_empty() {
            engine.handle(Input::ClassesRefused(refused), now());
        }
    }

    /// Has the programs leave these networks to the agent, or no longer. If they do not know all networks, they open
    /// nothing.
    pub(super) fn leave(&mut self, changes: &BTreeMap<IpNet, bool>, engine: &mut Engine) {
        let had_all = self.networks.has_all();
        let changed = self.networks.change(changes);
        let Err(error) = changed else { return };
        if !had_all {
            // That was said, and no class is there.
            return;
        }
        warn!(%error, "the kernel refused the list of networks: it opens no addresses");
        let (gone, refused) = self.classes.clear();
        for error in refused {
            warn!(%error, "cannot stop the kernel from opening addresses");
        }
        engine.handle(Input::ClassesRefused(gone), now());
    }

    /// From now on, a refusal is news again.
    pub(super) fn forget_refusal(&mut self) {
        self.is_refusal_logged = false;
    }
}

/// The way of held answers back onto their veths.
pub(crate) struct Releasing {
    releaser: Releaser,
    /// The interfaces to which answers were lost since the counters were last logged, and why.
    lost: Causes<(u32, &'static str)>,
}

impl Releasing {
    /// Through this socket.
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
            ..
        } = frame;
        if let Err(error) = self.releaser.release(*ifindex, bytes, *gso_size)
            && self.lost.is_news((*ifindex, error.reason()))
        {
            let port = engine.port_at(*ifindex).unwrap_or("unknown");
            warn!(
                ifindex,
                port,
                %error,
                "a held answer is lost; further losses of the same minute are only counted \
                 (dnsflow_held_answers_lost_total)"
            );
        }
    }

    /// From now on, each cause of a loss is news again.
    pub(super) fn forget_causes(&mut self) {
        self.lost.end();
    }
}
