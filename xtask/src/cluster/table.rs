//! The counts of a run, as a table and as JSON.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use serde::Serialize;

/// What became of the names of one pod.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub(super) struct Names {
    /// Connected by the first SYN.
    pub(super) first: usize,
    /// Connected by a SYN that was sent again.
    pub(super) late: usize,
    /// No answer, or no connection.
    pub(super) lost: usize,
}

impl Names {
    /// Of the lines that the lab's helper prints for `fresh-names`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut names = Self::default();
        for line in text.lines() {
            let outcome = line.split(' ').nth(1);
            *match outcome.with_context(|| format!("no outcome: {line}"))? {
                "first" => &mut names.first,
                "late" => &mut names.late,
                "lost" => &mut names.lost,
                _ => bail!("no outcome: {line}"),
            } += 1;
        }
        Ok(names)
    }

    pub(super) fn count(&self) -> usize {
        self.first + self.late + self.lost
    }
}

/// One restart, and the names that were asked for meanwhile.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Counted from 1.
    pub(super) run: usize,
    pub(super) restart: &'static str,
    /// Whether another version took part, whose programs may open nothing without their agent.
    pub(super) is_of_versions: bool,
    /// Whether the restart was over before the last name.
    pub(super) is_covered: bool,
    /// Of the pod behind rules.
    pub(super) rules: Names,
    /// Of the pod without a firewall.
    pub(super) plain: Names,
}

impl Row {
    /// Whether the rules cost a first packet: names were late or lost, and none of those without a firewall.
    fn is_worse(&self) -> bool {
        self.rules.first < self.rules.count() && self.plain.first == self.plain.count()
    }
}

/// The packets that left a node's switch by one way during the restarts.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Way {
    pub(super) way: &'static str,
    pub(super) packets: u64,
    /// With a bit of dnsflow's in the mark.
    pub(super) marked: u64,
}

/// Everything that was counted.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Counts {
    pub(super) restarts: Vec<Row>,
    pub(super) ways: Vec<Way>,
}

impl Counts {
    /// The restarts in which the rules cost a first packet.
    pub(super) fn worse(&self) -> usize {
        self.restarts.iter().filter(|row| row.is_worse()).count()
    }

    /// Those of them without another version.
    pub(super) fn worse_of_one_version(&self) -> usize {
        let rows = self.restarts.iter();
        rows.filter(|row| row.is_worse() && !row.is_of_versions)
            .count()
    }

    /// All packets with a bit of dnsflow's in the mark.
    pub(super) fn marked(&self) -> u64 {
        self.ways.iter().map(|way| way.marked).sum()
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{:<20}{:>24}{:>24}\n",
            "", "with rules", "without a firewall"
        );
        let columns = ["first", "late", "lost"].map(|name| format!("{name:>8}"));
        let columns = columns.concat();
        // Writing to a string does not fail.
        let _written = writeln!(text, "{:<4}{:<16}{columns}{columns}", "run", "restart");
        for row in &self.restarts {
            let _written = write!(text, "{:<4}{:<16}", row.run, row.restart);
            for names in [row.rules, row.plain] {
                for count in [names.first, names.late, names.lost] {
                    let _written = write!(text, "{count:>8}");
                }
            }
            text += match row.is_covered {
                true => "\n",
                false => "  (not over before the last name)\n",
            };
        }
        let _written = writeln!(
            text,
            "\nlate or lost with rules alone: in {} of {} restarts",
            self.worse(),
            self.restarts.len()
        );
        for Way {
            way,
            packets,
            marked,
        } in &self.ways
        {
            let _written = writeln!(text, "{way}: {marked} of {packets} packets with a mark");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_helper_are_counted() {
        let names = Names::parse("n1.a first 3\nn2.a late 1012\nn3.a lost 8000\nn4.a first 2\n");
        let names = names.expect("lines of the helper");
        assert_eq!(
            names,
            Names {
                first: 2,
                late: 1,
                lost: 1
            }
        );
        assert_eq!(names.count(), 4);
        Names::parse("n1.a reached 3").expect_err("no outcome");
    }

    #[test]
    fn a_table_has_a_line_for_each_restart() {
        let names = |late| Names {
            first: 120 - late,
            late,
            lost: 0,
        };
        let row = |run, rules, plain| Row {
            run,
            restart: "kill -9",
            is_of_versions: false,
            is_covered: true,
            rules: names(rules),
            plain: names(plain),
        };
        let counts = Counts {
            restarts: vec![row(1, 1, 2), row(2, 3, 0), row(3, 0, 0), row(4, 0, 1)],
            ways: vec![Way {
                way: "uplink",
                packets: 5,
                marked: 0,
            }],
        };
        let text = counts.text();
        for expected in [
            "1   kill -9              119       1       0     118       2       0",
            "4   kill -9              120       0       0     119       1       0",
            "late or lost with rules alone: in 1 of 4 restarts",
            "uplink: 0 of 5 packets with a mark",
        ] {
            assert!(text.lines().any(|line| line == expected), "{text}");
        }
    }
}
