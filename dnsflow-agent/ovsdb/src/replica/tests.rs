#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::schema::Column;

const DATABASE: &Database = &Database {
    name: "D",
    tables: &[Table {
        name: "T",
        columns: &[
            Column::scalar("name"),
            Column::set("ports"),
            Column::map("ids"),
        ],
        purpose: "tests",
        remedy: "remove rows",
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
    let id = Uuid::parse(ID).unwrap();
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

fn row(number: u8, operation: &str, columns: Value) -> Value {
    let id = Uuid::new(number.into()).to_string();
    json!({"T": {id: {operation: columns}}})
}

#[test]
fn the_rows_of_a_table_are_limited() {
    let limits = TableLimits {
        rows: 2,
        ..TableLimits::default()
    };
    let mut replica = Replica::limited(DATABASE, limits, &[]);
    for number in [1, 2, 2] {
        let insert = row(number, "insert", json!({}));
        replica.apply_value(insert).unwrap();
    }
    let error = replica.apply_value(row(3, "insert", json!({})));
    assert_eq!(
        error.unwrap_err().to_string(),
        "table T has more than 2 rows of interest"
    );
}

#[test]
fn the_bytes_of_a_table_are_limited_however_a_row_grows() {
    let limits = TableLimits {
        bytes: 100,
        ..TableLimits::default()
    };
    let name = |length: usize| json!({"name": "a".repeat(length)});
    let port = |number: u8| json!({"ports": format!("port {number}")});
    let in_two_rows = [
        row(1, "insert", name(60)),
        row(1, "insert", name(80)),
        row(1, "delete", Value::Null),
        row(1, "insert", name(10)),
        row(2, "insert", name(60)),
        row(3, "insert", name(60)),
    ];
    let in_one_row = (0..20).map(|number| {
        row(
            1,
            if number == 0 { "insert" } else { "modify" },
            port(number),
        )
    });
    for (updates, fit) in [(Vec::from(in_two_rows), 5), (in_one_row.collect(), 10)] {
        let mut replica = Replica::limited(DATABASE, limits, &[]);
        let mut results = updates
            .into_iter()
            .map(|update| replica.apply_value(update));
        let error = results.by_ref().find_map(Result::err).unwrap();
        assert_eq!(
            error.to_string(),
            "table T has more than 100 bytes in the columns that are read"
        );
        assert!(results.len() <= 20 - fit, "some have fitted");
    }
}

#[test]
fn a_table_that_can_be_done_without_is_left_out_as_a_whole() {
    let limits = TableLimits {
        rows: 2,
        ..TableLimits::default()
    };
    let mut replica = Replica::limited(DATABASE, limits, &["T"]);
    for number in [1, 2] {
        let insert = row(number, "insert", json!({"name": "a"}));
        replica.apply_value(insert).unwrap();
    }
    assert_eq!(replica.left_out().count(), 0);
    let gone = replica.apply_value(row(3, "insert", json!({}))).unwrap();
    let gone: Vec<_> = gone
        .iter()
        .map(|change| {
            (
                change.id,
                replica
                    .before(change)
                    .unwrap()
                    .text("name")
                    .unwrap()
                    .to_owned(),
            )
        })
        .collect();
    assert_eq!(
        gone,
        [1, 2].map(|number| (Uuid::new(number), "a".to_owned()))
    );
    let left_out: Vec<_> = replica
        .left_out()
        .map(|large| (large.table.name, large.limit.to_string(), large.is_left_out))
        .collect();
    assert_eq!(left_out, [("T", "2 rows of interest".to_owned(), true)]);
    // Whatever comes of it later, also of rows that are not known.
    for operation in ["insert", "modify", "delete", "what"] {
        for number in 1..9 {
            let update = row(number, operation, json!({"name": "b"}));
            assert_eq!(replica.apply_value(update).unwrap(), []);
        }
    }
    assert_eq!(replica.rows("T").count(), 0);
    assert!(
        replica.apply_value(json!({"U": {}})).is_err(),
        "others are as they were"
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
    let id = Uuid::parse(ID).unwrap();
    let Ok(Applied::Changed(change)) = replica.apply("T", id, None) else {
        panic!("no change");
    };
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
            let rows = &replica.tables["T"];
            let bytes: usize = rows.rows.values().map(PackedRow::len).sum();
            prop_assert_eq!(rows.bytes, bytes);
        }
    }
}
