//! What is read of the southbound database (`ovn-sb.ovsschema`).
//!
//! One monitor for all tables, so that one transaction of ovn-northd arrives in one update.

use dnsflow_core::ovn::rows::{
    Datapath, Encapsulation, LogicalFlow, Pipeline, PortBinding, PortGroup, SbUpdate, Stage,
};
use dnsflow_ovsdb::{
    CellError, Clause, Column, Condition, Database, Replica, Row, RowChange, Table,
    session::Conditions,
};

use crate::databases::{Conversion, Converter, row_id};

/// The database.
pub const DATABASE: Database = Database {
    name: "OVN_Southbound",
    tables: TABLES,
};

const DATAPATH_BINDING: &str = "Datapath_Binding";
const PORT_BINDING: &str = "Port_Binding";
const PORT_GROUP: &str = "Port_Group";
const ENCAP: &str = "Encap";
pub(super) const LOGICAL_FLOW: &str = "Logical_Flow";

const TABLES: &[Table] = &[
    Table {
        name: DATAPATH_BINDING,
        columns: &[Column::scalar("tunnel_key")],
        purpose: "the logical switches of pods",
        remedy: "reduce the number of networks, or of other logical switches",
        deferred: false,
    },
    Table {
        name: PORT_BINDING,
        columns: &[
            Column::scalar("logical_port"),
            Column::scalar("datapath"),
            Column::scalar("tunnel_key"),
            Column::pairs("external_ids", &["namespace"]),
        ],
        purpose: "the ports of pods",
        remedy: "reduce the number of pods, or of other logical ports",
        deferred: false,
    },
    Table {
        name: PORT_GROUP,
        columns: &[Column::scalar("name"), Column::set("ports")],
        purpose: "the pods of an EgressFirewall",
        remedy: "reduce the number of namespaces with an EgressFirewall, or of other port groups",
        deferred: false,
    },
    Table {
        name: ENCAP,
        columns: &[Column::scalar("ip")],
        purpose: "the addresses of nodes",
        remedy: "reduce the number of chassis",
        deferred: false,
    },
    Table {
        name: LOGICAL_FLOW,
        columns: &[
            Column::scalar("pipeline"),
            Column::scalar("table_id"),
            Column::scalar("priority"),
            Column::scalar("match"),
            Column::scalar("actions"),
            Column::pairs("external_ids", &["stage-hint"]),
        ],
        purpose: "the logical flows of the rules",
        remedy: "reduce the number of rules in the longest EgressFirewalls",
        // With the monitor request, 300,000 rows cost the server 300 to 760 ms, whatever the
        // condition; with a change of the condition, 100 ms.
        deferred: true,
    },
];

/// VIFs only, and no logical flow until some are asked for.
pub fn conditions() -> Conditions {
    Conditions::from([
        (
            PORT_BINDING,
            Condition::AnyOf(vec![Clause::equal("type", "")]),
        ),
        (LOGICAL_FLOW, Condition::Nothing),
    ])
}

/// The logical flows of this priority.
pub(super) fn priority_is(priority: u16) -> Clause {
    Clause::equal("priority", i64::from(priority))
}

/// The default logical flows of this stage: they match every packet that no other one matches. They
/// have no address set that could be empty, so ovn-controller always installs those of its
/// datapaths.
pub(super) fn last_of_stage(stage: Stage) -> Vec<Clause> {
    match stage {
        Stage::Table(pipeline, table_id) => vec![
            Clause::equal(
                "pipeline",
                match pipeline {
                    Pipeline::Ingress => "ingress",
                    Pipeline::Egress => "egress",
                },
            ),
            Clause::equal("table_id", i64::from(table_id)),
            priority_is(0),
        ],
        Stage::OutPortSecurity => vec![
            priority_is(0),
            Clause::includes_pair("external_ids", "stage-name", "ls_out_check_port_sec"),
        ],
    }
}

/// Everything there is.
pub(super) fn whole(replica: &Replica, converter: &mut Converter) -> SbUpdate {
    SbUpdate {
        reset: true,
        datapaths: converter.every(replica, DATAPATH_BINDING, datapath),
        port_bindings: converter.every(replica, PORT_BINDING, port_binding),
        port_groups: converter.every(replica, PORT_GROUP, port_group),
        logical_flows: converter.every(replica, LOGICAL_FLOW, logical_flow),
        encapsulations: converter.every(replica, ENCAP, encapsulation),
    }
}

/// The rows that have changed.
pub(super) fn changed(
    replica: &Replica,
    changes: &[RowChange],
    converter: &mut Converter,
) -> SbUpdate {
    SbUpdate {
        reset: false,
        datapaths: converter.changed(replica, changes, DATAPATH_BINDING, datapath),
        port_bindings: converter.changed(replica, changes, PORT_BINDING, port_binding),
        port_groups: converter.changed(replica, changes, PORT_GROUP, port_group),
        logical_flows: converter.changed(replica, changes, LOGICAL_FLOW, logical_flow),
        encapsulations: converter.changed(replica, changes, ENCAP, encapsulation),
    }
}

/// Reads a `Datapath_Binding` row.
pub fn datapath(row: &Row) -> Conversion<Datapath> {
    Ok(Some(Datapath {
        tunnel_key: row.integer("tunnel_key")?,
    }))
}

/// Reads an `Encap` row.
pub fn encapsulation(row: &Row) -> Conversion<Encapsulation> {
    let text = row.text("ip")?;
    let ip = text.parse();
    let ip = ip.map_err(|_| CellError::new("ip", format!("`{text}` is no address")))?;
    Ok(Some(Encapsulation { ip }))
}

/// Reads a `Port_Binding` row.
pub fn port_binding(row: &Row) -> Conversion<PortBinding> {
    let ids = row.pairs("external_ids")?;
    Ok(Some(PortBinding {
        logical_port: row.text("logical_port")?.to_owned(),
        datapath: row_id(row.reference("datapath")?),
        tunnel_key: row.integer("tunnel_key")?,
        namespace: ids.value("namespace").map(str::to_owned),
    }))
}

/// Reads a `Port_Group` row. ovn-northd names it `<tunnel key of the datapath>_<name in the
/// northbound database>` (`get_sb_port_group_name` in `lib/ovn-util.h`).
pub fn port_group(row: &Row) -> Conversion<PortGroup> {
    let name = row.text("name")?;
    let nb_name = name
        .split_once('_')
        .and_then(|(key, nb_name)| key.parse::<u32>().is_ok().then_some(nb_name))
        .ok_or_else(|| {
            CellError::new("name", format!("`{name}` does not begin with a tunnel key"))
        })?;
    Ok(Some(PortGroup {
        name: nb_name.to_owned(),
        ports: row.texts("ports")?.into_iter().map(str::to_owned).collect(),
    }))
}

/// Reads a `Logical_Flow` row; nothing if the row has no stage-hint and therefore belongs to no
/// ACL.
pub fn logical_flow(row: &Row) -> Conversion<LogicalFlow> {
    let Some(hint) = row.pairs("external_ids")?.value("stage-hint") else {
        return Ok(None);
    };
    let hint = u32::from_str_radix(hint, 16).map_err(|_| {
        CellError::new(
            "external_ids",
            format!("stage-hint: `{hint}` is no hex number"),
        )
    })?;
    let pipeline = match row.text("pipeline")? {
        "ingress" => Pipeline::Ingress,
        "egress" => Pipeline::Egress,
        other => return Err(CellError::new("pipeline", format!("`{other}` is none"))),
    };
    Ok(Some(LogicalFlow {
        pipeline,
        table_id: row.integer("table_id")?,
        priority: row.integer("priority")?,
        matches: row.text("match")?.to_owned(),
        actions: row.text("actions")?.to_owned(),
        stage_hint: Some(hint),
    }))
}

#[cfg(test)]
mod tests;
