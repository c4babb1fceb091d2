//! What the agents' DaemonSet becomes for a time: one that waits beside the agents, so that each node can be checked; or
//! a cleanup in their place. Pure.

use std::time::{Duration, Instant};

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use serde_json::{Value, json};

/// The DaemonSet's name, as in `deploy/base/daemonset.yaml`.
pub const DAEMON_SET: &str = "dnsflow";
/// The container of the agent, as there.
pub const CONTAINER: &str = "agent";
/// The label by which the DaemonSet selects its pods.
pub const LABEL: &str = "app.kubernetes.io/name";
/// The label whose value is `dnsflow` on all objects of dnsflow's, whatever their names.
pub const PART_OF: &str = "app.kubernetes.io/part-of";
/// The name of the DaemonSet that waits beside the agents, and the value of the label of its pods.
pub const PREFLIGHT: &str = "dnsflow-preflight";
/// Between two looks at a DaemonSet.
pub const POLL: Duration = Duration::from_secs(1);
/// The subcommand of a cleanup.
const CLEANUP: &str = "cleanup";

/// A strategic merge patch by which each pod of the DaemonSet cleans up instead of running an agent, on all nodes at
/// once. It changes only fields that the manifests have, so that applying these brings the agents back.
pub fn cleanup_patch() -> Value {
    let rolling = json!({"maxUnavailable": "100%"});
    let container = json!({"name": CONTAINER, "args": [CLEANUP, "--stay"]});
    json!({"spec": {
        "minReadySeconds": 0,
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
        "template": {"spec": {"containers": [container]}},
    }})
}

/// This DaemonSet with a name of its own, and pods that wait: with the image, options, directories and rights of the
/// agent. `None` where it is none.
pub fn preflight(daemon_set: &Value) -> Option<Value> {
    let mut waiting = daemon_set.clone();
    let metadata = waiting.get_mut("metadata")?.as_object_mut()?;
    metadata.insert("name".to_owned(), PREFLIGHT.into());
    for labels in [
        "/metadata/labels",
        "/spec/selector/matchLabels",
        "/spec/template/metadata/labels",
    ] {
        let labels = waiting.pointer_mut(labels)?.as_object_mut()?;
        labels.insert(LABEL.to_owned(), PREFLIGHT.into());
    }
    let spec = waiting.get_mut("spec")?.as_object_mut()?;
    spec.insert("minReadySeconds".to_owned(), 0.into());
    let containers = waiting.pointer_mut("/spec/template/spec/containers")?;
    for container in containers.as_array_mut()? {
        let container = container.as_object_mut()?;
        container.insert("args".to_owned(), json!(["wait"]));
        // Nothing listens. On the host's network, a port would keep the pod from a node with an agent.
        for field in ["startupProbe", "livenessProbe", "readinessProbe", "ports"] {
            container.remove(field);
        }
    }
    Some(waiting)
}

/// How many nodes have the pod that the DaemonSet is to have.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Progress {
    /// Nodes whose pod is there and ready.
    pub done: i32,
    /// All nodes that are to have one.
    pub nodes: i32,
    /// Whether the status is that of the present DaemonSet.
    is_current: bool,
}

impl Progress {
    /// By the DaemonSet's status, as `kubectl rollout status` takes it.
    pub fn of(daemon_set: &DaemonSet) -> Self {
        let generation = daemon_set.metadata.generation.unwrap_or_default();
        let status = daemon_set.status.clone().unwrap_or_default();
        let updated = status.updated_number_scheduled.unwrap_or_default();
        let is_current = status.observed_generation.unwrap_or_default() >= generation;
        Self {
            done: match is_current {
                true => updated.min(status.number_available.unwrap_or_default()),
                false => 0,
            },
            nodes: status.desired_number_scheduled,
            is_current,
        }
    }

    /// Whether every node has it.
    pub fn is_whole(self) -> bool {
        self.is_current && self.done >= self.nodes
    }
}

/// Waits for a DaemonSet: for so long without another node.
#[derive(Debug)]
pub struct Wait {
    patience: Duration,
    last: Option<Progress>,
    since: Instant,
}

impl Wait {
    /// From now on.
    pub fn new(patience: Duration, now: Instant) -> Self {
        Self {
            patience,
            last: None,
            since: now,
        }
    }

    /// Whether to look again.
    pub fn goes_on(&mut self, progress: Progress, now: Instant) -> bool {
        if self.last != Some(progress) {
            self.last = Some(progress);
            self.since = now;
        }
        !progress.is_whole() && now.duration_since(self.since) < self.patience
    }
}

/// The nodes whose pods have not cleaned up, each with the reason as far as Kubernetes knows it.
pub fn not_cleaned(pods: &[Pod]) -> Vec<(String, String)> {
    let left = pods.iter().filter_map(|pod| {
        let spec = pod.spec.as_ref()?;
        let mut arguments = spec
            .containers
            .iter()
            .flat_map(|one| one.args.iter().flatten());
        let status = pod.status.as_ref();
        let conditions = status.and_then(|status| status.conditions.as_ref());
        let is_ready = conditions.into_iter().flatten().any(|condition| {
            (condition.type_.as_str(), condition.status.as_str()) == ("Ready", "True")
        });
        let reason = match arguments.any(|argument| argument == CLEANUP) {
            // The kubelet of a node that is not ready takes no Pod away.
            false if pod.metadata.deletion_timestamp.is_some() => {
                "its agent was told to end and has not (is the node ready?)".to_owned()
            }
            false => "its agent has not ended".to_owned(),
            true if is_ready => return None,
            true => {
                let containers = status.and_then(|status| status.container_statuses.as_ref());
                let mut containers = containers.into_iter().flatten();
                let waiting = containers.find_map(|one| one.state.clone()?.waiting?.reason);
                waiting.unwrap_or_else(|| "it has not cleaned up yet".to_owned())
            }
        };
        let name = pod.metadata.name.clone();
        let node = spec.node_name.clone().or(name).unwrap_or_default();
        Some((node, reason))
    });
    left.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon_set(generation: i64, observed: i64, updated: i32, available: i32) -> DaemonSet {
        let value = json!({
            "metadata": {"generation": generation},
            "status": {
                "observedGeneration": observed, "desiredNumberScheduled": 3, "currentNumberScheduled": 3,
                "numberMisscheduled": 0, "numberReady": available,
                "updatedNumberScheduled": updated, "numberAvailable": available,
            },
        });
        serde_json::from_value(value).expect("a DaemonSet")
    }

    #[test]
    fn a_rollout_is_whole_by_the_status_of_the_present_generation() {
        for (generation, observed, updated, available, done, is_whole) in [
            (2, 1, 3, 3, 0, false),
            (2, 2, 1, 3, 1, false),
            (2, 2, 3, 2, 2, false),
            (2, 2, 3, 3, 3, true),
        ] {
            let progress = Progress::of(&daemon_set(generation, observed, updated, available));
            assert_eq!((progress.done, progress.is_whole()), (done, is_whole));
        }
        // Nobody has looked at it yet.
        assert!(!Progress::of(&daemon_set(1, 0, 0, 0)).is_whole());
    }

    #[test]
    fn each_further_node_has_the_whole_time() {
        let patience = Duration::from_secs(10);
        let start = Instant::now();
        let mut wait = Wait::new(patience, start);
        let mut at = |seconds, updated| {
            let progress = Progress::of(&daemon_set(1, 1, updated, updated));
            wait.goes_on(progress, start + Duration::from_secs(seconds))
        };
        assert!(at(0, 0));
        assert!(at(9, 0));
        assert!(at(9, 1));
        assert!(at(18, 1));
        assert!(!at(19, 1));
        assert!(!at(19, 3), "it is whole");
    }

    #[test]
    fn nodes_that_are_not_clean_are_named_with_the_reason() {
        let pod = |node: &str, argument: &str, ready: &str, state: Value| {
            let value = json!({
                "metadata": {"name": format!("pod-of-{node}")},
                "spec": {"nodeName": node, "containers": [{"name": "agent", "args": [argument]}]},
                "status": {
                    "conditions": [{"type": "Ready", "status": ready}],
                    "containerStatuses": [{
                        "name": "agent", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                        "state": state,
                    }],
                },
            });
            serde_json::from_value::<Pod>(value).expect("a pod")
        };
        let failed = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        let mut dead =
            serde_json::to_value(pod("n5", "agent", "False", json!({}))).expect("a pod is JSON");
        dead["metadata"]["deletionTimestamp"] = "2026-11-27T12:00:00Z".into();
        let dead = serde_json::from_value(dead).expect("a pod");
        let pods = [
            pod("n1", "cleanup", "True", json!({})),
            pod("n2", "cleanup", "False", failed),
            pod("n3", "agent", "True", json!({})),
            pod("n4", "cleanup", "False", json!({})),
            dead,
        ];
        let left = not_cleaned(&pods);
        let left: Vec<_> = left.iter().map(|(node, why)| (&**node, &**why)).collect();
        assert_eq!(
            left,
            [
                ("n2", "CrashLoopBackOff"),
                ("n3", "its agent has not ended"),
                ("n4", "it has not cleaned up yet"),
                (
                    "n5",
                    "its agent was told to end and has not (is the node ready?)"
                ),
            ]
        );
    }

    #[test]
    fn what_has_no_containers_is_no_daemon_set() {
        assert_eq!(preflight(&json!({"metadata": {"name": "dnsflow"}})), None);
        assert_eq!(preflight(&json!({"metadata": "x", "spec": []})), None);
    }
}
