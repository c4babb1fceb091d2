//! `dnsflow report --html`: one page for a person, which needs no server, no script and no other file.
//!
//! The template escapes whatever it is given. Names come from DNS and from the cluster, and may hold any
//! character.

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::Context as _;
use askama::Template;

use super::{
    print,
    report::{Bucket, Denial, NameReport, NamespaceReport, NodeReport},
    unused::{RuleUse, Used},
};
use crate::{VERSION, output::new_file};

/// The width of a bar with its gap, in the units of the drawing.
const BAR_PITCH: usize = 46;
/// The height of the highest bar.
const BAR_HEIGHT: u64 = 90;
/// Names that a rule shows.
const NAMES_SHOWN: usize = 6;

/// A page about some nodes.
#[derive(Debug, Template)]
#[template(path = "report.html")]
pub(crate) struct Page {
    nodes: Vec<NodeReport>,
    /// The nodes that have not answered, with the reason.
    silent: Vec<(String, String)>,
    version: &'static str,
}

impl Page {
    /// A page about these nodes, and about those that have not answered.
    pub(crate) fn new(nodes: Vec<NodeReport>, silent: Vec<(String, String)>) -> Self {
        Self {
            nodes,
            silent,
            version: VERSION,
        }
    }

    /// Writes the page into a file that is not there yet, or for `-` to `output`, which is standard output.
    pub(crate) fn write(&self, path: &Path, output: &mut impl Write) -> anyhow::Result<()> {
        let written = match path == Path::new("-") {
            true => self.write_into(output),
            false => new_file(path).and_then(|mut file| self.write_into(&mut file)),
        };
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    fn write_into(&self, output: &mut impl Write) -> io::Result<()> {
        Template::write_into(self, output)?;
        output.flush()
    }

    fn title(&self) -> String {
        match &self.nodes[..] {
            [node] if self.silent.is_empty() => node.node.clone(),
            nodes => format!("{} nodes", nodes.len()),
        }
    }
}

/// A bar of the histogram.
struct Bar {
    x: usize,
    y: u64,
    height: u64,
    count: u64,
    bound: String,
}

impl NodeReport {
    fn when(&self) -> String {
        moment(&self.time)
    }

    fn lines(&self) -> [(&'static str, String); 8] {
        print::status_lines(&self.status)
    }

    fn port_states(&self) -> Vec<print::Row> {
        let ports = self.status.node.ports.iter();
        ports.flat_map(print::port_rows).collect()
    }

    fn answers(&self) -> u64 {
        self.activation.iter().map(|bucket| bucket.count).sum()
    }

    fn bars(&self) -> Vec<Bar> {
        let highest = self.activation.iter().map(|bucket| bucket.count).max();
        let highest = highest.unwrap_or_default().max(1);
        let bars = self.activation.iter().enumerate().map(|(index, bucket)| {
            // What is there is seen.
            let height = (bucket.count * BAR_HEIGHT / highest).max(2 * bucket.count.min(1));
            Bar {
                x: index * BAR_PITCH,
                y: BAR_HEIGHT - height,
                height,
                count: bucket.count,
                bound: match bucket.le_s {
                    Some(le_s) => milliseconds(le_s),
                    None => "more".to_owned(),
                },
            }
        });
        bars.collect()
    }

    fn within(&self, percent: u64) -> String {
        within(&self.activation, percent)
    }
}

impl NamespaceReport {
    fn since(&self) -> String {
        let known = print::seconds(self.rules.known_s);
        format!("the last {known}: {}", print::since(self.rules.known_since))
    }

    /// What is wrong with a rule, or worth knowing.
    fn problems<'a>(&self, node: &'a NodeReport, rule: &RuleUse) -> Vec<&'a str> {
        let firewalls = node.status.node.firewalls.iter();
        let of_it = firewalls.filter(|firewall| firewall.namespace == self.rules.namespace);
        let problems = of_it.flat_map(|firewall| &firewall.problems);
        let of_rule = problems.filter(|problem| problem.rule == rule.rule);
        of_rule.map(|problem| &*problem.text).collect()
    }

    fn is_dry_run(&self, node: &NodeReport) -> bool {
        let mut firewalls = node.status.node.firewalls.iter();
        firewalls.any(|firewall| firewall.namespace == self.rules.namespace && firewall.is_dry_run)
    }
}

impl RuleUse {
    fn used_text(&self) -> String {
        print::rule_used(self)
    }

    fn class(&self) -> &'static str {
        match self.used {
            Used::Connected => "used",
            Used::Told | Used::Closes | Used::NotKnown => "open",
            Used::Never => "unused",
        }
    }

    fn names_text(&self) -> String {
        let names = self.names.iter().map(|name| &*name.name);
        some(names.take(NAMES_SHOWN), self.names.len())
    }
}

impl NameReport {
    fn name_text(&self) -> &str {
        match &*self.name {
            "" => "not known: flows of an earlier run",
            name => name,
        }
    }

    fn addresses_text(&self) -> String {
        let addresses = self.addresses.iter().map(ToString::to_string);
        some(addresses, self.address_count)
    }

    fn ttl_text(&self) -> String {
        match self.ttl_left_s {
            None => "–".to_owned(),
            Some((first, last)) if first == last => print::seconds(first),
            Some((first, last)) => {
                format!("{} to {}", print::seconds(first), print::seconds(last))
            }
        }
    }

    fn rules_text(&self) -> String {
        let rules: Vec<u32> = self.rules.iter().copied().collect();
        print::numbers(&rules)
    }

    fn packets_text(&self) -> String {
        print::packets(self.packets)
    }

    fn used_text(&self) -> String {
        match (&self.refused, self.last_s) {
            (Some(reason), _) => format!("never opened: {reason}"),
            (None, None) => "never".to_owned(),
            (None, Some(last_s)) => format!("{} ago", print::seconds(last_s)),
        }
    }
}

impl Denial {
    fn pods_text(&self) -> String {
        self.pods.iter().cloned().collect::<Vec<_>>().join(", ")
    }

    fn last_text(&self) -> String {
        moment(&self.last)
    }

    fn rule_text(&self) -> String {
        match self.rules[..] {
            [] => "no rule".to_owned(),
            _ => format!("rule {}", print::numbers(&self.rules)),
        }
    }
}

/// The bound below which this many of 100 answers lie.
fn within(buckets: &[Bucket], percent: u64) -> String {
    let all: u64 = buckets.iter().map(|bucket| bucket.count).sum();
    let wanted = (all * percent).div_ceil(100);
    let mut below = 0;
    let bucket = buckets.iter().find(|bucket| {
        below += bucket.count;
        below >= wanted
    });
    match bucket.and_then(|bucket| bucket.le_s) {
        Some(le_s) => format!("within {} ms", milliseconds(le_s)),
        None => "later than the last bound".to_owned(),
    }
}

/// The first of so many.
fn some(shown: impl Iterator<Item = impl AsRef<str>>, count: usize) -> String {
    let shown: Vec<_> = shown.collect();
    let more = count.saturating_sub(shown.len());
    let shown: Vec<&str> = shown.iter().map(AsRef::as_ref).collect();
    match (shown.is_empty(), more) {
        (true, _) => "–".to_owned(),
        (false, 0) => shown.join(", "),
        (false, more) => format!("{} and {more} more", shown.join(", ")),
    }
}

/// A time of RFC 3339 to its second, for people.
fn moment(time: &str) -> String {
    let time = time.split_once('.').map_or(time, |(time, _)| time);
    format!("{} UTC", time.replace('T', " "))
}

fn milliseconds(seconds: f64) -> String {
    let text = format!("{:.1}", seconds * 1000.0);
    text.trim_end_matches(".0").to_owned()
}

#[cfg(test)]
mod tests;
