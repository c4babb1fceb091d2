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
    pub(super) restart: &'static str,
    /// Of the pod behind rules.
    pub(super) rules: Names,
    /// Of the pod without a firewall.
    pub(super) plain: Names,
}

/// The packets that left a node during the restarts.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Uplink {
    pub(super) packets: u64,
    /// With a bit of dnsflow's in the mark.
    pub(super) marked: u64,
}

/// Everything that was counted.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Counts {
    pub(super) restarts: Vec<Row>,
    pub(super) uplink: Uplink,
}

impl Counts {
    /// For people.
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{:<16}{:>24}{:>24}\n",
            "", "with rules", "without a firewall"
        );
        let columns = ["first", "late", "lost"].map(|name| format!("{name:>8}"));
        let columns = columns.concat();
        // Writing to a string does not fail.
        let _written = writeln!(text, "{:<16}{columns}{columns}", "restart");
        for Row {
            restart,
            rules,
            plain,
        } in &self.restarts
        {
            let _written = write!(text, "{restart:<16}");
            for names in [rules, plain] {
                for count in [names.first, names.late, names.lost] {
                    let _written = write!(text, "{count:>8}");
                }
            }
            text.push('\n');
        }
        let Uplink { packets, marked } = self.uplink;
        let _written = writeln!(text, "\nuplink: {marked} of {packets} packets with a mark");
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
        let names = Names {
            first: 119,
            late: 1,
            lost: 0,
        };
        let counts = Counts {
            restarts: vec![Row {
                restart: "kill -9",
                rules: names,
                plain: names,
            }],
            uplink: Uplink {
                packets: 5,
                marked: 0,
            },
        };
        let expected = "kill -9              119       1       0     119       1       0";
        assert!(
            counts.text().lines().any(|line| line == expected),
            "{}",
            counts.text()
        );
    }
}
