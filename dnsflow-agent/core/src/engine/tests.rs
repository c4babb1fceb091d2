//! Stories about one node, told in inputs and checked in commands.

mod answers;
mod attempts;
mod backends;
mod beside;
mod blocked;
mod closed;
mod comparison;
mod denied;
mod dry_run;
mod earlier_dump;
mod edits;
mod ended;
mod expiry;
mod explain;
mod follow;
mod former_marks;
mod fronts;
mod groups;
mod handover;
mod hold;
mod hostile;
mod kernel_opens;
mod limits;
mod marks;
mod model;
mod networks;
mod numbers;
mod parts;
mod policy;
mod refused;
mod reports;
mod restart;
mod restore;
mod room;
mod room_of_scope;
mod scopes;
mod sentinels;
mod slow_switch;
mod starts;
mod under_way;
mod waiting_beside;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use super::*;
use crate::{
    cache::journal::SavedEntry,
    io::{
        input::{BatchError, BatchId, FlowQuestion, Frame, LOGICAL_FLOW_SAMPLE_MAX},
        report::Severity,
    },
    ovn::rows::{
        Acl, Datapath, InterfaceUpdate, LogicalFlow, LogicalSwitch, NbUpdate, PortBinding,
        PortGroup, RowId, SbUpdate,
    },
    testing::{
        BASE, DATAPATH, GROUP, Node, acl, acl_row, acls, allow, answer_frame, deny, deny_all,
        firewall, firewalls, frame, ifindex_of, interface, is_for_sentinel, logical_flow,
        logical_flow_row, logical_flows, port_binding, sentinel_of, udp_frame,
    },
    values::{
        connection::BlockedConnection,
        firewall::{Destination, Firewall, FirewallId, FirewallUpdate, Rule, RuleAction},
        flow::{Addresses, Cookie, FlowChange, FlowKey, Protocol, Sentinel, Transport},
        limits::{COMPARE_INTERVAL, COUNTERS_DELAY_MAX},
        name::DomainName,
    },
};

/// [`CacheLimits`] as they are by default.
const MIN_TTL: Duration = Duration::from_secs(60);
const IDLE_GRACE: Duration = Duration::from_secs(60);

const ADDRESS: [u8; 4] = [203, 0, 113, 1];
const OTHER: [u8; 4] = [203, 0, 113, 2];

/// The rows of so many rules.
fn rows_of(rules: &[Rule]) -> (NbUpdate, Vec<(RowId, Option<LogicalFlow>)>) {
    let all = 0..rules.len() as u32;
    let acls = all.clone().map(|at| (acl_row(at), acl(at, rules)));
    let logical_flows = all.map(|at| (logical_flow_row(at), logical_flow(at, rules)));
    let update = NbUpdate {
        acls: acls.collect(),
        ..NbUpdate::default()
    };
    (update, logical_flows.collect())
}

/// OVN enforces all of these rules.
fn follow(node: &mut Node, rules: &[Rule]) {
    let (acls, logical_flows) = rows_of(rules);
    node.give(Input::Nb(acls));
    node.give(Input::Sb(SbUpdate {
        logical_flows,
        ..SbUpdate::default()
    }));
}

/// TCP, from port 1 on.
fn tcp(ports: usize) -> Vec<Transport> {
    let port = |port| Transport {
        protocol: Protocol::Tcp,
        port: Some(port),
    };
    (1..=u16::MAX).take(ports).map(port).collect()
}

/// Different addresses, as many as are asked for.
fn addresses(from: u32, count: u32) -> Vec<[u8; 4]> {
    let addresses = from..from + count;
    addresses
        .map(|i| Ipv4Addr::from(0x0b00_0000 + i).octets())
        .collect()
}
