//! The agent's HTTP endpoints: `/livez` and `/readyz` for the kubelet, and `/metrics`.
//!
//! They must never make the agent wait, and never end it. The hot thread only writes a few atomic numbers. If the
//! address is taken, the agent tries again.
//!
//! Every process of the node can connect to a loopback address, as often as it likes. It learns whether the agent is
//! ready, and numbers without a pod, a name or an address. It keeps nobody else from the answer: a new connection
//! closes the oldest.

use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use dnsflow_core::{Timestamp, io::input::LargeTable};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, yield_now},
    time::{sleep, timeout},
};

use crate::{
    clock::now,
    metrics::{self, Metrics},
};

/// At most this many connections at once. So many must come after a connection, before its request does,
/// for it to be closed.
const CONNECTIONS_MAX: usize = 64;
/// A connection serves one request and lasts no longer than this.
const CONNECTION_LIMIT: Duration = Duration::from_secs(5);
/// The wait before an address that cannot be listened on is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// The hot thread wakes up at least once a minute, for its counters; after three times as long
/// it counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(180);

/// Why the agent is not well.
type Reason = Cow<'static, str>;

/// How the agent is, written by the hot thread.
#[derive(Debug, Default)]
pub struct Health {
    /// The last turn of the hot thread's loop.
    turn: AtomicU64,
    /// Every source was read once, the programs attached and the switch compared.
    synced: AtomicBool,
    /// The OpenFlow connection is up.
    connected: AtomicBool,
    /// There is a DNS server whose answers count.
    trusting: AtomicBool,
    /// Why a database is not read, by database and table.
    too_large: Mutex<BTreeMap<(&'static str, &'static str), String>>,
    /// Why `/readyz` last said no, if it did.
    refused: Mutex<Option<Reason>>,
}

impl Health {
    /// The hot thread's loop goes round.
    pub fn turn(&self, now: Timestamp) {
        self.turn.store(now.as_nanos(), Relaxed);
    }

    /// Everything was read once.
    pub fn synced(&self) {
        self.synced.store(true, Relaxed);
    }

    /// The OpenFlow connection came or went.
    pub fn connected(&self, connected: bool) {
        self.connected.store(connected, Relaxed);
    }

    /// Whether there is a DNS server whose answers count.
    pub fn trusting(&self, trusting: bool) {
        self.trusting.store(trusting, Relaxed);
    }

    /// A database is not read any more, because a table of it is too large.
    pub fn too_large(&self, table: &LargeTable) {
        let mut large = self.large();
        large.insert((table.database, table.table), table.to_string());
    }

    /// This table is no reason for that any more.
    pub fn read_again(&self, database: &'static str, table: &'static str) {
        self.large().remove(&(database, table));
    }

    fn large(&self) -> MutexGuard<'_, BTreeMap<(&'static str, &'static str), String>> {
        self.too_large
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs what `/readyz` answers where that is another reason than before: the kubelet shows only
    /// the status code.
    fn log_answer(&self, reason: Option<&Reason>) {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.as_ref() == reason {
            return;
        }
        *refused = reason.cloned();
        match reason {
            Some(reason) => {
                tracing::warn!(%reason, "the agent is not ready (/readyz)")
            }
            None => tracing::info!("the agent is ready (/readyz)"),
        }
    }

    /// Why the agent should be started anew, if it should.
    fn trouble(&self, now: Timestamp) -> Option<Reason> {
        let turn = Timestamp::from_nanos(self.turn.load(Relaxed));
        (now.since(turn) > STUCK_AFTER).then_some("the hot thread is stuck".into())
    }

    /// Why the agent does not do its work for everybody (yet), if it does not.
    ///
    /// What was read once stays in force without its source, so an API server or a database that is
    /// away is no reason; nor is a veth that cannot be attached to, for which the others must not
    /// wait. A database with a table that is too large is a reason: that does not end by itself.
    fn unready(&self, now: Timestamp) -> Option<Reason> {
        if let Some(trouble) = self.trouble(now) {
            Some(trouble)
        } else if !self.connected.load(Relaxed) {
            Some("no connection to the switch".into())
        } else if let Some(large) = self.large().values().next() {
            Some(large.clone().into())
        } else if !self.synced.load(Relaxed) {
            Some("not every source was read yet".into())
        } else if !self.trusting.load(Relaxed) {
            Some("no DNS server is trusted; see --dns-service".into())
        } else {
            None
        }
    }
}

/// What is served.
#[derive(Clone, Debug)]
struct Served {
    health: Arc<Health>,
    metrics: Arc<Metrics>,
}

/// Answers at this address for ever.
pub async fn serve(address: SocketAddr, health: Arc<Health>, metrics: Arc<Metrics>) {
    let served = Served { health, metrics };
    let mut told = false;
    if !address.ip().is_loopback() {
        tracing::warn!(
            %address,
            "--listen is not a loopback address: other hosts can read the metrics"
        );
    }
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                tracing::info!(%address, "answering /livez, /readyz and /metrics");
                accept(listener, &served).await;
            }
            Err(error) if !told => {
                told = true;
                tracing::warn!(
                    %address, %error,
                    "cannot listen; trying again; --listen sets another address"
                );
            }
            Err(_) => {}
        }
        sleep(RETRY).await;
    }
}

/// Serves until the listener fails.
async fn accept(listener: TcpListener, served: &Served) {
    let mut connections = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
                break;
            }
        };
        connections.retain(|connection: &AbortHandle| !connection.is_finished());
        if connections.len() == CONNECTIONS_MAX
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        let connection = tokio::spawn(serve_connection(stream, served.clone()));
        connections.push_back(connection.abort_handle());
        // A request that is there already is answered before others can push its connection out.
        yield_now().await;
    }
    for connection in connections {
        connection.abort();
    }
}

/// Answers one request. A client that breaks off, or is too slow, is its own loss.
async fn serve_connection(stream: TcpStream, served: Served) {
    let answer = service_fn(|request: Request<Incoming>| {
        let Served { health, metrics } = served.clone();
        async move {
            let (method, path) = (request.method(), request.uri().path());
            Ok::<_, Infallible>(match path {
                "/metrics" if method == Method::GET => scrape(&metrics).await,
                _ => respond(method, path, &health, now()),
            })
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), answer);
    let _ended = timeout(CONNECTION_LIMIT, connection).await;
}

fn respond(method: &Method, path: &str, health: &Health, now: Timestamp) -> Response<Full<Bytes>> {
    let (status, text): (_, Reason) = match (path, method) {
        ("/livez" | "/readyz", &Method::GET | &Method::HEAD) => {
            let trouble = match path {
                "/livez" => health.trouble(now),
                _ => {
                    let reason = health.unready(now);
                    health.log_answer(reason.as_ref());
                    reason
                }
            };
            match trouble {
                None => (StatusCode::OK, "ok".into()),
                Some(trouble) => (StatusCode::SERVICE_UNAVAILABLE, trouble),
            }
        }
        ("/livez" | "/readyz" | "/metrics", _) => {
            (StatusCode::METHOD_NOT_ALLOWED, "GET only".into())
        }
        _ => (
            StatusCode::NOT_FOUND,
            "there are /livez, /readyz and /metrics".into(),
        ),
    };
    text_response(status, &text)
}

/// The metrics, as Prometheus asks.
async fn scrape(metrics: &Metrics) -> Response<Full<Bytes>> {
    match metrics.scrape().await {
        Some(text) => response(StatusCode::OK, metrics::CONTENT_TYPE, text),
        None => text_response(
            StatusCode::SERVICE_UNAVAILABLE,
            "the hot thread does not answer",
        ),
    }
}

fn text_response(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let kind = "text/plain; charset=utf-8";
    response(status, kind, Bytes::from(format!("{text}\n")))
}

fn response(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests;
