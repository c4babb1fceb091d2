//! What is read of the northbound database (`ovn-nb.ovsschema`).

use std::{collections::BTreeSet, net::IpAddr};

use dnsflow_core::{
    ovn::rows::{
        Acl, Changes, GatewayPort, LoadBalancer, LogicalSwitch, NbUpdate, NodeSet, RowId,
        TemplateVariables, UnreadFronts,
    },
    values::limits::BALANCED_ADDRESSES_MAX,
};
use dnsflow_ovsdb::{
    CellError, Clause, Column, Condition, Database, Replica, Row, RowChange, Table, Uuid,
    session::Conditions, value::endpoint,
};
use ipnet::IpNet;

use super::balancers::{Balancers, size};
use crate::{
    asking::northbound::{self, NETWORK, OWNER, is_of_gateway_router},
    databases::{Conversion, Converter, row_id},
};

/// The database.
pub const DATABASE: Database = Database {
    name: northbound::NAME,
    tables: TABLES,
};

const ACL: &str = "ACL";
const LOGICAL_SWITCH: &str = "Logical_Switch";
const LOGICAL_ROUTER_PORT: &str = "Logical_Router_Port";
const ADDRESS_SET: &str = "Address_Set";
const LOAD_BALANCER: &str = "Load_Balancer";
const VIPS: &str = "vips";
const TEMPLATE_VARIABLES: &str = "Chassis_Template_Var";
const VARIABLES: &str = "variables";

/// The table of Services, whose networks `--cluster-networks` names as well, and that of the variables.
pub(super) const OF_SERVICES: &[&str] = &[LOAD_BALANCER, TEMPLATE_VARIABLES];
/// The columns that tell what load balancers have in front.
const FRONTS: [(&str, &str); 2] = [(LOAD_BALANCER, VIPS), (TEMPLATE_VARIABLES, VARIABLES)];
/// The variables alone. Without them, addresses get flows in place of marks.
pub(super) const OF_VARIABLES: &[&str] = &[TEMPLATE_VARIABLES];

// External ids of ovn-kubernetes (its go-controller/pkg/libovsdb/ops/db_object_types.go and
// go-controller/pkg/types/const.go).
/// The namespace of an EgressFirewall, or the name of an address set.
const NAME: &str = "k8s.ovn.org/name";
/// The index of a rule.
const RULE_INDEX: &str = "rule-index";
/// `primary` or `secondary`: what a user-defined network is to its pods.
const ROLE: &str = "k8s.ovn.org/role";
/// `Service`: the kind of object that a load balancer is made for.
const KIND: &str = "k8s.ovn.org/kind";
/// The kind of object that a row is made for.
const OWNER_TYPE: &str = "k8s.ovn.org/owner-type";
/// The name of the address sets of all nodes (`ClusterNodeIPsAddrSetName` in its
/// go-controller/pkg/ovn/addresssetmanager/addressset_manager.go).
const NODE_IPS: &str = "node-ips";

const TABLES: &[Table] = &[
    Table {
        name: ACL,
        columns: &[
            Column::scalar("priority"),
            Column::scalar("match"),
            Column::scalar("action"),
            Column::pairs("external_ids", &[NAME, RULE_INDEX]),
        ],
        purpose: "the rules of EgressFirewalls",
        remedy: "reduce the number of rules in the EgressFirewalls of the cluster",
        deferred: false,
    },
    Table {
        name: LOGICAL_SWITCH,
        columns: &[
            Column::pairs("other_config", &["subnet", "ipv6_prefix"]),
            Column::pairs("external_ids", &[NETWORK, ROLE]),
        ],
        purpose: "the networks of pods",
        remedy: "reduce the number of networks, or of other logical switches",
        deferred: false,
    },
    Table {
        name: LOGICAL_ROUTER_PORT,
        columns: &[Column::scalar("name"), Column::set("networks")],
        purpose: "the addresses of nodes",
        remedy: "reduce the number of networks, or of other logical router ports",
        deferred: false,
    },
    Table {
        name: ADDRESS_SET,
        columns: &[
            Column::set("addresses"),
            Column::pairs("external_ids", &[OWNER_TYPE]),
        ],
        purpose: "the addresses of nodes",
        remedy: "reduce the number of addresses of nodes",
        deferred: false,
    },
    Table {
        name: LOAD_BALANCER,
        columns: &[
            Column::scalar("name"),
            Column::backends(VIPS),
            Column::pairs("external_ids", &[KIND, OWNER, NETWORK]),
        ],
        purpose: "the addresses of Services and of other load balancers",
        remedy: "--cluster-networks with the Service networks of each family takes its place",
        // In a message of their own: each names all of its backends, and ovsdb-server puts a message together as a
        // whole.
        deferred: true,
    },
    Table {
        name: TEMPLATE_VARIABLES,
        columns: &[Column::addresses(VARIABLES)],
        purpose: "the addresses of load balancers with templates",
        remedy: "reduce the number of Services of type NodePort",
        deferred: true,
    },
];

/// The ACLs of EgressFirewalls and the address sets of nodes. The external ids of ovn-kubernetes are in its
/// `go-controller/pkg/libovsdb/ops/db_object_types.go` and `db_object_ids.go`.
pub fn conditions() -> Conditions {
    let ours = Clause::includes_pair("external_ids", OWNER_TYPE, "EgressFirewall");
    let nodes = Clause::includes_pair("external_ids", NAME, NODE_IPS);
    Conditions::from([
        (ACL, Condition::AnyOf(vec![ours])),
        (ADDRESS_SET, Condition::AnyOf(vec![nodes])),
    ])
}

/// Everything there is, but for load balancers without room.
pub(super) fn whole(
    replica: &Replica,
    converter: &mut Converter,
    balancers: &mut Balancers,
) -> NbUpdate {
    balancers.reset();
    // One after the other: together they may be too many.
    let rows = replica.rows(LOAD_BALANCER);
    let sizes = rows.filter_map(|(id, row)| {
        let row = load_balancer(&row).ok()??;
        Some((row_id(id), Some(size(&row))))
    });
    let [without_room, _] = balancers.change(sizes);
    tell_left_out(replica, &without_room, converter);
    let is_kept = |id| !balancers.leaves_out(id);
    NbUpdate {
        reset: true,
        acls: converter.every(replica, ACL, acl),
        switches: converter.every(replica, LOGICAL_SWITCH, logical_switch),
        gateway_ports: converter.every(replica, LOGICAL_ROUTER_PORT, gateway_port),
        load_balancers: converter.every_wanted(replica, LOAD_BALANCER, is_kept, load_balancer),
        template_variables: converter.every(replica, TEMPLATE_VARIABLES, template_variables),
        unread_fronts: {
            let mut unread = tables_left_out(replica);
            for (table, column) in FRONTS {
                let front = |row: &Row| unread_front(row, column);
                unread.extend(converter.every(replica, table, front));
            }
            unread.extend(without_room.iter().map(|id| (*id, Some(UnreadFronts))));
            unread
        },
        node_sets: converter.every(replica, ADDRESS_SET, node_set),
    }
}

/// The rows that have changed.
pub(super) fn changed(
    replica: &Replica,
    changes: &[RowChange],
    converter: &mut Converter,
    balancers: &mut Balancers,
) -> NbUpdate {
    let mut load_balancers = converter.changed(replica, changes, LOAD_BALANCER, load_balancer);
    let sizes = load_balancers.iter();
    let sizes = sizes.map(|(id, row)| (*id, row.as_ref().map(size)));
    let [without_room, with_room] = balancers.change(sizes);
    tell_left_out(replica, &without_room, converter);
    for (id, row) in &mut load_balancers {
        row.take_if(|_| balancers.leaves_out(*id));
    }
    load_balancers.extend(without_room.iter().map(|id| (*id, None)));
    let row = |id: RowId| replica.row(LOAD_BALANCER, Uuid::new(id.bits()));
    load_balancers.extend(with_room.iter().map(|id| {
        let row = row(*id).and_then(|row| load_balancer(&row).ok().flatten());
        (*id, row)
    }));
    let is_unread = |id| {
        let is_unreadable = |row: Row| row.backends(VIPS).is_err();
        balancers.leaves_out(id) || row(id).is_some_and(is_unreadable)
    };
    NbUpdate {
        reset: false,
        acls: converter.changed(replica, changes, ACL, acl),
        switches: converter.changed(replica, changes, LOGICAL_SWITCH, logical_switch),
        gateway_ports: converter.changed(replica, changes, LOGICAL_ROUTER_PORT, gateway_port),
        load_balancers,
        template_variables: converter.changed(
            replica,
            changes,
            TEMPLATE_VARIABLES,
            template_variables,
        ),
        unread_fronts: {
            let mut unread = tables_left_out(replica);
            for (table, column) in FRONTS {
                let front = |row: &Row| unread_front(row, column);
                unread.extend(converter.changed(replica, changes, table, front));
            }
            let others = without_room.iter().chain(&with_room);
            unread.extend(others.map(|id| (*id, is_unread(*id).then_some(UnreadFronts))));
            unread
        },
        node_sets: converter.changed(replica, changes, ADDRESS_SET, node_set),
    }
}

/// Reads an `ACL` row.
pub fn acl(row: &Row) -> Conversion<Acl> {
    let ids = row.pairs("external_ids")?;
    let id = |key: &str| {
        ids.value(key)
            .ok_or_else(|| CellError::new("external_ids", format!("no {key}")))
    };
    let index = id(RULE_INDEX)?;
    Ok(Some(Acl {
        namespace: id(NAME)?.into(),
        rule_index: index.parse().map_err(|_| {
            CellError::new(
                "external_ids",
                format!("rule-index: `{index}` is no number"),
            )
        })?,
        priority: row.integer("priority")?,
        matches: row.text("match")?.to_owned(),
        action: row.text("action")?.to_owned(),
    }))
}

/// The length of an `ipv6_prefix` that is written without one (ovn-nb(5)).
const IPV6_PREFIX_LEN: u8 = 64;

/// Reads a `Logical_Switch` row.
pub fn logical_switch(row: &Row) -> Conversion<LogicalSwitch> {
    let config = row.pairs("other_config")?;
    let texts = ["subnet", "ipv6_prefix"].map(|key| config.value(key));
    let networks = texts.into_iter().flatten().map(|text| {
        let prefix = || IpNet::new(text.parse().ok()?, IPV6_PREFIX_LEN).ok();
        let network = text.parse::<IpNet>().ok().or_else(prefix);
        let network = network.map(|network| network.trunc());
        network.ok_or_else(|| CellError::new("other_config", format!("`{text}` is no network")))
    });
    let ids = row.pairs("external_ids")?;
    let network = ids.value(NETWORK);
    Ok(Some(LogicalSwitch {
        network: network.map(str::to_owned),
        is_primary: network.is_some() && ids.value(ROLE) == Some("primary"),
        networks: networks.collect::<Result<_, _>>()?,
    }))
}

/// Reads a `Logical_Router_Port` row; `None` where it is not one of a gateway router's towards the outside.
pub fn gateway_port(row: &Row) -> Conversion<GatewayPort> {
    if !row.text("name")?.starts_with("rtoe-") {
        return Ok(None);
    }
    let addresses = row.texts("networks")?.into_iter().map(|text| {
        let network = text.parse::<IpNet>();
        let address = network.map(|network| network.addr());
        address.map_err(|_| CellError::new("networks", format!("`{text}` is no network")))
    });
    Ok(Some(GatewayPort {
        addresses: addresses.collect::<Result<_, _>>()?,
    }))
}

/// Reads an `Address_Set` row with the name of those of nodes; `None` where it is made for another object, such as a
/// namespace of that name. Releases before 2026 made it for EgressIP (`AddressSetClusterNodeIPs` and
/// `AddressSetEgressIP` in ovn-kubernetes' go-controller/pkg/libovsdb/ops/db_object_types.go).
pub fn node_set(row: &Row) -> Conversion<NodeSet> {
    let ids = row.pairs("external_ids")?;
    if !matches!(ids.value(OWNER_TYPE), Some("ClusterNodeIPs" | "EgressIP")) {
        return Ok(None);
    }
    let addresses = row.texts("addresses")?.into_iter().map(|text| {
        let address = text.parse::<IpAddr>();
        address.map_err(|_| CellError::new("addresses", format!("`{text}` is no address")))
    });
    Ok(Some(NodeSet {
        addresses: addresses.collect::<Result<_, _>>()?,
    }))
}

/// Reads a `Load_Balancer` row; `None` for a Service's that gateway routers alone have.
pub fn load_balancer(row: &Row) -> Conversion<LoadBalancer> {
    let ids = row.pairs("external_ids")?;
    let is_service = ids.value(KIND) == Some("Service");
    if is_service && is_of_gateway_router(row.text("name")?) {
        return Ok(None);
    }
    let vips = row.backends(VIPS)?;
    let backends: BTreeSet<_> = vips.iter().flat_map(|(_, to)| to.iter().copied()).collect();
    // The addresses of a template are those of its variables. OVN, too, leaves out another key that is no address
    // (`ovn_northd_lb_init` in its northd/lb.c).
    let addresses = vips.iter().filter_map(|(vip, _)| Some(endpoint(vip)?.0));
    Ok(Some(LoadBalancer {
        service: is_service.then(|| ids.value(OWNER).unwrap_or_default().to_owned()),
        network: ids.value(NETWORK).map(str::to_owned),
        addresses: addresses.collect(),
        backends: backends.into_iter().collect(),
    }))
}

/// Reads a `Chassis_Template_Var` row; `None` without an address. A variable that stands for the address of a load
/// balancer has no port, which is behind the variable (`ovn_lb_vip_init_template` in OVN's lib/lb.c). Those for
/// backends have: ovn-kubernetes joins each address with one (`buildTemplateLBs` in its
/// go-controller/pkg/ovn/controller/services/lb_config.go).
pub fn template_variables(row: &Row) -> Conversion<TemplateVariables> {
    let variables = row.backends(VARIABLES)?;
    let addresses = variables.iter().flat_map(|(_, addresses)| *addresses);
    let addresses: BTreeSet<IpAddr> = addresses.copied().collect();
    Ok((!addresses.is_empty()).then_some(TemplateVariables { addresses }))
}

/// Whether this column, which tells what load balancers have in front, cannot be read: the row is too long.
fn unread_front(row: &Row, column: &'static str) -> Conversion<UnreadFronts> {
    Ok(row.backends(column).is_err().then_some(UnreadFronts))
}

/// Counts load balancers that are left out from now on, and logs them.
fn tell_left_out(replica: &Replica, left_out: &[RowId], converter: &mut Converter) {
    for id in left_out {
        let id = Uuid::new(id.bits());
        let row = replica.row(LOAD_BALANCER, id);
        let row = row.and_then(|row| load_balancer(&row).ok().flatten());
        let whose = row.and_then(|row| row.service).unwrap_or_default();
        let why = format!(
            "the load balancers have more than {BALANCED_ADDRESSES_MAX} addresses together, this namespace most: reduce \
             the externalIPs or endpoints of the Service {whose}"
        );
        converter.skipped(LOAD_BALANCER, id, &why);
    }
}

/// Those of [`OF_SERVICES`] that are too large, in place of a row.
fn tables_left_out(replica: &Replica) -> Changes<UnreadFronts> {
    let mut left_out = replica.left_out();
    let left_out = left_out.any(|large| OF_SERVICES.contains(&large.table.name));
    // No row has this identity (RFC 4122, section 4.1.7).
    let change = left_out.then_some((RowId::new(0), Some(UnreadFronts)));
    change.into_iter().collect()
}

#[cfg(test)]
mod tests;
