#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::{
    collection::{btree_map, btree_set},
    prelude::*,
};

use super::*;

const TABLE: &Table = &Table {
    name: "T",
    columns: &[
        Column::scalar("number"),
        Column::scalar("text"),
        Column::set("names"),
        Column::map("pairs"),
        Column::pairs("some", &["a"]),
        Column::backends("vips"),
        Column::scalar("link"),
    ],
    purpose: "tests",
    remedy: "remove rows",
    deferred: false,
};

fn row(cells: Value) -> Row {
    let mut row = Row::new(TABLE);
    for (column, value) in cells.as_object().unwrap() {
        row.set(column, value.clone());
    }
    row
}

#[test]
fn of_a_map_only_what_is_read_is_kept() {
    let map = |pairs: Value| json!(["map", pairs]);
    let mut row = row(json!({
        "some": map(json!([["a", "1"], ["b", "2"]])),
        "vips": map(json!([["10.0.0.1:80", "10.244.0.5:8080"], ["10.0.0.2:80", "10.244.0.6:8080"]])),
    }));
    let pairs = |row: &Row| {
        let pairs = row.pairs("some").expect("a map");
        let pairs = pairs.iter().map(|(key, value)| format!("{key}={value}"));
        pairs.collect::<Vec<_>>()
    };
    let vips = |row: &Row| {
        let vips = row.backends("vips").expect("a map").into_iter();
        let vips = vips.map(|(vip, backends)| format!("{vip}={backends:?}"));
        vips.collect::<Vec<_>>()
    };
    assert_eq!(pairs(&row), ["a=1"]);
    assert_eq!(
        vips(&row),
        ["10.0.0.1:80=[10.244.0.5]", "10.0.0.2:80=[10.244.0.6]"]
    );
    // A value that changes, the same pair again, which removes it, and a new one.
    row.modify("some", map(json!([["a", "3"], ["b", "4"]])));
    assert_eq!(pairs(&row), ["a=3"]);
    row.modify("some", map(json!([["a", "3"], ["c", "5"]])));
    assert!(pairs(&row).is_empty());
    row.modify("vips", map(json!([["10.0.0.1:80", "10.244.0.7:8080"]])));
    assert_eq!(
        vips(&row),
        ["10.0.0.1:80=[10.244.0.7]", "10.0.0.2:80=[10.244.0.6]"]
    );
    row.modify(
        "vips",
        map(json!([
            ["10.0.0.1:80", "10.244.0.7:8080"],
            [
                "10.0.0.3:80",
                "10.244.0.7:80,10.244.0.5:8080,10.244.0.7:81,^LOCAL,[fd00::7]:80"
            ],
            ["10.0.0.4", "10.244.0.7,fd00::7"],
            ["10.0.0.4:80", "fd00::7,10.244.0.7"],
            ["10.0.0.5:80", ""]
        ])),
    );
    assert_eq!(
        vips(&row),
        [
            "10.0.0.2:80=[10.244.0.6]",
            "10.0.0.3:80=[10.244.0.5, 10.244.0.7, fd00::7]",
            "10.0.0.4=[10.244.0.7, fd00::7]",
            "10.0.0.4:80=[10.244.0.7, fd00::7]",
            "10.0.0.5:80=[]"
        ]
    );
    let packed = row.clone().pack();
    assert_eq!(packed.unpack(TABLE), row);
}

#[test]
fn one_element_and_the_bare_atom_are_the_same() {
    for (bare, set) in [
        (json!("a"), json!(["set", ["a"]])),
        (json!(7), json!(["set", [7]])),
        (json!(true), json!(["set", [true]])),
        (
            json!(["uuid", "26f8710d-96ec-42d8-9b8f-8fa63f3c4605"]),
            json!(["set", [["uuid", "26f8710d-96ec-42d8-9b8f-8fa63f3c4605"]]]),
        ),
    ] {
        assert_eq!(Datum::from_json(bare.clone()), Datum::from_json(set));
        assert_eq!(Datum::from_json(bare.clone()).to_json(), bare);
    }
}

#[test]
fn columns_left_out_have_their_defaults() {
    let row = row(json!({}));
    assert_eq!(row.text("text"), Ok(""));
    assert_eq!(row.integer::<u8>("number"), Ok(0));
    assert_eq!(row.optional_integer("number"), Ok(None));
    assert_eq!(row.texts("names"), Ok(vec![]));
    assert_eq!(row.pairs("pairs").unwrap().iter().count(), 0);
    assert!(row.reference("link").is_err());
}

#[test]
fn typed_access_refuses_other_types_and_names_the_column() {
    let row = row(json!({
        "number": 300,
        "text": ["set", ["a", "b"]],
        "names": ["set", ["a", 1]],
        "pairs": ["map", [["a", 1]]],
        "link": ["uuid", "not one"],
    }));
    assert_eq!(
        row.integer::<u8>("number").unwrap_err().to_string(),
        "column number: 300 is out of range"
    );
    assert_eq!(row.integer::<u16>("number"), Ok(300));
    assert_eq!(
        row.text("text").unwrap_err().to_string(),
        "column text: holds 2 values"
    );
    assert!(row.texts("names").is_err());
    assert!(row.pairs("pairs").is_err());
    assert!(row.pairs("number").is_err());
    assert_eq!(
        row.reference("link").unwrap_err().to_string(),
        "column link: holds an unreadable value"
    );
    assert!(row.text("absent").is_err());
}

#[test]
fn an_unreadable_scalar_is_replaced_by_the_next_value() {
    let mut datum = Datum::from_json(json!(1.5));
    assert_eq!(datum, Datum(Repr::Unreadable));
    datum.apply(Kind::Scalar, Datum::scalar(3));
    assert_eq!(datum, Datum::scalar(3));
}

/// The difference as `ovsdb_datum_diff` in `lib/ovsdb-data.c` makes it.
fn map_difference(old: &BTreeMap<String, u8>, new: &BTreeMap<String, u8>) -> BTreeMap<String, u8> {
    let removed = old.iter().filter(|(key, _)| !new.contains_key(*key));
    let changed = new
        .iter()
        .filter(|(key, value)| old.get(*key) != Some(value));
    removed
        .chain(changed)
        .map(|(key, value)| (key.clone(), *value))
        .collect()
}

fn wire_map(map: &BTreeMap<String, u8>) -> Datum {
    Datum::from_json(json!(["map", map.iter().collect::<Vec<_>>()]))
}

fn wire_set(set: &BTreeSet<i64>) -> Datum {
    Datum::from_json(json!(["set", set]))
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "set|map|uuid|named-uuid|[a-f0-9-]{36}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop::collection::vec(inner, 0..4).prop_map(Value::from)
    })
}

proptest! {
    #[test]
    fn set_differences_lead_from_old_to_new(
        old in btree_set(-9i64..9, 0..9),
        new in btree_set(-9i64..9, 0..9),
    ) {
        let difference = old.symmetric_difference(&new).copied().collect();
        let mut datum = wire_set(&old);
        datum.apply(Kind::Set, wire_set(&difference));
        prop_assert_eq!(datum, wire_set(&new));
    }

    #[test]
    fn map_differences_lead_from_old_to_new(
        old in btree_map("[ab]{1,2}", 0u8..3, 0..6),
        new in btree_map("[ab]{1,2}", 0u8..3, 0..6),
    ) {
        let mut datum = wire_map(&old);
        datum.apply(Kind::Map, wire_map(&map_difference(&old, &new)));
        prop_assert_eq!(datum, wire_map(&new));
    }

    #[test]
    fn any_json_is_taken_and_what_is_readable_survives_the_round_trip(json in json_value()) {
        let datum = Datum::from_json(json);
        if datum.0 != Repr::Unreadable {
            prop_assert_eq!(&Datum::from_json(datum.to_json()), &datum);
        }
    }

    #[test]
    fn any_difference_can_be_applied_to_any_value(old in json_value(), change in json_value()) {
        for kind in [Kind::Scalar, Kind::Set, Kind::Map] {
            Datum::from_json(old.clone()).apply(kind, Datum::from_json(change.clone()));
        }
    }
}
