//! The tests' own part of an API server, beside the one for custom resources: it answers
//! SubjectAccessReviews, serves Services and takes Events, and passes questions about custom
//! resources on. It judges every request by the rights that `deploy/` grants, and nothing else.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, Mutex, OnceLock},
};

use dnsflow_agent::k8s::egress_firewall::EgressFirewall;
use k8s_openapi::api::{core::v1::Service, events::v1::Event};
use kube::{
    Api, Client,
    api::{DynamicObject, ListParams},
    discovery::ApiResource,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

use crate::manifests::Grant;

/// The agent's user, as the API server calls its ServiceAccount.
pub(crate) const AGENT: &str = "system:serviceaccount:dnsflow:dnsflow";

/// A running server, and what it was asked.
pub(crate) struct Core {
    /// Where it listens, by plain HTTP.
    pub(crate) address: SocketAddr,
    state: Arc<State>,
    task: JoinHandle<()>,
}

struct State {
    grants: BTreeSet<Grant>,
    asked: Mutex<Vec<(Grant, bool)>>,
    services: Mutex<Vec<Service>>,
    events: Mutex<Vec<Event>>,
    /// The agent's own way to the server for custom resources.
    firewalls: OnceLock<Client>,
}

impl Core {
    /// Grants exactly these rights to the agent.
    pub(crate) async fn start(grants: BTreeSet<Grant>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State {
            grants,
            asked: Mutex::default(),
            services: Mutex::default(),
            events: Mutex::default(),
            firewalls: OnceLock::new(),
        });
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let state = Arc::clone(&shared);
                tokio::spawn(async move { state.serve(stream).await });
            }
        });
        Self {
            address,
            state,
            task,
        }
    }

    /// Passes questions about custom resources on, as the agent.
    pub(crate) fn pass_on(&self, agent: Client) {
        let first = self.state.firewalls.set(agent).is_ok();
        assert!(first, "it is said once");
    }

    /// Has this Service from now on.
    pub(crate) fn add_service(&self, service: Service) {
        self.state.services.lock().expect("no panic").push(service);
    }

    /// The Events that were created.
    pub(crate) fn events(&self) -> Vec<Event> {
        self.state.events.lock().expect("no panic").clone()
    }

    /// What the agent asked for so far, here and at the server for custom resources, and whether
    /// it may.
    pub(crate) fn asked(&self) -> Vec<(Grant, bool)> {
        self.state.asked.lock().expect("no panic").clone()
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl State {
    fn judge(&self, request: Grant) -> bool {
        let allowed = self.grants.iter().any(|grant| grant.allows(&request));
        let mut asked = self.asked.lock().expect("no panic");
        asked.push((request, allowed));
        allowed
    }

    async fn serve(&self, mut stream: TcpStream) {
        while let Some(request) = Request::read(&mut stream).await {
            let (code, answer) = self.answer(&request).await;
            let is_watch = code == 200 && request.query("watch") == Some("true");
            let head = if is_watch {
                "HTTP/1.1 200 Said\r\ncontent-type: application/json\r\n\
                 transfer-encoding: chunked\r\n\r\n"
                    .to_owned()
            } else {
                let answer = answer.to_string();
                format!(
                    "HTTP/1.1 {code} Said\r\ncontent-type: application/json\r\n\
                     content-length: {}\r\n\r\n{answer}",
                    answer.len()
                )
            };
            if stream.write_all(head.as_bytes()).await.is_err() {
                return;
            }
            if is_watch {
                // Nothing changes here; the client ends it.
                let _ended = stream.read_u8().await;
                return;
            }
        }
    }

    async fn answer(&self, request: &Request) -> (u16, Value) {
        const REVIEWS: &str = "/apis/authorization.k8s.io/v1/";
        // The server for custom resources comes without a name.
        if request.path() == format!("{REVIEWS}subjectaccessreviews") {
            return self.review(&request.body, |spec| spec["user"] == AGENT);
        }
        if request.user.as_deref() != Some(AGENT) {
            return failure(401);
        }
        // Everybody may ask what they may themselves (`system:basic-user`).
        if request.path() == format!("{REVIEWS}selfsubjectaccessreviews") {
            return self.review(&request.body, |_| true);
        }
        let Some(asked) = request.grant() else {
            return failure(404);
        };
        let kind = (asked.group.clone(), asked.resource.clone());
        if !self.judge(asked) {
            return failure(403);
        }
        match (&*kind.0, &*kind.1, &*request.method) {
            ("", "services", "GET") => (200, self.services(request)),
            ("events.k8s.io", "events", "POST") => {
                let event: Event = serde_json::from_slice(&request.body).expect("an Event");
                let answer = serde_json::to_value(&event).expect("JSON");
                self.events.lock().expect("no panic").push(event);
                (201, answer)
            }
            ("k8s.ovn.org", "egressfirewalls", "GET") => self.passed_on(request).await,
            _ => failure(404),
        }
    }

    /// A review with its answer.
    fn review(&self, body: &[u8], of_agent: impl Fn(&Value) -> bool) -> (u16, Value) {
        let mut review: Value = serde_json::from_slice(body).expect("a review in JSON");
        let asked = asked_for(&review["spec"]).filter(|_| of_agent(&review["spec"]));
        let allowed = asked.is_some_and(|asked| self.judge(asked));
        review["status"] = json!({"allowed": allowed});
        (201, review)
    }

    /// The Services that a request selects.
    fn services(&self, request: &Request) -> Value {
        let namespace = request.grant().and_then(|grant| grant.namespace);
        let is_selected = |service: &&Service| {
            let metadata = &service.metadata;
            let label = |(key, value): (&str, &str)| {
                let labels = metadata.labels.as_ref();
                labels
                    .and_then(|labels| labels.get(key))
                    .map(String::as_str)
                    == Some(value)
            };
            let by_name = request.field("metadata.name");
            let by_label = request
                .query("labelSelector")
                .map(|text| text.replace("%3D", "="));
            metadata.namespace == namespace
                && by_name.is_none_or(|name| metadata.name.as_ref() == Some(&name))
                && by_label.is_none_or(|text| text.split_once('=').is_some_and(label))
        };
        let services = self.services.lock().expect("no panic");
        let items: Vec<&Service> = services.iter().filter(is_selected).collect();
        json!({
            "kind": "ServiceList", "apiVersion": "v1",
            "metadata": {"resourceVersion": "1"}, "items": items,
        })
    }

    /// What the server for custom resources says.
    async fn passed_on(&self, request: &Request) -> (u16, Value) {
        let client = self.firewalls.get().expect("someone to pass it on to");
        let resource = ApiResource::erase::<EgressFirewall>(&());
        let said = match request.grant() {
            Some(Grant {
                namespace: Some(namespace),
                name: Some(name),
                ..
            }) => {
                let firewalls: Api<DynamicObject> =
                    Api::namespaced_with(client.clone(), &namespace, &resource);
                let found = firewalls.get(&name).await;
                found.map(|found| serde_json::to_value(found).expect("JSON"))
            }
            _ => {
                let firewalls: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
                let found = firewalls.list(&ListParams::default()).await;
                found.map(|found| serde_json::to_value(found).expect("JSON"))
            }
        };
        match said {
            Ok(answer) => (200, answer),
            Err(kube::Error::Api(status)) => failure(status.code),
            Err(error) => panic!("{error}"),
        }
    }
}

fn failure(code: u16) -> (u16, Value) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": code, "reason": "Said", "message": format!("the tests' server says {code}"),
    });
    (code, status)
}

/// The right that a review asks about.
fn asked_for(spec: &Value) -> Option<Grant> {
    let attributes = spec["resourceAttributes"].as_object()?;
    let text = |field: &str| {
        let text = attributes.get(field)?.as_str()?;
        (!text.is_empty()).then(|| text.to_owned())
    };
    let resource = text("resource")?;
    Some(Grant {
        verb: text("verb")?,
        group: text("group").unwrap_or_default(),
        resource: match text("subresource") {
            Some(sub) => format!("{resource}/{sub}"),
            None => resource,
        },
        namespace: text("namespace"),
        name: text("name"),
    })
}

struct Request {
    method: String,
    target: String,
    user: Option<String>,
    body: Vec<u8>,
}

impl Request {
    /// The next request on a connection.
    async fn read(stream: &mut TcpStream) -> Option<Self> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.ok()?);
        }
        let head = String::from_utf8(head).ok()?;
        let mut words = head.split(' ').map(str::to_owned);
        let (method, target) = (words.next()?, words.next()?);
        let header = |wanted: &str| {
            head.lines().find_map(|line| {
                let (name, value) = line.split_once(": ")?;
                name.eq_ignore_ascii_case(wanted).then_some(value)
            })
        };
        let length = header("content-length").and_then(|value| value.parse().ok());
        let user = header("authorization").and_then(|value| value.strip_prefix("Bearer "));
        let user = user.map(str::to_owned);
        let mut body = vec![0; length.unwrap_or(0)];
        stream.read_exact(&mut body).await.ok()?;
        Some(Self {
            method,
            target,
            user,
            body,
        })
    }

    /// The path, without the query.
    fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    fn query(&self, name: &str) -> Option<&str> {
        let (_, query) = self.target.split_once('?')?;
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find_map(|(key, value)| (key == name).then_some(value))
    }

    /// The value that a field selector wants.
    fn field(&self, name: &str) -> Option<String> {
        let selector = self.query("fieldSelector")?.replace("%3D", "=");
        let value = selector.strip_prefix(name)?.strip_prefix('=')?;
        Some(value.to_owned())
    }

    /// The right that the request takes (Kubernetes, `pkg/endpoints/request/requestinfo.go` of
    /// k8s.io/apiserver: a list or watch of one name by a field selector is judged by the name).
    fn grant(&self) -> Option<Grant> {
        let mut parts = self.path().split('/').skip(1);
        let group = match parts.next()? {
            "api" => String::new(),
            "apis" => parts.next()?.to_owned(),
            _ => return None,
        };
        let _version = parts.next()?;
        let mut rest: Vec<&str> = parts.collect();
        let namespace = (rest.first() == Some(&"namespaces") && rest.len() > 2).then(|| {
            let namespace = rest[1].to_owned();
            rest.drain(..2);
            namespace
        });
        let (resource, name) = match rest[..] {
            [resource] => (resource.to_owned(), None),
            [resource, name] => (resource.to_owned(), Some(name.to_owned())),
            [resource, name, sub] => (format!("{resource}/{sub}"), Some(name.to_owned())),
            _ => return None,
        };
        let verb = match (&*self.method, &name) {
            ("GET", Some(_)) => "get",
            ("GET", None) if self.query("watch") == Some("true") => "watch",
            ("GET", None) => "list",
            ("POST", None) => "create",
            ("PUT", Some(_)) => "update",
            ("PATCH", Some(_)) => "patch",
            ("DELETE", Some(_)) => "delete",
            _ => return None,
        };
        Some(Grant {
            verb: verb.to_owned(),
            group,
            resource,
            namespace,
            name: name.or_else(|| self.field("metadata.name")),
        })
    }
}
