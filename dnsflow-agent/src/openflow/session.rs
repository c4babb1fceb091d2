//! One OpenFlow connection without its socket: bytes and the time go in, bytes and events come out.
//!
//! ```text
//!  new            HELLO of the switch                 echo unanswered, malformed message
//!   |--> Greeting --------------------> Up ------------------------------------------> error
//! ```
//!
//! Changes take effect in the order of their commands. A plain batch is its flow_mods and a barrier. Its errors name
//! the xid of their flow_mod, and come before the barrier's reply. An atomic batch is a bundle in two steps. The
//! first step is OPEN, the additions and a barrier. The second step is DISCARD if an error came, else COMMIT. A
//! COMMIT in the first step would commit the good messages although a bad one was refused. Commands that arrive
//! between the two steps wait for the second.
//!
//! Flows can be counted by cookie, also between the flow_mods of a plain batch and its barrier: the switch then reads
//! the counters after it has taken the new flows. A count without an answer is not reported. While the monitor is
//! paused, no count is reported either: a count needs the monitor's reports about its flows ([`Event::CountLost`]).

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    sync::Arc,
    vec,
};

use bytes::BytesMut;
use dnsflow_core::{
    Timestamp,
    io::input::{BatchError, BatchId, CookieCount, FlowQuestion, FlowReply, FoundFlow},
    values::flow::{Cookie, Ends, FlowChange, FlowKey, InstalledFlow},
};

use super::{
    BATCHES_MAX, CHANGES_MAX, Event, IDLE_MAX, LostReason, OpenFlowCounters, ProtocolError,
    REQUESTS_MAX,
    error::SwitchError,
    shards::{SHARD_PAUSE, Shard, Shown, shards},
    wire::{self, BundleControl, FlowDesc, FlowUpdate, Message, MultipartReply},
};

/// The state of one connection. After an error it is of no further use but for [`Session::close`].
#[derive(Debug)]
pub struct Session {
    up: bool,
    input: BytesMut,
    output: BytesMut,
    events: VecDeque<Event>,
    next_xid: u32,
    /// Batches in flight, oldest first.
    batches: VecDeque<Batch>,
    /// Whether the youngest batch in flight is an atomic one that is still undecided.
    undecided: bool,
    /// The commands that wait for that decision.
    waiting: VecDeque<Command>,
    requests: BTreeMap<u32, Request>,
    /// The dump that is under way.
    dump: Option<Dump>,
    /// Another one that was asked for meanwhile.
    dump_again: Option<u32>,
    /// The number of flows in the last dump.
    shown: Shown,
    searches: BTreeMap<u32, Search>,
    counts: BTreeMap<u32, Count>,
    /// The cookies of the last count without a batch, without those of which a flow was removed
    /// since.
    counted: BTreeSet<u32>,
    monitored: BTreeSet<u8>,
    /// Tables in which flows of ours may be: those written to, read from and monitored.
    tables: BTreeSet<u8>,
    /// Those of them in which tags end.
    ends: BTreeSet<u8>,
    /// Whether the monitor is between PAUSED and RESUMED: it then also reports our own deletions,
    /// and not all changes.
    paused: bool,
    heard: Timestamp,
    probed: Option<Timestamp>,
    counters: OpenFlowCounters,
}

/// A request to a session.
#[derive(Debug)]
enum Command {
    Apply(Changes),
    Ask(FlowQuestion),
    MonitorTables(BTreeSet<u8>),
}

/// A batch to be sent.
#[derive(Debug)]
struct Changes {
    batch: BatchId,
    atomic: bool,
    changes: Vec<FlowChange>,
    /// The cookies to count behind the changes.
    count: Vec<u32>,
}

/// A batch in flight. Its flow_mods have the xids from `first` on, its [`Control`]s those behind.
#[derive(Debug)]
struct Batch {
    id: BatchId,
    first: u32,
    /// For each flow_mod, which change it belongs to.
    flow_mods: Vec<usize>,
    stage: Stage,
    errors: Vec<(usize, String)>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    /// A plain batch: the barrier's reply ends it.
    Plain,
    /// An atomic batch whose messages are being checked: the barrier's reply decides.
    Filling,
    /// An atomic batch that was committed or discarded: the reply or an error ends it.
    Deciding,
}

/// The messages that frame a batch's changes, in the order of their xids.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
enum Control {
    Barrier,
    /// Opens the bundle; its xid is the bundle's identifier.
    Open,
    /// Commits or discards it.
    Decision,
}

impl Batch {
    const CONTROLS: u32 = 3;

    fn xid(&self, control: Control) -> u32 {
        self.first + self.length() + control as u32
    }

    fn contains(&self, xid: u32) -> bool {
        (self.first..self.first + self.length() + Self::CONTROLS).contains(&xid)
    }

    /// The number of flow_mods. `allocate_xids` found room for them in 32 bits.
    fn length(&self) -> u32 {
        self.flow_mods.len() as u32
    }
}

/// A question in flight.
#[derive(Debug)]
enum Request {
    Dump,
    /// One question of the search with this number.
    Find(u32),
    /// One question of a count.
    Count {
        /// The count's number.
        number: u32,
        cookie: u32,
    },
    Monitor,
}

// The names of questions in refusals.
const DUMP: &str = "flow dump";
const FIND: &str = "look-up of cookies";
const COUNT: &str = "count of flows";
const MONITOR: &str = "flow monitor";

impl Request {
    fn name(&self) -> &'static str {
        match self {
            Self::Dump => DUMP,
            Self::Find(_) => FIND,
            Self::Count { .. } => COUNT,
            Self::Monitor => MONITOR,
        }
    }
}

/// A dump that is under way.
#[derive(Debug)]
struct Dump {
    /// Its number.
    number: u32,
    /// Those that are still to be asked for, …
    shards: vec::IntoIter<Shard>,
    /// … the next one then.
    next_at: Option<Timestamp>,
    shown: Shown,
}

/// A look-up of several cookies.
#[derive(Debug)]
struct Search {
    outstanding: usize,
    found: BTreeSet<FoundFlow>,
}

/// A count of the flows of several cookies.
#[derive(Debug)]
struct Count {
    batch: Option<BatchId>,
    outstanding: usize,
    counts: Vec<CookieCount>,
}

impl Session {
    /// A session on a connection that was made at `now`. Its hello is ready to be sent.
    pub fn new(now: Timestamp) -> Self {
        let mut session = Self {
            up: false,
            input: BytesMut::new(),
            output: BytesMut::new(),
            events: VecDeque::new(),
            next_xid: 1,
            batches: VecDeque::new(),
            undecided: false,
            waiting: VecDeque::new(),
            requests: BTreeMap::new(),
            dump: None,
            dump_again: None,
            shown: Shown::default(),
            searches: BTreeMap::new(),
            counts: BTreeMap::new(),
            counted: BTreeSet::new(),
            monitored: BTreeSet::new(),
            tables: BTreeSet::new(),
            ends: BTreeSet::new(),
            paused: false,
            heard: now,
            probed: None,
            counters: OpenFlowCounters::default(),
        };
        let xid = session.allocate_xids(1);
        wire::put_hello(&mut session.output, xid);
        session
    }

    /// Changes flows: all or nothing if `atomic`, else each by itself. [`Event::Applied`] always
    /// answers.
    ///
    /// Counts the flows with the cookies of `count` (OVN's: the upper half is zero) behind the changes, which then are
    /// not atomic. [`FlowReply::Counted`] comes before [`Event::Applied`], or not at all.
    pub fn apply(
        &mut self,
        batch: BatchId,
        atomic: bool,
        changes: Vec<FlowChange>,
        count: Vec<u32>,
    ) {
        let length = changes.len();
        let refusal = if !self.up {
            Err(BatchError::ConnectionLost)
        } else if self.batches.len() + self.waiting.len() >= BATCHES_MAX {
            refused(format!("{BATCHES_MAX} batches are outstanding"))
        } else if length > CHANGES_MAX {
            refused(format!(
                "{length} changes in one batch are more than {CHANGES_MAX}"
            ))
        } else {
            return self.submit(Command::Apply(Changes {
                batch,
                atomic: atomic && count.is_empty(),
                changes,
                count,
            }));
        };
        self.events.push_back(Event::Applied {
            batch,
            result: refusal,
        });
    }

    /// Asks a question; [`Event::Reply`] answers. Of the dumps that are asked for while one is under way, only the last
    /// one follows. [`Event::CountLost`] tells only of flows in monitored tables.
    pub fn ask(&mut self, question: FlowQuestion) {
        let name = match question {
            FlowQuestion::Dump { .. } => DUMP,
            FlowQuestion::Find(_) => FIND,
            FlowQuestion::Count(_) => COUNT,
        };
        self.request_later(name, Command::Ask(question));
    }

    /// Reports lost flows of exactly these tables from now on.
    pub fn monitor_tables(&mut self, tables: BTreeSet<u8>) {
        self.request_later(MONITOR, Command::MonitorTables(tables));
    }

    /// Takes bytes that the switch sent, in pieces of any size. Poll the events after each call.
    pub fn receive(&mut self, bytes: &[u8], now: Timestamp) -> Result<(), ProtocolError> {
        self.heard = now;
        self.probed = None;
        self.input.extend_from_slice(bytes);
        while let Some(message) = Message::split(&mut self.input)? {
            self.message(&message)?;
        }
        Ok(())
    }

    /// The next event, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Moves the bytes to be sent to the end of `output`.
    pub fn transmit(&mut self, output: &mut BytesMut) {
        if output.is_empty() {
            mem::swap(output, &mut self.output);
            self.output.clear();
        } else {
            output.unsplit(self.output.split());
        }
    }

    /// When [`Session::handle_timeout`] has to be called unless bytes come in before.
    pub fn next_deadline(&self) -> Timestamp {
        let next_part = self.dump.as_ref().and_then(|dump| dump.next_at);
        next_part.map_or(self.silent_at(), |at| at.min(self.silent_at()))
    }

    fn silent_at(&self) -> Timestamp {
        self.probed.unwrap_or(self.heard) + IDLE_MAX
    }

    /// Continues a dump; sends an echo request, or ends the session if the last one got no reply.
    pub fn handle_timeout(&mut self, now: Timestamp) -> Result<(), ProtocolError> {
        let dump = self.dump.as_mut();
        let next_part = dump.and_then(|dump| dump.next_at.take_if(|at| *at <= now));
        if next_part.is_some() {
            self.run_part();
        }
        if now < self.silent_at() {
            return Ok(());
        }
        if !self.up || self.probed.is_some() {
            return Err(ProtocolError::Silent);
        }
        self.probed = Some(now);
        let xid = self.allocate_xids(1);
        wire::put_echo(&mut self.output, wire::OFPT_ECHO_REQUEST, xid, &[]);
        Ok(())
    }

    /// Ends the session: every batch without a result gets [`BatchError::ConnectionLost`].
    pub fn close(&mut self) {
        self.up = false;
        let waiting = mem::take(&mut self.waiting);
        let lost = mem::take(&mut self.batches)
            .into_iter()
            .map(|batch| batch.id)
            .chain(waiting.into_iter().filter_map(|command| match command {
                Command::Apply(Changes { batch, .. }) => Some(batch),
                Command::Ask(_) | Command::MonitorTables(_) => None,
            }));
        self.events.extend(lost.map(|batch| Event::Applied {
            batch,
            result: Err(BatchError::ConnectionLost),
        }));
    }

    /// What this session has ignored; disconnects are not included.
    pub fn counters(&self) -> OpenFlowCounters {
        self.counters
    }

    /// Makes a request, or queues the request behind an undecided atomic batch.
    fn request_later(&mut self, request: &'static str, command: Command) {
        if !self.up {
            return;
        }
        if self.waiting.len() < BATCHES_MAX + REQUESTS_MAX {
            self.submit(command);
        } else {
            self.too_many(request);
        }
    }

    fn submit(&mut self, command: Command) {
        if self.undecided {
            self.waiting.push_back(command);
        } else {
            self.run(command);
        }
    }

    fn run(&mut self, command: Command) {
        match command {
            Command::Apply(changes) => self.run_apply(&changes),
            Command::Ask(FlowQuestion::Dump { number }) => self.run_dump(number),
            Command::Ask(FlowQuestion::Find(cookies)) => self.run_find(cookies),
            Command::Ask(FlowQuestion::Count(cookies)) => {
                self.run_count(None, &cookies);
                self.counted = cookies.into_iter().collect();
            }
            Command::MonitorTables(tables) => self.run_monitor(tables),
        }
    }

    /// A flow of ours may be in the table.
    fn note_table(&mut self, key: &FlowKey) {
        self.tables.insert(key.table);
        if matches!(key.matches.ends, Ends::AnyTag | Ends::Marked { .. }) {
            self.ends.insert(key.table);
        }
    }

    fn run_apply(&mut self, changes: &Changes) {
        let Changes {
            batch: id,
            atomic,
            changes,
            count,
        } = changes;
        let mut messages = Vec::with_capacity(changes.len());
        for (index, change) in changes.iter().enumerate() {
            match change {
                FlowChange::Add(key, _) | FlowChange::Delete(key, _) => {
                    self.note_table(key);
                    messages.push((index, key.table));
                }
                // Open vSwitch refuses OFPTT_ALL for OFPFC_MODIFY (OFPFMFC_BAD_TABLE_ID).
                FlowChange::Renew(_) => {
                    messages.extend(self.tables.iter().map(|&table| (index, table)));
                }
            }
        }
        // One message is atomic by itself.
        let atomic = *atomic && messages.len() > 1;
        let mut batch = Batch {
            id: *id,
            first: self.allocate_xids(messages.len() as u32 + Batch::CONTROLS),
            flow_mods: messages.iter().map(|&(index, _)| index).collect(),
            stage: if atomic { Stage::Filling } else { Stage::Plain },
            errors: Vec::new(),
        };
        let mark = self.output.len();
        let bundle = batch.xid(Control::Open);
        if atomic {
            wire::put_bundle_control(&mut self.output, bundle, bundle, BundleControl::Open);
        }
        for ((index, table), xid) in messages.into_iter().zip(batch.first..) {
            let (output, change) = (&mut self.output, &changes[index]);
            let put = if atomic {
                wire::put_bundle_add(output, xid, bundle, change, table)
            } else {
                wire::put_flow_mod(output, xid, change, table)
            };
            if let Err(error) = put {
                batch.errors.push((index, error.to_string()));
            }
        }
        if atomic && !batch.errors.is_empty() {
            self.output.truncate(mark);
            return self.finish(batch);
        }
        self.run_count(Some(*id), count);
        wire::put_barrier(&mut self.output, batch.xid(Control::Barrier));
        self.undecided = atomic;
        self.batches.push_back(batch);
    }

    fn run_dump(&mut self, number: u32) {
        if self.dump.is_some() {
            self.dump_again = Some(number);
            return;
        }
        self.dump = Some(Dump {
            number,
            shards: shards(self.shown, &self.ends).into_iter(),
            next_at: None,
            shown: Shown::default(),
        });
        self.run_part();
    }

    /// Asks for the next shard of the dump, if there is one.
    fn run_part(&mut self) {
        let shard = self.dump.as_mut().and_then(|dump| dump.shards.next());
        let request = shard.and_then(|shard| Some((shard, self.request(Request::Dump)?)));
        match request {
            Some((shard, xid)) => {
                let (cookie, mask) = shard.cookies();
                wire::put_flow_desc_request(&mut self.output, xid, cookie, mask, shard);
            }
            None => self.dump_done(),
        }
    }

    fn run_find(&mut self, cookies: Vec<u32>) {
        let cookies: BTreeSet<u32> = cookies.into_iter().collect();
        if cookies.is_empty() {
            return self.reply(FlowReply::Found(Vec::new()));
        }
        if self.requests.len() + cookies.len() > REQUESTS_MAX {
            return self.too_many(FIND);
        }
        let number = self.allocate_xids(1);
        self.searches.insert(
            number,
            Search {
                outstanding: cookies.len(),
                found: BTreeSet::new(),
            },
        );
        for cookie in cookies {
            if let Some(xid) = self.request(Request::Find(number)) {
                let cookie = cookie.into();
                wire::put_flow_desc_request(&mut self.output, xid, cookie, u64::MAX, Shard::All);
            }
        }
    }

    fn run_count(&mut self, batch: Option<BatchId>, cookies: &[u32]) {
        if cookies.is_empty() || self.requests.len() + cookies.len() > REQUESTS_MAX {
            return;
        }
        let number = self.allocate_xids(1);
        let count = Count {
            batch,
            outstanding: cookies.len(),
            counts: Vec::with_capacity(cookies.len()),
        };
        self.counts.insert(number, count);
        for &cookie in cookies {
            if let Some(xid) = self.request(Request::Count { number, cookie }) {
                wire::put_aggregate_request(&mut self.output, xid, cookie.into());
            }
        }
    }

    fn run_monitor(&mut self, tables: BTreeSet<u8>) {
        let old = mem::take(&mut self.monitored);
        for &table in old.symmetric_difference(&tables) {
            if let Some(xid) = self.request(Request::Monitor) {
                let watch = tables.contains(&table);
                wire::put_flow_monitor_request(&mut self.output, xid, table, watch);
            }
        }
        self.tables.extend(&tables);
        self.monitored = tables;
    }

    /// Notes a question. If too many are in flight: `None`, and a refusal.
    fn request(&mut self, request: Request) -> Option<u32> {
        if self.requests.len() >= REQUESTS_MAX {
            self.too_many(request.name());
            return None;
        }
        let xid = self.allocate_xids(1);
        self.requests.insert(xid, request);
        Some(xid)
    }

    fn too_many(&mut self, request: &'static str) {
        self.events.push_back(Event::Refused {
            request,
            reason: format!("{REQUESTS_MAX} questions are outstanding"),
        });
    }

    /// The first of `count` consecutive transaction identifiers. Zero is left out: the switch's own
    /// messages have it.
    fn allocate_xids(&mut self, count: u32) -> u32 {
        let first = match self.next_xid.checked_add(count) {
            Some(_) => self.next_xid,
            None => 1,
        };
        self.next_xid = first + count;
        first
    }

    fn message(&mut self, message: &Message) -> Result<(), ProtocolError> {
        if !self.up {
            return self.greeting(message);
        }
        if message.version != wire::VERSION {
            return Err(ProtocolError::Version(message.version));
        }
        match message.kind {
            wire::OFPT_ECHO_REQUEST => {
                let (output, kind) = (&mut self.output, wire::OFPT_ECHO_REPLY);
                wire::put_echo(output, kind, message.xid, &message.body);
            }
            wire::OFPT_ECHO_REPLY => {}
            wire::OFPT_BARRIER_REPLY => self.barrier_reply(message.xid),
            wire::OFPT_BUNDLE_CONTROL => self.bundle_reply(message.xid),
            wire::OFPT_MULTIPART_REPLY => self.multipart_reply(message)?,
            wire::OFPT_ERROR => self.error(message.xid, &SwitchError::parse(&message.body)?),
            _ => self.counters.unexpected_messages += 1,
        }
        Ok(())
    }

    fn greeting(&mut self, message: &Message) -> Result<(), ProtocolError> {
        match message.kind {
            wire::OFPT_HELLO if wire::hello_accepts(message)? => {
                self.up = true;
                self.events.push_back(Event::Up);
                Ok(())
            }
            wire::OFPT_HELLO => Err(ProtocolError::NoCommonVersion(format!(
                "its hello is of version {:#04x}",
                message.version
            ))),
            wire::OFPT_ERROR => Err(ProtocolError::NoCommonVersion(
                SwitchError::parse(&message.body)?.to_string(),
            )),
            other => Err(ProtocolError::NoHello(other)),
        }
    }

    fn barrier_reply(&mut self, xid: u32) {
        let is_it = |batch: &Batch| batch.xid(Control::Barrier) == xid;
        let Some(at) = self.batches.iter().position(is_it) else {
            self.counters.unexpected_messages += 1;
            return;
        };
        let batch = &mut self.batches[at];
        match batch.stage {
            Stage::Plain => self.finish_at(at),
            Stage::Filling => {
                batch.stage = Stage::Deciding;
                let decision = if batch.errors.is_empty() {
                    BundleControl::Commit
                } else {
                    BundleControl::Discard
                };
                let bundle = batch.xid(Control::Open);
                let xid = batch.xid(Control::Decision);
                wire::put_bundle_control(&mut self.output, xid, bundle, decision);
                self.undecided = false;
                while !self.undecided
                    && let Some(command) = self.waiting.pop_front()
                {
                    self.run(command);
                }
            }
            Stage::Deciding => self.counters.unexpected_messages += 1,
        }
    }

    /// The replies to a bundle's decision and to its opening.
    fn bundle_reply(&mut self, xid: u32) {
        let is_it = |batch: &Batch| batch.xid(Control::Decision) == xid;
        if let Some(at) = self.batches.iter().position(is_it) {
            self.finish_at(at);
        }
    }

    fn error(&mut self, xid: u32, error: &SwitchError<'_>) {
        if let Some(at) = self.batches.iter().position(|batch| batch.contains(xid)) {
            let batch = &mut self.batches[at];
            let at_message = (xid - batch.first) as usize;
            if let Some(&change) = batch.flow_mods.get(at_message) {
                batch.errors.push((change, error.to_string()));
            } else if batch.errors.is_empty() {
                // If the bundle fails as a whole, this is its only error; otherwise it only says
                // that a message has failed.
                batch
                    .errors
                    .push((0, format!("the bundle as a whole: {error}")));
            }
            if xid == batch.xid(Control::Decision) {
                self.finish_at(at);
            }
        } else if let Some(Request::Count { number, .. }) = self.requests.get(&xid) {
            self.counts.remove(number);
            self.requests.remove(&xid);
        } else if let Some(request) = self.requests.remove(&xid) {
            self.events.push_back(Event::Refused {
                request: request.name(),
                reason: error.to_string(),
            });
            match request {
                Request::Dump => self.dump_done(),
                Request::Find(number) => drop(self.searches.remove(&number)),
                Request::Count { .. } | Request::Monitor => {}
            }
        } else {
            self.counters.unexpected_messages += 1;
        }
    }

    fn reply(&mut self, reply: FlowReply) {
        self.events.push_back(Event::Reply(reply));
    }

    fn finish_at(&mut self, at: usize) {
        if let Some(batch) = self.batches.remove(at) {
            self.finish(batch);
        }
    }

    fn finish(&mut self, batch: Batch) {
        self.events.push_back(Event::Applied {
            batch: batch.id,
            result: if batch.errors.is_empty() {
                Ok(())
            } else {
                Err(BatchError::Refused(batch.errors))
            },
        });
    }

    fn multipart_reply(&mut self, message: &Message) -> Result<(), ProtocolError> {
        let reply = MultipartReply::parse(&message.body)?;
        match reply.kind {
            wire::OFPMP_FLOW_DESC => self.flow_descs(message.xid, &reply),
            wire::OFPMP_AGGREGATE_STATS => self.counted(message.xid, &reply),
            wire::OFPMP_FLOW_MONITOR => {
                if !reply.more && matches!(self.requests.get(&message.xid), Some(Request::Monitor))
                {
                    self.requests.remove(&message.xid);
                }
                for update in reply.flow_updates() {
                    self.flow_update(update?);
                }
                Ok(())
            }
            _ => {
                self.counters.unexpected_messages += 1;
                Ok(())
            }
        }
    }

    fn flow_descs(&mut self, xid: u32, reply: &MultipartReply<'_>) -> Result<(), ProtocolError> {
        match self.requests.get_mut(&xid) {
            Some(Request::Dump) => {
                let mut flows = Vec::new();
                for desc in reply.flow_descs() {
                    match installed(desc?) {
                        Some(mut flow) => {
                            self.note_table(&flow.key);
                            share(&mut flow, flows.last());
                            flows.push(flow);
                        }
                        None => self.counters.unreadable_flows += 1,
                    }
                }
                let Some(dump) = &mut self.dump else {
                    return Ok(());
                };
                dump.shown.count(&flows);
                let is_last = !reply.more && dump.shards.as_slice().is_empty();
                if !reply.more {
                    self.requests.remove(&xid);
                    dump.next_at = Some(self.heard + SHARD_PAUSE);
                }
                let (number, shown) = (dump.number, dump.shown);
                self.reply(FlowReply::Flows {
                    number,
                    flows,
                    more: !is_last,
                });
                if is_last {
                    self.shown = shown;
                    self.dump_done();
                }
            }
            Some(Request::Find(number)) => {
                let number = *number;
                if !reply.more {
                    self.requests.remove(&xid);
                }
                // The search is gone if another question of it was refused.
                let Some(search) = self.searches.get_mut(&number) else {
                    return Ok(());
                };
                for desc in reply.flow_descs() {
                    let desc = desc?;
                    if let Ok(cookie) = u32::try_from(desc.cookie) {
                        search.found.insert(FoundFlow {
                            cookie,
                            table: desc.table,
                            actions: desc.actions.to_vec(),
                        });
                    }
                }
                search.outstanding -= usize::from(!reply.more);
                if search.outstanding == 0 {
                    let found = mem::take(&mut search.found);
                    self.searches.remove(&number);
                    let found = found.into_iter().collect();
                    self.reply(FlowReply::Found(found));
                }
            }
            Some(Request::Count { .. } | Request::Monitor) | None => {
                self.counters.unexpected_messages += 1;
            }
        }
        Ok(())
    }

    fn counted(&mut self, xid: u32, reply: &MultipartReply<'_>) -> Result<(), ProtocolError> {
        let Some(&Request::Count { number, cookie }) = self.requests.get(&xid) else {
            self.counters.unexpected_messages += 1;
            return Ok(());
        };
        self.requests.remove(&xid);
        let wire::Stats { flows, packets, .. } = reply.aggregate()?;
        // The count is gone if another question of it was refused.
        let Some(count) = self.counts.get_mut(&number) else {
            return Ok(());
        };
        count.counts.push(CookieCount {
            cookie,
            flows,
            packets,
        });
        count.outstanding -= 1;
        if count.outstanding == 0
            && let Some(Count { batch, counts, .. }) = self.counts.remove(&number)
            && !self.paused
        {
            self.reply(FlowReply::Counted { batch, counts });
        }
        Ok(())
    }

    fn dump_done(&mut self) {
        self.dump = None;
        if let Some(number) = self.dump_again.take() {
            self.ask(FlowQuestion::Dump { number });
        }
    }

    fn flow_update(&mut self, update: FlowUpdate) {
        let (table, priority, cookie, matches, lost) = match update {
            FlowUpdate::Paused => {
                self.paused = true;
                return;
            }
            FlowUpdate::Resumed => {
                self.paused = false;
                self.events.push_back(Event::MonitorGap);
                return;
            }
            FlowUpdate::Uninteresting => return,
            _ if self.paused => return,
            FlowUpdate::Changed {
                table,
                priority,
                cookie,
                matches,
                lost,
            } => (table, priority, cookie, matches, lost),
        };
        let ours = Cookie::from_switch(cookie);
        if lost.is_some_and(|reason| reason != LostReason::Modified)
            && let Ok(cookie) = u32::try_from(cookie)
            && self.counted.remove(&cookie)
        {
            self.events.push_back(Event::CountLost { cookie });
        }
        let Some(matches) = matches else {
            self.counters.unreadable_flows += u64::from(ours.is_some());
            return;
        };
        let key = FlowKey {
            table,
            priority,
            matches,
        };
        match (ours, lost) {
            (Some(cookie), Some(reason)) => {
                self.events.push_back(Event::FlowLost {
                    key,
                    cookie,
                    reason,
                });
            }
            // Another agent of ours wrote the same flow: one cookie stands for one action list.
            (Some(_), None) => {}
            (None, Some(LostReason::Modified) | None) => {
                self.events.push_back(Event::ForeignFlow { key, cookie });
            }
            (None, Some(_)) => self.events.push_back(Event::ForeignFlowGone { key }),
        }
    }
}

/// A batch refused before anything was sent.
fn refused(text: String) -> Result<(), BatchError> {
    Err(BatchError::Refused(vec![(0, text)]))
}

/// Shares register tests with the flow before: flows of one rule come together and have the same
/// tests.
fn share(flow: &mut InstalledFlow, before: Option<&InstalledFlow>) {
    if let Some(before) = before
        && before.key.matches.registers == flow.key.matches.registers
    {
        flow.key.matches.registers = Arc::clone(&before.key.matches.registers);
    }
}

/// Converts a flow of ours; `None` if it is not ours, or if [`FlowKey::matches`] cannot hold its match.
fn installed(desc: FlowDesc<'_>) -> Option<InstalledFlow> {
    Some(InstalledFlow {
        key: FlowKey {
            table: desc.table,
            priority: desc.priority,
            matches: desc.matches?,
        },
        cookie: Cookie::from_switch(desc.cookie)?,
        packets: desc.stats.packets,
        hard_timeout_s: desc.hard_timeout_s,
    })
}

#[cfg(test)]
mod tests;
