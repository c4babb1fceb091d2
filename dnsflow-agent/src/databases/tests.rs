use dnsflow_ovsdb::{Table, TableLimit};

use super::*;

#[test]
fn every_row_left_out_is_counted_and_some_are_named() {
    let counters = Arc::<OvsdbCounters>::default();
    let mut converter = Converter::new("D", Arc::clone(&counters));
    let rows = 2 * WARNINGS_MAX;
    for row in 0..rows {
        let converted: Conversion<()> = Err(CellError::new("c", "is odd"));
        assert_eq!(converter.value("T", Uuid::new(row.into()), converted), None);
    }
    assert_eq!(counters.rows_skipped.load(Relaxed), u64::from(rows));
    assert_eq!(converter.warned, WARNINGS_MAX);
    converter.reset();
    assert_eq!(converter.warned, 0);
}

#[test]
fn a_table_that_is_too_large_is_told_with_the_remedy() {
    const TABLE: Table = Table {
        name: "T",
        columns: &[],
        purpose: "tests",
        remedy: "remove rows",
        deferred: false,
    };
    for (is_left_out, text) in [
        (
            true,
            "table T of D (for tests) has more than 2 rows of interest, and is left out; remove rows",
        ),
        (
            false,
            "table T of D (for tests) has more than 2 rows of interest, and nothing new is read of the database; \
             remove rows",
        ),
    ] {
        let large = TooLarge {
            table: &TABLE,
            limit: TableLimit::Rows(2),
            is_left_out,
        };
        assert_eq!(large_table("D", &large).to_string(), text);
    }
}
