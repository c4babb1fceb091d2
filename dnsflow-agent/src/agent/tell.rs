//! Reports of the core as log events: one report, one event, with fields to filter by.

use dnsflow_core::report::{Report, Standing};
use tracing::{debug, info, warn};

/// Logs a report.
pub(super) fn tell(report: Report) {
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
            settling,
        } => info!(
            namespace,
            port,
            %name,
            ?addresses,
            ?rules,
            flows,
            activation_us = activation.as_micros(),
            settling,
            "opened"
        ),
        Report::ClusterNetworks { networks, left_out } => {
            let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
            if left_out == 0 {
                info!(
                    ?networks,
                    "no address of the cluster's own networks is opened"
                );
            } else {
                warn!(
                    ?networks,
                    left_out,
                    "the cluster has more networks than are looked at: --cluster-networks names \
                     larger ones"
                );
            }
        }
        Report::PlaceTaken {
            table,
            priority,
            cookie,
        } => warn!(
            table,
            priority,
            cookie = format_args!("{cookie:#x}"),
            "someone else has a flow with the match of one of ours, which is left out"
        ),
        Report::AddressRefused {
            port,
            name,
            address,
            reason,
        } => info!(port, %name, %address, reason, "an address in an answer is not opened"),
        Report::Trusting(resolvers) if resolvers.is_empty() => {
            warn!("no DNS server is believed: --resolver names one, or --dns-service the cluster's")
        }
        Report::Trusting(resolvers) => {
            let resolvers: Vec<String> = resolvers.iter().map(ToString::to_string).collect();
            info!(?resolvers, "believing the answers of these DNS servers");
        }
        Report::Restored { flows } => info!(flows, "flows that had vanished were put back"),
        Report::Unblocked {
            connections,
            failed: 0,
        } => info!(
            connections,
            "connections that OVN had blocked in a gap of our flows go on"
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
        } if problems.is_empty() => {
            info!(namespace, "every rule of the EgressFirewall is in force")
        }
        Report::Problems {
            namespace,
            problems,
        } => {
            for (rule, (problem, standing)) in problems {
                match standing {
                    Standing::Waiting => {
                        info!(namespace, rule, problem, "a rule is not in force yet");
                    }
                    Standing::NotInForce | Standing::Caveat => {
                        warn!(namespace, rule, problem, "a rule of the EgressFirewall");
                    }
                }
            }
        }
        Report::LimitReached {
            namespace,
            port,
            name: Some(name),
            max,
        } => warn!(
            namespace, port, %name, max,
            "not every address of a name is open: --max-addresses-per-name"
        ),
        Report::LimitReached {
            namespace,
            port,
            name: None,
            max,
        } => warn!(
            namespace,
            port, max, "not every address that a pod was told is open: --max-leases-per-pod"
        ),
        Report::NotAttached { interface, reason } => {
            debug!(interface, reason, "not attached yet, will try again");
        }
    }
}
