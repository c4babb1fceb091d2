//! Lists and watches one kind of object, until the receiver is gone.
//!
//! One task per [`Follower`]; it owns the connection and may be dropped at any time. The follower handles the
//! objects. Errors are logged once per kind and retried for ever. An API server that is away must never look like an
//! empty one.

use std::{
    collections::VecDeque,
    fmt::Debug,
    pin::pin,
    time::{Duration, Instant},
};

use futures::StreamExt;
use kube::{Api, Client, Resource, api::ListParams, runtime::watcher::Event};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::{
    client::{ClientOptions, MAX_MESSAGE, chain, connect},
    convert,
    watcher::{self, Error},
};
use crate::causes::Causes;

/// The interval at which a client configuration is read again that is unreadable, or whose credentials are refused.
const CONFIG_RETRY: Duration = Duration::from_secs(5);

/// The interval at which an API server without an optional resource is asked again: it may have been updated.
const ABSENT_RETRY: Duration = Duration::from_secs(600);

/// A failure is logged again after this long without one. Attempts are never further apart: at most
/// 60 s of back-off with its jitter, and 30 s to connect.
const TROUBLE_OVER: Duration = Duration::from_secs(120);

/// A silent API server is logged after this long. The client itself gives up a connection that it cannot make after
/// 30 s (`DEFAULT_CONNECT_TIMEOUT` in kube-client's config), and a request without an answer after
/// [`READ_MAX`](super::client::READ_MAX).
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The watched objects, as texts for people.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    /// The kind: `EgressFirewalls`.
    pub(super) what: String,
    /// The text for an API server that does not know the resource, with the remedy.
    pub(super) missing: String,
    /// The right that the ServiceAccount needs.
    pub(super) permission: String,
}

/// Receives the objects that come and go.
pub(super) trait Follower {
    /// The objects.
    type Object: Resource + Clone + DeserializeOwned + Debug + Send + 'static;
    /// What is told of them.
    type Update;

    /// The objects, for people.
    fn subject(&self) -> Subject;

    /// Where they are.
    fn api(&self, client: Client) -> Api<Self::Object>;

    /// The selection of objects.
    fn selection(&self) -> ListParams {
        ListParams::default()
    }

    /// Whether an API server may lack the resource, because it is an older one. Then nothing is told.
    fn is_optional(&self) -> bool {
        false
    }

    /// What an event comes to.
    fn handle(&mut self, event: Event<Self::Object>) -> Option<Self::Update>;

    /// Adds an update to those that wait for the receiver. If an update has all objects, only the newest one counts.
    fn queue(waiting: &mut VecDeque<Self::Update>, update: Self::Update) {
        waiting.clear();
        waiting.push_back(update);
    }
}

/// Watches and sends each update, until the receiver of `updates` is gone.
pub(super) async fn follow<F: Follower>(
    options: &ClientOptions,
    mut follower: F,
    updates: mpsc::Sender<F::Update>,
) {
    let mut trouble = Trouble::default();
    loop {
        match connect(options).await {
            Ok((client, url)) => {
                let mut waiting = VecDeque::new();
                let news = (&mut waiting, &updates);
                let end = session(client, &url, &mut follower, &mut trouble, news).await;
                for update in waiting {
                    if updates.send(update).await.is_err() {
                        return;
                    }
                }
                let pause = match end {
                    End::Closed => return,
                    End::Absent => ABSENT_RETRY,
                    End::Credentials => CONFIG_RETRY,
                };
                if wait(pause, &updates).await {
                    return;
                }
            }
            Err(cause) => {
                trouble.tell(Kind::Configuration, &cause, Instant::now());
                if wait(CONFIG_RETRY, &updates).await {
                    return;
                }
            }
        }
    }
}

/// Waits for so long. Returns early, and `true`, if nobody listens any more.
async fn wait<T>(time: Duration, updates: &mpsc::Sender<T>) -> bool {
    tokio::select! {
        () = tokio::time::sleep(time) => false,
        () = updates.closed() => true,
    }
}

/// Why a session ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// Nobody listens any more.
    Closed,
    /// The credentials are refused: read them again.
    Credentials,
    /// The API server lacks the resource, which is optional.
    Absent,
}

async fn session<F: Follower>(
    client: Client,
    url: &str,
    follower: &mut F,
    trouble: &mut Trouble,
    (waiting, updates): (&mut VecDeque<F::Update>, &mpsc::Sender<F::Update>),
) -> End {
    let subject = follower.subject();
    let api = follower.api(client);
    let mut events = Box::pin(watcher::events(api, follower.selection()));
    let mut silence = Some(Box::pin(tokio::time::sleep(SILENCE_MAX)));
    let mut room = pin!(updates.reserve());
    loop {
        let silent = async {
            match &mut silence {
                Some(silence) => silence.await,
                None => std::future::pending().await,
            }
        };
        let event = tokio::select! {
            event = events.next() => event,
            // Events are read on meanwhile: of an object that changes again and again, the newest state is sent.
            permit = &mut room, if !waiting.is_empty() => {
                match (permit, waiting.pop_front()) {
                    (Ok(permit), Some(update)) => permit.send(update),
                    (Ok(_), None) => {}
                    (Err(_), _) => return End::Closed,
                }
                room.set(updates.reserve());
                continue;
            }
            () = updates.closed() => return End::Closed,
            () = silent => {
                silence = None;
                let what = &subject.what;
                let cause = format!(
                    "the Kubernetes API at {url} (--kubeconfig FILE names another) has not \
                     answered within {} s to a question for {what}",
                    SILENCE_MAX.as_secs()
                );
                trouble.tell(Kind::NoAnswer, &cause, Instant::now());
                continue;
            }
        };
        silence = None;
        match event {
            Some(Ok(event)) => {
                // `Init` comes once the server has begun to answer. The rest may fail.
                if !matches!(event, Event::Init) {
                    trouble.over(url);
                }
                if let Some(update) = follower.handle(event) {
                    F::queue(waiting, update);
                }
            }
            Some(Err(error)) => {
                let code = error.status().map(|status| status.code);
                if code == Some(404) && follower.is_optional() {
                    trouble.lacks(&subject, url);
                    return End::Absent;
                }
                match describe(&error, url, &subject) {
                    Some(cause) => {
                        let kind = code.map_or(Kind::NoAnswer, Kind::Answer);
                        trouble.tell(kind, &cause, Instant::now());
                    }
                    None => tracing::debug!(url, "the watch has expired; listing again"),
                }
                if code == Some(401) {
                    return End::Credentials;
                }
            }
            // The watcher never ends by itself.
            None => return End::Credentials,
        }
    }
}

/// The kind of a failure: two texts of one kind are one failure.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Kind {
    /// The client's configuration cannot be used.
    Configuration,
    /// The API server does not answer.
    NoAnswer,
    /// The API server answers with this status code.
    Answer(u16),
}

/// The failures of the connection; each kind is logged once.
#[derive(Debug, Default)]
struct Trouble {
    causes: Causes<Kind>,
    last: Option<Instant>,
}

impl Trouble {
    fn tell(&mut self, kind: Kind, cause: &str, now: Instant) {
        if self.is_news(kind, now) {
            tracing::warn!("{cause}; trying again; the known objects stay in force");
        }
    }

    fn is_news(&mut self, kind: Kind, now: Instant) -> bool {
        let is_recent = |last| now.saturating_duration_since(last) < TROUBLE_OVER;
        if !self.last.is_some_and(is_recent) {
            self.causes.end();
        }
        self.last = Some(now);
        self.causes.is_news(kind)
    }

    /// The API server lacks an optional resource.
    fn lacks(&mut self, subject: &Subject, url: &str) {
        if self.is_news(Kind::Answer(404), Instant::now()) {
            tracing::info!("the Kubernetes API at {url} {}", subject.missing);
        }
    }

    fn over(&mut self, url: &str) {
        if self.causes.end() {
            tracing::info!(url, "the Kubernetes API answers again");
        }
    }
}

/// The cause and the remedy; `None` for errors of normal work.
fn describe(error: &Error, url: &str, subject: &Subject) -> Option<String> {
    let Subject {
        what,
        missing,
        permission,
    } = subject;
    let Some(status) = error.status() else {
        return Some(format!(
            "cannot read {what} from the Kubernetes API at {url} (--kubeconfig FILE names \
             another): {}",
            chain(error)
        ));
    };
    Some(match status.code {
        _ if error.is_gone() => return None,
        404 => {
            format!("the Kubernetes API at {url} {missing} --kubeconfig FILE names another cluster")
        }
        403 => format!(
            "the Kubernetes API at {url} does not let dnsflow read {what}: its ServiceAccount \
             needs {permission}, as in deploy/base/rbac.yaml"
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

#[cfg(test)]
mod tests;
