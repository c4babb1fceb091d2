//! A table of a database that is too large, for people.

use dnsflow_core::io::input::LargeTable;
use dnsflow_ovsdb::TooLarge;

/// The table with its limit and the remedy.
pub fn large_table(database: &'static str, large: &TooLarge) -> LargeTable {
    let TooLarge {
        table,
        limit,
        is_left_out,
    } = large;
    LargeTable {
        database,
        table: table.name,
        limit: limit.to_string(),
        purpose: table.purpose,
        remedy: table.remedy,
        is_left_out: *is_left_out,
    }
}

#[cfg(test)]
mod tests {
    use dnsflow_ovsdb::{Table, TableLimit};

    use super::*;

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
}
