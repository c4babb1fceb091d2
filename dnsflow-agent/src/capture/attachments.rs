//! The veths on which the programs are, and those to which they are still to be attached.
//!
//! This module has no socket and no clock: the kernel is behind [`Attach`], and the caller gives the time.
//!
//! First the core learns the index of a veth. Then the program for answers is attached, and then the one for
//! questions. The order matters: attaching with TCX waits for all CPUs (`tcx_entry_sync` in Linux
//! `kernel/bpf/tcx.c`), 3 to 40 ms each time, and the pod's first answer may come by then. Until both are there,
//! answers count whether or not their question was seen.

use std::{collections::BTreeMap, time::Duration};

use aya::programs::{ProgramError, TcError};
use dnsflow_core::{Input, Timestamp, io::input::SourceAddresses, ovn::rows::RowId};
use tracing::{debug, info, warn};

use super::{AttachKind, LinkEvent};
use crate::causes::with_causes;

/// The first pause before another try; it doubles from try to try.
const RETRY_MIN: Duration = Duration::from_millis(10);
/// The longest pause.
const RETRY_MAX: Duration = Duration::from_secs(5);
/// The programs take the first place on an interface again so often at most. Others may do the same, and the answers of
/// some milliseconds are not seen each time.
const MOVE_PAUSE: Duration = Duration::from_secs(300);

/// The kernel, as far as programs are attached.
pub trait Attach {
    /// The programs' place on an interface. It may outlive the agent, but for [`Attach::detach`].
    type Link;

    /// The index of the interface of this name, if there is one.
    fn ifindex(&self, name: &str) -> Option<u32>;

    /// Sets the addresses of the pod at the interface of this index. Questions from other addresses
    /// do not count.
    fn trust_sources(&mut self, ifindex: u32, sources: &SourceAddresses);

    /// The interface of this index is gone, or the pod's no longer: nothing of it is remembered.
    fn forget(&mut self, ifindex: u32);

    /// Attaches the program that sees answers to the interface of this name and index. From here
    /// on, answers count whether or not their question was seen.
    ///
    /// # Errors
    ///
    /// If there is no such interface, or the kernel refuses.
    fn attach(&mut self, name: &str, ifindex: u32) -> Result<Self::Link, AttachError>;

    /// Has programs of an earlier agent, which are on the interface, go on for a while, until this agent's take their
    /// place. Returns whether there are any that can.
    fn let_go_on(&mut self, ifindex: u32) -> bool;

    /// Attaches the program that sees questions. After a short time, only answers to questions that
    /// were seen count.
    ///
    /// # Errors
    ///
    /// If the interface is gone, or the kernel refuses.
    fn complete(
        &mut self,
        name: &str,
        ifindex: u32,
        link: &mut Self::Link,
    ) -> Result<(), AttachError>;

    /// Looks whether both programs are on the interface, in front of all others.
    ///
    /// # Errors
    ///
    /// If they are not, with the programs in front or the one that is gone.
    fn look(&mut self, name: &str, ifindex: u32, link: &Self::Link) -> Result<(), AttachError>;

    /// Takes the programs off an interface.
    fn detach(&mut self, link: Self::Link);

    /// All interfaces that are wanted have been seen: what earlier agents have put onto others goes.
    fn sweep(&mut self);
}

/// Why a program is not attached to an interface.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no interface of this name, or it was just replaced.
    #[error("there is no interface {name} (yet)")]
    NoInterface {
        /// The interface.
        name: String,
    },
    /// The kernel refuses.
    #[error(
        "cannot attach to {name} by {kind}: {}{}",
        with_causes(source),
        hint(source)
    )]
    Refused {
        /// The interface.
        name: String,
        /// The way that was tried.
        kind: AttachKind,
        /// The kernel's answer.
        source: ProgramError,
    },
    /// The clsact qdisc cannot be added.
    #[error("cannot add the clsact qdisc to {name}: {}", with_causes(source))]
    Clsact {
        /// The interface.
        name: String,
        /// The kernel's answer.
        source: TcError,
    },
    /// Another qdisc stands where clsact has to.
    #[error(
        "cannot attach to {name}: a qdisc of kind {kind} has the place of clsact (it is Open \
         vSwitch's for ingress policing: remove the policing, or use Linux 6.6 with TCX)"
    )]
    OtherQdisc {
        /// The interface.
        name: String,
        /// The qdisc's kind.
        kind: String,
    },
    /// The link cannot be kept for the next agent.
    #[error(
        "cannot keep the program on {name} for the next agent: {}",
        with_causes(source)
    )]
    Pin {
        /// The interface.
        name: String,
        /// Why not.
        source: super::PinsError,
    },
    /// The program is no longer loaded.
    #[error("the program is not loaded")]
    Gone,
    /// Programs of others run before this agent's.
    #[error(
        "cannot stay in front of others on {name}: {others}; these may keep packets from dnsflow: have them attach \
         behind the first program (`bpftool net show dev {name}` lists all)"
    )]
    Behind {
        /// The interface.
        name: String,
        /// The other programs.
        others: String,
    },
    /// Another process has taken a program off.
    #[error(
        "another process has removed {program} from {name}: have it leave the filters and the clsact qdisc of others \
         alone"
    )]
    Removed {
        /// The interface.
        name: String,
        /// The program.
        program: &'static str,
    },
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

/// The interfaces that the core wants the programs on.
#[derive(Debug)]
pub struct Attachments<A: Attach> {
    program: A,
    entries: BTreeMap<RowId, Entry<A::Link>>,
    /// Whether the programs take the place of those of earlier agents.
    takes_over: bool,
}

#[derive(Debug)]
struct Entry<L> {
    name: String,
    sources: SourceAddresses,
    /// When it came.
    since: Timestamp,
    /// The index of the interface for which the kernel has the addresses.
    trusted_at: Option<u32>,
    /// The pause after the next failure.
    pause: Duration,
    /// When the programs last took the first place again.
    moved_at: Option<Timestamp>,
    state: State<L>,
}

#[derive(Debug)]
enum State<L> {
    /// Neither program is on the veth yet.
    Found {
        ifindex: u32,
    },
    /// The programs of an earlier agent are on the veth, and go on for now.
    Left {
        ifindex: u32,
    },
    /// The program that sees answers is attached.
    Seeing {
        ifindex: u32,
        link: L,
    },
    /// Both programs are attached.
    Attached {
        ifindex: u32,
        link: L,
        /// Why they may not see every packet.
        hidden: Option<String>,
    },
    Waiting {
        retry_at: Timestamp,
        reason: String,
    },
}

impl<L> State<L> {
    fn ifindex(&self) -> Option<u32> {
        match self {
            Self::Found { ifindex }
            | Self::Left { ifindex }
            | Self::Seeing { ifindex, .. }
            | Self::Attached { ifindex, .. } => Some(*ifindex),
            Self::Waiting { .. } => None,
        }
    }

    /// Why the programs do not see every packet.
    fn failure(&self) -> Option<&String> {
        match self {
            Self::Attached { hidden, .. } => hidden.as_ref(),
            Self::Waiting { reason, .. } => Some(reason),
            Self::Found { .. } | Self::Left { .. } | Self::Seeing { .. } => None,
        }
    }
}

impl<A: Attach> Attachments<A> {
    /// Attached to nothing.
    pub fn new(program: A) -> Self {
        Self {
            program,
            entries: BTreeMap::new(),
            takes_over: false,
        }
    }

    /// Takes the place of earlier agents' programs from now on. Until then, these go on, and their interfaces count as
    /// attached.
    pub fn take_over(&mut self) {
        self.takes_over = true;
        for entry in self.entries.values_mut() {
            if let State::Left { ifindex } = entry.state {
                entry.state = State::Found { ifindex };
            }
        }
    }

    /// The programs.
    pub fn program(&self) -> &A {
        &self.program
    }

    /// The programs, to change them.
    pub fn program_mut(&mut self) -> &mut A {
        &mut self.program
    }

    /// Looks for the veth and returns what was found. If there is no veth, later calls look again
    /// until [`detach`](Self::detach). [`work`](Self::work) attaches the programs.
    ///
    /// A second call for the same interface looks whether the veth is still the same.
    pub fn attach(
        &mut self,
        interface: RowId,
        name: String,
        sources: SourceAddresses,
        now: Timestamp,
    ) -> Input {
        let mut before = self.entries.remove(&interface);
        // One transaction can replace a row by another for the same port. The kernel does not take
        // the programs twice, so the new row takes over the attachment.
        if before.as_ref().is_none_or(|entry| entry.name != name) {
            let other = self.entries.iter().find(|(_, entry)| entry.name == name);
            if let Some(other) = other.map(|(row, _)| *row) {
                before = self.entries.remove(&other);
            }
        }
        let mut entry = match before {
            Some(entry) if entry.name == name => entry,
            before => {
                if let Some(entry) = before {
                    entry.leave(&mut self.program);
                }
                Entry::new(name, now)
            }
        };
        entry.trust(sources, &mut self.program);
        self.look(interface, entry, now)
    }

    /// Sets other addresses of the pod.
    pub fn trust_sources(&mut self, interface: RowId, sources: SourceAddresses) {
        if let Some(entry) = self.entries.get_mut(&interface) {
            entry.trust(sources, &mut self.program);
        }
    }

    /// Detaches, or stops trying to attach.
    pub fn detach(&mut self, interface: RowId) {
        if let Some(entry) = self.entries.remove(&interface) {
            debug!(name = entry.name, "detached");
            entry.leave(&mut self.program);
        }
    }

    /// An interface came, changed or went. Looks again for veths that are waited for, and whether
    /// attached veths are still there.
    pub fn link_event(&mut self, event: &LinkEvent, now: Timestamp) -> Vec<Input> {
        let concerned = |entry: &Entry<A::Link>| match (event, entry.state.ifindex()) {
            (LinkEvent::Overrun, _) => true,
            (LinkEvent::Present { name, ifindex }, known) => {
                entry.name == *name && Some(*ifindex) != known
            }
            (LinkEvent::Gone { ifindex }, known) => Some(*ifindex) == known,
        };
        self.look_where(concerned, now)
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.entries
            .values()
            .filter_map(|entry| match entry.state {
                State::Waiting { retry_at, .. } => Some(retry_at),
                _ => None,
            })
            .min()
    }

    /// Looks again for the veths that are due.
    pub fn handle_timeout(&mut self, now: Timestamp) -> Vec<Input> {
        let due = |entry: &Entry<A::Link>| match entry.state {
            State::Waiting { retry_at, .. } => retry_at <= now,
            _ => false,
        };
        self.look_where(due, now)
    }

    /// Whether [`work`](Self::work) has something to do.
    pub fn has_work(&self) -> bool {
        self.entries
            .values()
            .any(|entry| matches!(entry.state, State::Found { .. } | State::Seeing { .. }))
    }

    /// Attaches one program to one veth. Returns the input for the core.
    ///
    /// Veths come last where nothing counts: a pod can be on many secondary networks. Of the others, the programs that
    /// see answers come first, on all veths. Veths are taken in the order in which they came.
    pub fn work(&mut self, now: Timestamp) -> Option<Input> {
        let wanted = self.entries.iter().filter_map(|(row, entry)| {
            let is_seeing = match entry.state {
                State::Found { .. } => false,
                State::Seeing { .. } => true,
                State::Left { .. } | State::Attached { .. } | State::Waiting { .. } => return None,
            };
            let counts_nothing = entry.sources.ips.is_empty();
            Some((counts_nothing, is_seeing, entry.since, *row))
        });
        let (.., interface) = wanted.min()?;
        let entry = self.entries.get_mut(&interface)?;
        let blank = State::Waiting {
            retry_at: now,
            reason: String::new(),
        };
        let done = match std::mem::replace(&mut entry.state, blank) {
            State::Found { ifindex } if !self.takes_over && self.program.let_go_on(ifindex) => {
                Ok(State::Left { ifindex })
            }
            State::Found { ifindex } => self
                .program
                .attach(&entry.name, ifindex)
                .map(|link| State::Seeing { ifindex, link }),
            State::Seeing { ifindex, mut link } => {
                match self.program.complete(&entry.name, ifindex, &mut link) {
                    Ok(()) => Ok(State::Attached {
                        ifindex,
                        link,
                        hidden: None,
                    }),
                    Err(error) => {
                        self.program.detach(link);
                        Err(error)
                    }
                }
            }
            other => Ok(other),
        };
        match done {
            Ok(state) => {
                entry.state = state;
                let ifindex = match entry.state {
                    State::Left { ifindex } => {
                        debug!(name = entry.name, "the programs of an earlier agent go on");
                        ifindex
                    }
                    State::Attached { ifindex, .. } => {
                        entry.pause = RETRY_MIN;
                        info!(name = entry.name, ifindex, "attached");
                        ifindex
                    }
                    State::Found { .. } | State::Seeing { .. } | State::Waiting { .. } => {
                        return None;
                    }
                };
                Some(Input::Attached { interface, ifindex })
            }
            Err(error) => Some(entry.wait(interface, error.to_string(), now)),
        }
    }

    /// Looks whether the programs are still there, in front of all others. If they are not, they are attached anew by
    /// [`work`](Self::work). If they are behind others for a second time within five minutes, they stay. Returns what
    /// has changed.
    pub fn look_at_places(&mut self, now: Timestamp) -> Vec<Input> {
        let mut news = Vec::new();
        for (row, entry) in &mut self.entries {
            let interface = *row;
            let State::Attached {
                ifindex,
                link,
                hidden,
            } = &mut entry.state
            else {
                continue;
            };
            let ifindex = *ifindex;
            if self.program.ifindex(&entry.name) != Some(ifindex) {
                // An event will tell.
                continue;
            }
            let Err(error) = self.program.look(&entry.name, ifindex, link) else {
                if hidden.take().is_some() {
                    news.push(Input::Attached { interface, ifindex });
                }
                continue;
            };
            let is_behind = matches!(error, AttachError::Behind { .. });
            if is_behind && entry.moved_at.is_some_and(|at| now < at + MOVE_PAUSE) {
                let reason = error.to_string();
                if hidden.as_ref() != Some(&reason) {
                    *hidden = Some(reason.clone());
                    news.push(Input::AttachFailed { interface, reason });
                }
                continue;
            }
            warn!(name = entry.name, %error, "attaching the TC programs again: answers may have been missed");
            entry.moved_at = is_behind.then_some(now);
            let before = std::mem::replace(&mut entry.state, State::Found { ifindex });
            if let State::Attached { link, .. } = before {
                self.program.detach(link);
            }
        }
        news
    }

    /// Looks for the veths that `select` selects. Returns what has changed.
    fn look_where(
        &mut self,
        select: impl Fn(&Entry<A::Link>) -> bool,
        now: Timestamp,
    ) -> Vec<Input> {
        let selected: Vec<_> = self
            .entries
            .iter()
            .filter(|(_, entry)| select(entry))
            .map(|(row, _)| *row)
            .collect();
        let mut news = Vec::new();
        for interface in selected {
            let Some(entry) = self.entries.remove(&interface) else {
                continue;
            };
            let before = match entry.state.failure() {
                Some(reason) => Err(reason.clone()),
                None => Ok(entry.state.ifindex()),
            };
            let now_is = self.look(interface, entry, now);
            let changed = match (&now_is, &before) {
                (Input::AttachFailed { reason, .. }, Err(old)) => reason != old,
                (Input::Found { ifindex, .. } | Input::Attached { ifindex, .. }, Ok(old)) => {
                    Some(*ifindex) != *old
                }
                _ => true,
            };
            if changed {
                news.push(now_is);
            }
        }
        news
    }

    /// Looks whether the veth is there and still the same. Updates the entry, and returns its state.
    fn look(&mut self, interface: RowId, mut entry: Entry<A::Link>, now: Timestamp) -> Input {
        let ifindex = self.program.ifindex(&entry.name);
        if entry
            .state
            .ifindex()
            .is_some_and(|known| Some(known) != ifindex)
        {
            // A veth that was replaced took its link with it.
            let next = Entry {
                sources: entry.sources.clone(),
                trusted_at: entry.trusted_at.take(),
                ..Entry::new(entry.name.clone(), now)
            };
            std::mem::replace(&mut entry, next).leave(&mut self.program);
        }
        if entry.trusted_at != ifindex {
            if let Some(before) = entry.trusted_at.take() {
                self.program.forget(before);
            }
            if let Some(ifindex) = ifindex {
                self.free(ifindex, now);
                // The addresses come before the programs, so that the first question counts.
                self.program.trust_sources(ifindex, &entry.sources);
                entry.trusted_at = Some(ifindex);
            }
        }
        let input = match (ifindex, &entry.state) {
            (
                Some(_),
                State::Attached {
                    hidden: Some(reason),
                    ..
                },
            ) => Input::AttachFailed {
                interface,
                reason: reason.clone(),
            },
            (Some(ifindex), State::Attached { .. } | State::Left { .. }) => {
                Input::Attached { interface, ifindex }
            }
            (Some(ifindex), State::Waiting { .. }) => {
                entry.state = State::Found { ifindex };
                Input::Found { interface, ifindex }
            }
            (Some(ifindex), _) => Input::Found { interface, ifindex },
            (None, _) => {
                let reason = AttachError::NoInterface {
                    name: entry.name.clone(),
                };
                entry.wait(interface, reason.to_string(), now)
            }
        };
        self.entries.insert(interface, entry);
        input
    }

    /// Gives up what is known of other interfaces with this index: they are gone, and their rows go late. Later, it
    /// would be the new interface that loses its addresses and programs.
    fn free(&mut self, ifindex: u32, now: Timestamp) {
        for entry in self.entries.values_mut() {
            if entry.trusted_at == Some(ifindex) {
                let next = Entry {
                    sources: entry.sources.clone(),
                    ..Entry::new(entry.name.clone(), now)
                };
                std::mem::replace(entry, next).leave(&mut self.program);
            }
        }
    }
}

impl<L> Entry<L> {
    /// The entry of an interface of which nothing is known.
    fn new(name: String, now: Timestamp) -> Self {
        Self {
            name,
            sources: SourceAddresses::default(),
            since: now,
            trusted_at: None,
            pause: RETRY_MIN,
            moved_at: None,
            state: State::Waiting {
                retry_at: now,
                reason: String::new(),
            },
        }
    }

    /// Sets the pod's addresses in the kernel.
    fn trust<A: Attach>(&mut self, sources: SourceAddresses, program: &mut A) {
        if self.sources != sources {
            self.sources = sources;
            if let Some(ifindex) = self.trusted_at {
                program.trust_sources(ifindex, &self.sources);
            }
        }
    }

    /// Takes what there is of it out of the kernel: first the programs, which would remember something anew.
    fn leave<A: Attach<Link = L>>(self, program: &mut A) {
        if let State::Seeing { link, .. } | State::Attached { link, .. } = self.state {
            program.detach(link);
        }
        if let Some(ifindex) = self.trusted_at {
            program.forget(ifindex);
        }
    }

    /// Plans another try.
    fn wait(&mut self, interface: RowId, reason: String, now: Timestamp) -> Input {
        debug!(name = self.name, reason, "not attached, will try again");
        self.state = State::Waiting {
            retry_at: now + self.pause,
            reason: reason.clone(),
        };
        self.pause = (self.pause * 2).min(RETRY_MAX);
        Input::AttachFailed { interface, reason }
    }
}

#[cfg(test)]
mod tests;
