//! The asking end of the control socket.

use std::{io, path::Path, time::Duration};

use dnsflow_ovsdb::session::FIRST_CONTENT_WAIT;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    Method, Request, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::{net::UnixStream, time::timeout};

/// The longest answer that is taken whole: a status with 10,000 EgressFirewalls is shorter.
const ANSWER_MAX: usize = 64 * 1024 * 1024;
/// The wait for an answer's begin, and for each of its parts. The agent says itself if its hot thread has not answered
/// for 10 s.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);
/// The same of an explanation, for which the agent may ask OVN's northbound database.
const EXPLAIN_LIMIT: Duration = FIRST_CONTENT_WAIT.saturating_add(ANSWER_LIMIT);

/// Why the agent has not answered.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody listens.
    #[error(
        "no agent answers at {path}; run this on the node, in the agent's container (`kubectl exec \
         daemonset/dnsflow -- dnsflow …`), or name the socket with --control-socket"
    )]
    Connect {
        /// The socket.
        path: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Somebody listens, and says nothing.
    #[error(
        "the agent has not answered {path} within {limit_s} s; its log and `kubectl describe pod` may say why"
    )]
    Silent {
        /// The question.
        path: String,
        /// The wait, in seconds.
        limit_s: u64,
    },
    /// The connection has ended.
    #[error("the agent's answer is incomplete")]
    Http(#[from] hyper::Error),
    /// The agent refuses.
    #[error("the agent says: {0}")]
    Refused(String),
    /// The answer is not what was expected: another version may run.
    #[error("the agent's answer is not understood; is it of another version?")]
    Answer(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer cannot be handed on.
    #[error(transparent)]
    Output(#[from] io::Error),
}

/// What is asked, and how long its answer may take.
struct Conversation {
    path: String,
    limit: Duration,
}

impl Conversation {
    fn about(path: &str) -> Self {
        Self {
            path: path.to_owned(),
            limit: match path {
                "/v1/explain" => EXPLAIN_LIMIT,
                _ => ANSWER_LIMIT,
            },
        }
    }

    /// Waits for a part of the answer.
    async fn wait<T>(&self, part: impl Future<Output = T>) -> Result<T, AskError> {
        timeout(self.limit, part).await.map_err(|_| self.silence())
    }

    fn silence(&self) -> AskError {
        AskError::Silent {
            path: self.path.clone(),
            limit_s: self.limit.as_secs(),
        }
    }
}

/// Asks for one JSON value.
pub async fn get<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    parameters: &[(&str, String)],
) -> Result<T, AskError> {
    value(socket, Method::GET, path, parameters).await
}

/// Changes something, and takes the JSON value that comes back.
pub async fn put<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    parameters: &[(&str, String)],
) -> Result<T, AskError> {
    value(socket, Method::PUT, path, parameters).await
}

async fn value<T: DeserializeOwned>(
    socket: &Path,
    method: Method,
    path: &str,
    parameters: &[(&str, String)],
) -> Result<T, AskError> {
    let asked = Conversation::about(path);
    let body = request(socket, method, &asked, parameters).await?;
    let body = asked.wait(Limited::new(body, ANSWER_MAX).collect()).await?;
    let bytes = body.map_err(AskError::Answer)?.to_bytes();
    serde_json::from_slice(&bytes).map_err(|error| AskError::Answer(error.into()))
}

/// Asks for text: its first lines, at most `len_max` bytes, and whether there are more.
pub async fn text(socket: &Path, path: &str, len_max: usize) -> Result<(Vec<u8>, bool), AskError> {
    let asked = Conversation::about(path);
    let mut body = request(socket, Method::GET, &asked, &[]).await?;
    let mut text = Vec::new();
    while let Some(frame) = asked.wait(body.frame()).await? {
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        text.extend_from_slice(&data);
        if text.len() > len_max {
            text.truncate(len_max);
            let end = text.iter().rposition(|byte| *byte == b'\n');
            text.truncate(end.map_or(0, |end| end + 1));
            return Ok((text, true));
        }
    }
    Ok((text, false))
}

/// Asks for JSON values, one a line; hands each to `take` as it comes.
pub async fn lines<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    parameters: &[(&str, String)],
    take: impl FnMut(T) -> io::Result<()>,
) -> Result<(), AskError> {
    each_line(socket, path, parameters, true, take).await
}

/// The same of values that come as something happens: only the begin of the answer has a limit.
pub async fn follow<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    parameters: &[(&str, String)],
    take: impl FnMut(T) -> io::Result<()>,
) -> Result<(), AskError> {
    each_line(socket, path, parameters, false, take).await
}

/// Hands each line of an answer to `take`. `has_limit`: the lines come without a pause.
async fn each_line<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    parameters: &[(&str, String)],
    has_limit: bool,
    mut take: impl FnMut(T) -> io::Result<()>,
) -> Result<(), AskError> {
    let asked = Conversation::about(path);
    let mut body = request(socket, Method::GET, &asked, parameters).await?;
    let mut pending = Vec::new();
    loop {
        let frame = match has_limit {
            true => asked.wait(body.frame()).await?,
            false => body.frame().await,
        };
        let Some(frame) = frame else {
            return Ok(());
        };
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        pending.extend_from_slice(&data);
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let value = serde_json::from_slice(&pending[..end]);
            take(value.map_err(|error| AskError::Answer(error.into()))?)?;
            pending.drain(..=end);
        }
        if pending.len() > ANSWER_MAX {
            return Err(AskError::Answer("a line without an end".into()));
        }
    }
}

async fn request(
    socket: &Path,
    method: Method,
    asked: &Conversation,
    parameters: &[(&str, String)],
) -> Result<Incoming, AskError> {
    let stream = asked.wait(UnixStream::connect(socket)).await?;
    let stream = stream.map_err(|source| AskError::Connect {
        path: socket.display().to_string(),
        source,
    })?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.extend_pairs(parameters);
    let request = Request::builder()
        .method(method)
        .uri(format!("{}?{}", asked.path, query.finish()))
        .header("host", "dnsflow")
        .body(Empty::<Bytes>::new());
    let request = request.map_err(|error| AskError::Refused(error.to_string()))?;
    let response = asked.wait(sender.send_request(request)).await??;
    match response.status() {
        StatusCode::OK => Ok(response.into_body()),
        _ => {
            let body = Limited::new(response.into_body(), 4096).collect();
            let body = asked.wait(body).await?;
            let bytes = body.map_err(AskError::Answer)?.to_bytes();
            let text = String::from_utf8_lossy(&bytes).trim().to_owned();
            Err(AskError::Refused(text))
        }
    }
}

#[cfg(test)]
mod tests;
