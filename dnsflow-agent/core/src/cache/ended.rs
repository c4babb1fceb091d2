//! The names that count no more, and those that never had an address, for people who ask why an address is closed.

use std::{collections::VecDeque, net::IpAddr};

use crate::{
    Timestamp,
    dns::{Failure, tcp::ServerEnd},
    values::{
        limits::{ENDED_NAMES_MAX, Limit},
        name::DomainName,
        resolver::ServerId,
    },
};

/// Why a name does not lead to an address for a port any more, or never did.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum End {
    /// Its time is over, and the address was not in use.
    Expired,
    /// A limit left no room for it.
    Limit(Limit),
    /// The answer with it was truncated: the pod has to ask over TCP (RFC 2181, section 9).
    Truncated,
}

/// A name that does not lead to an address for a port any more.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct EndedName {
    /// The address.
    pub(crate) address: IpAddr,
    /// The name.
    pub(crate) name: DomainName,
    /// When it ended.
    pub(crate) at: Timestamp,
    /// Why.
    pub(crate) why: End,
}

/// A question of a port that a trusted DNS server has answered without an address.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct FailedQuestion {
    /// The question, and what was answered.
    pub(crate) failure: Failure,
    /// When the kernel saw the answer.
    pub(crate) at: Timestamp,
    /// Who has answered, where that is known.
    pub(crate) server: Option<ServerId>,
}

/// A connection of a port that a trusted DNS server has ended, and that had no answer to some question.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct FailedConnection {
    /// How the server has ended it.
    pub(crate) end: ServerEnd,
    /// When the kernel saw the end.
    pub(crate) at: Timestamp,
    /// The server, where that is known.
    pub(crate) server: Option<ServerId>,
}

/// The last facts of a kind about one port, the oldest first: at most [`ENDED_NAMES_MAX`].
#[derive(Debug)]
pub(crate) struct Latest<T>(VecDeque<T>);

impl<T> Default for Latest<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T: Fact> Latest<T> {
    /// Adds one in place of what is known of the same; the oldest gives way.
    pub(crate) fn push(&mut self, fact: T) {
        self.0.retain(|known| !known.is_of_same(&fact));
        if self.0.len() == ENDED_NAMES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(fact);
    }

    /// All of them, the latest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().rev()
    }

    /// How many there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Something of which the last is remembered.
pub(crate) trait Fact {
    /// Whether both are about the same.
    fn is_of_same(&self, other: &Self) -> bool;
}

impl Fact for EndedName {
    fn is_of_same(&self, other: &Self) -> bool {
        (self.address, &self.name) == (other.address, &other.name)
    }
}

impl Fact for FailedQuestion {
    fn is_of_same(&self, other: &Self) -> bool {
        self.failure.question == other.failure.question
    }
}

impl Fact for FailedConnection {
    fn is_of_same(&self, other: &Self) -> bool {
        (self.server, &self.end) == (other.server, &other.end)
    }
}
