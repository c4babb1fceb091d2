//! The tables of the recorded conversation.

use super::{Clause, Column, Condition, Conditions, Database, Table};

pub(super) const DATABASE: Database = Database {
    name: "OVN_Southbound",
    tables: &[
        table("Datapath_Binding", &[Column::scalar("tunnel_key")]),
        table(
            "Port_Binding",
            &[
                Column::scalar("logical_port"),
                Column::scalar("datapath"),
                Column::scalar("tunnel_key"),
                Column::pairs("external_ids", &["namespace"]),
            ],
        ),
        table(
            "Port_Group",
            &[Column::scalar("name"), Column::set("ports")],
        ),
        table("Encap", &[Column::scalar("ip")]),
        Table {
            deferred: true,
            ..table(
                "Logical_Flow",
                &[
                    Column::scalar("pipeline"),
                    Column::scalar("table_id"),
                    Column::scalar("priority"),
                    Column::scalar("match"),
                    Column::scalar("actions"),
                    Column::pairs("external_ids", &["stage-hint"]),
                ],
            )
        },
    ],
};

const fn table(name: &'static str, columns: &'static [Column]) -> Table {
    Table {
        name,
        columns,
        purpose: "tests",
        remedy: "remove rows",
        deferred: false,
    }
}

pub(super) fn conditions() -> Conditions {
    Conditions::from([
        (
            "Port_Binding",
            Condition::AnyOf(vec![Clause::equal("type", "")]),
        ),
        ("Logical_Flow", Condition::Nothing),
    ])
}
