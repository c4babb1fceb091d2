//! Holds answers until the switch lets the pod reach their addresses.
//!
//! Every frame leaves exactly once: as soon as its wait is over, and at the latest [`HoldLimits::longest`] after its
//! capture. Frames of one TCP connection leave in the order of their arrival. So a frame can wait for earlier frames,
//! but never makes earlier frames wait. No frame is dropped: if there is no room, the queue does not take the frame,
//! and the caller releases it.
//!
//! Only the first frame of each connection is examined. A frame costs a few look-ups in balanced trees, however many
//! frames there are.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use crate::{
    Command, Timestamp,
    dns::tcp::ConnectionKey,
    io::{
        input::{BatchId, Frame, HeldFrame},
        output::Output,
    },
    tools::{
        counter_vec::{CounterVec, labels},
        deadline::{self, Deadline, Why},
        table::HashMap,
    },
    values::limits::{
        HELD_BYTES_MAX, HELD_BYTES_PER_INTERFACE_MAX, HELD_MAX, HELD_PER_INTERFACE_MAX,
        HOLD_LONGEST,
    },
};

/// How long frames are held, and how many.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HoldLimits {
    /// A frame is held for at most this long, counted from its capture.
    pub longest: Duration,
    /// At most this many frames.
    pub frames: usize,
    /// At most this many frames for one interface, so that one pod cannot take the room of the
    /// others.
    pub per_interface: usize,
    /// At most this many bytes, of all frames together.
    pub bytes: usize,
    /// How many bytes those for one interface have together.
    pub bytes_per_interface: usize,
}

impl Default for HoldLimits {
    fn default() -> Self {
        Self {
            longest: HOLD_LONGEST,
            frames: HELD_MAX,
            per_interface: HELD_PER_INTERFACE_MAX,
            bytes: HELD_BYTES_MAX,
            bytes_per_interface: HELD_BYTES_PER_INTERFACE_MAX,
        }
    }
}

/// The conditions for which a frame waits. By default there is none: the frame leaves at once, behind the frames of
/// its connection.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Wait {
    /// All of these batches of changes ([`HoldQueue::waits_over`]). They take effect in any order.
    pub batches: BTreeSet<BatchId>,
    /// The comparison of the switch with the cache ([`HoldQueue::compared`]): some flows come in no batch that is known.
    pub comparison: bool,
}

impl Wait {
    /// One batch.
    pub fn batch(batch: BatchId) -> Self {
        Self {
            batches: BTreeSet::from([batch]),
            comparison: false,
        }
    }

    /// The comparison.
    pub fn comparison() -> Self {
        Self {
            batches: BTreeSet::new(),
            comparison: true,
        }
    }

    /// Waits for the conditions of `other`, too.
    pub fn and(mut self, other: Self) -> Self {
        self.batches.extend(other.batches);
        self.comparison |= other.comparison;
        self
    }

    /// Whether there is nothing to wait for.
    pub fn is_over(&self) -> bool {
        self.batches.is_empty() && !self.comparison
    }
}

/// The queue has no room for another frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("no room for another frame to be held")]
pub struct Full;

labels! {
    /// The outcome of a frame.
    HoldEvent {
        /// The frame was held.
        Held = "held",
        /// Released: the frame waited only for the frames before it.
        Free = "free",
        /// Released: the wait is over.
        Applied = "applied",
        /// Released: this frame, or a later one of its connection, was held for as long as is
        /// allowed.
        Overrun = "overrun",
        /// Not held: there was no room.
        Full = "full",
    }
}

/// A frame that is held.
#[derive(Debug)]
struct Held {
    frame: HeldFrame,
    /// The conditions that are still open.
    wait: Wait,
    /// Whether it had to wait for anything but the frames before it.
    has_waited: bool,
    connection: Option<ConnectionKey>,
    /// When the wait ended, or will end, if that is known.
    ready: Option<Timestamp>,
    /// When the frame leaves in any case: never later than a later frame of its connection has to
    /// leave.
    deadline: Timestamp,
}

impl Held {
    /// When the frame leaves, if no frame stands before it.
    fn due(&self) -> Timestamp {
        self.ready
            .map_or(self.deadline, |ready| ready.min(self.deadline))
    }

    fn why(&self) -> HoldEvent {
        match self.ready {
            _ if !self.has_waited => HoldEvent::Free,
            Some(ready) if ready <= self.deadline => HoldEvent::Applied,
            _ => HoldEvent::Overrun,
        }
    }
}

/// The number of a frame, in the order in which the frames came.
type Number = u64;

/// The held frames of one interface.
#[derive(Clone, Copy, Debug, Default)]
struct OfInterface {
    frames: usize,
    bytes: usize,
}

/// The frames that are held.
#[derive(Debug, Default)]
pub struct HoldQueue {
    limits: HoldLimits,
    frames: HashMap<Number, Held>,
    next: Number,
    bytes: usize,
    of_interface: HashMap<u32, OfInterface>,
    /// The first frame of each connection and the frames without one, by the time at which they
    /// leave.
    due: BTreeSet<(Timestamp, Number)>,
    waiting: BTreeSet<(BatchId, Number)>,
    /// Those that wait for the comparison.
    comparison: BTreeSet<Number>,
    connections: HashMap<ConnectionKey, VecDeque<Number>>,
    events: CounterVec<HoldEvent>,
}

impl HoldQueue {
    /// Holds nothing yet.
    pub fn new(limits: HoldLimits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Whether a frame of this connection has to wait for others.
    pub fn has_frames_of(&self, connection: &ConnectionKey) -> bool {
        self.connections.contains_key(connection)
    }

    /// Holds a frame. `connection`: its TCP connection; `None` for UDP, whose datagrams need no order.
    ///
    /// # Errors
    ///
    /// If there is no room. All frames of its connection are then due: the caller takes them with
    /// [`HoldQueue::take_due`], releases them, and then releases this frame.
    pub fn hold(
        &mut self,
        frame: &Frame<'_>,
        connection: Option<ConnectionKey>,
        wait: Wait,
        now: Timestamp,
    ) -> Result<(), Full> {
        let of_interface = self.of_interface.entry(frame.ifindex).or_default();
        if self.frames.len() >= self.limits.frames
            || of_interface.frames >= self.limits.per_interface
            || self.bytes + frame.bytes.len() > self.limits.bytes
            || of_interface.bytes + frame.bytes.len() > self.limits.bytes_per_interface
        {
            if of_interface.frames == 0 {
                self.of_interface.remove(&frame.ifindex);
            }
            self.events.count(HoldEvent::Full);
            if let Some(connection) = connection {
                self.hurry(&connection, now);
            }
            return Err(Full);
        }
        of_interface.frames += 1;
        of_interface.bytes += frame.bytes.len();
        self.bytes += frame.bytes.len();
        let number = self.next;
        self.next += 1;
        let deadline = frame.captured_at + self.limits.longest;
        self.note_waiting(number, &wait);
        let held = Held {
            frame: frame.to_held(),
            has_waited: !wait.is_over(),
            connection,
            ready: wait.is_over().then_some(frame.captured_at),
            wait,
            deadline,
        };
        let mut is_first = true;
        if let Some(connection) = &connection {
            self.hurry(connection, deadline);
            let queue = self.connections.entry(*connection).or_default();
            is_first = queue.is_empty();
            queue.push_back(number);
        }
        if is_first {
            self.due.insert((held.due(), number));
        }
        self.frames.insert(number, held);
        self.events.count(HoldEvent::Held);
        Ok(())
    }

    /// Whether a frame waits for this batch.
    pub fn awaits(&self, batch: BatchId) -> bool {
        let mut waiting = self.waiting.range((batch, Number::MIN)..);
        waiting.next().is_some_and(|(of, _)| *of == batch)
    }

    /// These batches are over, also where the switch refused them.
    pub fn waits_over(&mut self, batches: impl IntoIterator<Item = BatchId>, now: Timestamp) {
        for batch in batches {
            for number in self.take_waiting(batch) {
                self.change_wait(number, now, |wait| {
                    wait.batches.remove(&batch);
                });
            }
        }
    }

    /// The connection was lost before the switch has answered these batches. The comparison covers them.
    pub fn lost(&mut self, batches: impl IntoIterator<Item = BatchId>, now: Timestamp) {
        for batch in batches {
            for number in self.take_waiting(batch) {
                self.comparison.insert(number);
                self.change_wait(number, now, |wait| {
                    wait.batches.remove(&batch);
                    wait.comparison = true;
                });
            }
        }
    }

    /// The comparison has ended: frames that waited for it wait for these batches, which bring the missing flows.
    pub fn compared(&mut self, batches: &BTreeSet<BatchId>, now: Timestamp) {
        for number in std::mem::take(&mut self.comparison) {
            let waiting = batches.iter().map(|batch| (*batch, number));
            self.waiting.extend(waiting);
            self.change_wait(number, now, |wait| {
                wait.batches.extend(batches);
                wait.comparison = false;
            });
        }
    }

    /// Releases a frame, or holds it until it may be released.
    pub(crate) fn take(
        &mut self,
        frame: Frame<'_>,
        connection: Option<ConnectionKey>,
        wait: Wait,
        out: &mut Output,
    ) {
        let now = out.now();
        let has_to_wait =
            !wait.is_over() || connection.is_some_and(|connection| self.has_frames_of(&connection));
        if has_to_wait && self.hold(&frame, connection, wait, now).is_ok() {
            return;
        }
        self.release_due(out);
        out.command(Command::Release(frame.to_held()));
    }

    /// Releases the frames that are due.
    pub(crate) fn release_due(&mut self, out: &mut Output) {
        self.release_until(out.now(), out);
    }

    /// Releases all frames.
    pub(crate) fn release_all(&mut self, out: &mut Output) {
        self.release_until(Timestamp::from_nanos(u64::MAX), out);
    }

    fn release_until(&mut self, at: Timestamp, out: &mut Output) {
        let due = self.take_due(at);
        out.commands
            .extend(due.map(|(frame, _)| Command::Release(frame)));
    }

    /// When [`HoldQueue::release_due`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        deadline::at(self.next_deadline(), Why::Release)
    }

    /// When the next frame is due; possibly in the past.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Takes the frames that are due at `now`, in the order in which they are to be released, each
    /// with the reason. A time that never comes takes all frames.
    pub fn take_due(&mut self, now: Timestamp) -> impl Iterator<Item = (HeldFrame, HoldEvent)> {
        std::iter::from_fn(move || {
            let (at, number) = *self.due.first()?;
            if at > now {
                return None;
            }
            self.due.pop_first();
            self.leave(number)
        })
    }

    /// How many frames are held.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// How many bytes all of them have.
    pub fn bytes_held(&self) -> usize {
        self.bytes
    }

    /// The counters.
    pub fn events(&self) -> &CounterVec<HoldEvent> {
        &self.events
    }

    /// Moves the deadlines of a connection's frames so that all of them leave by this time.
    fn hurry(&mut self, connection: &ConnectionKey, deadline: Timestamp) {
        let Some(queue) = self.connections.get(connection) else {
            return;
        };
        // Along a connection, deadlines never decrease: the frames before an early one are early,
        // too.
        let is_late = |number: &&Number| {
            let held = self.frames.get(*number);
            held.is_some_and(|held| held.deadline > deadline)
        };
        let late: Vec<Number> = queue.iter().rev().take_while(is_late).copied().collect();
        for number in late {
            self.change(number, |held| held.deadline = deadline);
        }
    }

    fn note_waiting(&mut self, number: Number, wait: &Wait) {
        let waiting = wait.batches.iter().map(|batch| (*batch, number));
        self.waiting.extend(waiting);
        if wait.comparison {
            self.comparison.insert(number);
        }
    }

    /// The frames that have waited for this batch.
    fn take_waiting(&mut self, batch: BatchId) -> Vec<Number> {
        let of_batch = (batch, Number::MIN)..=(batch, Number::MAX);
        let waiting: Vec<_> = self.waiting.range(of_batch).copied().collect();
        for place in &waiting {
            self.waiting.remove(place);
        }
        waiting.into_iter().map(|(_, number)| number).collect()
    }

    /// Changes the conditions for which a frame waits.
    fn change_wait(&mut self, number: Number, now: Timestamp, change: impl FnOnce(&mut Wait)) {
        self.change(number, |held| {
            change(&mut held.wait);
            held.ready = held.wait.is_over().then_some(now);
        });
    }

    /// Changes a frame, and its place among the frames that are due.
    fn change(&mut self, number: Number, change: impl FnOnce(&mut Held)) {
        let Some(held) = self.frames.get_mut(&number) else {
            return;
        };
        let was_first = self.due.remove(&(held.due(), number));
        change(held);
        if was_first {
            self.due.insert((held.due(), number));
        }
    }

    /// Takes out a frame that is the first of its connection, and that was removed from `due`.
    fn leave(&mut self, number: Number) -> Option<(HeldFrame, HoldEvent)> {
        let mut held = self.frames.remove(&number)?;
        let why = held.why();
        held.frame.is_overrun = why == HoldEvent::Overrun;
        for batch in &held.wait.batches {
            self.waiting.remove(&(*batch, number));
        }
        if held.wait.comparison {
            self.comparison.remove(&number);
        }
        if let Some(of_interface) = self.of_interface.get_mut(&held.frame.ifindex) {
            of_interface.frames -= 1;
            of_interface.bytes -= held.frame.bytes.len();
            if of_interface.frames == 0 {
                self.of_interface.remove(&held.frame.ifindex);
            }
        }
        self.bytes -= held.frame.bytes.len();
        if let Some(connection) = held.connection
            && let Some(queue) = self.connections.get_mut(&connection)
        {
            queue.pop_front();
            match queue.front() {
                None => {
                    self.connections.remove(&connection);
                }
                Some(next) => {
                    if let Some(following) = self.frames.get(next) {
                        self.due.insert((following.due(), *next));
                    }
                }
            }
        }
        self.events.count(why);
        Some((held.frame, why))
    }
}

#[cfg(test)]
mod tests;
