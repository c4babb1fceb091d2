//! Reports of the core as log events: one report, one event, with fields to filter by.

use std::{collections::BTreeMap, fmt::Display};

use dnsflow_core::{
    ask::view,
    io::{
        input::LargeTable,
        report::{NewProblems, NotTrusted, Report, Severity},
    },
    values::limits::Limit,
};
use tracing::{debug, info, warn};

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
            "DNS answers on this secondary network are ignored: the cluster's DNS is not there, and a neighbour may \
             answer in its name"
        ),
        Report::PortNotTrusted {
            port,
            reason: NotTrusted::NoAddresses,
        } => warn!(
            port,
            "DNS answers at this port are ignored: its Interface row has no attached_mac or no ip_addresses, and \
             without port security on both, a pod can ask in another pod's name; give its network subnets (IPAM)"
        ),
        Report::ClusterNetworks { networks, left_out } => {
            let networks = list(networks);
            if *left_out == 0 {
                info!(
                    networks,
                    "addresses of the cluster's networks are never opened"
                );
            } else {
                warn!(
                    networks,
                    left_out,
                    "the cluster has too many networks: some are left out, and may be opened; --cluster-networks \
                     sets larger ones"
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
            "others can answer at the address of a trusted DNS server, and open any address: give the server an \
             address of its own, or remove it from --resolver"
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
                true => "the agent works without it",
                false => {
                    "the agent reads nothing new of the database, and retries every minute; open addresses stay open"
                }
            };
            warn!(
                database,
                table, limit, purpose, remedy, "a table of a database is too large: {consequence}"
            );
        }
        Report::TableReadAgain { database, table } => {
            info!(
                database,
                table, "the table is no longer too large, and is read again"
            );
        }
        Report::LoadBalancersUnread(true) => warn!(
            "some load balancers of OVN cannot be read: any address may be in front of one, so addresses are opened by \
             flows, not by marks"
        ),
        Report::LoadBalancersUnread(false) => {
            info!("all load balancers of OVN are read: addresses are opened by marks again");
        }
        Report::MarksEndNowhere => warn!(
            "OVN has no stage ls_out_check_port_sec: packets allowed by other rules keep their marks on this node; \
             --open-by=flows sets no marks"
        ),
        Report::ForeignFlow {
            table,
            priority,
            cookie,
        } => warn!(
            table,
            priority,
            cookie = format_args!("{cookie:#x}"),
            "a foreign flow has the same match as a flow of dnsflow: dnsflow leaves its flow out"
        ),
        Report::Closed {
            namespace,
            port,
            name,
            addresses,
            left_out,
            rule,
        } => {
            let name = name.as_ref().map(ToString::to_string);
            let addresses = list(addresses);
            info!(
                namespace,
                port, name, addresses, left_out, rule, "an edit has closed addresses in use"
            );
        }
        Report::AddressRefused {
            port,
            name,
            address,
            reason,
        } => info!(port, %name, %address, reason, "refused an address of a DNS answer"),
        Report::Trusting(resolvers) if resolvers.is_empty() => {
            warn!("no DNS server is trusted: set --dns-service or --resolver")
        }
        Report::Trusting(resolvers) => {
            let resolvers = list(resolvers);
            info!(resolvers, "trusting these DNS servers");
        }
        Report::Restored { flows } => info!(flows, "restored missing flows"),
        Report::Unblocked {
            connections,
            failed: 0,
        } => info!(
            connections,
            "unblocked connections after a gap in the flows"
        ),
        Report::Unblocked {
            connections,
            failed,
        } => warn!(
            connections,
            failed,
            "some connections stay blocked after a gap in the flows, until their pods send a packet"
        ),
        Report::Resynced { added, removed } => {
            info!(added, removed, "corrected the flows of the switch")
        }
        Report::FlowsRefused { reason } => warn!(reason, "the switch refused flows"),
        Report::Problems {
            namespace, present, ..
        } if present.is_empty() => {
            info!(namespace, "every rule of the EgressFirewall is in force")
        }
        Report::Problems {
            namespace, news, ..
        } => {
            for ProblemLine {
                rule,
                problem,
                severity,
                like_it,
            } in problem_lines(news)
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
                        warn!(
                            namespace,
                            rule, problem, "a rule of the EgressFirewall has a problem"
                        );
                    }
                    (Severity::NotInForce | Severity::Caveat, false) => {
                        warn!(
                            namespace,
                            rule, problem, like_it, "rules of the EgressFirewall have a problem"
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
            "dry run: would open addresses"
        ),
        Report::Denied(denied) => {
            let names = list(&denied.names);
            let left_out = denied.names_left_out;
            debug!(
                namespace = denied.namespace,
                port = denied.port,
                address = %denied.attempt.address,
                transport = view::transport_text(denied.attempt.transport()),
                names,
                names_left_out = (left_out > 0).then_some(left_out),
                rule = denied.rule,
                reason = %denied,
                "denied a connection"
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
            "cannot attach the TC programs to a pod's interface: DNS answers to the pod may open nothing; trying again"
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

/// The lines about new problems: one for each, or one for all with the same effect if these are too many.
fn problem_lines<'a>(news: &'a BTreeMap<Severity, NewProblems>) -> Vec<ProblemLine<'a>> {
    let kinds = [Severity::NotInForce, Severity::Caveat, Severity::Waiting];
    let mut lines = Vec::new();
    for severity in kinds {
        let Some(new) = news.get(&severity) else {
            continue;
        };
        let line = |(rule, problem): (&u32, &'a String), like_it| ProblemLine {
            rule: *rule,
            problem,
            severity,
            like_it,
        };
        let mut first = new.first.iter();
        if new.others.is_empty() {
            lines.extend(first.map(|one| line(one, String::new())));
        } else if let Some(one) = first.next() {
            lines.push(line(one, list(new.rules().skip(1))));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_problems_of_one_kind_get_one_line() {
        let new = |first: &[u32], others: &[u32]| NewProblems {
            first: first.iter().map(|rule| (*rule, "bad".into())).collect(),
            others: others.to_vec(),
        };
        let many: Vec<u32> = (9..200).collect();
        let news = [
            (Severity::Waiting, new(&[0, 1, 2, 3, 4, 5, 6, 8], &many)),
            (Severity::NotInForce, new(&[7], &[])),
        ];
        let news = news.into();
        let lines = problem_lines(&news);
        let short: Vec<_> = lines
            .iter()
            .map(|line| (line.rule, line.severity))
            .collect();
        assert_eq!(short, [(7, Severity::NotInForce), (0, Severity::Waiting)]);
        assert_eq!(lines[0].like_it, "");
        assert!(
            lines[1].like_it.starts_with("1,2,3,4,5,6,8,9,"),
            "{lines:?}"
        );
        assert!(lines[1].like_it.ends_with(",198,199"), "{lines:?}");
        let few = [(Severity::Waiting, new(&[3, 4], &[]))];
        assert_eq!(problem_lines(&few.into()).len(), 2);
        assert_eq!(problem_lines(&BTreeMap::new()), []);
    }
}
