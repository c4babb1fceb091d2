//! Stand-ins of the edges: each carries out a command as the edge would, and answers.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
};

use ipnet::IpNet;

use dnsflow_common::{
    key::CLASSES_MAX,
    walk::{self, Packet, Ports},
};

use super::{Node, frame, ifindex_of, sentinel_of};
use crate::{
    Command, Input, Timestamp,
    dns::{
        Response,
        opened::{self, Opened},
    },
    io::input::{
        AttachCommand, BatchError, BatchId, ClassChange, CookieCount, FlowQuestion, FlowReply,
        FoundFlow, Looked, MarkChange, MarkFound, MarkRefused, NameSetId,
    },
    ovn::rows::{RowId, Stage},
    values::{
        class::NameClass,
        connection::Path,
        flow::{Cookie, FlowChange, FlowKey, InstalledFlow, Sentinel},
        limits::{CLASS_RESTS, CacheLimits, MARK_SLACK},
        name::DomainName,
    },
};

/// A logical flow of the stage in which tags end.
const TAGS_END: RowId = RowId::new(0xe4d << 96);

/// The name filter in the kernel, and what it deferred.
#[derive(Debug, Default)]
pub struct Kernel {
    name_sets: BTreeMap<u32, NameSetId>,
    names: BTreeMap<NameSetId, BTreeSet<DomainName>>,
    unheld: BTreeSet<NameSetId>,
    /// Answers for names that no rule mentioned: interface, when the kernel saw it, frame.
    pub deferred: Vec<(u32, Timestamp, Vec<u8>)>,
    /// The interfaces whose attempts are told of.
    pub watched: BTreeSet<u32>,
    /// The interfaces whose answers all leave the kernel.
    pub recorded: BTreeSet<u32>,
    /// Whether the filter has no room, so that all answers leave the kernel.
    pub no_room: bool,
    /// Whether addresses of known classes are left to the agent all the same.
    pub opens_nothing: bool,
    /// The classes, and the marks of packets to their addresses.
    pub classes: BTreeMap<(u32, NameClass), u32>,
    /// Whether classes are refused.
    pub refuses_classes: bool,
    /// The elements that classes have or had.
    elements: ClassElements,
    /// The networks whose addresses it leaves to the agent.
    pub networks: BTreeSet<IpNet>,
}

/// The elements of the kernel's array of classes.
#[derive(Debug, Default)]
pub(crate) struct ClassElements {
    of: BTreeMap<(u32, NameClass), u32>,
    /// Since when no class has an element any more; `None` if one has.
    since: BTreeMap<u32, Option<Timestamp>>,
}

impl ClassElements {
    /// A class gets an element, which no program reads.
    #[track_caller]
    pub(crate) fn set(&mut self, element: u32, class: (u32, NameClass), now: Timestamp) {
        assert!(element < CLASSES_MAX);
        if let Some(before) = self.since.insert(element, None) {
            let has_rested = before.is_some_and(|since| since + CLASS_RESTS <= now);
            assert!(has_rested, "a program may read it: {element}, {before:?}");
        }
        let former = self.of.insert(class, element);
        assert!(former.is_none(), "the class has another one");
    }

    /// A class is gone.
    pub(crate) fn remove(&mut self, class: &(u32, NameClass), now: Timestamp) {
        let element = self.of.remove(class);
        self.since
            .extend(element.map(|element| (element, Some(now))));
    }
}

impl Kernel {
    /// Whether answers at an interface are held.
    pub fn holds(&self, ifindex: u32) -> bool {
        let name_set = self.name_sets.get(&ifindex);
        name_set.is_some_and(|name_set| !self.unheld.contains(name_set))
    }

    /// Whether an answer at an interface leaves the kernel.
    pub(super) fn passes(&self, ifindex: u32, bytes: &[u8]) -> bool {
        let Some(names) = self.name_sets.get(&ifindex).map(|id| &self.names[id]) else {
            return true;
        };
        if self.no_room {
            return true;
        }
        let Ok(Packet::UdpAnswer(message)) = walk::from_server(&bytes, &Ports::DNS) else {
            return true;
        };
        let message = message.payload_of(bytes).expect("a whole message");
        let Ok(Response { name, .. }) = Response::read(message) else {
            return true;
        };
        name.suffixes().any(|suffix| names.contains(suffix))
    }

    /// The mark of packets to the addresses of an answer, and these, if the kernel opens them by itself.
    fn opens(&self, ifindex: u32, bytes: &[u8]) -> Option<(u32, Opened)> {
        let names = self.name_sets.get(&ifindex).map(|id| &self.names[id])?;
        let Ok(Packet::UdpAnswer(message)) = walk::from_server(&bytes, &Ports::DNS) else {
            return None;
        };
        let Response { name, .. } = Response::read(message.payload_of(bytes)?).ok()?;
        let opened = opened::read(bytes, &Ports::DNS)?;
        let is_ipv6 = opened.addresses.first()?.is_ipv6();
        let class = NameClass::of(&name, names, is_ipv6)?;
        let mark = *self.classes.get(&(ifindex, class))?;
        let is_left = opened.addresses.iter().any(|one| self.leaves(*one));
        (!self.opens_nothing && !is_left).then_some((mark, opened))
    }

    /// Whether it leaves an address to the agent. There may be thousands of networks: a search through all of them would
    /// push the engine out of the processor's caches, and so falsify measurements.
    fn leaves(&self, address: IpAddr) -> bool {
        let single = IpNet::from(address);
        let mut networks = (0..=single.max_prefix_len())
            .filter_map(|prefix_len| Some(IpNet::new(address, prefix_len).ok()?.trunc()));
        networks.any(|network| self.networks.contains(&network))
    }
}

impl Node {
    /// The kernel opens the addresses of an answer, if it may. Returns whether it has.
    pub(super) fn open_in_kernel(&mut self, ifindex: u32, bytes: &[u8]) -> bool {
        let opens = self.kernel.opens(ifindex, bytes);
        // Its map is full.
        let Some((mark, opened)) = opens.filter(|_| !self.refuses_marks) else {
            return false;
        };
        let places: Vec<_> = opened
            .addresses
            .iter()
            .map(|address| (ifindex, *address))
            .collect();
        let marks = &mut self.marks;
        let is_other = |place| marks.get(place).is_some_and(|(known, ..)| *known != mark);
        if places.iter().any(is_other) {
            return false;
        }
        let CacheLimits {
            min_ttl, max_ttl, ..
        } = CacheLimits::default();
        let until = self.now + opened.ttl.max(min_ttl).min(max_ttl) + MARK_SLACK;
        for place in places {
            marks.entry(place).or_insert((mark, until, None));
        }
        true
    }

    /// Carries out the commands.
    pub fn obey(&mut self) {
        loop {
            self.engine.end_turn(self.now);
            self.reports.extend(self.engine.take_reports());
            self.journal.extend(self.engine.take_records());
            let commands = self.engine.take_commands();
            if commands.is_empty() {
                return;
            }
            for command in &commands {
                if let Command::Ask(FlowQuestion::Dump { number, .. }) = command {
                    self.dump = *number;
                }
            }
            if let Some(waiting) = &mut self.waiting {
                waiting.extend(commands);
                return;
            }
            for command in commands {
                self.log.push(command.clone());
                if let Some(answer) = self.carry_out(command) {
                    self.engine.handle(answer, self.now);
                }
            }
        }
    }

    /// Carries out the command that has waited longest. Returns whether there was one.
    pub fn carry_out_next(&mut self) -> bool {
        let Some(command) = self.waiting.as_mut().and_then(VecDeque::pop_front) else {
            return false;
        };
        self.log.push(command.clone());
        if let Some(answer) = self.carry_out(command) {
            self.engine.handle(answer, self.now);
        }
        self.obey();
        true
    }

    /// Carries out one command. Returns its answer, or the last of several.
    fn carry_out(&mut self, command: Command) -> Option<Input> {
        match command {
            Command::Attachment(AttachCommand::Attach { interface, .. }) => {
                let ifindex = ifindex_of(interface);
                Some(Input::Attached { interface, ifindex })
            }
            Command::Apply {
                batch,
                atomic,
                changes,
                count,
            } if self.switch_answers => {
                let refused = self.refused_of(&changes);
                let is_left_out = |at: usize| match atomic {
                    true => !refused.is_empty(),
                    false => refused.iter().any(|(index, _)| *index == at),
                };
                for (at, change) in changes.into_iter().enumerate() {
                    if !is_left_out(at) {
                        self.change_switch(change);
                    }
                }
                if !count.is_empty() {
                    let counted = self.counted(Some(batch), &count);
                    self.engine.handle(counted, self.now);
                }
                let result = match refused.is_empty() {
                    true => Ok(()),
                    false => Err(BatchError::Refused(refused)),
                };
                Some(Input::Applied { batch, result })
            }
            Command::Mark(changes) => {
                let mut refused = Vec::new();
                for change in changes {
                    match change {
                        MarkChange::Set {
                            ifindex, address, ..
                        } if self.refuses_marks => {
                            refused.push(MarkRefused { ifindex, address });
                        }
                        MarkChange::Set {
                            ifindex,
                            address,
                            mark,
                            until,
                        } => {
                            let place = (ifindex, address);
                            let before = self.marks.get(&place);
                            let used_at = before.and_then(|(.., used_at)| *used_at);
                            self.marks.insert(place, (mark, until, used_at));
                        }
                        MarkChange::Remove { ifindex, address } => {
                            self.marks.remove(&(ifindex, address));
                        }
                    }
                }
                (!refused.is_empty()).then_some(Input::MarksRefused(refused))
            }
            Command::ChangeClasses(changes) => {
                let mut refused = BTreeSet::new();
                for change in changes {
                    let Kernel {
                        classes,
                        elements,
                        refuses_classes,
                        ..
                    } = &mut self.kernel;
                    match change {
                        ClassChange::Set { element, .. } if *refuses_classes => {
                            refused.insert(element);
                        }
                        ClassChange::Set {
                            ifindex,
                            class,
                            mark,
                            element,
                        } => {
                            elements.set(element, (ifindex, class.clone()), self.now);
                            classes.insert((ifindex, class), mark);
                        }
                        ClassChange::Remove { ifindex, class } => {
                            let class = (ifindex, class);
                            elements.remove(&class, self.now);
                            classes.remove(&class);
                        }
                    }
                }
                (!refused.is_empty()).then_some(Input::ClassesRefused(refused))
            }
            Command::LeaveNetworks(changes) => {
                for (network, is_left) in changes {
                    match is_left {
                        true => self.kernel.networks.insert(network),
                        false => self.kernel.networks.remove(&network),
                    };
                }
                None
            }
            Command::EndEarlierOpening => {
                self.earlier_open = false;
                None
            }
            Command::ReadMarks if self.hides_marks => Some(self.marks(None, false)),
            Command::ReadMarks => {
                let marks = self.marks.iter();
                let found = marks.map(|(&(ifindex, address), &(mark, until, used_at))| MarkFound {
                    ifindex,
                    address,
                    mark,
                    until,
                    used_at,
                });
                // As the kernel does: some at a time, and the last may bring none.
                let found: Vec<_> = found.collect();
                for found in found.chunks(2) {
                    let found = self.marks(Some(found.to_vec()), true);
                    self.engine.handle(found, self.now);
                }
                Some(self.marks(Some(Vec::new()), false))
            }
            Command::Ask(FlowQuestion::Dump { number }) if self.switch_answers => {
                // As the switch does: some at a time, and the last may bring none.
                for flows in self.dump().chunks(2) {
                    let shown = shown(number, flows.to_vec(), true);
                    self.engine.handle(shown, self.now);
                }
                Some(shown(number, Vec::new(), false))
            }
            Command::Ask(FlowQuestion::Count(cookies)) => Some(self.counted(None, &cookies)),
            Command::Ask(FlowQuestion::Find(cookies)) => {
                Some(Input::Reply(FlowReply::Found(self.find(&cookies))))
            }
            Command::WatchLogicalFlows { priorities } => {
                Some(Input::LogicalFlowsWatched { priorities })
            }
            Command::SampleLogicalFlows(stage) => Some(Input::LogicalFlowSample {
                stage,
                flows: match stage {
                    Stage::Table(..) => vec![RowId::new(0x5eed << 96)],
                    Stage::OutPortSecurity => {
                        self.has_tags_end.then_some(TAGS_END).into_iter().collect()
                    }
                },
            }),
            Command::FilterNames { name_set, names } => {
                self.kernel.names.insert(name_set, names);
                None
            }
            Command::HoldAnswers { name_set, held } => {
                match held {
                    true => self.kernel.unheld.remove(&name_set),
                    false => self.kernel.unheld.insert(name_set),
                };
                None
            }
            Command::FilterInterface { ifindex, name_set } => {
                let name_sets = &mut self.kernel.name_sets;
                name_sets.remove(&ifindex);
                name_sets.extend(name_set.map(|id| (ifindex, id)));
                None
            }
            Command::ForgetNames { name_set } => {
                let in_use = self.kernel.name_sets.values().any(|used| *used == name_set);
                assert!(!in_use, "an interface without its names");
                self.kernel.names.remove(&name_set);
                None
            }
            Command::FindBlocked => Some(Input::Blocked {
                connections: self.blocked.clone(),
                more: false,
            }),
            Command::Unblock(connections) => {
                self.blocked
                    .retain(|blocked| !connections.contains(blocked));
                Some(Input::Unblocked {
                    unblocked: connections.len(),
                    failed: 0,
                })
            }
            Command::WatchAttempts { ifindex, watched } => {
                match watched {
                    true => self.kernel.watched.insert(ifindex),
                    false => self.kernel.watched.remove(&ifindex),
                };
                None
            }
            Command::RecordAnswers { ifindex, recorded } => {
                match recorded {
                    true => self.kernel.recorded.insert(ifindex),
                    false => self.kernel.recorded.remove(&ifindex),
                };
                None
            }
            Command::ReplayAnswers => {
                let mut deferred = std::mem::take(&mut self.kernel.deferred);
                deferred.retain(|(ifindex, captured_at, bytes)| {
                    let frame = frame(*ifindex, *captured_at, bytes);
                    self.engine.replay(frame, self.now)
                });
                self.kernel.deferred.append(&mut deferred);
                None
            }
            Command::ConfirmFilter => Some(Input::FilterConfirmed),
            Command::FindDropping(paths) => Some(Input::Dropping(self.dropping(paths))),
            Command::Release(_)
            | Command::Apply { .. }
            | Command::Ask(FlowQuestion::Dump { .. })
            | Command::Attachment(_)
            | Command::TrustResolvers(_)
            | Command::MonitorTables(_) => None,
        }
    }

    /// A part of a reading of the marks.
    fn marks(&self, found: Option<Vec<MarkFound>>, more: bool) -> Input {
        Input::Marks {
            found,
            more,
            records_wait: self.records_wait,
        }
    }

    /// The paths of these on which a megaflow drops.
    fn dropping(&self, paths: Vec<Path>) -> Looked {
        let Some(destinations) = &self.dropping else {
            return Looked::unknown(paths);
        };
        let drops = |path: &&Path| destinations.contains(&path.addresses.dst());
        Looked {
            dropping: paths.iter().filter(drops).cloned().collect(),
            unknown: Vec::new(),
        }
    }

    /// OVN's own flows: their actions are those that a test gave, else a drop.
    fn find(&self, cookies: &[u32]) -> Vec<FoundFlow> {
        let found = |&cookie: &u32| FoundFlow {
            cookie,
            table: match cookie == TAGS_END.prefix() {
                true => self.tags_end,
                false => self.ovn_table,
            },
            actions: self.ovn_actions.get(&cookie).cloned().unwrap_or_default(),
        };
        let cookies = cookies.iter().filter(|_| self.ovn_installed);
        cookies.map(found).collect()
    }

    /// What the switch says of OVN's flows with these cookies, one each.
    fn counted(&self, batch: Option<BatchId>, cookies: &[u32]) -> Input {
        let count = |&cookie: &u32| CookieCount {
            cookie,
            flows: 1,
            packets: self.ovn_packets.get(&cookie).copied().unwrap_or_default(),
        };
        let counts = cookies.iter().map(count).collect();
        Input::Reply(FlowReply::Counted { batch, counts })
    }

    /// The changes of these that the switch refuses, as the OpenFlow edge tells of them.
    fn refused_of(&self, changes: &[FlowChange]) -> Vec<(usize, String)> {
        let is_refused = |change: &FlowChange| matches!(change, FlowChange::Add(key, _) if self.refused.contains(key));
        let changes = changes.iter().enumerate();
        let refused = changes.filter(|(_, change)| is_refused(change));
        refused
            .map(|(index, _)| (index, "no such meter".to_owned()))
            .collect()
    }

    fn change_switch(&mut self, change: FlowChange) {
        match change {
            FlowChange::Add(key, body) if let Some(sentinel) = Sentinel::of(&key) => {
                assert!(body.cookie.is_of_sentinel() && body.hard_timeout_s > 0);
                self.sentinels.insert(sentinel, body.cookie);
                self.keep_flows_s = body.hard_timeout_s;
            }
            FlowChange::Delete(key, _) if let Some(sentinel) = Sentinel::of(&key) => {
                self.sentinels.remove(&sentinel);
                self.switch
                    .retain(|key, (cookie, _)| sentinel_of(key, *cookie) != sentinel);
            }
            FlowChange::Add(key, body) => {
                let sentinel = sentinel_of(&key, body.cookie);
                assert!(self.sentinels.contains_key(&sentinel), "it never goes");
                self.actions.insert(body.cookie, body.actions);
                self.switch.insert(key, (body.cookie, 0));
            }
            FlowChange::Delete(key, cookie) => {
                let found = self.switch.get(&key).map(|(found, _)| *found);
                if cookie.is_none_or(|cookie| found == Some(cookie)) {
                    self.switch.remove(&key);
                }
            }
            FlowChange::Renew(_) => {}
        }
    }

    /// The last dump that was asked for shows these flows.
    pub fn dump_shows(&mut self, flows: Vec<InstalledFlow>, more: bool) {
        self.give(shown(self.dump, flows, more));
    }

    /// The flows, without the sentinel flows, as a dump shows them.
    pub fn installed(&self) -> Vec<InstalledFlow> {
        let mut flows = self.dump();
        flows.retain(|flow| Sentinel::of(&flow.key).is_none());
        flows
    }

    fn dump(&self) -> Vec<InstalledFlow> {
        let installed = |key: FlowKey, cookie: Cookie, packets: u64| InstalledFlow {
            hard_timeout_s: match Sentinel::of(&key) {
                Some(_) => self.keep_flows_s,
                None => 0,
            },
            key,
            cookie,
            packets,
        };
        let flows = self.switch.iter();
        let sentinels = self.sentinels.iter();
        flows
            .map(|(key, (cookie, packets))| installed(key.clone(), *cookie, *packets))
            .chain(sentinels.map(|(sentinel, cookie)| installed(sentinel.key(), *cookie, 0)))
            .collect()
    }
}

/// A part of the dump with this number.
pub(crate) fn shown(number: u32, flows: Vec<InstalledFlow>, more: bool) -> Input {
    Input::Reply(FlowReply::Flows {
        number,
        flows,
        more,
    })
}
