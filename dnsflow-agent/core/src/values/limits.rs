//! Limits and periods of the core, each with its reason.

use std::{net::IpAddr, time::Duration};

use dnsflow_common::record::DEFER_BURST;

use crate::values::name::DomainName;

/// A limit that the answers to a pod have reached. The text has the loss of the pod, and the remedy; the caller prints the
/// limit's number beside it.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, thiserror::Error)]
pub enum Limit {
    /// Addresses of this name.
    #[error("not every address of a name is open: --max-addresses-per-name")]
    AddressesOfName(DomainName),
    /// Addresses of the pod.
    #[error("not every address of a pod is open: --max-addresses-per-pod")]
    AddressesOfPod,
    /// The same, and a rule denies all that there are: none of them makes room.
    #[error(
        "rules deny all kept addresses of a pod, and a new one is neither opened nor closed: deny by cidrSelector, \
         or raise --max-addresses-per-pod"
    )]
    DeniedAddresses,
    /// Names of this address.
    #[error(
        "an address has too many names, and a new one is ignored: allow or deny the address by cidrSelector"
    )]
    NamesOfAddress(IpAddr),
    /// Names of all addresses of the pod.
    #[error(
        "the addresses of a pod have too many names, and not every address is open: raise \
         --max-addresses-per-pod (names: twice as many)"
    )]
    NamesOfPod,
    /// Names of all addresses of all pods on the node.
    #[error(
        "the pods of this node have too many names, and not every address of the pod with the most names is open: \
         lower --max-addresses-per-pod, or allow a cidrSelector"
    )]
    NamesOfNode,
    /// Those of them that rules deny.
    #[error(
        "the pods of this node have too many denied names, and not every address of these is closed: deny by \
         cidrSelector"
    )]
    DeniedNamesOfNode,
    /// Flows of the groups of a namespace, or of all on the node.
    #[error(
        "the rules by name of a namespace need too many flows or groups; an address without room has those of its first \
         rule, or is closed if a rule denies it: list fewer ports and names, or let fewer names lead to one address"
    )]
    FlowsOfNamespace,
    /// Flows that answers to the pod change in a second.
    #[error(
        "a pod gets too many new addresses, and some are not opened now: allow a cidrSelector, or raise \
         --max-flow-changes"
    )]
    FlowChanges,
}

/// How long cache entries last, and how many there may be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CacheLimits {
    /// An address stays for at least this long after an answer, however short its TTL: clients
    /// use an address for longer than they may.
    pub min_ttl: Duration,
    /// An address that is not in use goes after this long without a new answer.
    pub max_ttl: Duration,
    /// After its TTL, an address stays until it has seen no packet for this long.
    pub idle_grace: Duration,
    /// An address that a rule denies stays denied for at least this long: here, expiry opens.
    pub deny_ttl: Duration,
    /// Addresses remembered for one port, whether a rule matches or not. If a pod resolves more, an
    /// address is forgotten: one that is not open, else one of the sixteenth that expires soonest.
    /// An address in use is never forgotten, and neither is one that nobody has had the time to
    /// use. If there is no other, the new address is refused.
    pub addresses_per_port_max: usize,
    /// Addresses kept for one name of one port. Beyond, the address that expires first goes, with
    /// the same exceptions. At most so many addresses of one answer are looked at. Names that a
    /// rule denies have no such limit.
    pub addresses_per_name_max: usize,
    /// Names remembered on the node: the names of all addresses of all ports.
    pub names_per_node_max: usize,
}

impl CacheLimits {
    /// Names that all addresses of one port have together: two for each address. Most addresses
    /// have one name; those of shared hosts and content networks have more.
    pub fn names_per_port_max(&self) -> usize {
        self.addresses_per_port_max.saturating_mul(2)
    }

    /// The limit of denied names on the node: a quarter of all names, as many as the node's budget lets change flows
    /// at once. A denied address is closed whatever the budget, so this limit bounds the number of such addresses.
    pub fn denied_names_per_node_max(&self) -> usize {
        self.names_per_node_max / 4
    }

    /// Addresses of one port to which only established connections pass: with more, further ones close for all.
    pub fn ended_per_port_max(&self) -> usize {
        self.addresses_per_port_max / 4
    }

    /// The same of all ports of the node.
    pub fn ended_per_node_max(&self) -> usize {
        self.names_per_node_max / 4
    }

    /// The number behind a limit of cache entries.
    pub(crate) fn of(&self, limit: &Limit) -> usize {
        match limit {
            Limit::AddressesOfName(_) => self.addresses_per_name_max,
            Limit::AddressesOfPod | Limit::DeniedAddresses => self.addresses_per_port_max,
            Limit::NamesOfAddress(_) => NAMES_PER_ADDRESS_MAX,
            Limit::NamesOfPod => self.names_per_port_max(),
            Limit::NamesOfNode => self.names_per_node_max,
            Limit::DeniedNamesOfNode => self.denied_names_per_node_max(),
            Limit::FlowsOfNamespace => GROUP_FLOWS_PER_SCOPE_MAX,
            Limit::FlowChanges => 0,
        }
    }
}

impl Default for CacheLimits {
    fn default() -> Self {
        Self {
            min_ttl: Duration::from_secs(60),
            max_ttl: Duration::from_secs(3600),
            idle_grace: Duration::from_secs(60),
            deny_ttl: Duration::from_secs(3600),
            addresses_per_port_max: 4096,
            addresses_per_name_max: 256,
            names_per_node_max: CACHED_NAMES_MAX,
        }
    }
}

/// Names remembered for one address of a port. Beyond, the rules that match decide which name gives way; one that a rule
/// denies, or is to deny, is remembered in any case (`docs/decisions/budgets.md`).
pub const NAMES_PER_ADDRESS_MAX: usize = 64;
/// Names remembered on the node: the names of all addresses of all ports. Beyond, the pod with
/// most names forgets one (`docs/decisions/budgets.md`). A name with its entry takes 400 to 700
/// bytes, at most 255 of them for the name.
pub const CACHED_NAMES_MAX: usize = 1 << 18;
// Each address with a mark has a name, or counts as one: the kernel has room for all.
const _: () = assert!(CACHED_NAMES_MAX <= dnsflow_common::key::ENTRIES_MAX as usize);
/// Networks of pods that are learned from OVN. Beyond, the user-defined network or namespace that has most loses its
/// smallest: each concerns its own pods alone.
pub const CLUSTER_NETWORKS_MAX: usize = 4096;
/// Refused addresses of one pod that are remembered as reported; with more, each is reported again.
pub const REFUSALS_REPORTED_MAX: usize = 64;
/// Addresses of all load balancers, in front and behind: some 90 MiB, at 255 bytes each in the core, and 100 in the
/// copy of the table and beside the kernel's list. Four Services have as many, or 100,000 usual ones.
pub const BALANCED_ADDRESSES_MAX: usize = 1 << 18;
/// Networks and Services in the report of those who may answer at a DNS server's address.
pub const COVERING_NAMED_MAX: usize = 16;
/// Addresses of OVN's rows that are taken over in one step: 1 to 5 ms of the hot thread with 50 pods. A tenant can
/// change 65,536 at once (`externalIPs` of a Service).
pub const ADDRESSES_PER_PART: usize = 1 << 10;
/// Of more than 65,536 that wait, a step takes one in so many: so they get fewer, however fast further ones come.
pub const ADDRESS_PARTS: usize = 64;
/// Names of one pod that are remembered after they have ended, for people who ask; as many of its questions without an
/// address, and of connections to DNS servers that these have ended without an answer.
pub const ENDED_NAMES_MAX: usize = 64;
/// Of the addresses of one answer that a limit has left out, so many are remembered with those names.
pub const LEFT_OUT_NAMED_MAX: usize = ENDED_NAMES_MAX / 2;
/// Reached limits of one pod that are remembered as reported; with more, each is reported again.
pub const LIMITS_REPORTED_MAX: usize = 64;
/// Reports that answers to one pod cause, and those of flows that the switch refuses, are given out this often …
pub const REPORT_INTERVAL: Duration = Duration::from_secs(4);
/// … and as many at once as this time allows: sixteen. The rest is counted.
pub const REPORT_BURST_TIME: Duration = Duration::from_secs(64);
/// Answers to one pod that are deferred before its rules are known: as many as the kernel defers at once.
pub const UNKNOWN_DEFERRED_MAX: usize = DEFER_BURST as usize;

/// Flows that answers to one pod may change in a second, by default. A pod whose addresses have one
/// flow each fills its share of the cache with this in a quarter of a minute.
pub const FLOW_CHANGES_PER_SECOND: u32 = 256;
/// A pod may save up the changes of so long and use them at once: by default 8,192. A browser that
/// is opened with all its tabs asks for some hundred names, with up to eight addresses each.
pub const FLOW_BURST_TIME: Duration = Duration::from_secs(32);
/// The same for all pods of the node together. Beyond, only pods with at least half of their own
/// budget left go on.
pub const NODE_FLOW_CHANGES_PER_SECOND: u32 = 4096;
/// The same for all pods of the node together: 65,536 changes.
pub const NODE_FLOW_BURST_TIME: Duration = Duration::from_secs(16);
/// Between parts of the sentinel flows that are renewed: openings go in between.
pub const RENEW_PAUSE: Duration = Duration::from_millis(50);
/// So many marks count as one change of a flow. A flow takes ovs-vswitchd hundreds of microseconds, a mark takes the
/// agent and the kernel a few (`docs/decisions/budgets.md`).
pub const MARKS_PER_FLOW_CHANGE: u32 = 16;
/// Changes that the answers to one pod have under way to the switch at a time. Further ones wait until
/// some are confirmed, and those of other pods go past. ovs-vswitchd takes these in about ten milliseconds.
pub const CHANGES_UNDER_WAY_MAX: usize = 128;
/// Flows that wait to be removed because nobody asks for them any more. Beyond, removals go to the switch at once. Each
/// takes 150 to 300 bytes.
pub const REMOVALS_WAITING_MAX: usize = 1 << 17;
/// Batches with a refused change whose numbers are remembered until a comparison has ended. Beyond, all earlier batches
/// count as refused until then.
pub const REFUSED_BATCHES_MAX: usize = 1 << 12;
/// Changes in one batch: the edge refuses a larger one as a whole. More changes go in several batches.
pub const CHANGES_PER_BATCH_MAX: usize = 1 << 18;
/// A pod whose answers change too many flows is reported this often.
pub const LIMIT_REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Problems of an EgressFirewall of one effect whose texts are in a report: of further ones, it has the rules or the
/// number. A namespace has thousands of rules, and each edit of one makes a report on each node.
pub const PROBLEM_TEXTS_MAX: usize = 8;
/// Logical flows looked up in the switch for actions to copy.
pub const ACTION_TEXTS_MAX: usize = 256;
/// Former EgressFirewalls of a namespace that are remembered until OVN enforces a younger one. Only
/// a script makes more edits at once; ovn-kubernetes takes over the last.
pub const FORMER_FIREWALLS_MAX: usize = 8;
/// Their rules on the node: as many as an EgressFirewall of the largest size has in eight versions. A rule takes some
/// 280 bytes. Beyond, namespaces without a pod here forget theirs, then the namespaces with most all but the first one,
/// which OVN may enforce, and last that one.
pub const FORMER_RULES_MAX: usize = 1 << 16;
/// An EgressFirewall for which ovn-kubernetes has made no ACLs within this time is reported.
pub const TAKEOVER_MAX: Duration = Duration::from_secs(30);
/// Actions to copy are looked for again this often, while some are missing.
pub const COPY_INTERVAL: Duration = Duration::from_secs(10);

/// The switch removes our flows when no agent has renewed their sentinel flows for so many seconds, by
/// default. The agent renews them after a third of the time.
pub const KEEP_FLOWS_S: u16 = 300;
/// The interval of comparisons between the switch and the cache. Counters are read with them.
pub const COMPARE_INTERVAL: Duration = Duration::from_secs(10);
/// An address that a pod uses has shown packets after this time at the latest: they come some time after the answer.
/// ovs-vswitchd reads a flow's counters from the datapath every half a second (`other_config:max-revalidator` in
/// ovs-vswitchd.conf.db(5)).
pub const COUNTERS_DELAY_MAX: Duration = Duration::from_secs(2);
/// After a flow is lost, the agent waits this long for others of the same wipe.
pub const RESTORE_DELAY: Duration = Duration::from_millis(20);

/// Flows of ours in the switch that no cache entry has, looked at in one comparison. There are many only
/// once, after a restart without a journal; the next comparison takes the rest.
pub const UNKNOWN_MAX: usize = 1 << 17;
/// Those of them that are no address's: as many as the groups of one namespace with one pattern each may have, whose rules
/// are gone.
pub const UNKNOWN_OF_GROUPS_MAX: usize = UNKNOWN_MAX / 4;
/// The journal has the end of a name to so many seconds: a name that is told again and again is recorded as often. After
/// a restart, it ends earlier by as much at most.
pub const TERM_SLOT_S: u64 = 16;
/// Lost flows are restored in batches of about so many …
pub const RESTORE_MAX: usize = 2048;
/// … of which so many are under way. The switch always has something to do, and an opening never
/// waits behind more.
pub const RESTORING_MAX: usize = 2;

/// The DNS header: no message is shorter (RFC 1035, section 4.1.1).
pub const DNS_MESSAGE_MIN: usize = 12;

/// DNS connections over TCP that are followed on the node. Beyond, the least recently used one of
/// the interface with most goes.
pub const TCP_CONNECTIONS_MAX: usize = 1024;
/// How many of them one pod's interface can have: a pod cannot push out those of the others.
pub const TCP_CONNECTIONS_PER_INTERFACE_MAX: usize = 64;
/// Bytes of unfinished messages that all of them hold together.
pub const TCP_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Bytes that those of one pod's interface hold together: eight of the longest messages.
pub const TCP_BYTES_PER_INTERFACE_MAX: usize = TCP_BYTES_MAX / 16;
/// Questions of one connection that wait for their answers. Beyond, the oldest is forgotten. A stub
/// resolver has two, one for each family of addresses.
pub const TCP_QUESTIONS_MAX: usize = 64;
/// Bytes of one connection that wait for a missing segment: the longest message with its length.
pub const TCP_AHEAD_BYTES_MAX: usize = u16::MAX as usize + 2;
/// Pieces of one connection that wait for a missing segment: the longest message in segments of
/// 536 bytes, the least that every host takes (RFC 9293, section 3.7.1).
pub const TCP_AHEAD_PIECES_MAX: usize = 128;
/// A connection is forgotten if the server sends nothing new for this long, whatever the pod sends. Otherwise a pod
/// could keep the connection in memory beyond its life, until the server begins another one of the same ports with
/// numbers that continue it. Linux adds a clock of 64 ns to each tuple's hash (`seq_scale` in net/core/secure_seq.c,
/// after RFC 9293, section 3.4.1), whose 32 bits wrap after 274.9 s. And Linux drops a closed connection silently
/// when nobody acknowledges its data for more than 100 s (`tcp_orphan_retries` in net/ipv4/tcp_timer.c). DNS servers
/// do not wait for as long: RFC 7766, section 6.2.3, recommends a few seconds; CoreDNS takes ten, BIND and Unbound
/// thirty.
pub const TCP_IDLE_MAX: Duration = Duration::from_secs(60);

/// Fragmented datagrams that are put together at the same time on the node. Beyond, the oldest one
/// of the interface with most goes.
pub const FRAGMENTED_MAX: usize = 256;
/// How many of them one pod's interface can have.
pub const FRAGMENTED_PER_INTERFACE_MAX: usize = 32;
/// Bytes that all of them hold together.
pub const FRAGMENT_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Bytes that those of one pod's interface hold together.
pub const FRAGMENT_BYTES_PER_INTERFACE_MAX: usize = FRAGMENT_BYTES_MAX / 16;
/// Fragments of one datagram: the longest one over links of IPv6's least MTU, 1280 bytes, takes
/// 54.
pub const FRAGMENTS_PER_DATAGRAM_MAX: usize = 64;
/// How long the agent waits for a whole datagram: as long as Linux (`net.ipv4.ipfrag_time`).
pub const FRAGMENT_WAIT_MAX: Duration = Duration::from_secs(30);

/// An answer is held for at most this long, by default. Open vSwitch needs up to two passes over its
/// megaflows until the pod's first packet gets through, and a pass takes 50 ms and more on a busy
/// node. A resolver waits for seconds before it asks again.
pub const HOLD_LONGEST: Duration = Duration::from_millis(500);
/// Frames that are held at the same time on the node: 10,000 answers a second for as long as they
/// may be held are 5,000.
pub const HELD_MAX: usize = 8192;
/// How many of them one pod's interface can have: a thousand answers a second for as long.
pub const HELD_PER_INTERFACE_MAX: usize = HELD_MAX / 16;
/// Bytes that all of them have together.
pub const HELD_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Bytes that those of one pod's interface have together.
pub const HELD_BYTES_PER_INTERFACE_MAX: usize = HELD_BYTES_MAX / 16;

/// Flows of others with keys that our flows could have, remembered at most. There should be none.
pub const FOREIGN_FLOWS_MAX: usize = 4096;

/// ovs-vswitchd begins a pass over its megaflows not earlier than this after the last one began
/// (`udpif_revalidator` in Open vSwitch's ofproto/ofproto-dpif-upcall.c), and every change of a
/// flow brings one about.
pub const REVALIDATION_INTERVAL: Duration = Duration::from_millis(5);

/// Between two looks at the datapath, at least. ovs-vswitchd takes such questions and flows on one
/// thread.
pub const LOOK_PAUSE: Duration = Duration::from_millis(1);
/// A pause is at least this part of the time that the newest batch has waited: a long wait gets few
/// looks, and is longer than need be by this part at most.
pub const LOOK_PAUSE_PART: u32 = 8;
/// Paths in one look. Each is compared with every megaflow that drops. A batch with more paths
/// waits for the estimated time.
pub const PATHS_PER_LOOK_MAX: usize = 64;

/// Open vSwitch keeps a megaflow for this long after its last packet (`other_config:max-idle` in
/// ovs-vswitchd.conf.db(5), 10 s) and until its revalidators come by (`max-revalidator`, 0.5 s),
/// unless its database says something else.
pub const MEGAFLOW_IDLE: Duration = Duration::from_millis(10_500);
/// Added to that time, beside two passes over all megaflows, because threads come late.
pub const MEGAFLOW_IDLE_MARGIN: Duration = Duration::from_millis(1500);
/// The flows that deny are counted this often.
pub const COUNT_INTERVAL: Duration = Duration::from_secs(10);
/// After rules have changed, further changes are waited for this long before the flows that deny are
/// counted.
pub const COUNT_DELAY: Duration = Duration::from_secs(1);
/// Cookies of flows that deny in one namespace. With more, counting them for each answer would cost
/// more than it saves.
pub const COUNTED_PER_NAMESPACE_MAX: usize = 16;
/// Cookies that are counted for answers that come together.
pub const COUNTED_PER_BATCH_MAX: usize = 64;
/// Cookies of all namespaces that are counted every ten seconds. In a namespace for which there is
/// no room, every new flow has to wait for revalidation.
pub const COUNTED_COOKIES_MAX: usize = 512;

/// Places that pods were told of, or tried to connect to, which are remembered for the reports of denied
/// connections: of one interface …
pub const PLACES_PER_INTERFACE: usize = 256;
/// … and of all of them. With four names each, they take about ten megabytes.
pub const PLACES: usize = 16_384;
/// Names of one place that are remembered, the newest ones.
pub const HEARD_NAMES_PER_ADDRESS_MAX: usize = 4;
/// A place that a pod was not told of for this long has no name any more.
pub const HEARD_TIME: Duration = Duration::from_secs(3600);
/// DNS servers that pods have asked and that were not trusted, which are remembered for people who ask: of one
/// interface …
pub const ASKED_SERVERS_PER_INTERFACE: usize = 16;
/// … and of all of them.
pub const ASKED_SERVERS: usize = 4096;
/// Errors of names that a rule mentions, which are remembered for people who ask: of one interface …
pub const FAILED_ANSWERS_PER_INTERFACE: usize = 64;
/// … and of all of them. They take about two megabytes.
pub const FAILED_ANSWERS: usize = 4096;
/// An explanation names a DNS server that is not trusted for this long after the pod has asked it: pods resolve a name
/// just before they connect.
pub const UNTRUSTED_ASKED_MAX: Duration = Duration::from_secs(60);
/// Places where pods have connected to, or have tried to, which are remembered for people who ask: of one
/// interface …
pub const HISTORY_PER_INTERFACE: usize = 512;
/// … and of all of them. With two names each, they take about ten megabytes.
pub const HISTORY_CONNECTIONS: usize = 16_384;
/// Names of one such place that are remembered, and of a denied connection that are reported, the newest ones: an address
/// can have all denied names of its pod.
pub const NAMES_PER_CONNECTION_MAX: usize = 8;
/// Such a place is remembered for this long after the last attempt.
pub const HISTORY_TIME: Duration = Duration::from_secs(3600);
/// A denied connection to one place is reported once in this time.
pub const DENIAL_REPORT_AGAIN: Duration = Duration::from_secs(60);
/// Denied connections of one pod are reported this often …
pub const DENIAL_REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// … and as many at once as this time allows: thirty-two. The rest is counted.
pub const DENIAL_REPORT_BURST_TIME: Duration = Duration::from_secs(64);

/// Flows of the groups with one pattern of a scope: the rules by name of a namespace, each with all of its ports. Those with
/// several have half as many. An address whose flows do not fit has those of its first rule, or is closed if one of its
/// rules denies.
pub const GROUP_FLOWS_PER_SCOPE_MAX: usize = 1 << 15;
/// Octets of the names of rules in all groups with several of one scope: the journal has as many.
pub const GROUP_NAMES_PER_SCOPE_MAX: usize = 1 << 20;
/// Flows of all groups of the node. In the last quarter, each scope has an equal part.
pub const GROUP_FLOWS_MAX: usize = 1 << 19;
/// Patterns of one group. An address with more has none of its own.
pub const PATTERNS_MAX: usize = 64;
/// For so long, no room is looked for again for the same patterns …
pub(crate) const NO_ROOM_STAYS: Duration = Duration::from_secs(1);
/// … which are so many at most.
pub(crate) const NO_ROOM_MAX: usize = 64;
/// Classes of names of one port whose addresses the kernel opens, with the elements that rest. Beyond, the agent opens
/// them.
pub(crate) const CLASSES_PER_PORT_MAX: usize = 256;
/// How long the element of a class is not another one's after its end: longer than any program runs.
pub(crate) const CLASS_RESTS: Duration = Duration::from_secs(10);
/// An edit closes what a pod has used in this time: that is told.
pub(crate) const USED_LATELY: Duration = Duration::from_secs(60);
/// So many names of a pod are told that an edit closes, with so many addresses of each. Of others, the number is.
pub(crate) const CLOSED_NAMED_MAX: usize = 8;
/// So many addresses of a pod are told or counted: each is compared with the rules by network.
pub(crate) const CLOSED_PER_EDIT_MAX: usize = 1024;
/// How long established connections to an address go on behind its time if no packet comes: as long as Open vSwitch's
/// userspace datapath remembers a TCP connection (`ct_dpif_netdev_tp_def` in its lib/conntrack-tp.c).
pub(crate) const ENDED_STAYS: Duration =
    Duration::from_secs(if cfg!(test) { 200 } else { 24 * 60 * 60 });
/// How long the flows of a group stay that no address has: pods ask for the same names again.
pub(crate) const GROUP_STAYS: Duration = Duration::from_secs(60);
/// How long the number of a group is not given to another one after its end, or after the last comparison that has found
/// a flow of it, whose removal waits. Until the revalidators have been at work, the switch has megaflows of it. Longer
/// than the time between two comparisons.
pub(crate) const GROUP_RESTS: Duration = Duration::from_secs(30);
/// Flows of groups that end with one comparison, but for those of the last group: as many as the switch takes until the
/// next one.
pub(crate) const SWEPT_MAX: usize = 1 << 14;
/// How long addresses get flows of their own after the kernel has refused a mark. Then one is tried again.
pub(crate) const MARKS_REFUSED: Duration = Duration::from_secs(60);
/// How long a mark counts after the last end of the address's names. In this time the agent reads whether the
/// address is in use, and prolongs the mark if it is.
pub const MARK_SLACK: Duration = Duration::from_secs(60);
