//! The inputs of the core, and its commands.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    time::Duration,
};

use ipnet::IpNet;

use crate::{
    Timestamp,
    ovn::rows::{InterfaceUpdate, MacAddress, NbUpdate, RowId, SbUpdate, Stage},
    values::{
        class::NameClass,
        connection::{BlockedConnection, Path},
        firewall::FirewallUpdate,
        flow::{Cookie, FlowChange, FlowKey, InstalledFlow},
        ids::RecordingId,
        name::DomainName,
        resolver::Resolver,
    },
};

/// A frame that the TC program copied off a veth, Ethernet header first.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// When the kernel saw the packet.
    pub captured_at: Timestamp,
    /// The bytes captured.
    pub bytes: &'a [u8],
    /// Whether the pod sent it, to a DNS server over TCP; else it is for the pod.
    pub from_pod: bool,
    /// Whether it was taken off the wire, and must be released ([`Command::Release`]).
    pub held: bool,
    /// Whether the kernel has opened its addresses ([`Command::ChangeClasses`]).
    pub opened: bool,
    /// The bytes of data in each piece that the kernel cuts a long TCP segment into (`gso_size`);
    /// zero if the frame is not to be cut.
    pub gso_size: u16,
    /// How many packets of this interface the programs had left out before this one, modulo 2^32: TCP connections whose
    /// segments may be among them are given up.
    pub left_out: u32,
}

impl Frame<'_> {
    /// The frame with bytes of its own, to be released later.
    pub(crate) fn to_held(self) -> HeldFrame {
        HeldFrame {
            ifindex: self.ifindex,
            bytes: self.bytes.into(),
            gso_size: self.gso_size,
            captured_at: self.captured_at,
            is_overrun: false,
        }
    }
}

/// A frame to be released unchanged.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HeldFrame {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// Its bytes, Ethernet header first.
    pub bytes: Box<[u8]>,
    /// As in [`Frame`].
    pub gso_size: u16,
    /// As in [`Frame`].
    pub captured_at: Timestamp,
    /// Whether the frame was held for as long as is allowed, and its wait is not over.
    pub is_overrun: bool,
}

/// The addresses of a pod's port: those that OVN's port security lets the pod send from. Only questions from these
/// addresses count.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SourceAddresses {
    /// The Ethernet address; `None` stands for any.
    pub mac: Option<MacAddress>,
    /// The IP addresses; without one, nothing counts.
    pub ips: Vec<IpAddr>,
}

/// The number of a name set. There is one for each namespace, shared by its interfaces.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NameSetId(pub u32);

/// The number of a [`Command::Apply`], which its result repeats.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BatchId(pub u64);

/// A change of the addresses whose packets the program on a pod's veth marks.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum MarkChange {
    /// Mark packets to an address.
    Set {
        /// The interface index of the veth's host side.
        ifindex: u32,
        /// The address.
        address: IpAddr,
        /// The bits of the mark, within the mask.
        mark: u32,
        /// Not any more from then on, whatever becomes of the agent.
        until: Timestamp,
    },
    /// Mark them no longer.
    Remove {
        /// The interface index of the veth's host side.
        ifindex: u32,
        /// The address.
        address: IpAddr,
    },
}

/// A change of the classes of names whose addresses the kernel opens by itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ClassChange {
    /// Open addresses of this class.
    Set {
        /// The interface index of the veth's host side.
        ifindex: u32,
        /// The class.
        class: NameClass,
        /// The bits of the mark of packets to them, within the mask.
        mark: u32,
        /// The element of the kernel's array that it gets. No program reads it.
        element: u32,
    },
    /// Open them no longer.
    Remove {
        /// The interface index of the veth's host side.
        ifindex: u32,
        /// The class.
        class: NameClass,
    },
}

/// An address whose packets are marked, as the kernel has it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MarkFound {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// The address.
    pub address: IpAddr,
    /// The bits of the mark.
    pub mark: u32,
    /// Packets are not marked any more from then on.
    pub until: Timestamp,
    /// When a packet was last marked, if one was.
    pub used_at: Option<Timestamp>,
}

/// An address whose packets the kernel does not mark as it was told.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MarkRefused {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// The address.
    pub address: IpAddr,
}

/// The result of a look at the datapath ([`Command::FindDropping`]).
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Looked {
    /// The paths on which a megaflow drops.
    pub dropping: Vec<Path>,
    /// The paths that the datapath could not be asked about.
    pub unknown: Vec<Path>,
}

impl Looked {
    /// The datapath could not be asked about these paths, which are all.
    pub fn unknown(paths: Vec<Path>) -> Self {
        Self {
            dropping: Vec::new(),
            unknown: paths,
        }
    }
}

/// Why the switch refused a batch.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BatchError {
    /// OpenFlow error messages: index of the change, and the error's text.
    #[error("the switch refused {} of the changes, the first: {}", .0.len(), .0.first().map_or("", |(_, text)| text))]
    Refused(Vec<(usize, String)>),
    /// The connection was lost before the barrier was answered.
    #[error("the connection to the switch was lost")]
    ConnectionLost,
}

/// A table of a database that is larger than its limits.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LargeTable {
    /// The database.
    pub database: &'static str,
    /// The table.
    pub table: &'static str,
    /// The limit.
    pub limit: String,
    /// The purpose of the table.
    pub purpose: &'static str,
    /// How people bring the table below its limit, or do without it.
    pub remedy: &'static str,
    /// Whether the agent goes on without the table. If not, it reads nothing new of the database.
    pub is_left_out: bool,
}

impl fmt::Display for LargeTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            database,
            table,
            limit,
            purpose,
            remedy,
            is_left_out,
        } = self;
        write!(
            f,
            "table {table} of {database} (for {purpose}) has more than {limit}, and "
        )?;
        f.write_str(match is_left_out {
            true => "is left out",
            false => "nothing new is read of the database",
        })?;
        write!(f, "; {remedy}")
    }
}

/// Something that happened, beside the frames that pass the veths.
#[derive(Clone, Debug)]
pub enum Input {
    /// The local Open_vSwitch database changed.
    Interfaces(InterfaceUpdate),
    /// The OVN northbound database changed.
    Nb(NbUpdate),
    /// The OVN southbound database changed.
    Sb(SbUpdate),
    /// The tables of a database that are too large are others than before.
    LargeTables {
        /// The database.
        database: &'static str,
        /// All tables of it that are too large.
        tables: Vec<LargeTable>,
    },
    /// EgressFirewalls changed.
    Firewalls(FirewallUpdate),
    /// The veth of this interface was found. The programs are about to be attached: from now on,
    /// frames of it can come.
    Found {
        /// The `Interface` row.
        interface: RowId,
        /// The interface index of the veth's host side.
        ifindex: u32,
    },
    /// The programs are attached to this interface's veth.
    Attached {
        /// The `Interface` row.
        interface: RowId,
        /// The interface index of the veth's host side.
        ifindex: u32,
    },
    /// The programs could not be attached (the veth may not exist yet); the edge tries again.
    AttachFailed {
        /// The `Interface` row.
        interface: RowId,
        /// The reason, for people.
        reason: String,
    },
    /// Somebody records the names that the pods of a namespace ask for.
    Record {
        /// The number that the recording gets.
        id: RecordingId,
        /// The namespace.
        namespace: String,
        /// For how long, [`TIME_MAX`](crate::pods::recording::TIME_MAX) at most.
        time: Duration,
    },
    /// Nobody wants to know that any more.
    EndRecording {
        /// Which recording.
        id: RecordingId,
    },
    /// The OpenFlow connection is ready for commands.
    SwitchUp,
    /// The OpenFlow connection is lost.
    SwitchDown,
    /// The result of [`Command::Apply`].
    Applied {
        /// Which batch.
        batch: BatchId,
        /// `Ok` once the barrier's reply was read.
        result: Result<(), BatchError>,
    },
    /// The answer to [`Command::ReadMarks`], or a part of it; `None` if the kernel does not let them be read.
    Marks {
        /// The marks.
        found: Option<Vec<MarkFound>>,
        /// Whether more follow.
        more: bool,
        /// Whether records of earlier agents' programs wait. They have the names of marks that these have set.
        records_wait: bool,
    },
    /// The kernel has refused marks ([`Command::Mark`]); it may have no room.
    MarksRefused(Vec<MarkRefused>),
    /// The kernel has refused the classes of these elements ([`Command::ChangeClasses`]), or has lost them.
    ClassesRefused(BTreeSet<u32>),
    /// The switch has replied to [`Command::Ask`], or counted for a [`Command::Apply`].
    Reply(FlowReply),
    /// A counted flow was removed, and its counter with it.
    CountLost {
        /// Its cookie.
        cookie: u32,
    },
    /// Someone else removed or replaced a flow of ours (flow monitor), or it timed out.
    FlowLost {
        /// Which flow.
        key: FlowKey,
        /// The cookie it had.
        cookie: Cookie,
    },
    /// Someone else wrote a flow of the shape of ours, or changed it.
    ForeignFlow {
        /// Which flow.
        key: FlowKey,
        /// The cookie that it has.
        cookie: u64,
    },
    /// Such a flow is gone.
    ForeignFlowGone {
        /// Which flow.
        key: FlowKey,
    },
    /// The DNS servers of the cluster, all of them.
    Resolvers(BTreeSet<Resolver>),
    /// The DNS cache of this node, all of its addresses.
    DnsCache(BTreeSet<Resolver>),
    /// The addresses of this node's interfaces, all of them.
    NodeAddresses(BTreeSet<IpAddr>),
    /// The networks that the API server takes the addresses of Services from, all of them.
    ServiceNetworks(BTreeSet<IpNet>),
    /// How long a pass of the revalidators takes behind a change of flows.
    Revalidation(Duration),
    /// The result of [`Command::FindDropping`].
    Dropping(Looked),
    /// The longest time for which the switch keeps a megaflow after its last packet.
    MegaflowsIdle(Duration),
    /// The flow monitor left out changes: flows may have been lost unseen.
    MonitorGap,
    /// The result of [`Command::ConfirmFilter`].
    FilterConfirmed,
    /// The switch refused a question, which gets no other answer.
    QuestionRefused,
    /// The result of [`Command::SampleLogicalFlows`].
    LogicalFlowSample {
        /// As asked.
        stage: Stage,
        /// Rows of that stage, at most [`LOGICAL_FLOW_SAMPLE_MAX`].
        flows: Vec<RowId>,
    },
    /// The result of [`Command::WatchLogicalFlows`]: every logical flow that has one of these
    /// priorities has been reported.
    LogicalFlowsWatched {
        /// As asked.
        priorities: BTreeSet<u16>,
    },
    /// The result of [`Command::FindBlocked`]: some of the connections that OVN has blocked; none
    /// if they could not be read.
    Blocked {
        /// Some of them, in the pods' conntrack zones.
        connections: Vec<BlockedConnection>,
        /// Whether others follow.
        more: bool,
    },
    /// The result of [`Command::Unblock`].
    Unblocked {
        /// How many were unblocked.
        unblocked: usize,
        /// The number of those that could not be unblocked. Ended connections are in neither
        /// number.
        failed: usize,
    },
}

/// A question about the switch's flows.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FlowQuestion {
    /// Which flows of dnsflow are there? [`FlowReply::Flows`] answers.
    Dump {
        /// It comes back with the answers: one of before may still be on its way.
        number: u32,
    },
    /// Which flows have these cookies, in any table? [`FlowReply::Found`] answers. The cookies are
    /// OVN's, whose upper half is zero.
    Find(Vec<u32>),
    /// How many packets have the flows with these cookies matched, in any table?
    /// [`FlowReply::Counted`] answers, or nothing does. From now on, [`Input::CountLost`] comes when
    /// one of the flows is removed.
    Count(Vec<u32>),
}

/// The switch's reply to a [`FlowQuestion`]. If the switch refuses, [`Input::QuestionRefused`] comes instead.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FlowReply {
    /// Flows of dnsflow, as many as came in one message.
    Flows {
        /// The number of the dump.
        number: u32,
        /// Some of them.
        flows: Vec<InstalledFlow>,
        /// Whether others follow.
        more: bool,
    },
    /// The flows with the cookies asked for, in their order, each once.
    Found(Vec<FoundFlow>),
    /// The counters of the flows with the cookies asked for, or with those of a [`Command::Apply`]. In
    /// the second case, [`Input::Applied`] follows.
    Counted {
        /// The batch behind whose changes the flows were counted, if there was one.
        batch: Option<BatchId>,
        /// One for each cookie.
        counts: Vec<CookieCount>,
    },
}

/// The counters of OVN's flows with one cookie.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CookieCount {
    /// Their cookie: the first 32 bits of the logical flow's row id.
    pub cookie: u32,
    /// How many they are.
    pub flows: u32,
    /// The packets that all of them have matched.
    pub packets: u64,
}

/// A flow of OVN's, found by its cookie.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct FoundFlow {
    /// Its cookie: the first 32 bits of the logical flow's row id.
    pub cookie: u32,
    /// The OpenFlow table that it is in.
    pub table: u8,
    /// Its action list, as the switch encodes it; empty means drop.
    pub actions: Vec<u8>,
}

/// At most this many rows come back from [`Command::SampleLogicalFlows`].
pub const LOGICAL_FLOW_SAMPLE_MAX: usize = 64;

/// The veths to which the TC programs are to be attached.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum AttachCommand {
    /// Attach the TC programs to this interface, and keep trying until [`AttachCommand::Detach`].
    Attach {
        /// The `Interface` row.
        interface: RowId,
        /// The host side of the veth.
        name: String,
        /// Whether Open vSwitch is to limit the pod's traffic.
        policed: bool,
        /// The addresses from which the pod's questions count.
        sources: SourceAddresses,
    },
    /// From now on, these are the addresses from which questions count at an interface that the
    /// programs are attached to, or shall be.
    TrustSources {
        /// The `Interface` row.
        interface: RowId,
        /// The addresses.
        sources: SourceAddresses,
    },
    /// Detach the programs, or stop trying to attach them.
    Detach {
        /// The `Interface` row.
        interface: RowId,
    },
}

/// Something to be done.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Command {
    /// Attach the TC programs to an interface, or detach them.
    Attachment(AttachCommand),
    /// Trust the answers of these DNS servers, and of no others.
    TrustResolvers(BTreeSet<Resolver>),
    /// Set the names of a name set: answers for them and for all names below them leave the
    /// kernel at the interfaces of the name set.
    FilterNames {
        /// The name set.
        name_set: NameSetId,
        /// The names that its rules mention, without wildcards.
        names: BTreeSet<DomainName>,
    },
    /// Hold answers at the interfaces of a name set, or no longer. They are held until this says otherwise.
    HoldAnswers {
        /// The name set.
        name_set: NameSetId,
        /// Whether to hold them.
        held: bool,
    },
    /// No interface has this name set any more.
    ForgetNames {
        /// The name set.
        name_set: NameSetId,
    },
    /// Put an interface under a name set; without one, all answers leave the kernel.
    FilterInterface {
        /// The interface index of the veth's host side.
        ifindex: u32,
        /// The name set.
        name_set: Option<NameSetId>,
    },
    /// Tell of the attempts of an interface to connect somewhere, or stop that.
    WatchAttempts {
        /// The interface index of the veth's host side.
        ifindex: u32,
        /// Whether to tell of them.
        watched: bool,
    },
    /// Let all answers at an interface leave the kernel, whatever the rules mention, or stop that.
    RecordAnswers {
        /// The interface index of the veth's host side.
        ifindex: u32,
        /// Whether to let them.
        recorded: bool,
    },
    /// Hand in the frames that were deferred because no rule mentioned their names
    /// ([`Engine::replay`](crate::engine::Engine::replay)), and defer those again for which it returns
    /// `true`.
    ReplayAnswers,
    /// Answer with [`Input::FilterConfirmed`] when the kernel knows the name filter as the commands before this one
    /// have set it.
    ConfirmFilter,
    /// Release a held frame: put it back onto its veth.
    Release(HeldFrame),
    /// Change flows, then answer with [`Input::Applied`].
    Apply {
        /// Comes back in the result.
        batch: BatchId,
        /// All or nothing (an OpenFlow bundle); else one by one behind a common barrier.
        atomic: bool,
        /// The changes, in their order. Without any, the answer says that all before it is done.
        changes: Vec<FlowChange>,
        /// The cookies whose flows are counted, in every table, behind the changes. Not with
        /// `atomic`.
        count: Vec<u32>,
    },
    /// Change marks, at once and in this order: later commands of the list rely on it. Answer with
    /// [`Input::MarksRefused`] if the kernel does not set some of them.
    Mark(Vec<MarkChange>),
    /// Change the classes of names whose addresses the kernel opens, at once and in this order. Answer with
    /// [`Input::ClassesRefused`] if the kernel does not take some of them.
    ChangeClasses(Vec<ClassChange>),
    /// Leave answers with an address in one of these networks to the agent from now on (`true`), or no longer.
    LeaveNetworks(BTreeMap<IpNet, bool>),
    /// Have the programs of earlier agents open no address from now on.
    EndEarlierOpening,
    /// Read all marks; answer with [`Input::Marks`], always. A command that comes while an earlier one is carried
    /// out replaces that one.
    ReadMarks,
    /// Ask the switch; answer with [`Input::Reply`].
    Ask(FlowQuestion),
    /// Look in the switch's datapath for megaflows that drop packets on these paths; answer with
    /// [`Input::Dropping`].
    FindDropping(Vec<Path>),
    /// Report lost flows of exactly these OpenFlow tables from now on.
    MonitorTables(BTreeSet<u8>),
    /// Watch the logical flows that have one of these priorities; [`Input::Sb`] brings them, then
    /// [`Input::LogicalFlowsWatched`] follows. A connection made later watches them from its
    /// first update on.
    WatchLogicalFlows {
        /// `Logical_Flow.priority` values.
        priorities: BTreeSet<u16>,
    },
    /// Read some logical flows of one stage once; answer with [`Input::LogicalFlowSample`].
    SampleLogicalFlows(Stage),
    /// Look for the connections that OVN has blocked; answer with [`Input::Blocked`], always.
    FindBlocked,
    /// Take OVN's mark off these connections; answer with [`Input::Unblocked`].
    Unblock(Vec<BlockedConnection>),
}
