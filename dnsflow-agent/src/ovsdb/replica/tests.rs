#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::ovsdb::schema::Column;

const DATABASE: &Database = &Database {
    name: "D",
    tables: &[Table {
        name: "T",
        columns: &[
            Column::scalar("name"),
            Column::set("ports"),
            Column::map("ids"),
        ],
        deferred: false,
    }],
};

const ID: &str = "26f8710d-96ec-42d8-9b8f-8fa63f3c4605";

fn update(operation: &str, columns: Value) -> Value {
    json!({"T": {ID: {operation: columns}}})
}

type Described = (String, Vec<String>, Vec<(String, String)>);

fn described(replica: &Replica) -> Vec<Described> {
    let rows = replica.rows("T").map(|(_, row)| {
        (
            row.text("name").unwrap().to_owned(),
            row.texts("ports")
                .unwrap()
                .into_iter()
                .map(str::to_owned)
                .collect(),
            row.pairs("ids")
                .unwrap()
                .iter()
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
        )
    });
    rows.collect()
}

#[test]
fn differences_are_applied_and_the_old_row_is_told() {
    let mut replica = Replica::new(DATABASE);
    let id = RowId::parse(ID).unwrap();
    let changes = replica.apply_value(update(
            "initial",
            json!({"name": "a", "ports": ["set", ["p", "q"]], "ids": ["map", [["k", "1"], ["l", "2"]]]}),
        )).unwrap();
    assert_eq!(
        changes,
        [RowChange {
            table: "T",
            id,
            old: None
        }]
    );
    let before = replica.row("T", id).unwrap().clone();
    let changes = replica
        .apply_value(update(
            "modify",
            json!({
                "name": "b",
                "ports": ["set", ["q", "r"]],
                "ids": ["map", [["k", "1"], ["l", "3"], ["m", "4"]]],
                "not replicated": 1,
            }),
        ))
        .unwrap();
    assert_eq!(
        changes,
        [RowChange {
            table: "T",
            id,
            old: Some(before.pack())
        }]
    );
    assert_eq!(
        described(&replica),
        [(
            "b".into(),
            vec!["p".into(), "r".into()],
            vec![("l".into(), "3".into()), ("m".into(), "4".into())]
        )]
    );
    let changes = replica.apply_value(update("delete", Value::Null)).unwrap();
    assert!(changes[0].old.is_some());
    assert_eq!(replica.rows("T").count(), 0);
}

#[test]
fn columns_that_were_left_out_can_be_modified() {
    let mut replica = Replica::new(DATABASE);
    replica.apply_value(update("insert", json!({}))).unwrap();
    let changes = json!({"name": "a", "ports": "p", "ids": ["map", [["k", "1"]]]});
    replica.apply_value(update("modify", changes)).unwrap();
    assert_eq!(
        described(&replica),
        [("a".into(), vec!["p".into()], vec![("k".into(), "1".into())])]
    );
}

#[test]
fn what_cannot_be_applied_is_an_error_that_names_table_and_row() {
    for (updates, message) in [
        (
            update("modify", json!({"name": "b"})),
            "table T: row 26f8710d-96ec-42d8-9b8f-8fa63f3c4605 is modified but was never inserted",
        ),
        (json!({"U": {}}), "table U was not asked for"),
        (json!({"T": []}), "table T: malformed update"),
        (
            json!({"T": {"x": {"insert": {}}}}),
            "table T: malformed update",
        ),
        (
            json!({"T": {ID: {"insert": 1}}}),
            "table T: malformed update",
        ),
        (json!({"T": {ID: {}}}), "table T: malformed update"),
        (json!([]), "table ?: malformed update"),
    ] {
        let error = Replica::new(DATABASE).apply_value(updates).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn the_rows_of_a_table_are_limited() {
    let mut replica = Replica::new(DATABASE);
    replica.table_rows_max = 2;
    let insert = |number: u8| {
        let id = RowId::new(number.into()).to_string();
        json!({"T": {id: {"insert": {}}}})
    };
    for number in [1, 2, 2] {
        replica.apply_value(insert(number)).unwrap();
    }
    let error = replica.apply_value(insert(3)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "table T has more than 2 rows of interest"
    );
}

#[test]
fn deleting_a_row_that_was_never_of_interest_changes_nothing() {
    let mut replica = Replica::new(DATABASE);
    let changes = replica.apply_value(update("delete", Value::Null)).unwrap();
    assert_eq!(changes.len(), 1);
    assert_eq!(changes[0].old, None);
}

fn member() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<i8>().prop_map(Value::from),
        Just(json!(["set", ["a", "b"]])),
        Just(json!(["map", [["a", "b"]]])),
        "[ab]".prop_map(Value::from),
    ]
}

#[test]
fn a_row_that_is_too_long_is_kept_as_one_that_cannot_be_read() {
    let mut replica = Replica::new(DATABASE);
    replica
        .apply_value(update("insert", json!({"name": "a"})))
        .unwrap();
    let id = RowId::parse(ID).unwrap();
    let change = replica.apply("T", id, None).unwrap();
    assert_eq!(replica.before(&change).unwrap().text("name"), Ok("a"));
    let told = |replica: &Replica| {
        replica
            .row("T", id)
            .unwrap()
            .texts("ports")
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        told(&replica),
        "column ports: is in a row of more than 16 MiB; make the Service, the rule or the namespace behind it \
         smaller"
    );
    // The difference to a value that was left out cannot be applied.
    replica
        .apply_value(update("modify", json!({"name": "b", "ports": "p"})))
        .unwrap();
    assert!(told(&replica).contains("16 MiB"));
    assert_eq!(replica.row("T", id).unwrap().text("name"), Ok("b"));
    replica
        .apply_value(update("insert", json!({"ports": "p"})))
        .unwrap();
    assert_eq!(replica.row("T", id).unwrap().texts("ports"), Ok(vec!["p"]));
}

proptest! {
    #[test]
    fn no_sequence_of_updates_panics(
        steps in prop::collection::vec(
            ("initial|insert|modify|delete|other", "name|ports|ids|other", member()),
            0..12,
        )
    ) {
        let mut replica = Replica::new(DATABASE);
        for (operation, column, value) in steps {
            if replica.apply_value(update(&operation, json!({column: value}))).is_err() {
                break;
            }
        }
    }
}
