//! Which sources have been read completely, and whether the node is ready.

use std::collections::BTreeMap;

use crate::io::{input::LargeTable, output::Output, report::Report};

/// The sources that decisions need.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    interfaces: bool,
    nb: bool,
    sb: bool,
    logical_flows: bool,
    firewalls: bool,
    ready: bool,
    /// The tables that are too large, by database.
    large: BTreeMap<&'static str, Vec<LargeTable>>,
}

/// A source whose first update has all its objects.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Source {
    Interfaces,
    Nb,
    Sb,
    Firewalls,
}

impl Sources {
    /// An update of a source was read; `is_all` if the update has all objects.
    pub(crate) fn read(&mut self, source: Source, is_all: bool) {
        let read = match source {
            Source::Interfaces => &mut self.interfaces,
            Source::Nb => &mut self.nb,
            Source::Sb => &mut self.sb,
            Source::Firewalls => &mut self.firewalls,
        };
        *read |= is_all;
    }

    /// These tables of a database are too large, and no others of it. Reports which of them are new, and which are over.
    ///
    /// Nothing else follows: the last content stays in force.
    pub(crate) fn large_tables(
        &mut self,
        database: &'static str,
        tables: Vec<LargeTable>,
        out: &mut Output,
    ) {
        let before = self.large.remove(database).unwrap_or_default();
        for old in &before {
            if !tables.iter().any(|now| now.table == old.table) {
                let table = old.table;
                out.report(Report::TableReadAgain { database, table });
            }
        }
        for table in &tables {
            if !before.contains(table) {
                out.report(Report::TableTooLarge(table.clone()));
            }
        }
        self.large.insert(database, tables);
    }

    /// The tables that are too large.
    pub(crate) fn all_large_tables(&self) -> impl Iterator<Item = &LargeTable> {
        self.large.values().flatten()
    }

    /// Whether the logical flows of all ACLs have been read.
    pub(crate) fn logical_flows_read(&mut self, are_all: bool) {
        self.logical_flows = are_all;
    }

    /// Whether EgressFirewalls have been read.
    pub(crate) fn know_firewalls(&self) -> bool {
        self.firewalls
    }

    /// Whether every source has been read.
    pub(crate) fn are_read(&self) -> bool {
        self.interfaces && self.firewalls && self.nb && self.sb && self.logical_flows
    }

    /// The switch is away: the node is not ready.
    pub(crate) fn switch_lost(&mut self) {
        self.ready = false;
    }

    /// Whether the node is ready.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready
    }

    /// The sources by name, and whether each was read.
    pub(crate) fn states(&self) -> impl Iterator<Item = (&'static str, bool)> {
        [
            ("Open vSwitch database", self.interfaces),
            ("EgressFirewalls", self.firewalls),
            ("OVN northbound database", self.nb),
            ("OVN southbound database", self.sb),
            ("logical flows of the ACLs", self.logical_flows),
        ]
        .into_iter()
    }

    /// Makes the node ready if every source has been read, and the `rest` is ready as well. Returns
    /// whether the node was not ready before.
    pub(crate) fn become_ready(&mut self, rest: impl FnOnce() -> bool) -> bool {
        let is_news = !self.ready && self.are_read() && rest();
        self.ready |= is_news;
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Source; 4] = [
        Source::Interfaces,
        Source::Nb,
        Source::Sb,
        Source::Firewalls,
    ];

    #[test]
    fn every_source_has_to_be_read_in_full_once() {
        let mut sources = Sources::default();
        for source in ALL {
            sources.read(source, false);
            sources.read(source, true);
            assert!(!sources.are_read());
            sources.read(source, false);
        }
        sources.logical_flows_read(true);
        assert!(sources.are_read());
        sources.logical_flows_read(false);
        assert!(!sources.are_read(), "ACLs with other priorities have come");
    }

    #[test]
    fn a_table_that_is_too_large_is_reported_once_and_when_it_is_over() {
        let table = |table, is_left_out| LargeTable {
            database: "D",
            table,
            limit: "2 rows".into(),
            purpose: "tests",
            remedy: "remove rows",
            is_left_out,
        };
        let (left_out, needed) = (table("T", true), table("U", false));
        let mut sources = Sources::default();
        let mut report = |database, tables: &[LargeTable]| {
            let mut out = Output::default();
            sources.large_tables(database, tables.to_vec(), &mut out);
            out.reports
        };
        let too_large = |table: &LargeTable| Report::TableTooLarge(table.clone());
        let again = |table| Report::TableReadAgain {
            database: "D",
            table,
        };
        assert_eq!(
            report("D", std::slice::from_ref(&left_out)),
            [too_large(&left_out)]
        );
        let both = [left_out.clone(), needed.clone()];
        assert_eq!(report("D", &both), [too_large(&needed)]);
        assert_eq!(report("D", &both), []);
        assert_eq!(
            report("E", &[]),
            [],
            "another database says nothing of this one"
        );
        assert_eq!(report("D", std::slice::from_ref(&needed)), [again("T")]);
        assert_eq!(report("D", &[]), [again("U")]);
        assert_eq!(
            [left_out, needed].map(|table| table.to_string()),
            [
                "table T of D (for tests) has more than 2 rows, and is left out; remove rows",
                "table U of D (for tests) has more than 2 rows, and nothing new is read of the database; remove rows",
            ]
        );
    }

    #[test]
    fn a_node_becomes_ready_once_and_again_after_the_switch_was_away() {
        let mut sources = Sources::default();
        assert!(!sources.become_ready(|| true));
        for source in ALL {
            sources.read(source, true);
        }
        sources.logical_flows_read(true);
        assert!(!sources.become_ready(|| false));
        assert!(sources.become_ready(|| true));
        assert!(!sources.become_ready(|| true), "no news");
        sources.switch_lost();
        assert!(sources.become_ready(|| true));
    }
}
