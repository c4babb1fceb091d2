//! The state of one node: routes inputs to the owners of the state, and orders their outputs.
//!
//! One task owns the engine. It hands in each [`Input`] with the time, ends the turn ([`Engine::end_turn`]), takes
//! the resulting [`Command`]s and [`Report`]s, and calls [`Engine::handle_timeout`] when [`Engine::next_deadline`]
//! has passed.
//!
//! No owner reaches into another: the engine hands an owner the parts of others that it needs. The cache entries
//! decide which flows should be in the switch. The flows in the switch are only ever compared with them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU32,
    time::Duration,
};

use dnsflow_common::walk::Ports as DnsPorts;

use crate::{
    Command, Input, Timestamp,
    access::{Access, Asked, Classes, Outcome, Plans, ReadAnswer, Told},
    ask::view::View,
    cache::{
        Cache,
        journal::{Parts, Record, Saved},
    },
    dns::{
        Answer, Response,
        answers::{Answers, Read},
        fragments::FragmentEvent,
        opened,
        tcp::TcpEvent,
    },
    installed::{Batch, Expected},
    io::{
        counters::Counters,
        input::{BatchError, FlowReply, Frame, MarkChange, MarkRefused},
        output::Output,
        report::Report,
    },
    ovn::{rows::RowId, view::Touched},
    pods::{
        budget::FlowBudget,
        filter::Filter,
        ports::{Port, PortChange, Ports},
        recording::Recordings,
    },
    policy::{
        Mention, Policy,
        refused::{Recheck, Refusals, Refused, RefusedAddresses},
        rules::{ChangedNames, ChangedRules},
    },
    sources::{Source, Sources},
    switch::{
        Opening, Switch,
        deny_counters::RevalidationWait,
        hold::{HoldEvent, HoldLimits, HoldQueue, Wait},
        revalidation::RevalidationEvent,
    },
    tools::{
        counter_vec::CounterVec,
        deadline::{self, Deadline, Why},
    },
    values::{
        class::NameClass,
        flow::FlowKey,
        ids::PortId,
        limits::{
            ADDRESS_PARTS, ADDRESSES_PER_PART, CacheLimits, FLOW_CHANGES_PER_SECOND, KEEP_FLOWS_S,
        },
        name::DomainName,
        resolver::Resolver,
    },
};

pub use crate::policy::FIREWALL_NAME;

/// The agent's options, as far as the core needs them.
#[derive(Clone, Debug)]
pub struct Config {
    /// Whether a rule's name also stands for its sub-domains, where its EgressFirewall does not
    /// say.
    pub subdomains: bool,
    /// Whether flows are planned, and not installed.
    pub dry_run: bool,
    /// How long cache entries last, and how many there may be.
    pub cache_limits: CacheLimits,
    /// How many flows the answers to one pod may change each second.
    pub flow_changes_per_second: u32,
    /// How long an answer that was taken off the wire is held at most.
    pub hold_max: Duration,
    /// How long flows stay in the switch when no agent renews them, in seconds: the hard timeout of their
    /// sentinel flows.
    pub keep_flows_s: u16,
    /// The ports that DNS servers answer from.
    pub dns_ports: DnsPorts,
    /// The addresses that are never opened.
    pub refusals: Refusals,
    /// DNS servers to trust beside those of the cluster.
    pub resolvers: BTreeSet<Resolver>,
    /// The bits of a packet's mark that say its group; without them, each address has a flow of its own.
    pub mark_mask: Option<NonZeroU32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            subdomains: true,
            dry_run: false,
            cache_limits: CacheLimits::default(),
            flow_changes_per_second: FLOW_CHANGES_PER_SECOND,
            hold_max: HoldLimits::default().longest,
            keep_flows_s: KEEP_FLOWS_S,
            dns_ports: DnsPorts::DNS,
            refusals: Refusals::default(),
            resolvers: BTreeSet::new(),
            mark_mask: None,
        }
    }
}

/// The state of one node.
#[derive(Debug)]
pub struct Engine {
    sources: Sources,
    ports: Ports,
    answers: Answers,
    policy: Policy,
    told: Told,
    switch: Switch,
    hold: HoldQueue,
    filter: Filter,
    recordings: Recordings,
    out: Output,
}

impl Engine {
    /// An engine that knows nothing yet.
    pub fn new(config: Config) -> Self {
        let Config {
            subdomains,
            dry_run,
            cache_limits,
            flow_changes_per_second,
            hold_max,
            keep_flows_s,
            dns_ports,
            refusals,
            resolvers,
            mark_mask,
        } = config;
        let mut out = Output::default();
        Self {
            sources: Sources::default(),
            ports: Ports::default(),
            answers: Answers::new(dns_ports, resolvers, &mut out),
            policy: Policy::new(subdomains, dry_run),
            told: Told {
                cache: Cache::new(
                    cache_limits,
                    mark_mask.map(NonZeroU32::get),
                    refusals.translation().clone(),
                ),
                plans: Plans::default(),
                budget: FlowBudget::new(flow_changes_per_second),
                refused: RefusedAddresses::new(refusals, &mut out),
                classes: Classes::default(),
            },
            switch: Switch::new(hold_max, keep_flows_s, cache_limits.idle_grace),
            hold: HoldQueue::new(HoldLimits {
                longest: hold_max,
                ..HoldLimits::default()
            }),
            filter: Filter::default(),
            recordings: Recordings::default(),
            out,
        }
    }

    /// Handles an input that came at `now`.
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        self.out.begin(now);
        self.end_turn(now);
        self.told.plans.begin();
        if may_change_plans(&input) {
            self.told.plans.forget();
        }
        let mut batch = self.switch.begin(now);
        self.route(input, &mut batch);
        self.finish(Some(batch), now);
    }

    /// Takes in a frame of the ring buffer. Returns whether to defer it, because a rule may come that mentions its
    /// name: the kernel let it through for a rule that is gone, or before the pod's rules were known.
    pub fn handle_frame(&mut self, frame: Frame<'_>, now: Timestamp) -> bool {
        self.out.begin(now);
        let was_wider = self.filter.was_wider(frame.captured_at);
        let mention = self.frame(frame, !frame.opened, now);
        self.finish(None, now);
        match mention {
            Some(Mention::None) => was_wider,
            Some(Mention::Unknown) => {
                let port = self.ports.at_veth(frame.ifindex);
                let has_room = port.is_some_and(|port| self.told.cache.defer_unknown(port));
                self.out.counters.answers_not_deferred += u64::from(!has_room);
                has_room
            }
            Some(Mention::Some) | None => false,
        }
    }

    /// Takes in a frame that was deferred ([`Command::ReplayAnswers`]). Returns whether to defer it again:
    /// no rule mentions its name, as far as is known, and one may come.
    pub fn replay(&mut self, frame: Frame<'_>, now: Timestamp) -> bool {
        self.out.begin(now);
        let mention = self.frame(frame, false, now);
        self.finish(None, now);
        matches!(mention, Some(Mention::None | Mention::Unknown))
    }

    fn route(&mut self, input: Input, batch: &mut Batch) {
        let now = batch.now();
        match input {
            Input::Interfaces(update) => {
                let reset = update.reset;
                self.sources.read(Source::Interfaces, reset);
                let (mut come, mut gone) = (Vec::new(), Vec::new());
                for change in self.ports.apply(update, &mut self.out) {
                    if let PortChange::Opened(port) | PortChange::Moved(port) = change {
                        come.push(port);
                    }
                    if let PortChange::Closed { port, .. } = change {
                        gone.push(port);
                    }
                    self.port_changed(change, batch);
                }
                for id in self.ports.take_regrouped() {
                    if let Some(port) = self.ports.get(id) {
                        self.told.cache.regroup(id, port.sandbox);
                    }
                }
                // Nothing of a pod that goes is left to one that comes with its logical port and its address.
                let come = self.access().0.senders(come);
                self.switch.end(batch, |key| come.have(key));
                let groups = self.told.cache.groups();
                self.switch
                    .put_off(batch, |key| !come.have(key) && !groups.are_of_group(key));
                for port in gone {
                    self.switch.pod_gone(port, batch);
                }
                if reset {
                    // Pods that went while nobody looked.
                    self.told.cache.forget_awaited();
                }
            }
            Input::Nb(update) => {
                self.sources.read(Source::Nb, update.reset);
                let are_all = update.reset;
                let touched = self.policy.apply_nb(update);
                self.learn_networks(are_all, batch);
                if let Some(networks) = self.policy.take_changed_primary_networks() {
                    self.ports.learn_primary_networks(networks, &mut self.out);
                    self.filter.outdate();
                }
                self.policy.watch_logical_flows(&mut self.out);
                self.policy_touched(touched, batch);
            }
            Input::Sb(update) => {
                self.sources.read(Source::Sb, update.reset);
                let touched = self.policy.apply_sb(update);
                self.learn_networks(false, batch);
                self.policy_touched(touched, batch);
            }
            Input::LargeTables { database, tables } => {
                self.sources.large_tables(database, tables, &mut self.out);
            }
            Input::Firewalls(update) => {
                self.sources.read(Source::Firewalls, update.reset);
                if update.reset {
                    self.filter.outdate();
                }
                let namespaces = self.policy.apply_firewalls(update, now).into_iter();
                let touched = Touched {
                    namespaces: namespaces.map(|name| (name, BTreeSet::new())).collect(),
                    ports: BTreeSet::new(),
                };
                self.policy_touched(touched, batch);
            }
            Input::Found { interface, ifindex } => self.veth_found(interface, ifindex),
            Input::Attached { interface, ifindex } => {
                self.veth_found(interface, ifindex);
                self.ports.attached(interface);
                self.mark_at(ifindex, batch);
            }
            Input::AttachFailed { interface, reason } => {
                self.ports.not_attached(interface, reason, now);
                if let Some(port) = self.ports.of_interface(interface)
                    && self.told.cache.groups_mut().not_attached(port)
                {
                    self.access().0.replan_port(port, batch);
                }
            }
            Input::LogicalFlowsWatched { priorities } => {
                let are_all = self.policy.watches(&priorities);
                self.sources.logical_flows_read(are_all);
            }
            Input::Record {
                id,
                namespace,
                time,
            } => {
                self.recordings.begin(id, namespace, time, now);
                self.filter.outdate();
            }
            Input::EndRecording { id } => {
                self.recordings.end(id);
                self.filter.outdate();
            }
            Input::SwitchUp => {
                self.switch.connected(now);
                self.policy.tables_are_unknown();
                self.policy.verify(&mut self.out);
            }
            Input::SwitchDown => {
                self.sources.switch_lost();
                self.policy.interrupted();
                let over = self.switch.disconnected();
                self.hold.lost(self.switch.unanswered(), now);
                let comparisons = self.switch.comparisons();
                self.told.cache.disconnected(comparisons);
                self.hold.waits_over(over, now);
            }
            Input::Applied { batch: id, result } => {
                let is_refused = matches!(result, Err(BatchError::Refused(_)));
                let (mut access, switch, out) = self.access();
                if is_refused && switch.send_one_by_one(id, &mut access, out) {
                    return;
                }
                let is_awaited = self.hold.awaits(id);
                let out = &mut self.out;
                let answered = self.switch.answered(id, result, is_awaited, out);
                if answered.is_over {
                    self.hold.waits_over([id], now);
                }
                if answered.is_written {
                    let foreign = |key: &_| self.switch.is_foreign(key);
                    self.told.cache.confirmed(id, foreign, batch);
                    // Before the answers go back that wait for the marks.
                    batch.give_out_marks(&mut self.out);
                }
            }
            Input::Dropping(looked) => {
                let over = self.switch.dropping_found(&looked, now);
                self.hold.waits_over(over, now);
            }
            Input::Reply(FlowReply::Flows { number, .. }) if !self.switch.is_comparison(number) => {
            }
            Input::Reply(FlowReply::Flows { flows, more, .. }) => {
                let (mut access, switch, out) = self.access();
                switch.shown(flows, &mut access, now);
                if !more && let Some(changes) = switch.compared(&mut access, out) {
                    *batch = changes;
                }
            }
            Input::Marks {
                found,
                more,
                records_wait,
            } => {
                let (mut access, switch, out) = self.access();
                let how = (more, records_wait);
                if let Some(changes) = switch.marks_read(found, how, &mut access, out) {
                    *batch = changes;
                }
            }
            Input::MarksRefused(refused) => {
                self.out.counters.marks_refused += refused.len() as u64;
                let mut of_ports: BTreeMap<PortId, Vec<IpAddr>> = BTreeMap::new();
                for MarkRefused { ifindex, address } in refused {
                    if let Some(port) = self.ports.at_veth(ifindex) {
                        of_ports.entry(port).or_default().push(address);
                    }
                }
                for (port, addresses) in of_ports {
                    self.open_by_flows(port, addresses, now);
                }
            }
            Input::ClassesRefused(elements) => self.told.classes.refused(&elements),
            Input::FlowLost { key, cookie } => {
                let (mut access, switch, _) = self.access();
                switch.flow_lost(&key, cookie, &mut access, now);
            }
            Input::Reply(FlowReply::Counted { batch, counts }) => {
                self.switch.counted(batch, counts, now);
            }
            Input::CountLost { cookie } => self.switch.count_lost(cookie),
            Input::ForeignFlow { key, cookie } => {
                let (mut access, switch, out) = self.access();
                switch.foreign_flow(key, cookie, &mut access, out);
            }
            Input::ForeignFlowGone { key } => self.switch.foreign_flow_gone(&key, now),
            Input::Resolvers(resolvers) => {
                let addresses = addresses_of(&resolvers);
                self.answers.trust(resolvers, &mut self.out);
                let refused = &mut self.told.refused;
                let recheck = refused.learn_dns(addresses, &mut self.out);
                self.recheck(&recheck, batch);
            }
            Input::DnsCache(dns_cache) => {
                let addresses = addresses_of(&dns_cache);
                self.answers.trust_dns_cache(dns_cache, &mut self.out);
                let refused = &mut self.told.refused;
                let recheck = refused.learn_dns_cache(addresses, &mut self.out);
                self.recheck(&recheck, batch);
            }
            Input::NodeAddresses(addresses) => {
                let refused = &mut self.told.refused;
                let recheck = refused.learn_own(addresses, &mut self.out);
                self.recheck(&recheck, batch);
            }
            Input::ServiceNetworks(networks) => {
                let refused = &mut self.told.refused;
                let recheck = refused.learn_service_networks(networks, &mut self.out);
                self.recheck(&recheck, batch);
            }
            Input::Revalidation(time) => self.switch.revalidates_in(time),
            Input::MegaflowsIdle(time) => self.switch.megaflows_idle_for(time),
            Input::FilterConfirmed => self.filter.confirmed(&mut self.out),
            Input::MonitorGap => self.switch.monitor_gap(now),
            Input::QuestionRefused => {
                self.switch.question_refused(now);
                self.policy.interrupted();
            }
            Input::LogicalFlowSample { stage, flows } => {
                if self.policy.sampled(stage, flows, &mut self.out) {
                    self.replan_all(batch);
                }
            }
            Input::Blocked { connections, more } => {
                let (access, switch, out) = self.access();
                switch.blocked_found(connections, more, &access, out);
            }
            Input::Unblocked { unblocked, failed } => self.out.unblocked(unblocked, failed),
            Input::Reply(FlowReply::Found(found)) => {
                if self.policy.learn(&found, now) {
                    self.replan_all(batch);
                }
            }
        }
    }

    /// Carries out all work that is due at `now`.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.out.begin(now);
        self.end_turn(now);
        if self.may_expire() {
            let mut batch = self.switch.begin(now);
            self.told.cache.expire(&mut batch);
            self.commit(batch);
        }
        let planner = self.told.plans.planner();
        if self.switch.timeout(planner, &mut self.out) {
            // OVN may have come back with other tables.
            self.policy.verify(&mut self.out);
        }
        self.filter.timeout(&mut self.out);
        self.ports.timeout(&mut self.out);
        if self.recordings.timeout(now) {
            self.filter.outdate();
        }
        self.switch
            .count_denials(&self.ports, &self.policy, &mut self.out);
        self.switch.search_for_blocked(&mut self.out);
        self.policy.timeout(self.switch.is_up(), &mut self.out);
        let further = (self.policy.waiting_addresses() > 0).then(|| {
            let mut batch = self.switch.begin(now);
            self.learn_networks(false, &mut batch);
            batch
        });
        self.finish(further, now);
    }

    /// When [`Engine::handle_timeout`] wants to be called, and why.
    pub fn next_deadline(&self) -> Option<Deadline> {
        let expiry = self.told.cache.deadline().filter(|_| self.may_expire());
        deadline::first([
            expiry,
            self.switch.deadline(can_judge(
                &self.sources,
                &self.policy,
                &self.ports,
                self.told.cache.groups().are_marked(),
            )),
            self.filter.deadline(),
            self.hold.deadline(),
            self.policy.deadline(),
            self.ports.deadline(),
            self.recordings.deadline(),
            self.addresses_deadline(),
        ])
    }

    /// The next part of the addresses that have changed is due at once.
    fn addresses_deadline(&self) -> Option<Deadline> {
        let waits = self.policy.waiting_addresses() > 0;
        deadline::at(waits.then(Timestamp::default), Why::Addresses)
    }

    /// Ends a turn of any number of inputs: the openings of all of its answers are sent together.
    pub fn end_turn(&mut self, now: Timestamp) {
        self.out.begin(now);
        self.switch
            .flush_openings(self.told.plans.planner(), &mut self.out);
        let moved = self.switch.take_moved();
        self.access().0.go_in(moved);
        let left_out = self.switch.take_left_out();
        if !left_out.is_empty() {
            self.hold.waits_over(left_out, now);
            self.hold.release_due(&mut self.out);
        }
    }

    /// The commands to carry out, in this order. Those of the last call have been carried out.
    pub fn take_commands(&mut self) -> Vec<Command> {
        self.told.classes.commands_taken(self.out.now());
        std::mem::take(&mut self.out.commands)
    }

    /// The reports.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.out.reports)
    }

    // What happened so far.

    /// Everything that has no reasons of its own.
    pub fn counters(&self) -> &Counters {
        &self.out.counters
    }

    /// The outcomes of TCP segments.
    pub fn tcp_events(&self) -> &CounterVec<TcpEvent> {
        self.answers.tcp_events()
    }

    /// The outcomes of IP fragments.
    pub fn fragment_events(&self) -> &CounterVec<FragmentEvent> {
        self.answers.fragment_events()
    }

    /// The outcomes of held frames.
    pub fn hold_events(&self) -> &CounterVec<HoldEvent> {
        self.hold.events()
    }

    /// Whether new flows had to wait for revalidation, for each batch that answers opened.
    pub fn revalidation_waits(&self) -> &CounterVec<RevalidationWait> {
        self.switch.revalidation_waits()
    }

    /// The reasons for which waits for revalidation ended.
    pub fn revalidation_events(&self) -> &CounterVec<RevalidationEvent> {
        self.switch.revalidation_events()
    }

    /// Addresses that were not opened, by reason.
    pub fn refused(&self) -> &CounterVec<Refused> {
        self.told.refused.counts()
    }

    /// The logical port whose frames pass the interface of this index.
    pub fn port_at(&self, ifindex: u32) -> Option<&str> {
        let port = self.ports.get(self.ports.at_veth(ifindex)?)?;
        Some(&port.row.iface_id)
    }

    /// Whether it is known which DNS servers are trusted. Frames that were captured before wait for that.
    pub fn knows_servers(&self) -> bool {
        self.answers.knows_servers()
    }

    /// The state, to answer a question of people.
    pub fn view(&self) -> View<'_> {
        let Self {
            sources,
            ports,
            answers,
            policy,
            told:
                Told {
                    cache,
                    budget,
                    refused,
                    ..
                },
            switch,
            recordings,
            ..
        } = self;
        View {
            sources,
            ports,
            answers,
            budget,
            refused,
            policy,
            cache,
            switch,
            recordings,
        }
    }

    // What outlives the agent.

    /// Takes over what an earlier run has left, before any other input.
    pub fn load(&mut self, saved: Saved, now: Timestamp) {
        self.told.cache.load(saved, now);
    }

    /// An earlier run has left no journal, and this run's begins, before any other input.
    pub fn begin_journal(&mut self, now: Timestamp) {
        self.told.cache.begin_journal(now);
    }

    /// Takes out the records of the turn. They are to be written before its commands are carried out.
    pub fn take_records(&mut self) -> Vec<Record> {
        self.told.cache.take_records()
    }

    /// So many records could not be written.
    pub fn records_lost(&mut self, count: usize) {
        self.out.counters.records_lost += count as u64;
    }

    /// The next part of the records of all that lives; `None` if they were given out.
    pub fn next_part(&self, parts: &mut Parts) -> Option<Vec<Record>> {
        self.told.cache.next_part(parts)
    }

    /// The ports at which programs of the earlier run may have opened addresses, as far as its journal says.
    fn ports_of_earlier_run(&self) -> impl Iterator<Item = &Port> {
        let ports = self.ports.iter().map(|(_, port)| port);
        ports.filter(|port| {
            let pod = port.row.iface_id_ver.as_deref();
            self.told.cache.is_of_earlier_run(&port.row.iface_id, pod)
        })
    }

    /// Whether the rules for all pods of the earlier run are those by which its programs open.
    fn are_rules_those_of_earlier_run(&self) -> bool {
        let mut looked_at = BTreeSet::new();
        // All pods of a namespace have its rules.
        let mut ports = self.ports_of_earlier_run();
        self.told.cache.knows_earlier_run()
            && ports.all(|port| {
                let namespace = self.policy.namespace_of_rules(&port.row);
                namespace.is_none_or(|namespace| {
                    !looked_at.insert(namespace)
                        || self.told.cache.earlier_rules(namespace)
                            == Some(self.policy.hash_of_rules(&port.row))
                })
            })
    }

    /// A comparison has ended: records the rules in force that the kernel follows.
    fn record_rules(&mut self) {
        let comparisons = self.switch.comparisons();
        let mut namespaces = BTreeSet::new();
        for (_, port) in self.ports.iter() {
            if let Some(namespace) = self.policy.namespace_of_rules(&port.row)
                && namespaces.insert(namespace)
            {
                let version = self.policy.rules_version(&port.row);
                let hash = || self.policy.hash_of_rules(&port.row);
                let journal = self.told.cache.journal_mut();
                journal.rules_are_in_force(namespace, (version, comparisons), hash);
            }
        }
        self.told.cache.journal_mut().keep_rules(&namespaces);
    }

    /// The rules for these ports may be others, by which the kernel opens.
    fn rules_change(&mut self, ports: &[PortId]) {
        for port in ports.iter().filter_map(|port| self.ports.get(*port)) {
            if let Some(namespace) = self.policy.namespace_of_rules(&port.row) {
                let journal = self.told.cache.journal_mut();
                journal.rules_change(namespace, self.switch.comparisons());
            }
        }
    }

    /// The rules for these ports, or where they are enforced, may be others: the programs of earlier agents open nothing
    /// more, if they do so at one of their interfaces.
    fn end_earlier_at(&mut self, ports: &[PortId], now: Timestamp) {
        let mut interfaces = ports
            .iter()
            .filter_map(|port| self.ports.get(*port)?.ifindex);
        if interfaces.any(|ifindex| self.told.classes.may_earlier_open_at(ifindex)) {
            self.end_earlier(now);
        }
    }

    /// The programs of earlier agents open nothing more. A comparison at once closes what they have opened and nobody knows.
    fn end_earlier(&mut self, now: Timestamp) {
        if self.told.classes.end_earlier() {
            self.switch.compare_by(now);
        }
    }

    /// What the next run takes over, by the records of all that lives.
    #[cfg(test)]
    pub(crate) fn saved(&self, now: Timestamp) -> Saved {
        let mut parts = Parts::default();
        let mut folding = crate::cache::journal::Folding::default();
        let records = std::iter::from_fn(|| self.next_part(&mut parts)).flatten();
        records.for_each(|record| folding.take(record));
        folding.end(now)
    }

    /// The bits of a packet's mark that say its group, if packets are marked.
    #[cfg(any(test, feature = "test-util"))]
    pub fn mark_mask(&self) -> Option<u32> {
        self.told.cache.groups().mask()
    }

    /// How many flows should be in the switch.
    pub fn flow_count(&self) -> usize {
        self.told.cache.flow_count()
    }

    /// Whether the switch has not confirmed all changes, or further changes wait for that.
    pub fn is_writing(&self) -> bool {
        self.switch.is_writing()
    }

    /// Releases all held frames. The agent stops, so no later call would.
    pub fn release_all(&mut self) {
        self.hold.release_all(&mut self.out);
    }

    // Steps that concern several owners.

    /// Handles a frame. A held frame waits until its answers are in force. Returns whether rules mention it, if it is
    /// a whole answer. `is_timed`: see [`Asked`].
    fn frame(&mut self, frame: Frame<'_>, is_timed: bool, now: Timestamp) -> Option<Mention> {
        let told = self.ports.at_veth(frame.ifindex);
        let pod = told.and_then(|told| self.ports.get(told));
        let pod = pod.map(|port| port.row.addresses.as_slice());
        let Read {
            responses,
            failures,
            end,
            server,
            connection,
            carries,
        } = self.answers.read(frame, pod, &mut self.out);
        if let Some(told) = told {
            let by = (told, server, frame.captured_at);
            self.access().0.failed(by, failures, end);
        }
        let mut wait = Wait::default();
        let mut mentioned = None;
        let mut name = None;
        for response in responses {
            let Some(told) = told else { continue };
            let Some(port) = self.ports.get(told) else {
                continue;
            };
            let mention = self.policy.mention(&port.row, &response.name);
            mentioned = Some(mention);
            name = frame.opened.then(|| response.name.clone());
            let asked = Asked {
                asker: told,
                server,
                captured_at: frame.captured_at,
                is_timed,
                mention,
            };
            let Some(needs) = self.answer(&asked, response, now) else {
                continue;
            };
            if carries {
                wait = wait.and(needs);
            }
        }
        let port = told.and_then(|told| self.ports.get(told));
        if port.is_some_and(|port| !self.policy.holds_at(&port.row)) {
            wait = Wait::default();
        }
        if frame.held {
            self.hold.take(frame, connection, wait, &mut self.out);
        }
        if frame.opened {
            self.opened(frame, name.as_ref(), now);
        }
        let is_whole = carries && connection.is_none();
        mentioned.filter(|_| is_whole)
    }

    /// The kernel has opened the addresses of an answer for this name. Those that it should not have opened are closed:
    /// the rules have changed meanwhile, or the answer has met a limit.
    fn opened(&mut self, frame: Frame<'_>, name: Option<&DomainName>, now: Timestamp) {
        let ifindex = frame.ifindex;
        let told = self.ports.at_veth(ifindex);
        let names = told.and_then(|told| self.names_at(told));
        let opened = opened::read(frame.bytes, self.answers.ports());
        let addresses = opened.map(|opened| opened.addresses).unwrap_or_default();
        let is_ipv6 = addresses.first().is_some_and(IpAddr::is_ipv6);
        let class = name
            .zip(names)
            .and_then(|(name, names)| NameClass::of(name, names, is_ipv6));
        let is_known = told
            .zip(class)
            .is_some_and(|(told, class)| self.told.classes.had(told, &class, frame.captured_at));
        let mut batch = self.switch.begin(now);
        for address in addresses {
            let entry = told.and_then(|told| self.told.cache.entry(told, address));
            if entry.is_some_and(|entry| entry.installed.is_marked()) {
                self.out.counters.addresses_opened_by_kernel += 1;
            } else if let Some(told) = told.filter(|_| is_known)
                && entry.is_some_and(|entry| {
                    entry.installed.is_open() && !entry.is_refused && !entry.is_front
                })
            {
                // Its flows may be under way. The next reading of the marks removes this one.
                self.told.classes.note_beside(told, address, now);
            } else {
                batch.mark(MarkChange::Remove { ifindex, address });
            }
        }
        batch.give_out_marks(&mut self.out);
    }

    /// The names that rules mention at the interface of a port, as the kernel was told.
    fn names_at(&self, port: PortId) -> Option<&BTreeSet<DomainName>> {
        let port = self.ports.get(port)?;
        let namespace = self.policy.namespace_of_names(&port.row)?;
        self.filter.names_at(port.ifindex?, namespace)
    }

    /// Handles an answer. Returns the wait until its addresses are open; `None` if the message is no usable answer.
    fn answer(&mut self, asked: &Asked, response: Response<'_>, now: Timestamp) -> Option<Wait> {
        let Asked { asker, mention, .. } = *asked;
        let is_recorded = self.records_of(asker).is_some();
        // Whoever sends the message chooses what its records cost: only for these are they read.
        if mention == Mention::None && !is_recorded {
            self.unmentioned();
            return Some(Wait::default());
        }
        let (mut access, _, out) = self.access();
        let recipients = access.recipients(asker, &response.name);
        let mut reading = access.read(asked, recipients, response, out)?;
        if is_recorded {
            self.record(asker, &reading.answer);
        }
        // Nothing is remembered, reported or paid for what no rule mentions.
        if mention == Mention::None {
            self.unmentioned();
            return Some(Wait::default());
        }
        let (mut access, switch, out) = self.access();
        access.take_out_refused(&mut reading, out);
        let waiting = |ends| switch.waiting_at(ends);
        let expected = access.expected(&reading, waiting);
        let mut batch = switch.begin_openings(asker, expected, now);
        let outcome = access.apply(&reading, &mut batch, out);
        let matched = outcome.matched;
        let changes = batch.added();
        let opening = opening(&access, &reading, outcome, changes, out);
        // The kernel marks packets before the answer goes back.
        batch.give_out_marks(out);
        let (opening, by_marks) = match changes {
            0 => (None, opening),
            _ => (opening, None),
        };
        // Also changes that closed an address to make room, or that restored flows.
        switch.open(asker, batch, opening);
        access.go_in(switch.take_moved());
        if !matched {
            return Some(Wait::default());
        }
        let written = access.written(&reading);
        let waits = written.map(|written| switch.wait_for(written));
        let wait = waits.fold(Wait::default(), Wait::and);
        if let Some(opening) = by_marks {
            switch.opened_by_group(opening, &wait, out);
        }
        self.classify(&reading);
        Some(wait)
    }

    /// The kernel may open further addresses of the name's class, if all that the rules ask for is in force.
    fn classify(&mut self, reading: &ReadAnswer) {
        let asker = reading.asked.asker;
        let (access, ..) = self.access();
        if !access.may_be_opened_by_kernel(asker) {
            return;
        }
        let in_force: Vec<_> = access.tags_in_force(reading).collect();
        for (is_ipv6, tag) in in_force {
            let names = self.names_at(asker);
            let class = names.and_then(|names| NameClass::of(&reading.answer.name, names, is_ipv6));
            if let Some(class) = class {
                let Told { cache, classes, .. } = &mut self.told;
                classes.open((asker, class), tag, cache.groups(), self.out.now());
            }
        }
        self.told.classes.give_out(&mut self.out);
    }

    /// Counts an answer that no rule mentions.
    fn unmentioned(&mut self) {
        self.out.counters.answers_unmatched += 1;
        self.out.counters.answers_unmentioned += 1;
    }

    /// The namespace of a port, if somebody wants to know the names that its pods ask for.
    fn records_of(&self, port: PortId) -> Option<&str> {
        let namespace = self.policy.namespace_of_names(&self.ports.get(port)?.row)?;
        self.recordings.are_of(namespace).then_some(namespace)
    }

    /// Records a name. One that leads into the cluster alone is no business of an EgressFirewall.
    fn record(&mut self, port: PortId, answer: &Answer) {
        let (mut access, ..) = self.access();
        let addresses = answer.addresses.iter().map(|(address, _)| *address);
        let addresses: Vec<IpAddr> = addresses
            .filter(|address| access.may_open(port, *address))
            .collect();
        let namespace = self.records_of(port).map(str::to_owned);
        if let Some(namespace) = namespace
            && !addresses.is_empty()
        {
            self.recordings.note(&namespace, &answer.name, &addresses);
        }
    }

    /// Takes over the cluster's own networks from OVN's rows, and a part of its addresses, or all.
    fn learn_networks(&mut self, are_all: bool, batch: &mut Batch) {
        let part = self.policy.waiting_addresses() / ADDRESS_PARTS;
        let most = match are_all {
            true => usize::MAX,
            false => part.max(ADDRESSES_PER_PART),
        };
        let changes = self.policy.take_cluster_changes(most);
        let recheck = changes.map(|changes| self.told.refused.learn(changes, &mut self.out));
        if let Some(recheck) = recheck {
            self.recheck(&recheck, batch);
        }
    }

    /// The addresses that are never opened have changed.
    fn recheck(&mut self, recheck: &Recheck, batch: &mut Batch) {
        if !recheck.is_empty() {
            let (mut access, switch, out) = self.access();
            let closed = access.recheck(recheck, batch, out);
            // What has ended there, and waits, may have been open until now.
            switch.end(batch, access.is_rechecked(recheck));
            self.end_earlier_at(&closed, batch.now());
        }
        if let Some(trusted) = self.answers.trusted() {
            let services_at = |address| self.policy.services_at(address);
            let refused = &mut self.told.refused;
            refused.look_at_resolvers(trusted, services_at, &mut self.out);
        }
    }

    fn veth_found(&mut self, interface: RowId, ifindex: u32) {
        let before = self.ports.at_veth(ifindex);
        if self.ports.found(interface, ifindex) {
            self.filter.outdate();
            if before.is_some() && before != self.ports.at_veth(ifindex) {
                // Of the port that had the index before.
                self.answers.forget_interface(ifindex);
            }
        }
    }

    /// The kernel has not taken the marks of these addresses: they get flows, which a pod pays for and waits for as for
    /// those of an answer.
    fn open_by_flows(&mut self, port: PortId, addresses: Vec<IpAddr>, now: Timestamp) {
        let (mut access, switch, out) = self.access();
        let expected = Expected {
            most: usize::MAX,
            denies: false,
        };
        let mut batch = switch.begin_openings(port, expected, now);
        for address in addresses {
            let before = batch.cost();
            access.mark_refused(port, address, &mut batch);
            let changes = batch.cost().since(before);
            access.budget.spend(port, changes, now);
        }
        batch.give_out_marks(out);
        switch.open(port, batch, None);
        access.go_in(switch.take_moved());
    }

    fn port_changed(&mut self, change: PortChange, batch: &mut Batch) {
        if let PortChange::Opened(port) | PortChange::Moved(port) = change {
            let of_pod = self.ports.of_pod(port);
            self.end_earlier_at(&of_pod, batch.now());
            if self.switch.is_start_over() {
                self.rules_change(&of_pod);
            }
        }
        let (mut access, _, out) = self.access();
        if let PortChange::Opened(port) | PortChange::Moved(port) = change {
            access.forget_classes(port, batch);
        }
        match change {
            PortChange::Opened(port) => {
                // A port that has taken the place of another one has its interface.
                let ifindex = access.ports.get(port).and_then(|port| port.ifindex);
                if let Some(ifindex) = ifindex {
                    access.cache.attached(port, ifindex, batch);
                }
                access.open_port(port, batch, out);
                self.filter.outdate();
            }
            PortChange::Moved(port) => {
                // Some networks are refused to the ports of a network alone.
                access.recheck_port(port, batch, out);
                access.replan(port, batch);
                // The kernel has no names at the ports of secondary networks.
                self.filter.outdate();
            }
            PortChange::Closed { port, ifindex } => {
                access.forget_classes(port, batch);
                access.cache.close(port, batch);
                access.budget.forget(port);
                out.forget(port);
                access.refused.forget(port);
                self.filter.outdate();
                if let Some(ifindex) = ifindex {
                    self.answers.forget_interface(ifindex);
                }
            }
        }
    }

    /// Rules, or where they are enforced, may be others.
    fn policy_touched(&mut self, touched: Touched, batch: &mut Batch) {
        let now = batch.now();
        let Touched { namespaces, ports } = touched;
        // Most namespaces of a cluster have no pod here.
        let is_filtered = |namespace: &String| self.filter.is_for(namespace);
        let are_filtered = namespaces.keys().any(is_filtered);
        let groups = self.policy.pair_namespaces(&namespaces, now);
        for namespace in namespaces.keys() {
            if self.policy.is_local(namespace) || self.filter.is_for(namespace) {
                self.switch.rules_changed(namespace, now);
            }
        }
        let named = ports.iter().filter_map(|name| self.ports.named(name));
        let mut concerned: BTreeMap<PortId, ChangedRules> =
            named.map(|port| (port, ChangedRules::All)).collect();
        // Some networks are refused to a namespace alone.
        let moved = self.policy.take_moved_groups();
        let mut of_others: BTreeSet<PortId> = concerned.keys().copied().collect();
        if !moved.is_empty() {
            let ports = self.ports.iter();
            let in_moved = ports.filter(|(_, port)| self.policy.is_in_any(&port.row, &moved));
            of_others.extend(in_moved.map(|(port, _)| port));
        }
        let (mut access, _, out) = self.access();
        for port in of_others {
            access.recheck_port(port, batch, out);
        }
        let mut edited = Vec::new();
        if !groups.is_empty() {
            for (id, port) in self.ports.iter() {
                for changed in self.policy.changed_for(&port.row, &groups) {
                    edited.push(id);
                    let nothing = || ChangedRules::Of(ChangedNames::new());
                    let known = concerned.entry(id).or_insert_with(nothing);
                    known.add(changed.clone());
                }
            }
        }
        if are_filtered || !concerned.is_empty() {
            self.filter.outdate();
        }
        let (mut access, ..) = self.access();
        let mut gone = BTreeSet::new();
        for (id, changed) in concerned {
            access.replan_changed(id, &changed, batch);
            let port = access.ports.get(id);
            if port.is_some_and(|port| access.policy.tunnel_keys(&port.row).is_none()) {
                gone.extend(access.ports.addresses(id));
            } else if changed == ChangedRules::All {
                edited.push(id);
            }
        }
        // After an edit, no flow of the former rules waits, and none of those that held for a logical port before.
        let are_edited = !edited.is_empty();
        self.rules_change(&edited);
        self.switch.rules_of_ports_change(&edited, now);
        self.end_earlier_at(&edited, now);
        let edited = self.access().0.senders(edited);
        if are_edited {
            self.switch.end(batch, |key| edited.have(key));
        }
        // Without its logical port, a pod reaches nothing. It may have another port with the same address, on another
        // network, and what the edit closes there does not wait.
        if !gone.is_empty() {
            let is_gone = |key: &FlowKey| {
                key.matches
                    .ends
                    .src()
                    .is_some_and(|src| gone.contains(&src))
                    && !edited.have(key)
            };
            self.switch.put_off(batch, is_gone);
        }
    }

    /// Plans for every address anew.
    fn replan_all(&mut self, batch: &mut Batch) {
        let ports: Vec<PortId> = self.ports.iter().map(|(id, _)| id).collect();
        let (mut access, ..) = self.access();
        for port in ports {
            access.replan(port, batch);
        }
    }

    /// The end of every input: the work for all changes together.
    fn finish(&mut self, changes: Option<Batch>, now: Timestamp) {
        // First of all, the kernel opens nothing more by rules that are not in force.
        let out_of_force = self.told.cache.groups_mut().take_out_of_force();
        self.told.classes.out_of_force(&out_of_force);
        let has_marks = self.told.cache.groups().are_marked();
        let refused = &mut self.told.refused;
        let addresses_wait = self.policy.waiting_addresses() > 0;
        if refused.give_out_networks((has_marks, addresses_wait), &mut self.out) {
            self.end_earlier(now);
        }
        self.told.classes.give_out(&mut self.out);
        if let Some(at) = self.told.cache.take_reading() {
            self.switch.read_counters(at);
        }
        // First the frames that are overdue: the switch's megaflows did not end their wait.
        self.hold.release_due(&mut self.out);
        let hold = &self.hold;
        let over = self.switch.revalidated(|batch| hold.awaits(batch), now);
        self.hold.waits_over(over, now);
        self.hold.release_due(&mut self.out);
        self.switch.find_dropping(&mut self.out);
        if self.switch.is_up() {
            self.policy.locate(&mut self.out);
        }
        self.update_filter();
        if self.switch.is_start_over() {
            self.access().0.forget_unmentioned();
        }
        if let Some(changes) = changes {
            self.commit(changes);
        }
        let (mut access, switch, out) = self.access();
        access.report_cut_plans(out);
        access.report_closed(out);
        switch.restore_lost(&mut access, out);
        access.go_in(switch.take_moved());
        if let Some(batches) = self.switch.settled() {
            self.hold.compared(&batches, now);
            self.record_rules();
            self.hold.release_due(&mut self.out);
        }
        if let Some(tables) = self.policy.take_changed_tables() {
            self.switch.monitor(tables, &mut self.out);
        }
        let with_marks = self.told.cache.groups().are_marked();
        if self.switch.is_comparison_due(now)
            && can_judge(&self.sources, &self.policy, &self.ports, with_marks)
        {
            if with_marks && self.told.classes.are_earlier_unknown() {
                // Before any flow of these rules is written that has a number of an earlier agent.
                let are_rules_same = self.are_rules_those_of_earlier_run();
                let interfaces = self.ports_of_earlier_run();
                let interfaces = interfaces.filter_map(|port| port.ifindex).collect();
                self.told.classes.decide_earlier(are_rules_same, interfaces);
                self.told.classes.give_out(&mut self.out);
            }
            self.switch.start_comparison(with_marks, &mut self.out);
        }
        if self.sources.are_read() {
            self.policy.tell_problems(&mut self.out);
        }
        let rest = || self.switch.is_compared() && self.ports.are_tried();
        if self.sources.become_ready(rest) {
            self.out.report(Report::Ready {
                attached: self.ports.with_veth(),
                firewalls: self.policy.firewall_count(),
                flows: self.flow_count(),
            });
        }
    }

    /// Brings the name filter in line with interfaces and EgressFirewalls.
    fn update_filter(&mut self) {
        if !self.sources.know_firewalls() || !self.filter.is_outdated() {
            return;
        }
        // A pod can be on many networks. Only the ways out of it take the room of the node.
        let ports = self.ports.iter().map(|(_, port)| port);
        let ports = ports.filter(|port| !self.ports.is_on_secondary_network(&port.row));
        let known = ports
            .filter_map(|port| Some((port.ifindex?, self.policy.namespace_of_names(&port.row)?)));
        let known: BTreeMap<u32, &str> = known.collect();
        let names_in = |namespace: &str, known| self.policy.names_in(namespace, known);
        let holds = |namespace: &str| self.policy.holds(namespace);
        self.filter.update(&known, names_in, holds, &mut self.out);
        let of_pods_in = |is_in: &dyn Fn(&str) -> bool| {
            let found = known.iter().filter(|(_, namespace)| is_in(namespace));
            found.map(|(ifindex, _)| *ifindex).collect()
        };
        let watched = of_pods_in(&|namespace| self.policy.enforced(namespace).is_some());
        let recorded = of_pods_in(&|namespace| self.recordings.are_of(namespace));
        self.filter.watch(watched, &mut self.out);
        self.filter.record(recorded, &mut self.out);
    }

    /// Whether names may end. A rule that was not read yet may deny them, and then they count for longer. The
    /// first comparison needs the names of the journal, whether or not their time is over.
    fn may_expire(&self) -> bool {
        self.sources.are_read() && self.switch.is_start_over()
    }

    fn commit(&mut self, batch: Batch) {
        self.switch
            .commit(batch, true, self.told.plans.planner(), &mut self.out);
        let moved = self.switch.take_moved();
        self.access().0.go_in(moved);
    }

    /// The program is attached to an interface, and marks the packets of its port.
    fn mark_at(&mut self, ifindex: u32, batch: &mut Batch) {
        if let Some(port) = self.ports.at_veth(ifindex)
            && self.told.cache.attached(port, ifindex, batch)
        {
            let (mut access, ..) = self.access();
            access.replan_port(port, batch);
        }
    }

    /// The access of the pods, the switch that enforces it, and the output of both.
    fn access(&mut self) -> (Access<'_>, &mut Switch, &mut Output) {
        let Self {
            ports,
            policy,
            told,
            switch,
            out,
            ..
        } = self;
        (Access::new(ports, policy, told), switch, out)
    }
}

/// Counts the outcome of an answer. Returns the opened addresses, to be reported once they are in force.
fn opening(
    access: &Access<'_>,
    reading: &ReadAnswer,
    outcome: Outcome,
    changes: usize,
    out: &mut Output,
) -> Option<Opening> {
    let Outcome {
        matched,
        rules,
        opened,
        would_open,
        ..
    } = outcome;
    if !matched {
        out.counters.answers_unmatched += 1;
        return None;
    }
    let Asked {
        asker,
        captured_at,
        is_timed,
        ..
    } = reading.asked;
    let name = reading.answer.name.clone();
    let row = &access.ports.get(asker)?.row;
    let rules = rules.into_iter().collect();
    if !would_open.is_empty() {
        out.counters.answers_dry_run += 1;
        let report = Report::WouldOpen {
            port: row.iface_id.clone(),
            name,
            addresses: would_open.into_iter().collect(),
            rules,
        };
        out.report_of_pod(asker, report);
        return None;
    }
    if opened.is_empty() {
        out.counters.answers_known += 1;
        return None;
    }
    out.counters.answers_opening += 1;
    Some(Opening {
        namespace: access.policy.namespace_of_rules(row).map(str::to_owned),
        port: row.iface_id.clone(),
        name,
        addresses: opened.into_iter().collect(),
        rules,
        changes,
        waits_since: is_timed.then_some(captured_at),
    })
}

/// Whether the wanted flows are known: else flows of an earlier run would be taken for foreign ones.
fn can_judge(sources: &Sources, policy: &Policy, ports: &Ports, with_marks: bool) -> bool {
    // Addresses with groups are planned for interfaces that the programs are attached to.
    let are_attached = !with_marks || ports.are_tried();
    sources.are_read() && policy.can_plan() && are_attached
}

fn addresses_of(servers: &BTreeSet<Resolver>) -> BTreeSet<IpAddr> {
    servers.iter().map(|server| server.address).collect()
}

/// Whether rules, ports or the pipeline may be others behind this input.
fn may_change_plans(input: &Input) -> bool {
    !matches!(
        input,
        Input::Applied { .. }
            | Input::Reply(FlowReply::Counted { .. } | FlowReply::Flows { .. })
            | Input::Marks { .. }
            | Input::MarksRefused(_)
            | Input::ClassesRefused(_)
            | Input::CountLost { .. }
            | Input::FlowLost { .. }
            | Input::ForeignFlow { .. }
            | Input::ForeignFlowGone { .. }
            | Input::Revalidation(_)
            | Input::Dropping(_)
            | Input::FilterConfirmed
            | Input::MegaflowsIdle(_)
            | Input::Record { .. }
            | Input::EndRecording { .. }
            | Input::Blocked { .. }
            | Input::Unblocked { .. }
    )
}

#[cfg(test)]
mod tests;
