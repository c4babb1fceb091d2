//! Answers that were taken off the wire: each goes back once the flows that it asks for are
//! installed.

use super::Engine;
use crate::{
    Command, Timestamp,
    hold::{Released, TakenFrame, Wait},
    input::{Frame, HeldFrame},
    tcp::ConnectionKey,
};

/// Waits for what no batch will bring: until the frame may be held no longer.
pub(super) const FOR_NOTHING: Wait = Wait::Until(Timestamp::from_nanos(u64::MAX));

/// What takes longer. Batches take effect in their order.
pub(super) fn longer(one: Wait, other: Wait) -> Wait {
    match (one, other) {
        (Wait::Nothing, wait) | (wait, Wait::Nothing) => wait,
        (Wait::Until(one), Wait::Until(other)) => Wait::Until(one.max(other)),
        // A batch that is still to be answered has to settle for as long as one before it, or need not
        // settle at all.
        (FOR_NOTHING, Wait::Batch(_)) | (Wait::Batch(_), FOR_NOTHING) => FOR_NOTHING,
        (Wait::Until(_), batch @ Wait::Batch(_)) | (batch @ Wait::Batch(_), Wait::Until(_)) => {
            batch
        }
        (Wait::Batch(one), Wait::Batch(other)) => Wait::Batch(one.max(other)),
    }
}

impl Engine {
    /// Puts a frame back, or holds it until that may be done.
    pub(super) fn hold(
        &mut self,
        frame: Frame<'_>,
        connection: Option<ConnectionKey>,
        wait: Wait,
        now: Timestamp,
    ) {
        let has_to_wait = wait != Wait::Nothing
            || connection.is_some_and(|connection| self.held.has_frames_of(&connection));
        let taken = TakenFrame {
            ifindex: frame.ifindex,
            captured_at: frame.captured_at,
            bytes: frame.bytes,
            gso_size: frame.gso_size,
            connection,
        };
        if has_to_wait && self.held.hold(&taken, wait, now).is_ok() {
            return;
        }
        self.release_due(now);
        self.commands.push(Command::Release(HeldFrame {
            ifindex: frame.ifindex,
            bytes: frame.bytes.into(),
            gso_size: frame.gso_size,
        }));
    }

    /// Puts back the frames that need wait no longer.
    pub(super) fn release_due(&mut self, now: Timestamp) {
        let due = self.held.take_due(now).map(|released| {
            let Released {
                ifindex,
                bytes,
                gso_size,
                ..
            } = released;
            Command::Release(HeldFrame {
                ifindex,
                bytes,
                gso_size,
            })
        });
        self.commands.extend(due);
    }

    /// Puts back every frame, whatever it waits for: nobody will, later.
    pub fn release_all(&mut self) {
        self.release_due(Timestamp::from_nanos(u64::MAX));
    }
}
