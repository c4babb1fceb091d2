//! The asking end of the control socket.

use std::{io, path::Path};

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    Method, Request, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

/// The longest answer that is taken whole: a status with 10,000 EgressFirewalls is shorter.
const ANSWER_MAX: usize = 64 * 1024 * 1024;

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
    /// The connection has ended.
    #[error("the agent broke off")]
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

/// Asks for one JSON value.
pub async fn get<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    parameters: &[(&str, String)],
) -> Result<T, AskError> {
    value(request(socket, Method::GET, path, parameters).await?).await
}

/// Changes something, and takes the JSON value that comes back.
pub async fn put<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    parameters: &[(&str, String)],
) -> Result<T, AskError> {
    value(request(socket, Method::PUT, path, parameters).await?).await
}

async fn value<T: DeserializeOwned>(body: Incoming) -> Result<T, AskError> {
    let body = Limited::new(body, ANSWER_MAX).collect().await;
    let bytes = body.map_err(AskError::Answer)?.to_bytes();
    serde_json::from_slice(&bytes).map_err(|error| AskError::Answer(error.into()))
}

/// Asks for text: its first lines, at most `len_max` bytes, and whether there are more.
pub async fn text(socket: &Path, path: &str, len_max: usize) -> Result<(Vec<u8>, bool), AskError> {
    let mut body = request(socket, Method::GET, path, &[]).await?;
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
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
    mut take: impl FnMut(T) -> io::Result<()>,
) -> Result<(), AskError> {
    let mut body = request(socket, Method::GET, path, parameters).await?;
    let mut pending = Vec::new();
    while let Some(frame) = body.frame().await {
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
    Ok(())
}

async fn request(
    socket: &Path,
    method: Method,
    path: &str,
    parameters: &[(&str, String)],
) -> Result<Incoming, AskError> {
    let stream = UnixStream::connect(socket).await;
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
        .uri(format!("{path}?{}", query.finish()))
        .header("host", "dnsflow")
        .body(Empty::<Bytes>::new());
    let request = request.map_err(|error| AskError::Refused(error.to_string()))?;
    let response = sender.send_request(request).await?;
    match response.status() {
        StatusCode::OK => Ok(response.into_body()),
        _ => {
            let body = Limited::new(response.into_body(), 4096).collect().await;
            let bytes = body.map_err(AskError::Answer)?.to_bytes();
            let text = String::from_utf8_lossy(&bytes).trim().to_owned();
            Err(AskError::Refused(text))
        }
    }
}
