use std::{env, fs, path::PathBuf, process};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixListener,
    time::Instant,
};

use super::*;

/// An agent that takes questions, answers each with these bytes, and says nothing more.
struct Stuck(PathBuf);

impl Stuck {
    fn start(name: &str, begin: &'static str) -> Self {
        let path = env::temp_dir().join(format!("dnsflow-{name}-{}.sock", process::id()));
        let _none = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("there is room");
        tokio::spawn(async move {
            let mut clients = Vec::new();
            loop {
                let (mut client, _) = listener.accept().await.expect("a client");
                client.read_u8().await.expect("a question");
                client
                    .write_all(begin.as_bytes())
                    .await
                    .expect("it is read");
                clients.push(client);
            }
        });
        Self(path)
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        fs::remove_file(&self.0).expect("it is there");
    }
}

fn nothing(_: Value) -> io::Result<()> {
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_says_nothing_is_named_with_the_question() {
    let stuck = Stuck::start("silent", "");
    for (path, limit_s) in [("/v1/status", 15), ("/v1/explain", 75)] {
        let begin = Instant::now();
        let error = get::<Value>(&stuck.0, path, &[])
            .await
            .expect_err("silence");
        let expected = format!("the agent has not answered {path} within {limit_s} s; ");
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert_eq!(begin.elapsed().as_secs(), limit_s);
    }
    let error = put::<Value>(&stuck.0, "/v1/log-level", &[]).await;
    assert!(matches!(error, Err(AskError::Silent { .. })), "{error:?}");
    let error = follow(&stuck.0, "/v1/events", &[], nothing).await;
    assert!(matches!(error, Err(AskError::Silent { .. })), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_stops_within_its_answer_is_named_as_well() {
    let stuck = Stuck::start("stops", "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{}\n");
    let error = get::<Value>(&stuck.0, "/v1/status", &[]).await;
    assert!(matches!(error, Err(AskError::Silent { .. })), "{error:?}");
    let error = text(&stuck.0, "/v1/metrics", 100).await;
    assert!(matches!(error, Err(AskError::Silent { .. })), "{error:?}");
    let error = lines(&stuck.0, "/v1/cache", &[], nothing).await;
    assert!(matches!(error, Err(AskError::Silent { .. })), "{error:?}");
    // What happens may take hours.
    let hours = Duration::from_secs(36_000);
    let following = follow(&stuck.0, "/v1/events", &[], nothing);
    assert!(timeout(hours, following).await.is_err());
}
