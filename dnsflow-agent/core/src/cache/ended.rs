//! The names that count no more, and those that never had an address, for people who ask why an address is closed.

use std::{collections::VecDeque, net::IpAddr};

use crate::{
    Timestamp,
    dns::Failure,
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

/// The last names of one port that have ended, the oldest first: at most [`ENDED_NAMES_MAX`].
#[derive(Debug, Default)]
pub(crate) struct EndedNames(VecDeque<EndedName>);

impl EndedNames {
    /// Adds one in place of what is known of its name and address; the oldest gives way.
    pub(crate) fn push(&mut self, ended: EndedName) {
        self.0
            .retain(|known| (known.address, &known.name) != (ended.address, &ended.name));
        if self.0.len() == ENDED_NAMES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(ended);
    }

    /// All of them, the latest first.
    pub(crate) fn latest(&self) -> impl Iterator<Item = &EndedName> {
        self.0.iter().rev()
    }

    /// How many there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
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

/// The last questions of one port that were answered without an address, the oldest first: at most [`ENDED_NAMES_MAX`].
#[derive(Debug, Default)]
pub(crate) struct FailedQuestions(VecDeque<FailedQuestion>);

impl FailedQuestions {
    /// Adds one in place of what is known of its question; the oldest gives way.
    pub(crate) fn push(&mut self, failed: FailedQuestion) {
        self.0
            .retain(|known| known.failure.question != failed.failure.question);
        if self.0.len() == ENDED_NAMES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(failed);
    }

    /// All of them, the latest first.
    pub(crate) fn latest(&self) -> impl Iterator<Item = &FailedQuestion> {
        self.0.iter().rev()
    }
}
