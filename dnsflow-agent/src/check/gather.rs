//! Gathers the facts with the agent's own edges. Every question has a time limit.

mod kernel;
mod kubernetes;
mod ovn;
mod vswitch;

use std::{path::PathBuf, time::Duration};

use dnsflow_ovsdb::{Remote, Remotes};
use tokio::{
    net::{TcpStream, UnixStream},
    time::timeout,
};

use super::facts::{Facts, Firewalls, Source};
use crate::{
    asking::{manifests, northbound},
    k8s::ClientOptions,
    node_addresses::NodeAddresses,
    open_by::Decision,
    openflow::{self, Event},
    options::AgentOptions,
    ovn_db::SB_SOCKETS,
    vswitch_db,
};

/// How long each of the databases, the switch and the API server may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Gathers all facts.
pub(super) async fn gather(options: AgentOptions) -> Facts {
    let open_by = Decision::of(&options, Duration::ZERO).await;
    let AgentOptions {
        manifests: directory,
        kubeconfig,
        dns_service,
        ovs_db,
        ovn_nb,
        ovn_sb,
        openflow_socket,
        pin_dir,
        // They have been asked for the choice.
        open_by: _,
        verdict: _,
        mark_mask: _,
        subdomains,
        // Options for what the agent does later are not checked.
        hold: _,
        hold_max: _,
        keep_flows_s: _,
        min_ttl: _,
        max_ttl: _,
        idle_grace: _,
        max_addresses_per_name: _,
        max_addresses_per_pod: _,
        max_flow_changes: _,
        state_dir: _,
        resolver: _,
        dns_port: _,
        cluster_networks,
        deny_answers: _,
        allow_answers: _,
        nat64_prefix: _,
        dry_run: _,
        denied_events: _,
        listen: _,
        control_socket: _,
        log_format: _,
    } = options;
    let ovs_db = ovs_db.unwrap_or_else(|| Remotes::unix(&[vswitch_db::DEFAULT_SOCKET]));
    let ovn_nb = ovn_nb.unwrap_or_else(|| Remotes::unix(northbound::SOCKETS));
    let ovn_sb = ovn_sb.unwrap_or_else(|| Remotes::unix(SB_SOCKETS));
    let (connection, openflow) = connect(openflow_socket.path).await;
    let (nb, sb) = ovn::ask(&ovn_nb, &ovn_sb, &cluster_networks, connection).await;
    let (source, firewalls) = match directory {
        Some(dir) => read_manifests(dir),
        None => {
            let client = ClientOptions { kubeconfig };
            match kubernetes::ask(client, &dns_service, cluster_networks).await {
                Ok((cluster, firewalls)) => (Source::Cluster(Ok(cluster)), firewalls),
                Err(reason) => (Source::Cluster(Err(reason)), Firewalls::default()),
            }
        }
    };
    Facts {
        kernel: kernel::ask(),
        vswitch: vswitch::ask(&ovs_db, pin_dir.as_deref()).await,
        openflow,
        open_by,
        node: NodeAddresses::find().map_err(|error| error.to_string()),
        nb,
        sb,
        source,
        firewalls,
        subdomains,
    }
}

fn read_manifests(dir: PathBuf) -> (Source, Firewalls) {
    let names = manifests::names(&dir).map_err(|error| error.to_string());
    let source = Source::Manifests(dir.display().to_string(), names.map(|names| names.len()));
    let read = manifests::Directory::new(dir).read().unwrap_or_default();
    let read = read.firewalls.into_iter();
    let firewalls = Firewalls {
        read: read
            .map(|(id, firewall)| (id.namespace, firewall))
            .collect(),
        are_more: false,
    };
    (source, firewalls)
}

/// A connection to the bridge, if it could be made.
async fn connect(socket: PathBuf) -> (Option<openflow::Connection>, Result<(), String>) {
    let mut connection = openflow::Connection::new(&socket);
    match timeout(PATIENCE, connection.next()).await {
        Ok(Event::Up) => (Some(connection), Ok(())),
        Ok(Event::Down { reason }) => (None, Err(reason)),
        Ok(event) => (None, Err(format!("the switch began with {event:?}"))),
        Err(_) => (None, Err(format!("{} does not answer", socket.display()))),
    }
}

/// Whether one of these addresses accepts a connection; if not, why.
async fn reach(remotes: &Remotes) -> Result<(), String> {
    let mut reasons = Vec::new();
    for remote in remotes.iter() {
        let connected = timeout(PATIENCE, async {
            match remote {
                Remote::Unix(path) => UnixStream::connect(path).await.map(drop),
                Remote::Tcp { host, port } => {
                    TcpStream::connect((host.as_str(), *port)).await.map(drop)
                }
            }
        });
        match connected.await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => reasons.push(format!("{remote}: {error}")),
            Err(_) => reasons.push(format!("{remote}: no answer")),
        }
    }
    Err(reasons.join(", "))
}

/// The reason for a database that accepts a connection and sends no rows.
fn no_rows() -> String {
    format!(
        "it takes connections, but gave no rows within {} s",
        PATIENCE.as_secs()
    )
}
