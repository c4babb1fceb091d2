//! `dnsflow cleanup-nodes`: has every node of a cluster clean up in its agent's place, before Helm deletes the release.
//!
//! The same as `kubectl dnsflow uninstall` does by kubectl, with the rights of a ServiceAccount that is there for this
//! time only. It deletes nothing.

use std::{io::Write, time::Instant};

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use tokio::{runtime, time::sleep};

use crate::{
    asking::rollout::{POLL, Progress, Wait, cleanup_patch, not_cleaned},
    exit::Exit,
    k8s::{ClientOptions, client::connect},
    options::CleanupNodesOptions,
};

/// Has every node cleaned, and says how many are. Those that are not are named on standard error, with the exit code of an
/// answer that is not whole.
///
/// # Errors
///
/// If the API server refuses, or somebody else deletes the DaemonSet.
pub fn run(options: &CleanupNodesOptions, output: &mut impl Write) -> anyhow::Result<Exit> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    runtime.block_on(clean_up(options, output))
}

async fn clean_up(options: &CleanupNodesOptions, output: &mut impl Write) -> anyhow::Result<Exit> {
    let (namespace, name) = (&*options.namespace, &*options.daemon_set);
    let client = ClientOptions {
        kubeconfig: options.kubeconfig.clone(),
    };
    let (client, _) = connect(&client).await.map_err(|reason| anyhow!(reason))?;
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), namespace);
    let get = async || {
        let found = daemon_sets.get_opt(name).await;
        found.with_context(|| format!("cannot read the DaemonSet {namespace}/{name}"))
    };
    let Some(found) = get().await? else {
        writeln!(output, "there is no DaemonSet {namespace}/{name}")?;
        return Ok(Exit::Done);
    };
    let patch = Patch::Strategic(cleanup_patch());
    let parameters = PatchParams::default();
    let patched = daemon_sets.patch(name, &parameters, &patch).await;
    patched.with_context(|| format!("cannot change the DaemonSet {namespace}/{name}"))?;
    let mut wait = Wait::new(options.timeout, Instant::now());
    let progress = loop {
        let found = get().await?.context("somebody else has deleted it")?;
        let progress = Progress::of(&found);
        if !wait.goes_on(progress, Instant::now()) {
            break progress;
        }
        sleep(POLL).await;
    };
    writeln!(
        output,
        "{} of {} nodes are clean",
        progress.done, progress.nodes
    )?;
    output.flush()?;
    if progress.is_whole() {
        return Ok(Exit::Done);
    }
    let pods: Api<Pod> = Api::namespaced(client, namespace);
    let labels = found.spec.selector.match_labels.unwrap_or_default();
    let labels: Vec<String> = labels
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let of_agents = ListParams::default().labels(&labels.join(","));
    let pods = pods
        .list(&of_agents)
        .await
        .context("cannot list the pods")?;
    for (node, reason) in not_cleaned(&pods.items) {
        eprintln!("node {node}: {reason}");
    }
    Ok(Exit::Incomplete)
}
