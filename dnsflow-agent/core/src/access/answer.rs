//! The steps of one answer that need ports, policy and cache. `Engine::answer` has their order.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use super::{Access, is_matched, patterns_of, whose};
use crate::{
    Timestamp,
    cache::{Cache, End, Entry, FailedConnection, FailedQuestion, Resolution},
    dns::{Answer, Failure, FailureKind, QuestionType, Response, answers, tcp::ServerEnd},
    installed::{Batch, Expected, Fit, Flows, Tagging, Written},
    io::output::Output,
    policy::{
        Mention,
        plan::{MatchedRules, Patterns, matched_rules},
        rules::{ActiveRule, RuleSet, is_dry_run},
    },
    values::{
        firewall::RuleAction,
        flow::{Addresses, Ends, Tag},
        ids::PortId,
        limits::{CHANGES_UNDER_WAY_MAX, LEFT_OUT_NAMED_MAX, Limit, NAMES_PER_ADDRESS_MAX},
        name::DomainName,
        resolver::ServerId,
    },
};

/// Where an answer comes from, and how the rules mention its name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// The port whose pod has asked. Its budget pays for the changes.
    pub(crate) asker: PortId,
    /// The server that has answered.
    pub(crate) server: Option<ServerId>,
    /// When the kernel saw the answer.
    pub(crate) captured_at: Timestamp,
    /// Whether the answer's way counts as an activation. It does not if the kernel has opened the addresses, or if a
    /// rule came after the answer: the time would be that of the edit.
    pub(crate) is_timed: bool,
    /// Whether a rule for the asker mentions the name.
    pub(crate) mention: Mention,
}

/// A port that an answer is for, and its rules about the name.
#[derive(Debug)]
struct Recipient {
    port: PortId,
    /// The rules that OVN enforces and that match the name.
    matched: MatchedRules,
    /// Whether one of these denies the name.
    is_denied: bool,
    /// Whether a rule denies the name, or will when OVN enforces the rule.
    is_to_be_denied: bool,
}

/// The ports that an answer is for: those of the pod that has asked, but for networks on which no rule holds.
#[derive(Debug, Default)]
pub(crate) struct Recipients(Vec<Recipient>);

impl Recipients {
    /// Whether a rule of one denies the name, or will.
    fn any_denies(&self) -> bool {
        let mut ports = self.0.iter();
        ports.any(|recipient| recipient.is_to_be_denied)
    }

    /// Whether rules of all deny the name, or will.
    fn all_deny(&self) -> bool {
        let mut ports = self.0.iter();
        self.any_denies() && ports.all(|recipient| recipient.is_to_be_denied)
    }
}

/// An answer as it counts for its recipients.
#[derive(Debug)]
pub(crate) struct ReadAnswer {
    pub(crate) asked: Asked,
    recipients: Recipients,
    /// The name, and the addresses that may be opened.
    pub(crate) answer: Answer,
    /// All addresses, if the rules of some recipients deny the name, and those of others do not.
    denied: Option<Vec<(IpAddr, Duration)>>,
}

impl ReadAnswer {
    /// The addresses for a port whose rules deny the name. A denied address is closed, wherever it leads.
    fn if_denied(&self) -> &[(IpAddr, Duration)] {
        self.denied.as_deref().unwrap_or(&self.answer.addresses)
    }
}

/// The results of an answer for all ports that are told.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Whether a rule matches the name.
    pub(crate) matched: bool,
    /// Indices of the rules that open the addresses, in order.
    pub(crate) rules: BTreeSet<u32>,
    /// Addresses that were not open before.
    pub(crate) opened: BTreeSet<IpAddr>,
    /// Addresses that would have been opened if this were no dry run.
    pub(crate) would_open: BTreeSet<IpAddr>,
    /// The number of addresses that were not opened because the pod is over its budget.
    over_budget: usize,
}

impl Outcome {
    /// Adds that for another port.
    fn add(&mut self, other: Self) {
        let Self {
            matched,
            rules,
            opened,
            would_open,
            over_budget,
        } = other;
        self.matched |= matched;
        self.rules.extend(rules);
        self.opened.extend(opened);
        self.would_open.extend(would_open);
        self.over_budget += over_budget;
    }
}

impl Access<'_> {
    /// The ports that an answer to a question of this port is for. The rules of each are looked up once.
    pub(crate) fn recipients(&self, asker: PortId, name: &DomainName) -> Recipients {
        let ports = self.ports.of_pod_with_ways_out(asker).into_iter();
        let ports = ports.filter(|(port, is_way_out)| self.is_concerned(*port, *is_way_out));
        let recipients = ports.filter_map(|(port, _)| self.recipient(port, name));
        Recipients(recipients.collect())
    }

    fn recipient(&self, id: PortId, name: &DomainName) -> Option<Recipient> {
        let row = &self.ports.get(id)?.row;
        let sets = self.policy.sets(row);
        let matched: MatchedRules = matched_rules(&sets, name).collect();
        let is_denied = rules(&sets, &matched).any(|rule| rule.action == RuleAction::Deny);
        Some(Recipient {
            port: id,
            matched,
            is_denied,
            is_to_be_denied: is_denied || self.policy.is_to_be_denied(row, name),
        })
    }

    /// Reads the addresses of an answer. `None`: the message is no usable answer.
    pub(crate) fn read(
        &mut self,
        asked: &Asked,
        recipients: Recipients,
        response: Response<'_>,
        out: &mut Output,
    ) -> Option<ReadAnswer> {
        let asked = *asked;
        let is_denied = recipients.any_denies();
        let most = self.cache.addresses_per_answer_max(is_denied);
        let note = |access: &mut Self, recipients: &Recipients, failure| {
            if asked.mention != Mention::None {
                let failed = FailedQuestion {
                    failure,
                    at: asked.captured_at,
                    server: asked.server,
                };
                access.note_failure(recipients, &failed);
            }
        };
        // What a rule denies is closed, even if the message is no usable answer.
        let mut denied = is_denied.then(|| response.every_address(most));
        if let Some(answer) = denied.take_if(|_| recipients.all_deny()) {
            return Some(ReadAnswer {
                asked,
                recipients,
                answer,
                denied: None,
            });
        }
        if response.is_truncated() && !is_denied {
            let Answer {
                question,
                name,
                addresses,
                ..
            } = response.every_address(LEFT_OUT_NAMED_MAX);
            let ports = recipients.0.iter().map(|recipient| recipient.port);
            for port in ports {
                for (address, _) in &addresses {
                    // What follows over TCP is seen later.
                    self.not_open((port, *address), &name, End::Truncated, asked.captured_at);
                }
            }
            let kind = FailureKind::Truncated;
            note(self, &recipients, Failure { question, kind });
        }
        let answer = match (answers::usable(response.answer(most), out), &denied) {
            (Some(answer), _) => answer,
            (None, Some(denied)) => Answer {
                addresses: Vec::new(),
                ..denied.clone()
            },
            (None, None) => {
                if asked.mention == Mention::Unknown {
                    // A rule may deny the name.
                    self.cache.note_unknown_mention(asked.asker);
                }
                return None;
            }
        };
        if let Some(failure) = answer.failure() {
            note(self, &recipients, failure);
        }
        let left_out = denied.as_ref().map_or(0, |denied| denied.left_out);
        Some(ReadAnswer {
            asked,
            recipients,
            answer: Answer {
                left_out: answer.left_out.max(left_out),
                ..answer
            },
            denied: denied.map(|denied| denied.addresses),
        })
    }

    /// Remembers errors in place of answers to this port's questions about mentioned names, and how the server has ended
    /// the connection without an answer.
    pub(crate) fn failed(
        &mut self,
        (asker, server, at): (PortId, Option<ServerId>, Timestamp),
        failures: Vec<Failure>,
        end: Option<ServerEnd>,
    ) {
        for failure in failures {
            let recipients = self.recipients(asker, &failure.question.name);
            let row = self.ports.get(asker).map(|port| &port.row);
            let mention = row.map(|row| self.policy.mention(row, &failure.question.name));
            if mention.is_some_and(|mention| mention != Mention::None) {
                let failed = FailedQuestion {
                    failure,
                    at,
                    server,
                };
                self.note_failure(&recipients, &failed);
            }
        }
        if let Some(end) = end {
            for (id, _) in self.ports.of_pod_with_ways_out(asker) {
                let end = end.clone();
                let failed = FailedConnection { end, at, server };
                self.cache.note_failed_connection(id, failed);
            }
        }
    }

    /// Remembers that an answer has no address, for the ports that have an own address of the IP version: most names have
    /// none of the other one.
    fn note_failure(&mut self, recipients: &Recipients, failed: &FailedQuestion) {
        let failure = &failed.failure;
        let is_ipv6 = failure.question.kind == QuestionType::Aaaa;
        for Recipient { port: id, .. } in &recipients.0 {
            let own = self.ports.get(*id).map(|port| &port.row.addresses);
            let has_own = own.is_some_and(|own| own.iter().any(|own| own.is_ipv6() == is_ipv6));
            if failure.is_for_all_types() || failure.question.is_for_addresses() && has_own {
                self.cache.note_failure(*id, failed.clone());
            }
        }
    }

    /// Whether an address of an answer to this port may be opened.
    pub(crate) fn may_open(&mut self, port: PortId, address: IpAddr) -> bool {
        self.catch_up(address);
        self.ports.get(port).is_some_and(|port| {
            let namespace = self.policy.namespace_of_rules(&port.row);
            self.refused.check(address, &port.row, namespace).is_ok()
        })
    }

    /// Takes the addresses out that are never opened, unless the rules of all recipients deny the name.
    pub(crate) fn take_out_refused(&mut self, reading: &mut ReadAnswer, out: &mut Output) {
        let asker = reading.asked.asker;
        if let Some(port) = self.ports.get(asker)
            && !reading.recipients.all_deny()
        {
            let whose = (asker, &port.row, self.policy.namespace_of_rules(&port.row));
            let Answer {
                name, addresses, ..
            } = &mut reading.answer;
            for (address, _) in &*addresses {
                self.catch_up(*address);
            }
            self.refused.take_out(whose, name, addresses, out);
        }
    }

    /// How much an answer may change; `waiting` gives how many changes wait between these ends.
    pub(crate) fn expected(
        &self,
        reading: &ReadAnswer,
        waiting: impl Fn(Ends) -> usize,
    ) -> Expected {
        let addresses = reading.if_denied();
        let of_recipient = |recipient: &Recipient| {
            let row = &self.ports.get(recipient.port)?.row;
            let sets = self.policy.sets(row);
            let groups = self.cache.groups();
            let of_rules = [false, true].map(|is_ipv6| {
                let rules = rules(&sets, &recipient.matched);
                rules.map(|rule| rule.flow_count(is_ipv6, 1)).sum::<usize>()
            });
            // The flows of its group, if they are not there.
            let of_group = |is_ipv6: bool| {
                let mut addresses = addresses.iter();
                let is_there = addresses.any(|(address, _)| address.is_ipv6() == is_ipv6);
                let patterns = Patterns::of(&sets, (is_ipv6, false), &recipient.matched);
                let patterns = patterns.filter(|_| is_there);
                patterns.map_or(0, |patterns| match groups.of(recipient.port, &patterns) {
                    Some(tag) => {
                        let flows = groups.flows(tag).filter(|flows| {
                            flows.is_lost() || matches!(flows.written, Written::Unsent { .. })
                        });
                        waiting(Ends::Tagged { tag, is_ipv6 }) + flows.map_or(0, Flows::len)
                    }
                    None => of_rules[usize::from(is_ipv6)],
                })
            };
            let of_groups = of_group(false) + of_group(true);
            // Those of the group that an address has, if they are lost, or if the address gets further patterns.
            let mut former = BTreeMap::new();
            for (address, _) in addresses {
                let entry = self.cache.entry(recipient.port, *address);
                if let Some(tag) = entry.and_then(|entry| entry.installed.tag()) {
                    former.insert(tag, address.is_ipv6());
                }
            }
            let of_former = former.into_iter().map(|(tag, is_ipv6)| {
                let patterns = groups.patterns(tag);
                let has_all = patterns.is_none_or(|one| one.have(&sets, &recipient.matched));
                if has_all && groups.is_in_force(tag) {
                    return 0;
                }
                let further = if has_all {
                    0
                } else {
                    of_rules[usize::from(is_ipv6)]
                };
                further + groups.flows(tag).map_or(0, Flows::len)
            });
            let at = |(address, _): &(IpAddr, Duration)| {
                let entry = self.cache.entry(recipient.port, *address);
                if entry.is_some_and(|entry| entry.fit == Fit::Cut) {
                    // There may be room for a group of any size.
                    return CHANGES_UNDER_WAY_MAX + 1;
                }
                let sources = row.addresses.iter();
                let ends = sources.filter_map(|source| Addresses::between(*source, *address));
                let waiting: usize = ends.map(|ends| waiting(Ends::Addresses(ends))).sum();
                // A flow that opens an address takes the place of one for established connections.
                let has_ended = entry.is_some_and(Entry::has_ended);
                row.addresses.len() * (1 + usize::from(has_ended)) + waiting
            };
            let of_former: usize = of_former.sum();
            let planned = of_groups + of_former + addresses.iter().map(at).sum::<usize>();
            let name = &reading.answer.name;
            let room = self
                .cache
                .removed_at_most(recipient.port, name, addresses.len());
            Some(planned + room)
        };
        Expected {
            most: reading.recipients.0.iter().filter_map(of_recipient).sum(),
            denies: reading.recipients.any_denies(),
        }
    }

    /// Applies an answer to its recipients.
    pub(crate) fn apply(
        &mut self,
        reading: &ReadAnswer,
        batch: &mut Batch,
        out: &mut Output,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        for recipient in &reading.recipients.0 {
            if reading.asked.mention == Mention::Unknown {
                self.cache.note_unknown_mention(recipient.port);
            }
            outcome.add(self.apply_to(recipient, reading, batch, out));
        }
        self.report_limits(reading, &outcome, out);
        outcome
    }

    /// Applies an answer to one port.
    fn apply_to(
        &mut self,
        recipient: &Recipient,
        reading: &ReadAnswer,
        batch: &mut Batch,
        out: &mut Output,
    ) -> Outcome {
        let now = batch.now();
        let asked = &reading.asked;
        let mut outcome = Outcome::default();
        let Recipient {
            port: id,
            ref matched,
            is_denied,
            is_to_be_denied,
        } = *recipient;
        let Some(port) = self.ports.get(id) else {
            return outcome;
        };
        let sets = self.policy.sets(&port.row);
        outcome.matched = !matched.is_empty();
        let mut opens = false;
        let facts = self.policy.facts(id, &port.row, &sets);
        let facts = facts.filter(|_| self.cache.groups().knows(id));
        let is_dry_run = is_dry_run(&sets);
        // The patterns of this name, by family. Nearly every address has only this name.
        let mut of_name: BTreeMap<bool, Option<Patterns>> = BTreeMap::new();
        let name = &reading.answer.name;
        let addresses = match is_to_be_denied {
            true => reading.if_denied(),
            false => &reading.answer.addresses,
        };
        let standing = OnceCell::new();
        for (address, ttl) in addresses {
            let mut term = self.cache.term(asked.captured_at, *ttl);
            term.server = asked.server;
            if is_denied {
                term.deny();
            }
            if term.end() <= now {
                continue;
            }
            // An address that a rule denies is closed whatever the budget. Such entries stay for an
            // hour, so that the limits of the cache bound their flows.
            let is_free = matched.is_empty() || is_denied;
            let is_unplanned = self.cache.is_unplanned(id, *address);
            // One that has ended is as one that is new.
            let had_ended = self.cache.has_ended(id, *address);
            let is_known = self.cache.knows(id, *address, name) && !had_ended;
            let is_over_budget =
                !is_free && (is_unplanned || !is_known) && !self.budget.has_left(asked.asker, now);
            if is_over_budget {
                outcome.over_budget += 1;
                if !is_to_be_denied && !is_known {
                    let limit = Limit::FlowChanges;
                    self.cache.leave_out((id, *address), name, limit, now);
                    continue;
                }
            }
            let before = batch.cost();
            let resolution = Resolution {
                port: id,
                address: *address,
                name,
                term,
                is_to_be_denied,
                standing: &standing,
            };
            let names = |cache: &Cache| {
                let entry = cache.entry(id, *address);
                entry.map_or(0, |entry| entry.names.len())
            };
            let names_before = names(self.cache);
            let is_news = self.learn(resolution, batch, out);
            let gave_way = names(self.cache) <= names_before;
            let cache = &mut *self.cache;
            let has_budget_left = || self.budget.has_left(asked.asker, now);
            let looks_for_room = cache.may_have_room(id, *address) && has_budget_left();
            let is_again = cache.is_lost(id, *address) || is_unplanned || looks_for_room;
            let lacks_flows = cache.lacks_flows(id, *address) && has_budget_left();
            // Over budget, a name that will be denied is remembered, and opens nothing before an answer of later.
            if is_over_budget {
                cache.note_unplanned(id, *address, true);
                continue;
            }
            if !is_news && !is_again && !lacks_flows {
                continue;
            }
            let learned = batch.len();
            let key = (id, *address);
            self.cache
                .drop_ended(key, |name| is_matched(&sets, name), now);
            let Some(entry) = self.cache.entry(id, *address) else {
                continue;
            };
            let Some(facts) = facts else {
                self.cache.withdraw(key, batch);
                continue;
            };
            let may_stay = is_news && !had_ended && !gave_way && !is_again && !lacks_flows;
            if entry.names.len() > NAMES_PER_ADDRESS_MAX && may_stay {
                // Most further names of an address with many change nothing, and each is to cost little.
                let tag = entry.installed.tag();
                let patterns = tag.and_then(|tag| self.cache.groups().patterns(tag));
                let stays = match patterns {
                    Some(patterns) => patterns.have(&sets, matched),
                    None => entry.fit == Fit::Cut && !is_denied,
                };
                if stays && !is_dry_run {
                    continue;
                }
            }
            let is_alone = entry.names.len() == 1 && entry.names.until(name).is_some();
            let is_ipv6 = address.is_ipv6();
            let patterns = match is_alone && !entry.is_refused {
                true => of_name
                    .entry(is_ipv6)
                    .or_insert_with(|| Patterns::of(&sets, (is_ipv6, false), matched))
                    .clone(),
                false => patterns_of(&sets, entry, *address),
            };
            let planner = &mut self.plans.planner;
            if is_dry_run {
                let size = patterns.map_or(0, |patterns| planner.size(facts, &patterns));
                if size > 0 && !is_denied {
                    outcome.would_open.insert(*address);
                    opens = true;
                }
                continue;
            }
            let mut tagging = Tagging { facts, planner };
            let cache = &mut *self.cache;
            let enforced = cache.enforce(key, patterns.as_ref(), &mut tagging, batch);
            if lacks_flows {
                cache.replace_mark(key, &mut tagging, batch);
            }
            if enforced.added > 0 {
                outcome.opened.insert(*address);
                opens = true;
            }
            if batch.adds_since(learned) {
                batch.is_for(&port.row, *address);
            }
            let mut changes = batch.cost().since(before);
            // The search for room costs time, too.
            let is_cut = looks_for_room || enforced.fit == Fit::Cut;
            changes.flows = changes.flows.max(usize::from(is_cut));
            match is_denied {
                true => self.budget.spend_denied(asked.asker, changes, now),
                false => self.budget.spend(asked.asker, changes, now),
            }
        }
        if opens {
            let opening = rules(&sets, matched);
            outcome.rules = opening.map(|rule| rule.index).collect();
        }
        outcome
    }

    /// The tags that the kernel may give to further addresses of names that the same rules match, each with whether
    /// the addresses are of IPv6: an address that has this name alone has the tag, whose flows are in force.
    pub(crate) fn tags_in_force(&self, reading: &ReadAnswer) -> impl Iterator<Item = (bool, Tag)> {
        let Asked { asker, mention, .. } = reading.asked;
        let recipients = || reading.recipients.0.iter();
        // The kernel opens at the asker's port alone: no other port of the pod may have a rule for the name.
        let mut others = recipients().filter(|one| one.port != asker);
        let is_alone = !others.any(|one| !one.matched.is_empty() || one.is_to_be_denied);
        let mut own = recipients().filter(|one| one.port == asker);
        let recipient = own.find(|one| !one.matched.is_empty() && !one.is_to_be_denied);
        let recipient = recipient.filter(|_| mention == Mention::Some && is_alone);
        [false, true].into_iter().filter_map(move |is_ipv6| {
            let Recipient { port, .. } = recipient?;
            let mut addresses = reading.answer.addresses.iter();
            let (address, _) = addresses.find(|(address, _)| address.is_ipv6() == is_ipv6)?;
            let entry = self.cache.entry(*port, *address)?;
            let has_this_alone = entry.names.len() == 1
                && entry.names.until(&reading.answer.name).is_some()
                && entry.fit == Fit::Exact;
            let tag = entry.installed.tag().filter(|_| has_this_alone)?;
            let groups = self.cache.groups();
            let is_open = entry.installed.is_marked() && groups.is_in_force_at(*port, tag);
            is_open.then_some((is_ipv6, tag))
        })
    }

    /// How the flows of an answer's addresses came into the switch, for each recipient.
    pub(crate) fn written(&self, reading: &ReadAnswer) -> impl Iterator<Item = Written> {
        let addresses = reading.if_denied().iter().map(|(address, _)| *address);
        reading.recipients.0.iter().flat_map(move |recipient| {
            let addresses = addresses.clone();
            addresses.flat_map(|address| self.cache.written(recipient.port, address))
        })
    }

    /// Remembers why an address of an answer did not open, unless an earlier answer has opened it.
    fn not_open(&mut self, key: (PortId, IpAddr), name: &DomainName, why: End, now: Timestamp) {
        let (port, address) = key;
        if self.cache.entry(port, address).is_none() {
            self.cache.note_end(key, name, why, now);
        }
    }

    /// Counts and reports the addresses of an answer that were not opened for a limit.
    fn report_limits(&mut self, reading: &ReadAnswer, outcome: &Outcome, out: &mut Output) {
        let asker = reading.asked.asker;
        if outcome.over_budget > 0 {
            out.counters.addresses_over_budget += outcome.over_budget as u64;
            let max = self.budget.per_second();
            self.limit_reached(asker, Limit::FlowChanges, max, out);
        }
        let Answer {
            name,
            left_out,
            beyond,
            ..
        } = &reading.answer;
        if *left_out > 0 {
            out.counters.addresses_refused += *left_out as u64;
            let limit = Limit::AddressesOfName(name.clone());
            let ports = reading.recipients.0.iter().map(|recipient| recipient.port);
            for (port, address) in ports.flat_map(|port| beyond.iter().map(move |one| (port, *one)))
            {
                let why = End::Limit(limit.clone());
                self.not_open((port, address), name, why, out.now());
            }
            let whose = |port| whose(self.ports, self.policy, port);
            self.cache.limit_reached(asker, limit, &whose, out);
        }
    }
}

/// The rules of a port's sets that these indices stand for.
pub(super) fn rules<'a>(
    sets: &'a [&'a RuleSet],
    matched: &'a MatchedRules,
) -> impl Iterator<Item = &'a ActiveRule> {
    let indices = matched.iter();
    indices.map(|(set, rule)| &*sets[*set].rules()[*rule])
}
