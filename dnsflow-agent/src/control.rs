//! The agent's end of the control socket, for the commands that ask a running agent.
//!
//! The agent answers by HTTP with JSON over a Unix socket that only root can use. `kubectl exec` into its container
//! is enough to ask ([`asking`](crate::asking)).
//!
//! The hot thread owns the state. It answers one small question at a time ([`Inquiries`]). JSON, filters and slow
//! clients are handled here.
//!
//! | path | answer |
//! |---|---|
//! | `/v1/status` | one object ([`Status`]) |
//! | `/v1/cache` | one [`EntryView`] a line |
//! | `/v1/explain?namespace=&pod=&target=` | a list of [`Explanation`], one for each port of the pod |
//! | `/v1/events?namespace=&pod=&event=&since_ms=&last=&follow=` | one [`Event`](crate::asking::event::Event) a line |
//! | `/v1/history?namespace=` | one [`Line`](crate::asking::history::Line) a line |
//! | `/v1/firewall?namespace=` | [`PresentFirewall`](crate::asking::history::PresentFirewall) |
//! | `/v1/learn?namespace=&for_s=` | one [`Line`](crate::asking::learn::Line) a line, as it comes, for so many seconds |
//! | `/v1/log-level` | [`Levels`](crate::asking::Levels); `PUT` with `level=` changes it |
//! | `/v1/log` | the last lines of the log |
//! | `/v1/metrics` | the metrics, as `/metrics` has them |
//! | `/v1/options` | [`AgentCommand`] |
//!
//! `/v1/cache` takes [`Filter`]. A line is one JSON object.

mod events;
mod history;
mod recorded;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    convert::Infallible,
    env,
    ffi::OsString,
    fs::{self, DirBuilder},
    io,
    net::IpAddr,
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use clap::CommandFactory as _;
use dnsflow_core::{
    Input,
    ask::view::{Beside, EntryView, Explanation, Frontend, StepOutcome, Target, Verdict},
    ovn::rows::pod_of_port,
    values::{
        connection::PendingQuery,
        name::{DnsName, DomainName},
    },
};
use dnsflow_ovsdb::Remotes;
use futures::{Stream, TryStreamExt as _, stream};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::{
    fs::{Mode, fchmod},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};
use serde::Serialize;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc},
    time::sleep,
};

use crate::{
    asking::{AgentCommand, Status, VERSION, northbound},
    capture::PendingQueries,
    causes::Causes,
    denied_connections::{Connections, Heard},
    inquiries::Inquiries,
    journal::Journal,
    k8s::Objects,
    logging::LogView,
    metrics::{self, Metrics},
    options::Cli,
};

/// Clients at once. Only root can connect; a client that finds no room is told so.
const CLIENTS_MAX: usize = 16;
/// A request has to be there after this time.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// The wait before a socket that cannot be made is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Cache entries that one question to the hot thread is for.
const ENTRIES_PER_INQUIRY: usize = 16;
/// The `Content-Type` of text.
const TEXT: &str = "text/plain; charset=utf-8";
/// Addresses that OVN is asked about at a time.
const ASKED_ADDRESSES: usize = 16;
/// Addresses of one name that a hint names.
const ADDRESSES_SHOWN: usize = 8;
/// How often the journal is read for a client that follows it. The hot thread wakes no reader.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(100);

/// What slow threads know.
#[derive(Clone, Debug)]
pub struct Slow {
    /// Where pods have connected to.
    pub connections: Connections,
    /// Answers that no rule mentions.
    pub heard: Heard,
    /// The queries that no answer has followed, if there are programs.
    pub queries: Option<Arc<PendingQueries>>,
    /// Where OVN's northbound database is, as the option says.
    pub northbound: Option<Remotes>,
    /// The EgressFirewalls and manifests that are not usable as written.
    pub objects: Objects,
}

/// What the server answers from.
#[derive(Debug)]
pub struct Server {
    inquiries: Inquiries,
    inputs: mpsc::Sender<Input>,
    recordings: AtomicU64,
    journal: Arc<Journal>,
    metrics: Arc<Metrics>,
    slow: Slow,
    log: LogView,
    started: Instant,
}

/// Which entries are wanted: all for which each field that is given holds.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Filter {
    /// `namespace`: the namespace of the pod.
    pub namespace: Option<String>,
    /// `pod`: the pod.
    pub pod: Option<String>,
    /// `name`: this name or one below it leads to the address.
    pub name: Option<DomainName>,
    /// `address`: the address.
    pub address: Option<IpAddr>,
}

/// The hot thread has not answered a question: what was said until then is not whole.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the hot thread does not answer")]
struct Unanswered;

type Body = UnsyncBoxBody<Bytes, Unanswered>;

impl Server {
    /// A server that asks `inquiries`, and has the hot thread record names by `inputs`.
    pub fn new(
        inquiries: Inquiries,
        inputs: mpsc::Sender<Input>,
        journal: Arc<Journal>,
        metrics: Arc<Metrics>,
        slow: Slow,
        log: LogView,
    ) -> Self {
        Self {
            inquiries,
            inputs,
            recordings: AtomicU64::new(0),
            journal,
            metrics,
            slow,
            log,
            started: Instant::now(),
        }
    }

    /// Answers at this path for ever.
    pub async fn serve(self, path: PathBuf) {
        let server = Arc::new(self);
        let room = Arc::new(Semaphore::new(CLIENTS_MAX));
        let mut causes = Causes::<io::ErrorKind>::default();
        loop {
            match listen_at(&path) {
                Ok(listener) => {
                    causes.end();
                    tracing::debug!(path = %path.display(), "answering at the control socket");
                    server.accept(&listener, &room).await;
                }
                Err(error) if causes.is_news(error.kind()) => tracing::warn!(
                    path = %path.display(), %error,
                    "cannot open the control socket; trying again; dnsflow's commands get no answer; \
                     --control-socket sets another path"
                ),
                Err(_) => {}
            }
            sleep(RETRY).await;
        }
    }

    /// Serves until the listener fails.
    async fn accept(self: &Arc<Self>, listener: &UnixListener, room: &Arc<Semaphore>) {
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept clients of the control socket");
                    return;
                }
            };
            let place = Arc::clone(room).try_acquire_owned().ok();
            let server = Arc::clone(self);
            tokio::spawn(async move {
                let is_served = place.is_some();
                serve_client(stream, server, is_served).await;
                drop(place);
            });
        }
    }

    async fn respond(self: &Arc<Self>, request: &Request<Incoming>) -> Response<Body> {
        let changes = request.method() == Method::PUT;
        if !changes && request.method() != Method::GET {
            return refuse(StatusCode::METHOD_NOT_ALLOWED, "GET and PUT only");
        }
        let parameters = match Parameters::parse(request.uri().query().unwrap_or_default()) {
            Ok(parameters) => parameters,
            Err(error) => return refuse(StatusCode::BAD_REQUEST, error),
        };
        let path = request.uri().path();
        let answer = match path {
            "/v1/log-level" => self.log_level(parameters, changes),
            _ if changes => return refuse(StatusCode::METHOD_NOT_ALLOWED, "GET only"),
            "/v1/status" => self.status().await,
            "/v1/cache" => self.cache(parameters).await,
            "/v1/explain" => self.explain(parameters).await,
            "/v1/events" => self.events(parameters),
            "/v1/history" => self.history(parameters),
            "/v1/firewall" => self.firewall(parameters).await,
            "/v1/learn" => self.learn(parameters).await,
            "/v1/log" => parameters
                .end()
                .map(|()| whole(StatusCode::OK, TEXT, self.log.last.read())),
            "/v1/metrics" => self.metrics(parameters).await,
            "/v1/options" => parameters.end().map(|()| json(&command_of_this_process())),
            _ => {
                let text = "there are /v1/status, /v1/cache, /v1/explain, /v1/events, /v1/history, \
                            /v1/firewall, /v1/learn, /v1/log-level, /v1/log, /v1/metrics and /v1/options";
                return refuse(StatusCode::NOT_FOUND, text);
            }
        };
        answer.unwrap_or_else(|error| match error {
            Refusal::Request(text) => refuse(StatusCode::BAD_REQUEST, text),
            Refusal::Stuck => refuse(
                StatusCode::SERVICE_UNAVAILABLE,
                "the hot thread does not answer",
            ),
        })
    }

    async fn status(&self) -> Result<Response<Body>, Refusal> {
        let node = self
            .inquiries
            .ask(|engine, _| engine.view().node())
            .await
            .ok_or(Refusal::Stuck)?;
        let (object_problems, object_problems_left_out) = self.slow.objects.list();
        Ok(json(&Status {
            version: VERSION.to_owned(),
            up_s: self.started.elapsed().as_secs(),
            object_problems,
            object_problems_left_out,
            node,
        }))
    }

    fn log_level(
        &self,
        mut parameters: Parameters,
        changes: bool,
    ) -> Result<Response<Body>, Refusal> {
        let level = match changes {
            true => Some(parameters.required("level")?),
            false => None,
        };
        parameters.end()?;
        let Some(level) = level else {
            return Ok(json(&self.log.level.levels()));
        };
        let levels = self.log.level.set(&level).map_err(Refusal::request)?;
        tracing::info!(level = levels.level, "the log level was changed");
        Ok(json(&levels))
    }

    async fn metrics(&self, parameters: Parameters) -> Result<Response<Body>, Refusal> {
        parameters.end()?;
        let text = self.metrics.scrape().await.ok_or(Refusal::Stuck)?;
        Ok(whole(StatusCode::OK, metrics::CONTENT_TYPE, text))
    }

    async fn explain(&self, mut parameters: Parameters) -> Result<Response<Body>, Refusal> {
        let namespace = parameters.required("namespace")?;
        let pod = parameters.required("pod")?;
        let target = parameters.required("target")?;
        parameters.end()?;
        let target: Target = target.parse().map_err(Refusal::request)?;
        self.slow.heard.catch_up().await;
        let mut beside = Beside {
            heard: match &target {
                Target::Address(address, _) => self.slow.heard.at(*address),
                Target::Name(name, _) => self.slow.heard.of(name),
            },
            failed: match &target {
                Target::Address(..) => Vec::new(),
                Target::Name(name, _) => self.slow.heard.failed_for(name),
            },
            ..Beside::default()
        };
        let asked = (&*namespace, &*pod, &target);
        let explained = self.explained(asked, beside.clone()).await?;
        let addresses = explained.iter().flat_map(|one| &one.addresses);
        let addresses: BTreeSet<IpAddr> = addresses.filter_map(|one| one.address).collect();
        let mut addresses: Vec<IpAddr> = addresses.into_iter().collect();
        let services = self.services_at(&addresses).await?;
        let mut verdicts = explained.iter().map(|one| one.verdict);
        // OVN is asked where that may change the answer.
        if services.is_empty() && verdicts.all(|verdict| verdict == Verdict::Allowed) {
            return Ok(json(&explained));
        }
        let nb = &self.slow.northbound;
        if !services.is_empty() {
            beside.frontends = northbound::frontends(nb.clone(), &services).await.ok();
            addresses.extend(backends_of(beside.frontends.as_deref().unwrap_or_default()));
        }
        beside.sets = sets_with(nb, &addresses).await;
        let veths = self.veths(&namespace, &pod).await?;
        let heard = &self.slow.heard;
        let servers = veths.iter().flat_map(|veth| heard.servers_asked(*veth));
        beside.servers = servers.collect();
        if matches!(target, Target::Name(..)) {
            beside.pending = self.pending(&veths);
        }
        let mut explained = self.explained(asked, beside).await?;
        for one in &mut explained {
            let hints = resolved_names(nb, one).await;
            one.hints.extend(hints);
        }
        Ok(json(&explained))
    }

    /// The Services at these addresses.
    async fn services_at(&self, addresses: &[IpAddr]) -> Result<BTreeSet<String>, Refusal> {
        let addresses = addresses.to_vec();
        let services = self
            .inquiries
            .ask(move |engine, _| engine.view().services_at(&addresses));
        services.await.ok_or(Refusal::Stuck)
    }

    /// The interface indices of a pod's veths.
    async fn veths(&self, namespace: &str, pod: &str) -> Result<Vec<u32>, Refusal> {
        let (namespace, pod) = (namespace.to_owned(), pod.to_owned());
        let veths = self
            .inquiries
            .ask(move |engine, _| engine.view().veths_of(&namespace, &pod));
        veths.await.ok_or(Refusal::Stuck)
    }

    /// The queries at these veths that no answer has followed.
    fn pending(&self, veths: &[u32]) -> Vec<PendingQuery> {
        let Some(queries) = &self.slow.queries else {
            return Vec::new();
        };
        let pending: Result<Vec<_>, _> = veths.iter().map(|veth| queries.of(*veth)).collect();
        pending.map(|all| all.concat()).unwrap_or_else(|error| {
            tracing::warn!(%error, "the kernel does not say which queries have no answer");
            Vec::new()
        })
    }

    /// What the engine says of a target at each port of a pod.
    async fn explained(
        &self,
        (namespace, pod, target): (&str, &str, &Target),
        beside: Beside,
    ) -> Result<Vec<Explanation>, Refusal> {
        let (namespace, pod) = (namespace.to_owned(), pod.to_owned());
        let target = target.clone();
        let explained = self.inquiries.ask(move |engine, now| {
            let view = engine.view();
            let ports = view.ports_of(&namespace, &pod).into_iter();
            let explained = ports.filter_map(|port| view.explain(&port, &target, &beside, now));
            explained.collect::<Vec<Explanation>>()
        });
        explained.await.ok_or(Refusal::Stuck)
    }

    async fn cache(
        self: &Arc<Self>,
        mut parameters: Parameters,
    ) -> Result<Response<Body>, Refusal> {
        let filter = Filter {
            namespace: parameters.optional("namespace"),
            pod: parameters.optional("pod"),
            name: parameters.parsed("name")?,
            address: parameters.parsed("address")?,
        };
        parameters.end()?;
        let all = self.inquiries.ask(|engine, _| engine.view().ports());
        let mut ports = all.await.ok_or(Refusal::Stuck)?;
        ports.retain(|port| filter.wants_port(port));
        let listing = Listing {
            server: Arc::clone(self),
            filter,
            ports: ports.into(),
            addresses: VecDeque::new(),
        };
        let parts = stream::try_unfold(listing, |mut listing| async move {
            let entries = listing.next().await?;
            Ok(entries.map(|entries| {
                let lines: Vec<Bytes> = entries.iter().map(line).collect();
                (stream::iter(lines.into_iter().map(Ok)), listing)
            }))
        });
        Ok(lines(parts.try_flatten()))
    }
}

/// By each of these addresses, OVN's address sets that have it; `None` if OVN does not answer.
async fn sets_with(
    nb: &Option<Remotes>,
    addresses: &[IpAddr],
) -> Option<BTreeMap<IpAddr, BTreeSet<u64>>> {
    let mut sets: BTreeMap<_, _> = addresses
        .iter()
        .map(|one| (*one, BTreeSet::new()))
        .collect();
    for some in addresses.chunks(ASKED_ADDRESSES) {
        sets.extend(northbound::with(nb.clone(), some).await.ok()?);
    }
    Some(sets)
}

/// The first backends of these Services: the rules are asked about few.
fn backends_of(frontends: &[Frontend]) -> BTreeSet<IpAddr> {
    let backends = frontends.iter().filter_map(|one| one.backends.as_ref());
    let backends = backends.flatten().map(|backend| backend.address);
    let backends: BTreeSet<IpAddr> = backends.collect();
    backends.into_iter().take(ASKED_ADDRESSES).collect()
}

/// How this process was started.
fn command_of_this_process() -> AgentCommand {
    let text = |value: OsString| value.to_string_lossy().into_owned();
    let cli = Cli::command();
    let options = cli.find_subcommand("agent").into_iter();
    let options = options.flat_map(|agent| agent.get_arguments());
    let names = options.filter_map(|option| Some(option.get_env()?.to_owned()));
    let names = names.chain([OsString::from("RUST_LOG")]);
    let environment = names.filter_map(|name| Some((env::var_os(&name)?, name)));
    AgentCommand {
        version: VERSION.to_owned(),
        arguments: env::args_os().map(text).collect(),
        environment: environment
            .map(|(value, name)| (text(name), text(value)))
            .collect(),
    }
}

/// What ovn-kubernetes has resolved the name of the rule to, where the pod was told no address.
async fn resolved_names(nb: &Option<Remotes>, explained: &Explanation) -> Vec<String> {
    let mut hints = Vec::new();
    let untold = explained.addresses.iter();
    let untold = untold.filter(|one| one.address.is_none());
    let steps = untold.flat_map(|one| &one.steps);
    for step in
        steps.filter(|step| matches!(step.outcome, StepOutcome::Decides | StepOutcome::OnceAsked))
    {
        let name = step.destination.strip_prefix("dnsName: ");
        let Some(name) = name.and_then(|name| name.parse::<DnsName>().ok()) else {
            continue;
        };
        let names = [(step.rule, name)];
        let Ok(mut addresses) = northbound::of_names(nb.clone(), &names).await else {
            continue;
        };
        let addresses = addresses.remove(&step.rule).unwrap_or_default();
        let [(_, name)] = &names;
        let shown = addresses.iter().take(ADDRESSES_SHOWN);
        let shown: Vec<String> = shown.map(ToString::to_string).collect();
        let more = match addresses.len().saturating_sub(ADDRESSES_SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let name = name.written();
        hints.push(match &shown[..] {
            [] => format!("ovn-kubernetes has resolved {name} to no address"),
            _ => format!(
                "ovn-kubernetes has resolved {name} to {}{more}: rule {} lets these pass by itself",
                shown.join(", "),
                step.rule
            ),
        });
    }
    hints
}

impl Filter {
    fn wants_port(&self, port: &str) -> bool {
        let (namespace, pod) = pod_of_port(port);
        self.namespace.as_deref().is_none_or(|one| one == namespace)
            && self.pod.as_deref().is_none_or(|one| one == pod)
    }

    fn wants(&self, entry: &EntryView) -> bool {
        let Some(wanted) = &self.name else {
            return true;
        };
        entry.names.iter().any(|name| {
            let name = name.name.parse::<DomainName>();
            name.is_ok_and(|name| name.suffixes().any(|suffix| suffix == wanted.wire()))
        })
    }
}

/// Entries that are still to be listed: the hot thread is asked for some at a time.
struct Listing {
    server: Arc<Server>,
    filter: Filter,
    ports: VecDeque<String>,
    /// The addresses of the first port that are still to come.
    addresses: VecDeque<IpAddr>,
}

impl Listing {
    /// Some entries; `None` at the end.
    async fn next(&mut self) -> Result<Option<Vec<EntryView>>, Unanswered> {
        loop {
            let Some(port) = self.ports.front().cloned() else {
                return Ok(None);
            };
            if self.addresses.is_empty() {
                self.addresses = match self.filter.address {
                    Some(address) => [address].into(),
                    None => {
                        let port = port.clone();
                        let asked = move |engine: &dnsflow_core::engine::Engine, _| {
                            engine.view().addresses(&port)
                        };
                        let addresses = self.server.inquiries.ask(asked).await;
                        addresses.ok_or(Unanswered)?.into()
                    }
                };
            }
            let count = self.addresses.len().min(ENTRIES_PER_INQUIRY);
            let part: Vec<IpAddr> = self.addresses.drain(..count).collect();
            if self.addresses.is_empty() {
                self.ports.pop_front();
            }
            if part.is_empty() {
                continue;
            }
            let asked = self
                .server
                .inquiries
                .ask(move |engine, now| engine.view().entries(&port, &part, now));
            let mut entries = asked.await.ok_or(Unanswered)?;
            entries.retain(|entry| self.filter.wants(entry));
            if !entries.is_empty() {
                return Ok(Some(entries));
            }
        }
    }
}

/// The parameters of a request, each once.
#[derive(Debug)]
struct Parameters(BTreeMap<String, String>);

impl Parameters {
    fn parse(query: &str) -> Result<Self, String> {
        let mut parameters = BTreeMap::new();
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            let key = key.into_owned();
            if parameters.insert(key.clone(), value.into_owned()).is_some() {
                return Err(format!("`{key}` is given twice"));
            }
        }
        Ok(Self(parameters))
    }

    fn optional(&mut self, key: &str) -> Option<String> {
        self.0.remove(key)
    }

    fn required(&mut self, key: &str) -> Result<String, Refusal> {
        let missing = || Refusal::Request(format!("`{key}` is missing"));
        self.optional(key).ok_or_else(missing)
    }

    fn parsed<T>(&mut self, key: &str) -> Result<Option<T>, Refusal>
    where
        T: std::str::FromStr<Err: std::fmt::Display>,
    {
        let Some(text) = self.optional(key) else {
            return Ok(None);
        };
        let parsed = text.parse();
        parsed
            .map(Some)
            .map_err(|error| Refusal::Request(format!("`{key}`: {error}")))
    }

    /// Refuses what nobody has asked for: it may be misspelt.
    fn end(self) -> Result<(), Refusal> {
        match self.0.into_keys().next() {
            Some(key) => Err(Refusal::Request(format!("there is no parameter `{key}`"))),
            None => Ok(()),
        }
    }
}

/// Why there is no answer.
#[derive(Debug)]
enum Refusal {
    /// The request is wrong.
    Request(String),
    /// The hot thread does not answer.
    Stuck,
}

impl Refusal {
    fn request(error: impl std::fmt::Display) -> Self {
        Self::Request(error.to_string())
    }
}

/// Makes the socket, with its directory. Only root can use it, from its first moment on.
fn listen_at(path: &Path) -> io::Result<UnixListener> {
    if let Some(directory) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
    }
    remove_leftover(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    // The file gets the mode that the socket has when it is bound (unix(7)).
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, CLIENTS_MAX as i32)?;
    UnixListener::from_std(socket.into())
}

/// Removes the socket of an agent that has ended. One at which an agent answers is left alone, and so is
/// what is no socket.
fn remove_leftover(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the path is not a socket",
        )),
        Ok(_) => match std::os::unix::net::UnixStream::connect(path) {
            Ok(_) => Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "another agent answers there",
            )),
            Err(_) => fs::remove_file(path),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Answers one request. A client that breaks off, or is too slow to ask, is its own loss.
async fn serve_client(stream: UnixStream, server: Arc<Server>, is_served: bool) {
    let answer = service_fn(|request: Request<Incoming>| {
        let server = Arc::clone(&server);
        async move {
            Ok::<_, Infallible>(match is_served {
                true => server.respond(&request).await,
                false => refuse(StatusCode::SERVICE_UNAVAILABLE, "too many clients"),
            })
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_LIMIT)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), answer);
    let _ended = connection.await;
}

fn json(value: &impl Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(bytes) => whole(StatusCode::OK, "application/json", bytes),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

fn refuse(status: StatusCode, text: impl Into<String>) -> Response<Body> {
    let mut text = text.into();
    text.push('\n');
    whole(status, TEXT, text.into_bytes())
}

fn whole(status: StatusCode, kind: &'static str, bytes: impl Into<Bytes>) -> Response<Body> {
    let body = Full::new(bytes.into()).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// One JSON object a line, as they come. An error breaks off the answer, which the client notices.
fn lines(lines: impl Stream<Item = Result<Bytes, Unanswered>> + Send + 'static) -> Response<Body> {
    let frames = lines.map_ok(Frame::data);
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

fn line(value: &impl Serialize) -> Bytes {
    // No key of ours is no text, which alone could fail.
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

#[cfg(test)]
mod tests;
