//! Room for a further name, and who gives way for it. The rule is in `docs/decisions/budgets.md`, "Room in the cache".

use std::{net::IpAddr, slice};

use crate::{
    Timestamp,
    cache::{
        Cache, Learning, Origin, Resolution, Whose,
        candidates::{Wanted, Yielding},
        ended::{End, EndedName, FailedConnection, FailedQuestion},
        entries::{
            Sizes,
            names::{AtAddress, Claim},
        },
        ports::Key,
    },
    io::{output::Output, report::Report},
    values::{
        ids::{PortId, SandboxId},
        limits::{LIMITS_REPORTED_MAX, Limit},
        name::DomainName,
    },
};

impl Cache {
    /// How the address takes a further name.
    pub(super) fn at_address(&mut self, learning: &Learning<'_>) -> AtAddress {
        let told = &learning.resolution;
        let entry = self.entry_mut(told.port, told.address);
        // An earlier run has left no more names of an address than it had.
        let entry = entry.filter(|_| told.term.origin != Origin::Journal);
        let Some(entry) = entry else {
            return AtAddress::Room;
        };
        let further = || (learning.standing)(told.name, told.term.is_denied);
        let further = || told.standing.get_or_init(further);
        // Names that have ended go where a name comes that a rule matches.
        if entry.has_ended() && further().claim > Claim::Mentioned {
            return AtAddress::Room;
        }
        let names = &mut entry.names;
        names.at_address(learning.version, learning.standing, further)
    }

    /// Makes room for one more name of an address, and for the address if it is new. Notes the addresses that
    /// have lost a name for that.
    ///
    /// # Errors
    ///
    /// The limit that leaves no room: all that is there may be in use, or is denied. Nobody has given way then, unless
    /// an address of the pod without a name has.
    pub(super) fn make_room(
        &mut self,
        at_address: &AtAddress,
        learning: &mut Learning<'_>,
    ) -> Result<(), Limit> {
        let told = learning.resolution;
        let (limits, entries) = (&self.limits, &self.port(told.port).entries);
        let is_denied = told.term.is_denied || told.is_to_be_denied;
        // An earlier run has left no more addresses of a name than it had.
        let counts_addresses = !is_denied && told.term.origin != Origin::Journal;
        let has_all =
            counts_addresses && entries.of_name(told.name).len() >= limits.addresses_per_name_max;
        let gives_way = *at_address == AtAddress::GivesWay;
        let is_new = entries.get(told.address).is_none();
        let limit_of_pod = if is_new && entries.len() >= limits.addresses_per_port_max {
            Some(Limit::AddressesOfPod)
        } else if entries.sizes().names >= limits.names_per_port_max() && !has_all && !gives_way {
            Some(Limit::NamesOfPod)
        } else {
            None
        };
        let yielding = match is_denied {
            true => Yielding::Undenied,
            false => Yielding::Unused,
        };
        // First who gives way, so that nobody does in vain.
        if *at_address == AtAddress::Full {
            return Err(Limit::NamesOfAddress(told.address));
        }
        let limit_of_name = has_all.then(|| Limit::AddressesOfName(told.name.clone()));
        let of_name =
            limit_of_name.map(|limit| self.candidate(told.port, yielding, limit, learning));
        let of_name = of_name.transpose()?;
        let of_pod = limit_of_pod.map(|limit| self.candidate(told.port, yielding, limit, learning));
        let of_pod = of_pod.transpose()?;
        self.make_room_for_denied(learning)?;
        if let Some((candidate, limit)) = of_name {
            self.give_up_name((told.port, candidate), told.name, limit, learning);
        }
        if gives_way {
            self.give_way_at_address(learning);
            return Ok(());
        }
        if let Some((candidate, limit)) = of_pod {
            self.give_up((told.port, candidate), yielding, limit, learning);
        }
        self.make_room_on_node(learning)
    }

    /// Makes room for one more name that a rule denies, among all of the node. The pod that has most of them gives
    /// one up, unless this one would then have as many. So no pod pushes out its own denials, and pods stop pushing
    /// out each other's.
    fn make_room_for_denied(&mut self, learning: &mut Learning<'_>) -> Result<(), Limit> {
        let Resolution { port, term, .. } = learning.resolution;
        let denied = &self.ports.totals().denied_names;
        // An edit may have denied more in an earlier run.
        let counts = term.is_denied && term.origin != Origin::Journal;
        if !counts || denied.total() < self.limits.denied_names_per_node_max() {
            return Ok(());
        }
        let limit = Limit::DeniedNamesOfNode;
        let own = self.ports.sandbox(port).map_or(0, |own| denied.of(own));
        let most = denied.most().filter(|most| own + 1 < denied.of(*most));
        match most.and_then(|most| self.ports.largest_of(most, |sizes| sizes.denied_names)) {
            Some(most) => self.give_way(most, Yielding::Denied, limit, learning),
            None => Err(limit),
        }
    }

    /// Makes room for one more name among all of the node. The pod that has most loses an address, used or not. If
    /// it is this pod, only an unused address goes. Names that a rule denies are not concerned, unless an edit has
    /// denied more than their share.
    fn make_room_on_node(&mut self, learning: &mut Learning<'_>) -> Result<(), Limit> {
        let Resolution { port, term, .. } = learning.resolution;
        let totals = self.ports.totals();
        if totals.names() < self.limits.names_per_node_max {
            return Ok(());
        }
        let (denied, others) = (&totals.denied_names, &totals.other_names);
        let over = denied.total() > self.limits.denied_names_per_node_max();
        let most = denied.most().filter(|_| over);
        if let Some(most) =
            most.and_then(|most| self.ports.largest_of(most, |sizes| sizes.denied_names))
        {
            let limit = Limit::DeniedNamesOfNode;
            return self.give_way(most, Yielding::Denied, limit, learning);
        }
        let own = self.ports.sandbox(port);
        // Nobody begins a connection there.
        let ended = totals.ended.most();
        let ended = ended.and_then(|most| self.ports.largest_of(most, |sizes| sizes.ended));
        let most = others.most().or(own);
        let of = |pod: Option<SandboxId>| pod.map_or(0, |pod| others.of(pod));
        let has_more = of(own) + 1 < of(most);
        let (pod, yielding) = match term.is_denied || has_more {
            true => (most, Yielding::Others),
            false => (own, Yielding::Unused),
        };
        if let Some(ended) = ended
            && self
                .give_way(ended, Yielding::Unused, Limit::NamesOfNode, learning)
                .is_ok()
        {
            return Ok(());
        }
        let other_names = |sizes: Sizes| sizes.names - sizes.denied_names;
        let largest = pod.and_then(|pod| self.ports.largest_of(pod, other_names));
        self.give_way(
            largest.unwrap_or(port),
            yielding,
            Limit::NamesOfNode,
            learning,
        )
    }

    // Who gives way.

    /// The address of a port that matters least, or least for a name with a limit of its own, and the limit for which it
    /// gives way.
    ///
    /// # Errors
    ///
    /// The limit, if nothing gives way.
    fn candidate(
        &mut self,
        id: PortId,
        yielding: Yielding,
        limit: Limit,
        learning: &Learning<'_>,
    ) -> Result<(IpAddr, Limit), Limit> {
        let idle_grace = self.limits.idle_grace;
        let names_max = self.limits.names_per_port_max();
        let (candidate, are_all_denied) = self.ports.change(id, |port| {
            let entries = &mut port.entries;
            let (candidates, batch) = (&mut port.candidates, &learning.batch);
            // An address that comes has a name.
            let with_names = limit != Limit::AddressesOfPod || entries.sizes().names >= names_max;
            let candidate = match &limit {
                Limit::AddressesOfName(name) => {
                    candidates.next_of_name(entries, name, idle_grace, batch.now())
                }
                _ => {
                    let wanted = Wanted {
                        yielding,
                        with_names,
                    };
                    candidates.next(entries, wanted, idle_grace, batch)
                }
            };
            (candidate, entries.are_all_denied(with_names))
        });
        match (candidate, limit) {
            (Some(address), limit) => Ok((address, limit)),
            (None, Limit::AddressesOfPod) if are_all_denied => Err(Limit::DeniedAddresses),
            (None, limit) => Err(limit),
        }
    }

    /// Forgets the least important address of a port, because of a limit.
    ///
    /// # Errors
    ///
    /// The limit, if nothing gives way.
    fn give_way(
        &mut self,
        id: PortId,
        yielding: Yielding,
        limit: Limit,
        learning: &mut Learning<'_>,
    ) -> Result<(), Limit> {
        let (address, limit) = self.candidate(id, yielding, limit, learning)?;
        self.give_up((id, address), yielding, limit, learning);
        Ok(())
    }

    /// Takes a name from a full address for a further one ([`Names::first_to_go`]).
    ///
    /// [`Names::first_to_go`]: crate::cache::entries::names::Names::first_to_go
    fn give_way_at_address(&mut self, learning: &mut Learning<'_>) {
        let told = learning.resolution;
        let entry = self.entry_mut(told.port, told.address);
        let further = told.standing.get().zip(entry);
        let first = further.and_then(|(further, entry)| entry.names.first_to_go(further));
        let Some((first, alike)) = first else {
            return;
        };
        self.drop_name(&first, learning);
        self.ports.change(told.port, |port| {
            if let Some(alike) = alike {
                port.entries.stand_for(told.address, &alike, &first);
            }
            port.entries.forget_name(told.address, &first);
        });
    }

    /// Forgets an address because of a limit; or one of its names, if only that gives way, or if the address is the one
    /// that is learned.
    fn give_up(&mut self, key: Key, yielding: Yielding, limit: Limit, learning: &mut Learning<'_>) {
        let Some(entry) = self.entry(key.0, key.1) else {
            return;
        };
        let told = learning.resolution;
        let gives_denied = yielding == Yielding::Denied;
        let is_learned = key == (told.port, told.address);
        let first = match gives_denied || entry.is_denied() || is_learned {
            true => entry.names.first_to_end(gives_denied),
            false => None,
        };
        if let Some((name, _)) = first {
            let name = name.clone();
            self.give_up_name(key, &name, limit, learning);
            return;
        }
        let names: Vec<DomainName> = entry.names.keys().cloned().collect();
        self.evicted(key, &names, limit, learning);
        self.close_entry(key, learning.batch);
    }

    /// Takes a name from an address because of a limit.
    fn give_up_name(
        &mut self,
        key: Key,
        name: &DomainName,
        limit: Limit,
        learning: &mut Learning<'_>,
    ) {
        self.evicted(key, slice::from_ref(name), limit, learning);
        self.ports
            .change(key.0, |port| port.entries.forget_name(key.1, name));
        self.end_expired(key, learning.batch);
        learning.replan.push(key);
    }

    // What is told of it.

    /// Counts an address that makes room because of a limit, and remembers the names that it loses. Reports the limit if
    /// the address is open.
    fn evicted(
        &mut self,
        key: Key,
        names: &[DomainName],
        limit: Limit,
        learning: &mut Learning<'_>,
    ) {
        let now = learning.batch.now();
        if self.has_ended(key.0, key.1) {
            // The pod has to ask again in any case.
            for name in names {
                self.note_end(key, name, End::Expired, now);
            }
            return;
        }
        for name in names {
            self.leave_out(key, name, limit.clone(), now);
        }
        learning.out.counters.addresses_evicted += 1;
        let entry = self.entry(key.0, key.1);
        if entry.is_some_and(|entry| !entry.installed.is_empty()) {
            self.limit_reached(key.0, limit, learning.whose, learning.out);
        }
    }

    /// Counts a name for which a full address has no room.
    pub(super) fn drop_name(&mut self, name: &DomainName, learning: &mut Learning<'_>) {
        let told = learning.resolution;
        let limit = Limit::NamesOfAddress(told.address);
        let now = learning.batch.now();
        self.leave_out((told.port, told.address), name, limit, now);
        learning.out.counters.names_dropped += 1;
    }

    /// Reports a limit that keeps an allowed address closed, or a denied one open. The limit is
    /// reported again only after its port was far below it.
    pub(crate) fn limit_reached(
        &mut self,
        id: PortId,
        limit: Limit,
        whose: Whose<'_>,
        out: &mut Output,
    ) {
        let max = self.limits.of(&limit);
        let report = self.ports.change(id, |cached| {
            let reported = &mut cached.limits_reported;
            let is_news = !reported.contains(&limit);
            let (namespace, port) = is_news.then(|| whose(id))??;
            if reported.len() >= LIMITS_REPORTED_MAX {
                reported.clear();
            }
            reported.insert(limit.clone());
            Some(Report::LimitReached {
                namespace,
                port,
                limit,
                max,
            })
        });
        if let Some(report) = report {
            out.report_of_pod(id, report);
        }
    }

    /// Remembers that a limit left no room for an answer to a port.
    pub(crate) fn leave_out(&mut self, key: Key, name: &DomainName, limit: Limit, now: Timestamp) {
        self.note_end(key, name, End::Limit(limit), now);
    }

    /// Remembers why a name does not lead to an address for a port.
    pub(crate) fn note_end(
        &mut self,
        (id, address): Key,
        name: &DomainName,
        why: End,
        now: Timestamp,
    ) {
        self.ports.change(id, |port| {
            port.ended.push(EndedName {
                address,
                name: name.clone(),
                at: now,
                why,
            });
        });
    }

    /// Remembers that a question of a port was answered without an address.
    pub(crate) fn note_failure(&mut self, id: PortId, failed: FailedQuestion) {
        self.ports.change(id, |port| port.failed.push(failed));
    }

    /// Remembers that a DNS server has ended a connection of a port without an answer.
    pub(crate) fn note_failed_connection(&mut self, id: PortId, failed: FailedConnection) {
        self.ports
            .change(id, |port| port.failed_connections.push(failed));
    }
}
