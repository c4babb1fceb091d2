//! Lists and watches EgressFirewalls in all namespaces.
//!
//! One task; it owns the connection and the copy of what the core was last told. It may be
//! dropped at any time. What it must never do: tell the core of a list before it is complete, or
//! take a firewall away because the API server is away or an object cannot be read. Only a
//! complete list or a delete event says that a firewall is gone.
//!
//! A plain list followed by a watch works with every API server. To have the list streamed
//! ("watch-list", an option of Kubernetes 1.27 and later), add `streaming_lists()` to the
//! [`watcher::Config`] in [`watch()`]; a server without it refuses the request.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, Instant},
};

use futures::StreamExt;
use kube::{
    Api, Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
    core::Status,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use tokio::sync::mpsc;
use tower::limit::RateLimitLayer;

use super::{
    convert::{self, Reading},
    egress_firewall::Stored,
    reports::Reports,
};
use crate::core::{
    Input,
    firewall::{Firewall, FirewallId, FirewallUpdate},
};

/// How often a client configuration that cannot be read is read again.
const CONFIG_RETRY: Duration = Duration::from_secs(5);

/// At most this many requests per [`REQUEST_PERIOD`]: a proxy that takes each watch and closes
/// it at once would otherwise be asked again without a pause. A watch lasts minutes, and a page
/// of the list holds 500 objects.
const REQUESTS_PER_PERIOD: u64 = 20;
/// See [`REQUESTS_PER_PERIOD`].
const REQUEST_PERIOD: Duration = Duration::from_secs(10);

/// The same trouble is told again when there was none for this long. Attempts are never further
/// apart: at most 60 s of back-off with its jitter, and 30 s to connect.
const TROUBLE_OVER: Duration = Duration::from_secs(120);

/// At most this many characters of a message are logged.
const MAX_MESSAGE: usize = 400;

/// How to reach the Kubernetes API.
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    /// A kubeconfig file; without it, `KUBECONFIG`, `~/.kube/config` or the Pod's ServiceAccount.
    pub kubeconfig: Option<PathBuf>,
}

impl ClientOptions {
    async fn config(&self) -> Result<Config, String> {
        let Some(path) = &self.kubeconfig else {
            return Config::infer().await.map_err(|error| {
                format!(
                    "found no way to the Kubernetes API, neither a kubeconfig (--kubeconfig FILE \
                     names one) nor a Pod's ServiceAccount: {}",
                    chain(&error)
                )
            });
        };
        let unusable = |error: &dyn std::error::Error| {
            format!(
                "cannot use --kubeconfig {}: {}",
                path.display(),
                chain(error)
            )
        };
        let file = Kubeconfig::read_from(path).map_err(|error| unusable(&error))?;
        Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .map_err(|error| unusable(&error))
    }
}

/// Watches EgressFirewalls and sends each change, until the receiver of `inputs` is gone.
///
/// The first update, and each one after a list was made anew (410 Gone), is a complete list with
/// [`FirewallUpdate::reset`]. Errors are logged once per cause and retried for ever.
pub async fn watch(options: ClientOptions, inputs: mpsc::Sender<Input<'static>>) {
    let mut known = Known::default();
    let mut trouble = Trouble::default();
    loop {
        match connect(&options).await {
            Ok((client, url)) => {
                if session(client, &url, &mut known, &mut trouble, &inputs).await == End::Closed {
                    return;
                }
            }
            Err(cause) => {
                trouble.tell(&cause, Instant::now());
                tokio::select! {
                    () = tokio::time::sleep(CONFIG_RETRY) => {}
                    () = inputs.closed() => return,
                }
            }
        }
    }
}

async fn connect(options: &ClientOptions) -> Result<(Client, String), String> {
    let config = options.config().await?;
    let url = config.cluster_url.to_string();
    let builder = ClientBuilder::try_from(config).map_err(|error| {
        format!(
            "cannot make a client for {url} (--kubeconfig FILE names another): {}",
            chain(&error)
        )
    })?;
    let client = builder
        .with_layer(&RateLimitLayer::new(REQUESTS_PER_PERIOD, REQUEST_PERIOD))
        .build();
    Ok((client, url))
}

/// Why a session ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// Nobody listens any more.
    Closed,
    /// The credentials are refused: read them again.
    Credentials,
}

async fn session(
    client: Client,
    url: &str,
    known: &mut Known,
    trouble: &mut Trouble,
    inputs: &mpsc::Sender<Input<'static>>,
) -> End {
    let api: Api<Stored> = Api::all(client);
    // 0.8 s to 30 s, doubled each time, with jitter: an API server that comes back is not met by
    // all nodes at once.
    let begin = || {
        let events = watcher(api.clone(), watcher::Config::default());
        Box::pin(events.default_backoff())
    };
    let mut events = begin();
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            () = inputs.closed() => return End::Closed,
        };
        match event {
            Some(Ok(event)) => {
                // `Init` is said before anything was asked of the server.
                if !matches!(event, Event::Init) {
                    trouble.over(url);
                }
                if let Some(update) = known.handle(event)
                    && inputs.send(Input::Firewalls(update)).await.is_err()
                {
                    return End::Closed;
                }
            }
            Some(Err(error)) => {
                let code = status(&error).map(|status| status.code);
                match describe(&error, url) {
                    Some(cause) => trouble.tell(&cause, Instant::now()),
                    None => tracing::debug!(url, "the watch is too old; listing anew"),
                }
                match (code, &error) {
                    // kube lists anew for the event 410, but for the answer 410 it would ask for
                    // the same events for ever.
                    (Some(410), watcher::Error::WatchStartFailed(_)) => events = begin(),
                    (Some(401), _) => {
                        tokio::time::sleep(CONFIG_RETRY).await;
                        return End::Credentials;
                    }
                    _ => {}
                }
            }
            // The watcher never ends by itself.
            None => return End::Credentials,
        }
    }
}

/// What the core was last told, and a list in the making.
#[derive(Debug, Default)]
struct Known {
    firewalls: BTreeMap<FirewallId, Firewall>,
    list: Option<List>,
    reports: Reports,
}

#[derive(Debug, Default)]
struct List {
    firewalls: BTreeMap<FirewallId, Firewall>,
    objects: BTreeSet<String>,
}

impl Known {
    /// What an event changes for the core.
    fn handle(&mut self, event: Event<Stored>) -> Option<FirewallUpdate> {
        match event {
            Event::Init => {
                self.list = Some(List::default());
                None
            }
            Event::InitApply(stored) => {
                let (object, firewall) = self.read(&stored);
                let list = self.list.get_or_insert_default();
                list.objects.insert(object);
                list.firewalls.extend(firewall);
                None
            }
            Event::InitDone => {
                let list = self.list.take()?;
                self.reports.retain(|object| list.objects.contains(object));
                self.firewalls = list.firewalls;
                Some(FirewallUpdate {
                    reset: true,
                    firewalls: self
                        .firewalls
                        .iter()
                        .map(|(id, firewall)| (id.clone(), Some(firewall.clone())))
                        .collect(),
                })
            }
            Event::Apply(stored) => {
                let (_, firewall) = self.read(&stored);
                let (id, firewall) = firewall?;
                // Most events change the status alone.
                if self.firewalls.get(&id) == Some(&firewall) {
                    return None;
                }
                self.firewalls.insert(id.clone(), firewall.clone());
                Some(change(id, Some(firewall)))
            }
            Event::Delete(stored) => {
                let converted = convert::firewall(&stored.object);
                self.reports.forget(&converted.object);
                match converted.reading {
                    Reading::Firewall(id, _) | Reading::Unreadable(id) => {
                        self.firewalls.remove(&id)?;
                        Some(change(id, None))
                    }
                    Reading::Ignored => None,
                }
            }
        }
    }

    /// The object's name for people, and the firewall that is in force by it.
    fn read(&mut self, stored: &Stored) -> (String, Option<(FirewallId, Firewall)>) {
        let converted = convert::firewall(&stored.object);
        let mut reasons = converted.reasons;
        let firewall = match converted.reading {
            Reading::Firewall(id, firewall) => Some((id, firewall)),
            Reading::Unreadable(id) => {
                let kept = self.firewalls.get(&id).cloned();
                if kept.is_some() {
                    reasons.push("what was last read of it stays in force".into());
                }
                kept.map(|firewall| (id, firewall))
            }
            Reading::Ignored => None,
        };
        self.reports.tell(&converted.object, reasons);
        (converted.object, firewall)
    }
}

fn change(id: FirewallId, firewall: Option<Firewall>) -> FirewallUpdate {
    FirewallUpdate {
        reset: false,
        firewalls: vec![(id, firewall)],
    }
}

/// What is wrong with the connection, told once.
#[derive(Debug, Default)]
struct Trouble {
    told: Option<String>,
    last: Option<Instant>,
}

impl Trouble {
    fn tell(&mut self, cause: &str, now: Instant) {
        if self.is_news(cause, now) {
            tracing::warn!("{cause}; trying again, and what is known stays in force");
        }
    }

    fn is_news(&mut self, cause: &str, now: Instant) -> bool {
        let recent = self
            .last
            .is_some_and(|last| now.saturating_duration_since(last) < TROUBLE_OVER);
        let news = !(recent && self.told.as_deref() == Some(cause));
        self.told = Some(cause.to_owned());
        self.last = Some(now);
        news
    }

    fn over(&mut self, url: &str) {
        if self.told.take().is_some() {
            tracing::info!(url, "the Kubernetes API answers again");
        }
    }
}

/// What the server said, where it is the server's error.
fn status(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status),
        _ => None,
    }
}

/// The cause and the cure; `None` for what belongs to normal work.
fn describe(error: &watcher::Error, url: &str) -> Option<String> {
    let Some(status) = status(error) else {
        return Some(format!(
            "cannot read EgressFirewalls from the Kubernetes API at {url} (--kubeconfig FILE \
             names another): {}",
            chain(error)
        ));
    };
    Some(match status.code {
        // Events older than the server keeps (RFC 9110, section 15.5.11).
        410 => return None,
        404 => format!(
            "the Kubernetes API at {url} has no resource EgressFirewall (k8s.ovn.org/v1): is \
             ovn-kubernetes installed there, with its egress firewall enabled? --kubeconfig FILE \
             names another cluster"
        ),
        403 => format!(
            "the Kubernetes API at {url} does not let dnsflow read EgressFirewalls: its \
             ServiceAccount needs get, list and watch of egressfirewalls in k8s.ovn.org, as in \
             deploy/base/rbac.yaml"
        ),
        401 => format!(
            "the Kubernetes API at {url} refuses the credentials; they are read again \
             (--kubeconfig FILE names others)"
        ),
        code => format!(
            "the Kubernetes API at {url} answers with the error {code}: {}",
            convert::shorten(&status.message.replace('\n', " "), MAX_MESSAGE)
        ),
    })
}

/// An error and its sources on one line, without those that the text before already quotes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text += &format!(": {next}");
        }
        source = error.source();
    }
    convert::shorten(&text.replace('\n', " "), MAX_MESSAGE)
}

#[cfg(test)]
mod tests;
