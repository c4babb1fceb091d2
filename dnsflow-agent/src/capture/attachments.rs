//! Which veths the program sits on, and which it waits for.
//!
//! No sockets and no clock here: the kernel is behind [`Attach`], time is handed in.

use std::{collections::BTreeMap, time::Duration};

use aya::programs::{ProgramError, TcError};
use tracing::{debug, info};

use super::{AttachKind, LinkEvent};
use crate::core::{Input, Timestamp, ovn::rows::RowId};

/// The first pause before another try; it doubles from try to try.
const RETRY_MIN: Duration = Duration::from_millis(10);
/// The longest pause.
const RETRY_MAX: Duration = Duration::from_secs(5);

/// Where the program can be attached.
pub trait Attach {
    /// The program's place on an interface; dropping it detaches.
    type Link;

    /// The index of the interface of this name, if there is one.
    fn ifindex(&self, name: &str) -> Option<u32>;

    /// Attaches to the interface of this name; also gives its index.
    ///
    /// # Errors
    ///
    /// Where there is no such interface, or the kernel refuses.
    fn attach(&mut self, name: &str) -> Result<(u32, Self::Link), AttachError>;
}

/// Why the program is not on an interface.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is none of this name, or it was replaced just now.
    #[error("there is no interface {name} (yet)")]
    NoInterface {
        /// The interface.
        name: String,
    },
    /// The kernel refuses.
    #[error("cannot attach to {name} by {kind}: {}{}", chain(source), hint(source))]
    Refused {
        /// The interface.
        name: String,
        /// The way that was tried.
        kind: AttachKind,
        /// The kernel's answer.
        source: ProgramError,
    },
    /// The clsact qdisc cannot be added.
    #[error("cannot add the clsact qdisc to {name}: {}", chain(source))]
    Clsact {
        /// The interface.
        name: String,
        /// The kernel's answer.
        source: TcError,
    },
    /// Another qdisc stands where clsact has to.
    #[error(
        "cannot attach to {name}: a qdisc of kind {kind} stands where clsact has to (Open \
         vSwitch's ingress policing puts one there: remove the policing, or use Linux 6.6 with TCX)"
    )]
    OtherQdisc {
        /// The interface.
        name: String,
        /// The qdisc's kind.
        kind: String,
    },
    /// The program is no longer loaded.
    #[error("the program is not loaded")]
    Gone,
}

/// An error and its causes on one line: [`Input::AttachFailed`] carries text.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

fn hint(source: &ProgramError) -> &'static str {
    let error = match source {
        ProgramError::TcError(TcError::NetlinkError(error)) => error.raw_os_error(),
        ProgramError::SyscallError(error) => error.io_error.raw_os_error(),
        _ => None,
    };
    match error {
        Some(libc::EPERM | libc::EACCES) => " (it needs CAP_NET_ADMIN)",
        _ => "",
    }
}

/// The interfaces that the core wants the program on.
#[derive(Debug)]
pub struct Attachments<A: Attach> {
    program: A,
    entries: BTreeMap<RowId, Entry<A::Link>>,
}

#[derive(Debug)]
struct Entry<L> {
    name: String,
    state: State<L>,
}

#[derive(Debug)]
enum State<L> {
    Attached {
        ifindex: u32,
        /// Held for its `Drop`.
        _link: L,
    },
    Waiting {
        retry_at: Timestamp,
        pause: Duration,
        reason: String,
    },
}

impl<A: Attach> Attachments<A> {
    /// Attached to nothing.
    pub fn new(program: A) -> Self {
        Self {
            program,
            entries: BTreeMap::new(),
        }
    }

    /// The program.
    pub fn program(&self) -> &A {
        &self.program
    }

    /// The program, to change it.
    pub fn program_mut(&mut self) -> &mut A {
        &mut self.program
    }

    /// Attaches now, or else tries again until [`detach`](Self::detach); says how it went.
    ///
    /// Called again for the same interface, it looks whether the veth is still the one it was.
    pub fn attach(&mut self, interface: RowId, name: String, now: Timestamp) -> Input<'static> {
        let mut before = self.entries.remove(&interface);
        // A row can be replaced by another for the same port in one transaction. The kernel does
        // not take the program twice, so the new row takes the place over.
        if before.as_ref().is_none_or(|entry| entry.name != name) {
            let other = self.entries.iter().find(|(_, entry)| entry.name == name);
            if let Some(other) = other.map(|(row, _)| *row) {
                before = self.entries.remove(&other);
            }
        }
        let state = match before {
            Some(entry) if entry.name == name => Some(entry.state),
            _ => None,
        };
        self.settle(interface, name, state, now)
    }

    /// Detaches, or stops trying to attach.
    pub fn detach(&mut self, interface: RowId) {
        if let Some(entry) = self.entries.remove(&interface) {
            debug!(name = entry.name, "detached");
        }
    }

    /// An interface came, changed or went: whoever waits for it tries again, whoever was on it
    /// looks whether it still is.
    pub fn link_event(&mut self, event: &LinkEvent, now: Timestamp) -> Vec<Input<'static>> {
        let concerned = |entry: &Entry<A::Link>| match (event, &entry.state) {
            (LinkEvent::Overrun, _) => true,
            (LinkEvent::Present { name, ifindex }, State::Attached { ifindex: old, .. }) => {
                entry.name == *name && ifindex != old
            }
            (LinkEvent::Present { name, .. }, State::Waiting { .. }) => entry.name == *name,
            (LinkEvent::Gone { ifindex }, State::Attached { ifindex: old, .. }) => ifindex == old,
            (LinkEvent::Gone { .. }, State::Waiting { .. }) => false,
        };
        self.settle_where(concerned, now)
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.entries
            .values()
            .filter_map(|entry| match entry.state {
                State::Waiting { retry_at, .. } => Some(retry_at),
                State::Attached { .. } => None,
            })
            .min()
    }

    /// Tries again where it is time to.
    pub fn handle_timeout(&mut self, now: Timestamp) -> Vec<Input<'static>> {
        let due = |entry: &Entry<A::Link>| match entry.state {
            State::Waiting { retry_at, .. } => retry_at <= now,
            State::Attached { .. } => false,
        };
        self.settle_where(due, now)
    }

    /// Settles the entries that `select` selects; gives what has changed.
    fn settle_where(
        &mut self,
        select: impl Fn(&Entry<A::Link>) -> bool,
        now: Timestamp,
    ) -> Vec<Input<'static>> {
        let selected: Vec<_> = self
            .entries
            .iter()
            .filter(|(_, entry)| select(entry))
            .map(|(row, _)| *row)
            .collect();
        let mut news = Vec::new();
        for interface in selected {
            let Some(Entry { name, state }) = self.entries.remove(&interface) else {
                continue;
            };
            let before = match &state {
                State::Attached { ifindex, .. } => Ok(*ifindex),
                State::Waiting { reason, .. } => Err(reason.clone()),
            };
            let now_is = self.settle(interface, name, Some(state), now);
            let changed = match (&now_is, &before) {
                (Input::Attached { ifindex, .. }, Ok(old)) => ifindex != old,
                (Input::AttachFailed { reason, .. }, Err(old)) => reason != old,
                _ => true,
            };
            if changed {
                news.push(now_is);
            }
        }
        news
    }

    /// Makes the entry what it should be from what it was, puts it in place and says how it is.
    fn settle(
        &mut self,
        interface: RowId,
        name: String,
        state: Option<State<A::Link>>,
        now: Timestamp,
    ) -> Input<'static> {
        let pause = match state {
            Some(State::Attached { ifindex, _link })
                if self.program.ifindex(&name) == Some(ifindex) =>
            {
                let state = State::Attached { ifindex, _link };
                self.entries.insert(interface, Entry { name, state });
                return Input::Attached { interface, ifindex };
            }
            Some(State::Waiting { pause, .. }) => (pause * 2).min(RETRY_MAX),
            // The veth that the link belonged to is gone; the link goes here.
            Some(State::Attached { .. }) | None => RETRY_MIN,
        };
        let (state, input) = match self.program.attach(&name) {
            Ok((ifindex, link)) => {
                info!(name, ifindex, "attached");
                let state = State::Attached {
                    ifindex,
                    _link: link,
                };
                (state, Input::Attached { interface, ifindex })
            }
            Err(error) => {
                let reason = error.to_string();
                debug!(name, reason, "not attached, will try again");
                let state = State::Waiting {
                    retry_at: now + pause,
                    pause,
                    reason: reason.clone(),
                };
                (state, Input::AttachFailed { interface, reason })
            }
        };
        self.entries.insert(interface, Entry { name, state });
        input
    }
}

#[cfg(test)]
mod tests;
