//! What is read of the northbound database (`ovn-nb.ovsschema`).

use crate::{
    core::ovn::rows::{Acl, NbUpdate},
    ovsdb::{
        Clause, Column, Condition, Database, Replica, Row, RowChange, Table,
        convert::{Conversion, Converter},
        session::Conditions,
        value::CellError,
    },
};

/// The database.
pub const DATABASE: Database = Database {
    name: "OVN_Northbound",
    tables: TABLES,
};

const ACL: &str = "ACL";
const TABLES: &[Table] = &[Table {
    name: ACL,
    columns: &[
        Column::scalar("direction"),
        Column::scalar("priority"),
        Column::scalar("match"),
        Column::scalar("action"),
        Column::map("external_ids"),
    ],
    deferred: false,
}];

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
    }
}

/// What is another than before.
pub(super) fn changed(
    replica: &Replica,
    changes: &[RowChange],
    converter: &mut Converter,
) -> NbUpdate {
    NbUpdate {
        reset: false,
        acls: converter.changed(replica, changes, ACL, acl),
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
        direction: row.text("direction")?.to_owned(),
        priority: row.integer("priority")?,
        matches: row.text("match")?.to_owned(),
        action: row.text("action")?.to_owned(),
    }))
}

#[cfg(test)]
mod tests;
