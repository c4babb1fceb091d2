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
