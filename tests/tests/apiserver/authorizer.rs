//! The tests' own part of an API server: it answers SubjectAccessReviews by the rights that
//! `deploy/` grants, and nothing else; and it judges requests by them.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, Mutex},
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
#[derive(Debug)]
pub(crate) struct Authorizer {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<(Grant, bool)>>>,
    task: JoinHandle<()>,
}

impl Authorizer {
    /// Grants exactly these rights to the agent.
    pub(crate) async fn start(grants: BTreeSet<Grant>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let asked = Arc::<Mutex<Vec<_>>>::default();
        let (grants, log) = (Arc::new(grants), Arc::clone(&asked));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&grants), Arc::clone(&log)));
            }
        });
        Self {
            address,
            asked,
            task,
        }
    }

    /// What was asked so far, and the answers.
    pub(crate) fn asked(&self) -> Vec<(Grant, bool)> {
        self.asked.lock().expect("no panic").clone()
    }
}

impl Drop for Authorizer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(
    mut stream: TcpStream,
    grants: Arc<BTreeSet<Grant>>,
    asked: Arc<Mutex<Vec<(Grant, bool)>>>,
) {
    while let Some((target, body)) = read(&mut stream).await {
        let path = target.split('?').next().unwrap_or_default();
        let (code, response) = match path {
            "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                let mut review: Value = serde_json::from_slice(&body).expect("a review in JSON");
                let allowed = match asked_for(&review["spec"]) {
                    Some(request) => {
                        let allowed = grants.iter().any(|grant| grant.allows(&request));
                        asked.lock().expect("no panic").push((request, allowed));
                        allowed
                    }
                    None => false,
                };
                review["status"] = json!({"allowed": allowed});
                (201, review)
            }
            _ => (
                404,
                json!({"kind": "Status", "apiVersion": "v1", "code": 404}),
            ),
        };
        let body = response.to_string();
        let head = format!(
            "HTTP/1.1 {code} Said\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        if stream.write_all((head + &body).as_bytes()).await.is_err() {
            return;
        }
    }
}

/// The right that the agent asks for; nothing for other users.
fn asked_for(spec: &Value) -> Option<Grant> {
    let attributes = spec["resourceAttributes"].as_object()?;
    let text = |field: &str| {
        let text = attributes.get(field)?.as_str()?;
        (!text.is_empty()).then(|| text.to_owned())
    };
    if spec["user"] != AGENT {
        return None;
    }
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

/// The target and the body of the next request on a connection.
async fn read(stream: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?;
    let target = head.split(' ').nth(1)?.to_owned();
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        is_length.then(|| value.parse::<usize>().ok())?
    });
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).await.ok()?;
    Some((target, body))
}
