//! An API server that does exactly what each test says, over plain HTTP on loopback.

// Each test program uses another part of it.
#![allow(dead_code, unreachable_pub)]

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
    time::timeout,
};

/// Longer than any back-off that a test goes through.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The EgressFirewalls of all namespaces.
pub const EGRESS_FIREWALLS: &str = "/apis/k8s.ovn.org/v1/egressfirewalls";

/// An HTTP server that hands each request to the test.
pub struct Server {
    pub address: std::net::SocketAddr,
    /// What lists and watches are expected to be of.
    pub path: &'static str,
    requests: mpsc::Receiver<Request>,
    task: JoinHandle<()>,
}

impl Server {
    pub async fn start(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (sender, requests) = mpsc::channel(64);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(Request::read(stream, sender.clone()));
            }
        });
        Self {
            address,
            path: EGRESS_FIREWALLS,
            requests,
            task,
        }
    }

    /// The next request, which must be a list.
    pub async fn list(&mut self) -> Request {
        let request = self.request().await;
        assert_eq!(request.path(), self.path);
        assert!(!request.target.contains("watch=true"), "{}", request.target);
        request
    }

    /// The next request, which must be a watch from this resource version.
    pub async fn watch(&mut self, from: &str) -> Request {
        let request = self.request().await;
        assert_eq!(request.path(), self.path);
        assert!(request.target.contains("watch=true"), "{}", request.target);
        assert!(
            request.target.contains(&format!("resourceVersion={from}")),
            "{}",
            request.target
        );
        request
    }

    /// That nothing was asked. What comes before gives this its meaning.
    pub fn no_request(&mut self) {
        if let Ok(request) = self.requests.try_recv() {
            panic!("a request: {}", request.target);
        }
    }

    pub async fn request(&mut self) -> Request {
        timeout(PATIENCE, self.requests.recv())
            .await
            .expect("a request in time")
            .expect("a request")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub struct Request {
    pub method: String,
    pub target: String,
    pub body: Vec<u8>,
    stream: TcpStream,
}

impl Request {
    /// The path, without the query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// The body.
    pub fn object(&self) -> Value {
        serde_json::from_slice(&self.body).expect("a body of JSON")
    }

    async fn read(mut stream: TcpStream, sender: mpsc::Sender<Self>) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(octet) => head.push(octet),
                Err(_) => return,
            }
        }
        let head = String::from_utf8(head).expect("a request of text");
        let mut words = head.split(' ').map(str::to_owned);
        let method = words.next().expect("a method");
        let target = words.next().expect("a target");
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("content-length")
                .then(|| value.parse::<usize>().expect("a length"))
        });
        let mut body = vec![0; length.unwrap_or(0)];
        if stream.read_exact(&mut body).await.is_err() {
            return;
        }
        let request = Self {
            method,
            target,
            body,
            stream,
        };
        let _ = sender.send(request).await;
    }

    /// Answers with one object.
    pub async fn json(mut self, code: u16, body: Value) {
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {code} Said\r\ncontent-type: application/json\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        self.stream
            .write_all((head + &body).as_bytes())
            .await
            .expect("a client that reads");
        self.stream.shutdown().await.expect("an open connection");
    }

    /// Answers with the first half of an object.
    pub async fn half(mut self, body: Value) -> Half {
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 200 Said\r\ncontent-type: application/json\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        let (first, rest) = body.split_at(body.len() / 2);
        self.stream
            .write_all((head + first).as_bytes())
            .await
            .expect("a client that reads");
        Half(self.stream, rest.to_owned())
    }

    /// Answers with an error.
    pub async fn status(self, code: u16) {
        self.json(code, status(code)).await;
    }

    /// Answers with a complete list.
    pub async fn items(self, version: &str, items: &[Value]) {
        self.json(200, list(version, items)).await;
    }

    /// Begins a stream of watch events.
    pub async fn events(mut self) -> Events {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\
                    transfer-encoding: chunked\r\nconnection: close\r\n\r\n";
        self.stream
            .write_all(head.as_bytes())
            .await
            .expect("a client that reads");
        Events(self.stream)
    }
}

/// What is missing of an answer.
pub struct Half(TcpStream, String);

impl Half {
    pub async fn rest(mut self) {
        let Self(stream, rest) = &mut self;
        let written = stream.write_all(rest.as_bytes()).await;
        written.expect("a client that reads");
    }
}

/// A stream of watch events.
pub struct Events(TcpStream);

impl Events {
    pub async fn send(&mut self, kind: &str, object: Value) {
        let event = json!({"type": kind, "object": object});
        self.raw(&format!("{event}\n")).await;
    }

    pub async fn raw(&mut self, text: &str) {
        let chunk = format!("{:x}\r\n{text}\r\n", text.len());
        self.0
            .write_all(chunk.as_bytes())
            .await
            .expect("a client that reads");
    }

    /// Ends the stream as a server does whose time is up; a drop cuts it.
    pub async fn end(mut self) {
        self.0
            .write_all(b"0\r\n\r\n")
            .await
            .expect("a client that reads");
    }
}

pub fn status(code: u16) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": code, "reason": "Test", "message": format!("the test says {code}"),
    })
}

pub fn list(version: &str, items: &[Value]) -> Value {
    list_of("k8s.ovn.org/v1", "EgressFirewall", version, items)
}

/// A list of objects of this kind.
pub fn list_of(api: &str, kind: &str, version: &str, items: &[Value]) -> Value {
    json!({
        "kind": format!("{kind}List"), "apiVersion": api,
        "metadata": {"resourceVersion": version}, "items": items,
    })
}

/// Everything logged since the last look.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub fn take(&self) -> String {
        let bytes = std::mem::take(&mut *self.0.lock().expect("the log"));
        String::from_utf8(bytes).expect("a log of text")
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("the log").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub struct Kubeconfig(PathBuf);

impl Kubeconfig {
    pub fn new() -> Self {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("dnsflow-k8s-watch-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    pub fn write(&self, address: std::net::SocketAddr) {
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        std::fs::write(&self.0, text.to_string()).expect("a kubeconfig");
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Kubeconfig {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
