//! What the agent tells of the last hour's connections, and of the EgressFirewall that was there for them.

use std::{path::Path, time::Duration};

use dnsflow_core::ask::history::ConnectionView;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::client::{self, AskError};

/// A line of the answer to `history`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// Connections of one pod to one place.
    Connection(ConnectionView),
    /// There are no more.
    End {
        /// The seconds that are known of, 3600 at most.
        known_s: u64,
        /// How many places were forgotten within their hour since the agent has started.
        forgotten: u64,
    },
}

/// The answer to `firewall`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct PresentFirewall {
    /// The EgressFirewall of the namespace, as the resource has it.
    pub resource: Option<Value>,
    /// Whether a name without a wildcard stands for its sub-domains as well, where the EgressFirewall does
    /// not say.
    pub subdomains: bool,
    /// The seconds since its rules came.
    pub came_s: u64,
    /// Whether OVN still enforces the EgressFirewall before this one.
    pub enforces_former: bool,
}

/// The connections of a namespace's pods, or of all pods.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Known {
    /// Each, in the order of pods and places.
    pub connections: Vec<ConnectionView>,
    /// The time that is known of.
    pub time: Duration,
    /// How many places of all pods were forgotten within their hour.
    pub forgotten: u64,
}

impl Known {
    /// Asks the agent.
    pub async fn ask(socket: &Path, namespace: Option<&str>) -> Result<Self, AskError> {
        let namespace = namespace.map(|namespace| ("namespace", namespace.to_owned()));
        let mut known = Self::default();
        let take = |line| {
            match line {
                Line::Connection(connection) => known.connections.push(connection),
                Line::End { known_s, forgotten } => {
                    (known.time, known.forgotten) = (Duration::from_secs(known_s), forgotten);
                }
            }
            Ok(())
        };
        client::lines(socket, "/v1/history", namespace.as_slice(), take).await?;
        known.connections.sort_by(|one, other| {
            let key = |connection: &ConnectionView| {
                let ConnectionView {
                    namespace,
                    pod,
                    address,
                    protocol,
                    port,
                    ..
                } = connection;
                (namespace.clone(), pod.clone(), *address, *protocol, *port)
            };
            key(one).cmp(&key(other))
        });
        Ok(known)
    }
}
