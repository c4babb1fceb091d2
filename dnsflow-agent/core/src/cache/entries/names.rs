//! The names of one address, and how long each counts.
//!
//! [`Names`] keeps each name once and in order, and the names by their rules in step with them. Terms change in its
//! methods alone.

mod standing;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::{
    Timestamp,
    cache::journal::RecordedTerm,
    values::{limits::NAMES_PER_ADDRESS_MAX, name::DomainName, resolver::ServerId},
};

pub(in crate::cache) use standing::AtAddress;
use standing::ByRules;
pub(crate) use standing::{Claim, Standing};

/// How long a name counts for an address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Term {
    /// A name that no rule denies counts until this time.
    pub(crate) until: Timestamp,
    /// A name that a rule denies counts at least until this time: afterwards the address would be
    /// open again.
    pub(crate) deny_until: Timestamp,
    /// Whether a rule denies the name. Then the name is kept to its end, whatever else has to go.
    pub(crate) is_denied: bool,
    /// Whether its time is over: it lets packets of established connections pass until then, and no others. Beside it, the
    /// address has no name that counts and that a rule matches ([`Cache::drop_ended`]).
    ///
    /// [`Cache::drop_ended`]: crate::cache::Cache::drop_ended
    pub(crate) is_ended: bool,
    /// The source of its term.
    pub(crate) origin: Origin,
    /// The server that has told it last, where that is known.
    pub(crate) server: Option<ServerId>,
}

// There is one for each name of each address of each pod.
const _: () = assert!(size_of::<Term>() == 24);

/// The source of a name's term.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// An answer, within its TTL.
    Answer,
    /// An answer of an earlier run of the agent.
    Journal,
    /// The address is in use: the TTL is over.
    InUse,
    /// The TTL is over, and the address was not in use: established connections go on.
    Ended,
}

impl Term {
    /// A term of the journal.
    pub(in crate::cache) fn of(recorded: RecordedTerm, origin: Origin) -> Self {
        let RecordedTerm {
            until,
            deny_until,
            is_denied,
            is_ended,
        } = recorded;
        Self {
            until,
            deny_until,
            is_denied,
            is_ended,
            origin,
            server: None,
        }
    }

    /// When the name ends.
    pub(crate) fn end(&self) -> Timestamp {
        match self.is_denied {
            true => self.until.max(self.deny_until),
            false => self.until,
        }
    }

    /// Notes that a rule denies the name. One that has ended is not open again when no rule denies it any more.
    pub(crate) fn deny(&mut self) {
        self.is_denied = true;
        if self.is_ended {
            self.until = Timestamp::default();
        }
    }

    /// Whether the name counts for new connections: it is denied, or allowed and its time is not over.
    pub(crate) fn counts(&self) -> bool {
        self.is_denied || !self.is_ended
    }

    /// Notes that no rule denies the name any more. The name counts until this time at least, and no longer than
    /// if it were denied.
    fn release(&mut self, until: Timestamp) {
        self.is_denied = false;
        self.until = self.until.max(until.min(self.deny_until));
    }

    fn prolong(&mut self, other: Self) {
        if self.is_ended && !other.is_ended {
            (self.until, self.is_ended) = (Timestamp::default(), false);
        }
        self.origin = other.origin;
        self.server = other.server.or(self.server);
        self.until = self.until.max(other.until);
        self.deny_until = self.deny_until.max(other.deny_until);
        self.is_denied |= other.is_denied;
    }
}

impl From<&Term> for RecordedTerm {
    fn from(term: &Term) -> Self {
        Self {
            until: term.until,
            deny_until: term.deny_until,
            is_denied: term.is_denied,
            is_ended: term.is_ended,
        }
    }
}

/// Names with their terms, in order, each once.
///
/// Nearly always there is one name.
#[derive(Debug, Default)]
pub(crate) struct Names {
    terms: SmallVec<[(DomainName, Term); 1]>,
    /// Whether one has ended.
    has_ended: bool,
    /// What is known of them together, if there are several.
    several: Option<Box<Several>>,
    /// How many names were looked at for further ones.
    #[cfg(test)]
    pub(in crate::cache) looked_at: usize,
    /// How many names were looked at for whatever reason.
    #[cfg(test)]
    pub(in crate::cache) work: std::cell::Cell<usize>,
}

/// What is known of several names together.
#[derive(Debug, Default)]
struct Several {
    /// How many of them a rule denies.
    denied: usize,
    /// When the last one ends, as far as that is known.
    last_end: Option<Timestamp>,
    /// The names by their rules, if there are as many as are kept and a further one has asked for them.
    by_rules: Option<ByRules>,
}

impl Names {
    // What there is.

    fn place(&self, name: &DomainName) -> Result<usize, usize> {
        self.terms.binary_search_by(|(other, _)| other.cmp(name))
    }

    /// The number of names.
    pub(crate) fn len(&self) -> usize {
        self.terms.len()
    }

    /// Whether there is no name.
    pub(crate) fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// The names with their terms.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&DomainName, &Term)> {
        #[cfg(test)]
        self.work.update(|work| work + self.len());
        self.terms.iter().map(|(name, term)| (name, term))
    }

    /// The names.
    pub(crate) fn keys(&self) -> impl ExactSizeIterator<Item = &DomainName> {
        self.terms.iter().map(|(name, _)| name)
    }

    /// The ends of the names.
    pub(super) fn ends(&self) -> impl Iterator<Item = Timestamp> {
        self.iter().map(|(_, term)| term.end())
    }

    /// The end of this name; `None` if there is no such name.
    pub(crate) fn until(&self, name: &DomainName) -> Option<Timestamp> {
        self.place(name).ok().map(|at| self.terms[at].1.end())
    }

    /// The term of this name.
    pub(crate) fn term(&self, name: &DomainName) -> Option<Term> {
        self.place(name).ok().map(|at| self.terms[at].1)
    }

    /// When the last name ends.
    pub(super) fn last_end(&self) -> Option<Timestamp> {
        let known = self.several.as_ref().and_then(|names| names.last_end);
        known.or_else(|| self.ends().max())
    }

    /// The number of names that a rule denies.
    pub(super) fn denied(&self) -> usize {
        match &self.several {
            Some(several) => several.denied,
            None => self.count_denied(),
        }
    }

    fn count_denied(&self) -> usize {
        let denied = self.terms.iter().filter(|(_, term)| term.is_denied);
        denied.count()
    }

    /// The name that ends first, and when: of those that a rule denies, or of the others.
    pub(in crate::cache) fn first_to_end(
        &self,
        is_denied: bool,
    ) -> Option<(&DomainName, Timestamp)> {
        let names = self.iter().filter(|(_, term)| term.is_denied == is_denied);
        let ends = names.map(|(name, term)| (name, term.end()));
        ends.min_by_key(|(_, end)| *end)
    }

    // What changes it.

    /// Prolongs the term of a name. Returns whether there is such a name.
    pub(super) fn prolong(&mut self, name: &DomainName, term: Term) -> bool {
        let place = self.place(name);
        if let Ok(at) = place {
            self.prolong_at(at, term);
        }
        place.is_ok()
    }

    /// Prolongs the term of the name at this place.
    fn prolong_at(&mut self, at: usize, other: Term) {
        let term = &mut self.terms[at].1;
        let before = *term;
        term.prolong(other);
        let term = *term;
        self.changed(before, term);
        self.look_for_ended();
    }

    fn look_for_ended(&mut self) {
        if self.has_ended {
            self.has_ended = self.terms.iter().any(|(_, term)| term.is_ended);
        }
    }

    /// A name has another term, which ends no earlier, unless the name had ended.
    fn changed(&mut self, before: Term, term: Term) {
        let last_end = match before.is_ended {
            true => None,
            false => self.last_end().max(Some(term.end())),
        };
        if let Some(several) = &mut self.several {
            several.denied -= usize::from(before.is_denied);
            several.denied += usize::from(term.is_denied);
            several.last_end = last_end;
        }
    }

    /// Forgets what is known of names whose terms have changed, but for the number of those that a rule denies.
    fn forget_known(&mut self, denied: usize) {
        if let Some(several) = &mut self.several {
            (several.by_rules, several.last_end) = (None, None);
            several.denied = denied;
        }
    }

    /// Sets the term of a name, and adds the name if it is new.
    pub(super) fn insert(&mut self, name: DomainName, term: Term) {
        let denied = self.denied() + usize::from(term.is_denied);
        self.has_ended |= term.is_ended;
        match self.place(&name) {
            Ok(at) => {
                let before = std::mem::replace(&mut self.terms[at].1, term);
                self.forget_known(denied - usize::from(before.is_denied));
            }
            Err(at) => {
                let last_end = self.last_end().max(Some(term.end()));
                self.terms.insert(at, (name, term));
                if self.len() > 1 {
                    let several = self.several.get_or_insert_default();
                    (several.denied, several.last_end) = (denied, last_end);
                    several.by_rules = None;
                }
            }
        }
    }

    /// Adds a name, whose rules are known if the names by their rules may be.
    pub(super) fn add(&mut self, name: DomainName, term: Term, standing: Option<&Standing>) {
        let by_rules = self.take_by_rules().zip(standing);
        self.insert(name.clone(), term);
        if let Some(several) = &mut self.several {
            several.by_rules = by_rules.map(|(mut by_rules, standing)| {
                by_rules.add(name, standing.clone());
                by_rules
            });
        }
    }

    fn take_by_rules(&mut self) -> Option<ByRules> {
        self.several.as_mut()?.by_rules.take()
    }

    /// Removes a name. Returns its term, if there was such a name.
    pub(super) fn remove(&mut self, name: &DomainName) -> Option<Term> {
        let at = self.place(name).ok()?;
        let (_, term) = self.terms.remove(at);
        self.look_for_ended();
        self.several = self.several.take().filter(|_| self.terms.len() > 1);
        if let Some(several) = &mut self.several {
            several.denied -= usize::from(term.is_denied);
            several.last_end = None;
            if let Some(by_rules) = &mut several.by_rules {
                by_rules.remove(name);
            }
        }
        Some(term)
    }

    /// Has one of the names count for as long as another one. Returns whether there are both.
    pub(super) fn stand_for(&mut self, name: &DomainName, other: &DomainName) -> bool {
        let (Ok(at), Ok(other)) = (self.place(name), self.place(other)) else {
            return false;
        };
        let (mut term, before) = (self.terms[other].1, self.terms[at].1);
        term.prolong(before);
        self.terms[at].1 = term;
        self.changed(before, term);
        self.look_for_ended();
        true
    }

    /// Notes for each name whether a rule denies the name. The rule can be younger than the answer. A name that no
    /// rule denies any more counts until `released` at least. `changed` is told the names that are denied or released now.
    /// Returns whether a name may end earlier now.
    pub(super) fn deny(
        &mut self,
        is_denied: impl Fn(&DomainName, &Term) -> bool,
        released: Timestamp,
        mut changed: impl FnMut(&DomainName),
    ) -> bool {
        let before = self.denied();
        let (mut released_count, mut denied_count) = (0, 0);
        let mut goes_on = false;
        for (name, term) in &mut self.terms {
            match (term.is_denied, is_denied(name, term)) {
                (true, false) => {
                    term.release(released);
                    released_count += 1;
                }
                (false, true) => {
                    goes_on |= term.is_ended;
                    term.deny();
                    denied_count += 1;
                }
                (false, false) | (true, true) => continue,
            }
            changed(name);
        }
        if released_count + denied_count > 0 {
            self.forget_known(before + denied_count - released_count);
            self.look_for_ended();
        }
        goes_on || released_count > 0
    }

    /// Names whose time is over stay for as long as they are in use, if `in_use` gives a time.
    pub(in crate::cache) fn stay_in_use(
        &mut self,
        now: Timestamp,
        mut in_use: impl FnMut(&DomainName) -> Option<Timestamp>,
    ) {
        let (denied, mut stays_any) = (self.denied(), false);
        for (name, term) in &mut self.terms {
            if term.end() <= now
                && let Some(until) = in_use(name)
            {
                stays_any = true;
                term.until = until.max(term.until);
                term.origin = Origin::InUse;
            }
        }
        if stays_any {
            self.forget_known(denied);
        }
    }

    /// Whether one of the names has ended.
    pub(in crate::cache) fn any_has_ended(&self) -> bool {
        self.has_ended
    }

    /// Whether only established connections pass by the names.
    pub(super) fn have_ended(&self) -> bool {
        self.has_ended && self.denied() == 0
    }

    /// These of the names have ended, and let established connections pass until then. Returns whether there are some.
    pub(in crate::cache) fn end(
        &mut self,
        until: Timestamp,
        mut is_one: impl FnMut(&DomainName, &Term) -> bool,
    ) -> bool {
        let denied = self.denied();
        for (name, term) in &mut self.terms {
            if is_one(name, term) {
                (term.until, term.is_ended) = (until, true);
                self.has_ended = true;
            }
        }
        self.forget_known(denied);
        self.has_ended
    }

    // A further name at an address with as many as are kept.

    /// How an address takes a further name. `standing` gives the rules of this version for a name; its second
    /// argument says whether a rule denies the name.
    pub(in crate::cache) fn at_address<'a>(
        &mut self,
        version: impl FnOnce() -> Option<u64>,
        standing: impl Fn(&DomainName, bool) -> Standing,
        further: impl FnOnce() -> &'a Standing,
    ) -> AtAddress {
        if self.len() < NAMES_PER_ADDRESS_MAX {
            return AtAddress::Room;
        }
        let version = version();
        let known = self.take_by_rules().filter(|known| known.is_of(version));
        #[cfg(test)]
        if known.is_none() {
            self.looked_at += self.len();
        }
        let Self { terms, several, .. } = self;
        let Some(several) = several else {
            return AtAddress::Room;
        };
        let by_rules = several.by_rules.insert(known.unwrap_or_else(|| {
            let names = terms.iter();
            let names = names.map(|(name, term)| (name.clone(), standing(name, term.is_denied)));
            ByRules::new(version, names)
        }));
        by_rules.at_address(further())
    }

    /// The name that gives way to a further one, and the one that stands for it from then on, if any does
    /// (`docs/decisions/budgets.md`, "Room in the cache").
    pub(in crate::cache) fn first_to_go(
        &mut self,
        further: &Standing,
    ) -> Option<(DomainName, Option<DomainName>)> {
        #[cfg(test)]
        {
            self.looked_at += self.len();
        }
        let by_rules = self.several.as_ref()?.by_rules.as_ref()?;
        by_rules.first_to_go(further, |name| self.until(name))
    }
}

#[cfg(test)]
mod tests;
