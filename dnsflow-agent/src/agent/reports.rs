//! Reports of the core as log events: one report, one event, with fields to filter by.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
};

use dnsflow_core::{
    ask::view,
    io::{
        input::LargeTable,
        report::{NotTrusted, Report, Severity},
    },
    values::limits::Limit,
};
use tracing::{debug, info, warn};

/// So many problems of one kind that come together get a line each; of more, one line tells.
const LINES_MAX: usize = 8;

/// Logs a report.
pub(super) fn tell(report: &Report) {
    match report {
        Report::Ready {
            attached,
            firewalls,
            flows,
        } => info!(attached, firewalls, flows, "ready"),
        Report::Opened {
            namespace,
            port,
            name,
            addresses,
            rules,
            flows,
            activation,
            revalidation_wait,
        } => debug!(
            namespace,
            port,
            %name,
            addresses = list(addresses),
            rules = list(rules),
            flows,
            // JSON has it as a number up to 64 bits.
            activation_us = activation.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
            revalidation_wait,
            "opened"
        ),
        Report::PortNotTrusted {
            port,
            reason: NotTrusted::SecondaryNetwork(network),
        } => info!(
            port,
            network,
            "nothing that a pod is told on a network other than its primary one counts: the cluster's \
             DNS is not there, and a neighbour may speak in its name"
        ),
        Report::PortNotTrusted {
            port,
            reason: NotTrusted::NoAddresses,
        } => warn!(
            port,
            "nothing that a pod is told at this port counts, so none of its names is opened there: its \
             Interface row names no attached_mac or no ip_addresses, and without port security on \
             both a pod can ask in another's name; give its network subnets (IPAM)"
        ),
        Report::ClusterNetworks { networks, left_out } => {
            let networks = list(networks);
            if *left_out == 0 {
                info!(
                    networks,
                    "no address of the cluster's own networks is opened"
                );
            } else {
                warn!(
                    networks,
                    left_out,
                    "the cluster has more networks than are looked at: --cluster-networks names \
                     larger ones"
                );
            }
        }
        Report::AllowedAnyway(networks) if networks.is_empty() => {
            info!("--allow-answers overrides no refusal");
        }
        Report::AllowedAnyway(networks) => {
            for (network, reasons) in networks {
                let reasons = list(reasons);
                warn!(%network, reasons, "--allow-answers overrides refusals");
            }
        }
        Report::ResolverCovered { resolver, by } => warn!(
            %resolver,
            by = list(by),
            "others may answer at the address of a DNS server that is trusted, and open what they \
             like: give the server an address of its own, or take it from --resolver"
        ),
        Report::TableTooLarge(LargeTable {
            database,
            table,
            limit,
            purpose,
            remedy,
            is_left_out,
        }) => {
            let consequence = match is_left_out {
                true => "the agent goes on without it",
                false => {
                    "the database is not read any further, and open addresses stay open; it is read again every minute"
                }
            };
            warn!(
                database,
                table, limit, purpose, remedy, "a table of a database is too large: {consequence}"
            );
        }
        Report::TableReadAgain { database, table } => {
            info!(database, table, "a formerly too large table is read again");
        }
        Report::MarksEndNowhere => warn!(
            "OVN has no stage ls_out_check_port_sec, in which marks end: a packet that another rule lets pass keeps \
             its mark on this node; --open-by=flows sets none"
        ),
        Report::ForeignFlow {
            table,
            priority,
            cookie,
        } => warn!(
            table,
            priority,
            cookie = format_args!("{cookie:#x}"),
            "a foreign flow has the match of one of ours: ours is left out"
        ),
        Report::AddressRefused {
            port,
            name,
            address,
            reason,
        } => info!(port, %name, %address, reason, "an address in an answer is not opened"),
        Report::Trusting(resolvers) if resolvers.is_empty() => {
            warn!("no DNS server is trusted: --resolver names one, or --dns-service the cluster's")
        }
        Report::Trusting(resolvers) => {
            let resolvers = list(resolvers);
            info!(resolvers, "believing the answers of these DNS servers");
        }
        Report::Restored { flows } => info!(flows, "missing flows were restored"),
        Report::Unblocked {
            connections,
            failed: 0,
        } => info!(
            connections,
            "connections blocked by OVN in a gap of our flows were unblocked"
        ),
        Report::Unblocked {
            connections,
            failed,
        } => warn!(
            connections,
            failed,
            "connections that OVN had blocked in a gap of our flows: not all of them go on, and \
             those that fail may hang until the pod sends a packet"
        ),
        Report::Resynced {
            added,
            removed,
            adopted,
        } => info!(added, removed, adopted, "the switch was brought in line"),
        Report::FlowsRefused { reason } => warn!(reason, "flows refused"),
        Report::Problems {
            namespace,
            problems,
            ..
        } if problems.is_empty() => {
            info!(namespace, "every rule of the EgressFirewall is in force")
        }
        Report::Problems {
            namespace,
            problems,
            news,
        } => {
            for ProblemLine {
                rule,
                problem,
                severity,
                like_it,
            } in problem_lines(problems, news)
            {
                match (severity, like_it.is_empty()) {
                    (Severity::Waiting, true) => {
                        info!(namespace, rule, problem, "a rule is not in force yet");
                    }
                    (Severity::Waiting, false) => {
                        info!(
                            namespace,
                            rule, problem, like_it, "rules are not in force yet"
                        );
                    }
                    (Severity::NotInForce | Severity::Caveat, true) => {
                        warn!(namespace, rule, problem, "a rule of the EgressFirewall");
                    }
                    (Severity::NotInForce | Severity::Caveat, false) => {
                        warn!(
                            namespace,
                            rule, problem, like_it, "rules of the EgressFirewall"
                        );
                    }
                }
            }
        }
        Report::LimitReached {
            namespace,
            port,
            limit: Limit::AddressesOfName(name),
            max,
        } => {
            let limit = Limit::AddressesOfName(name.clone());
            warn!(namespace, port, %name, max, "{limit}");
        }
        Report::LimitReached {
            namespace,
            port,
            limit: Limit::NamesOfAddress(address),
            max,
        } => {
            let limit = Limit::NamesOfAddress(*address);
            warn!(namespace, port, %address, max, "{limit}");
        }
        Report::LimitReached {
            namespace,
            port,
            limit,
            max,
        } => warn!(namespace, port, max, "{limit}"),
        Report::WouldOpen {
            port,
            name,
            addresses,
            rules,
        } => debug!(
            port,
            %name,
            addresses = list(addresses),
            rules = list(rules),
            "would be opened if this were no dry run"
        ),
        Report::Denied(denied) => {
            let names = list(&denied.names);
            debug!(
                namespace = denied.namespace,
                port = denied.port,
                address = %denied.attempt.address,
                transport = view::transport_text(denied.attempt.transport()),
                names,
                rule = denied.rule,
                reason = %denied,
                "a connection is denied"
            );
        }
        Report::NotAttached {
            port,
            pod_uid: _,
            interface,
            reason,
        } => warn!(
            port,
            interface,
            reason,
            "the TC programs are not attached to a pod's interface: its names open nothing; trying again"
        ),
    }
}

/// The parts on one line, which JSON has as a plain text: a field of an event cannot be a list.
fn list(parts: impl IntoIterator<Item = impl Display>) -> String {
    let parts = parts.into_iter().map(|part| part.to_string());
    parts.collect::<Vec<_>>().join(",")
}

/// What one line says of problems.
#[derive(Debug, Eq, PartialEq)]
struct ProblemLine<'a> {
    rule: u32,
    problem: &'a str,
    severity: Severity,
    /// The other rules with a problem of this kind, where one line is for all of them.
    like_it: String,
}

/// What is to be said of the problems that are news.
fn problem_lines<'a>(
    problems: &'a BTreeMap<u32, (String, Severity)>,
    news: &BTreeSet<u32>,
) -> Vec<ProblemLine<'a>> {
    let kinds = [Severity::NotInForce, Severity::Caveat, Severity::Waiting];
    let of_kind = |kind: Severity| {
        let news = problems.iter().filter(|(rule, _)| news.contains(rule));
        news.filter(move |(_, (_, severity))| *severity == kind)
    };
    let line = |(rule, (problem, severity)): (&u32, &'a (String, Severity)), like_it| ProblemLine {
        rule: *rule,
        problem,
        severity: *severity,
        like_it,
    };
    let mut lines = Vec::new();
    for kind in kinds {
        let mut of_kind = of_kind(kind);
        if of_kind.clone().count() <= LINES_MAX {
            lines.extend(of_kind.map(|one| line(one, String::new())));
        } else if let Some(first) = of_kind.next() {
            let others = list(of_kind.map(|(rule, _)| rule));
            lines.push(line(first, others));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_problems_of_one_kind_get_one_line() {
        let problem = |severity| ("bad".to_owned(), severity);
        let mut problems: BTreeMap<_, _> = (0..200)
            .map(|rule| (rule, problem(Severity::Waiting)))
            .collect();
        problems.insert(7, problem(Severity::NotInForce));
        let all: BTreeSet<u32> = problems.keys().copied().collect();
        let lines = problem_lines(&problems, &all);
        let short: Vec<_> = lines
            .iter()
            .map(|line| (line.rule, line.severity))
            .collect();
        assert_eq!(short, [(7, Severity::NotInForce), (0, Severity::Waiting)]);
        assert_eq!(lines[0].like_it, "");
        assert!(lines[1].like_it.starts_with("1,2,3,4,5,6,8,"), "{lines:?}");
        // What was told before is not told again.
        assert_eq!(problem_lines(&problems, &[3, 4].into()).len(), 2);
        assert_eq!(problem_lines(&problems, &BTreeSet::new()), []);
    }
}
