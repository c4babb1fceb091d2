//! What is read of the northbound database (`ovn-nb.ovsschema`).

use dnsflow_core::ovn::rows::{Acl, LogicalSwitch, NbUpdate};
use ipnet::IpNet;

use crate::ovsdb::{
    Clause, Column, Condition, Database, Replica, Row, RowChange, Table,
    convert::{Conversion, Converter},
    session::Conditions,
    value::CellError,
};

/// The database.
pub const DATABASE: Database = Database {
    name: "OVN_Northbound",
    tables: TABLES,
};

const ACL: &str = "ACL";
const LOGICAL_SWITCH: &str = "Logical_Switch";
const TABLES: &[Table] = &[
    Table {
        name: ACL,
        columns: &[
            Column::scalar("priority"),
            Column::scalar("match"),
            Column::scalar("action"),
            Column::map("external_ids"),
        ],
        deferred: false,
    },
    Table {
        name: LOGICAL_SWITCH,
        columns: &[Column::map("other_config"), Column::map("external_ids")],
        deferred: false,
    },
];

/// The ACLs of EgressFirewalls. The external ids of ovn-kubernetes are in its
/// `go-controller/pkg/libovsdb/ops/db_object_types.go` and `db_object_ids.go`.
pub fn conditions() -> Conditions {
    let ours = Clause::includes_pair("external_ids", "k8s.ovn.org/owner-type", "EgressFirewall");
    Conditions::from([(ACL, Condition::AnyOf(vec![ours]))])
}

/// Everything there is.
pub(super) fn whole(replica: &Replica, converter: &mut Converter) -> NbUpdate {
    NbUpdate {
        reset: true,
        acls: converter.every(replica, ACL, acl),
        switches: converter.every(replica, LOGICAL_SWITCH, logical_switch),
    }
}

/// The rows that have changed.
pub(super) fn changed(
    replica: &Replica,
    changes: &[RowChange],
    converter: &mut Converter,
) -> NbUpdate {
    NbUpdate {
        reset: false,
        acls: converter.changed(replica, changes, ACL, acl),
        switches: converter.changed(replica, changes, LOGICAL_SWITCH, logical_switch),
    }
}

/// Reads an `ACL` row.
pub fn acl(row: &Row) -> Conversion<Acl> {
    let ids = row.pairs("external_ids")?;
    let id = |key: &str| {
        ids.value(key)
            .ok_or_else(|| CellError::new("external_ids", format!("no {key}")))
    };
    let index = id("rule-index")?;
    Ok(Some(Acl {
        namespace: id("k8s.ovn.org/name")?.to_owned(),
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
    let is_primary = ids.value("k8s.ovn.org/role") == Some("primary");
    let network = ids.value("k8s.ovn.org/network").filter(|_| is_primary);
    Ok(Some(LogicalSwitch {
        primary_network: network.map(str::to_owned),
        networks: networks.collect::<Result<_, _>>()?,
    }))
}

#[cfg(test)]
mod tests;
