//! The agent's own account of what became of answers.

use anyhow::{Context, Result};

use crate::lab::Lab;

/// What the agent counts of answers. The counters of one agent only grow; the next one begins at zero.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Account {
    /// Answers that the kernel took off the wire.
    pub held: u64,
    /// Answers that came back onto the veth.
    pub released: u64,
    /// Answers that passed without being held, as while no agent is well.
    pub passed: u64,
    /// Answers that the ring buffer had no room for: the agent does not keep up.
    pub ring_full: u64,
    /// Answers to queries that the TC program has not seen. Open vSwitch's userspace datapath may send a query on before
    /// the program sees it.
    pub not_asked: u64,
    /// Answers over the pod's share of the ring buffer.
    pub over_share: u64,
    /// Answers that the TC program could not copy.
    pub copy_failed: u64,
    /// Answers that were held and could not be put back.
    pub lost: u64,
    /// Answers that went back because `--hold-max` was over.
    pub overrun: u64,
    /// Answers that went back although a megaflow still dropped.
    pub dropping: u64,
    /// Waits for the datapath that ended by an estimate, because it could not be asked.
    pub estimated: u64,
    /// Addresses over the pod's budget of changes.
    pub over_budget: u64,
    /// Addresses that found no room in the cache.
    pub no_room: u64,
    /// Answers that opened an address.
    pub opening: u64,
    /// Addresses that the kernel has opened without the agent.
    pub by_kernel: u64,
    /// Answers that could not be decoded.
    pub malformed: u64,
    /// Changes that the switch or the kernel refused.
    pub refused: u64,
}

impl Account {
    /// Reads it from metrics in the format of OpenMetrics.
    fn parse(metrics: &str) -> Self {
        let sum = |series: &str| {
            let lines = metrics.lines().filter(|line| line.starts_with(series));
            let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
            values.sum::<f64>() as u64
        };
        Self {
            held: sum(r#"dnsflow_packets_to_pods_total{reason="held"}"#),
            released: sum(r#"dnsflow_packets_to_pods_total{reason="released"}"#),
            passed: sum(r#"dnsflow_packets_to_pods_total{reason="captured"}"#),
            ring_full: sum(r#"dnsflow_packets_to_pods_total{reason="ring_full"}"#),
            not_asked: sum(r#"dnsflow_packets_to_pods_total{reason="not_asked"}"#),
            over_share: sum(r#"dnsflow_packets_to_pods_total{reason="over_share"}"#),
            copy_failed: sum(r#"dnsflow_packets_to_pods_total{reason="copy_failed"}"#),
            lost: sum("dnsflow_held_answers_lost_total{"),
            overrun: sum(r#"dnsflow_held_answers_total{event="overrun"}"#),
            dropping: sum(r#"dnsflow_revalidation_ends_total{event="dropping"}"#),
            estimated: sum(r#"dnsflow_revalidation_ends_total{event="estimated"}"#),
            over_budget: sum(r#"dnsflow_addresses_not_kept_total{reason="over_budget"}"#),
            no_room: sum(r#"dnsflow_addresses_not_kept_total{reason="no_room"}"#),
            opening: sum(r#"dnsflow_answers_total{result="opening"}"#),
            by_kernel: sum("dnsflow_addresses_opened_by_kernel_total"),
            malformed: sum(r#"dnsflow_answers_total{result="malformed"}"#),
            refused: sum(r#"dnsflow_flow_changes_total{change="refused"}"#)
                + sum(r#"dnsflow_mark_changes_total{change="refused"}"#),
        }
    }

    /// What the same agent has counted since `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            held: self.held - earlier.held,
            released: self.released - earlier.released,
            passed: self.passed - earlier.passed,
            ring_full: self.ring_full - earlier.ring_full,
            not_asked: self.not_asked - earlier.not_asked,
            over_share: self.over_share - earlier.over_share,
            copy_failed: self.copy_failed - earlier.copy_failed,
            lost: self.lost - earlier.lost,
            overrun: self.overrun - earlier.overrun,
            dropping: self.dropping - earlier.dropping,
            estimated: self.estimated - earlier.estimated,
            over_budget: self.over_budget - earlier.over_budget,
            no_room: self.no_room - earlier.no_room,
            opening: self.opening - earlier.opening,
            by_kernel: self.by_kernel - earlier.by_kernel,
            malformed: self.malformed - earlier.malformed,
            refused: self.refused - earlier.refused,
        }
    }

    /// What a limit, the switch or the kernel took from the answers; empty if nothing. Where this is not empty, a
    /// measurement is of the limit and not of the path behind it.
    pub fn losses(&self) -> Vec<String> {
        let losses = [
            (
                self.over_budget,
                "addresses over the pod's budget of changes",
            ),
            (self.no_room, "addresses without room in the cache"),
            (self.ring_full, "answers without room in the ring buffer"),
            (
                self.over_share,
                "answers over the pod's share of the ring buffer",
            ),
            (self.copy_failed, "answers that could not be copied"),
            (self.lost, "held answers that could not be put back"),
            (self.malformed, "answers that could not be decoded"),
            (self.refused, "changes refused by the switch or the kernel"),
        ];
        let losses = losses.into_iter().filter(|(count, _)| *count > 0);
        losses
            .map(|(count, what)| format!("{count} {what}"))
            .collect()
    }

    /// How many answers went back before the switch let their first packet pass. Either wait is for the same answer, and
    /// is counted as one of both (`what_ended_the_wait_of_an_answer_is_counted_once` in the core).
    pub fn gave_up(&self) -> u64 {
        self.overrun + self.dropping
    }
}

impl Lab {
    /// What the lab's agent has counted at all: the lines of its metrics that are not zero, without distributions.
    pub fn counted(&self) -> String {
        let metrics = match self.agent_metrics() {
            Ok(metrics) => metrics,
            Err(error) => return format!("no metrics: {error:#}"),
        };
        let says = |line: &&str| {
            !line.starts_with('#') && !line.contains("_bucket{") && !line.ends_with(" 0")
        };
        metrics.lines().filter(says).collect::<Vec<_>>().join("\n")
    }

    /// The account of the lab's agent, up to a second old.
    pub fn account(&self) -> Result<Account> {
        let metrics = self.agent_metrics().context("the agent's metrics")?;
        Ok(Account::parse(&metrics))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_is_read_from_the_metrics() {
        let metrics = r#"dnsflow_packets_to_pods_total{reason="held"} 7
dnsflow_packets_to_pods_total{reason="released"} 6
dnsflow_packets_to_pods_total{reason="captured"} 2
dnsflow_packets_to_pods_total{reason="ring_full"} 1
dnsflow_packets_to_pods_total{reason="not_asked"} 7
dnsflow_packets_to_pods_total{reason="over_share"} 3
dnsflow_packets_to_pods_total{reason="copy_failed"} 0
dnsflow_packets_from_pods_total{reason="captured"} 9
dnsflow_held_answers_total{event="held"} 7
dnsflow_held_answers_total{event="overrun"} 3
dnsflow_held_answers_lost_total{reason="full"} 1
dnsflow_held_answers_lost_total{reason="too_long"} 1
dnsflow_revalidation_ends_total{event="dropping"} 2
dnsflow_revalidation_ends_total{event="estimated"} 9
dnsflow_addresses_not_kept_total{reason="over_budget"} 4
dnsflow_addresses_not_kept_total{reason="no_room"} 5
dnsflow_answers_total{result="opening"} 8
dnsflow_addresses_opened_by_kernel_total 6
dnsflow_answers_total{result="malformed"} 0
dnsflow_flow_changes_total{change="refused"} 1
dnsflow_mark_changes_total{change="refused"} 2"#;
        let account = Account::parse(metrics);
        let expected = Account {
            held: 7,
            released: 6,
            passed: 2,
            ring_full: 1,
            not_asked: 7,
            over_share: 3,
            copy_failed: 0,
            lost: 2,
            overrun: 3,
            dropping: 2,
            estimated: 9,
            over_budget: 4,
            no_room: 5,
            opening: 8,
            by_kernel: 6,
            malformed: 0,
            refused: 3,
        };
        assert_eq!(account, expected);
        assert_eq!(account.gave_up(), 5);
        assert_eq!(account.since(expected), Account::default());
        let losses = [
            "4 addresses over the pod's budget of changes",
            "5 addresses without room in the cache",
            "1 answers without room in the ring buffer",
            "3 answers over the pod's share of the ring buffer",
            "2 held answers that could not be put back",
            "3 changes refused by the switch or the kernel",
        ];
        assert_eq!(account.losses(), losses);
        assert!(Account::default().losses().is_empty());
    }
}
