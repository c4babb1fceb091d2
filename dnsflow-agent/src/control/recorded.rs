//! `/v1/learn`: a recording, for as long as its client reads.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use dnsflow_core::{Input, engine::Engine, pods::recording, values::ids::RecordingId};
use futures::{StreamExt as _, stream};
use hyper::{Response, body::Bytes};
use tokio::time::sleep;

use super::{Body, FOLLOW_INTERVAL, Parameters, Refusal, Server, line, lines};
use crate::asking::learn::{LearnedName, Line};

/// How often a recording is read. The hot thread wakes no reader.
const LEARN_INTERVAL: Duration = Duration::from_secs(1);
/// Recorded names that one question to the hot thread is for.
const NAMES_PER_INQUIRY: usize = 64;

impl Server {
    pub(super) async fn learn(
        self: &Arc<Self>,
        mut parameters: Parameters,
    ) -> Result<Response<Body>, Refusal> {
        let namespace = parameters.required("namespace")?;
        let time = Duration::from_secs(parameters.parsed("for_s")?.unwrap_or(0));
        parameters.end()?;
        if time.is_zero() || time > recording::TIME_MAX {
            let most = recording::TIME_MAX.as_secs();
            return Err(Refusal::Request(format!(
                "`for_s`: not between 1 and {most}"
            )));
        }
        let id = RecordingId(self.recordings.fetch_add(1, Relaxed));
        let input = Input::Record {
            id,
            namespace,
            time,
        };
        self.inputs.send(input).await.map_err(|_| Refusal::Stuck)?;
        let recording = Recording {
            server: Arc::clone(self),
            id,
            read: 0,
            left_out: 0,
            until: Instant::now() + time,
            is_over: false,
        };
        if !recording.has_begun().await? {
            let most = recording::RECORDINGS_MAX;
            return Err(Refusal::Request(format!("{most} recordings go on already")));
        }
        let parts = stream::unfold(recording, |mut recording| async move {
            let lines = recording.next().await?;
            let lines: Vec<Bytes> = lines.iter().map(line).collect();
            Some((stream::iter(lines), recording))
        });
        Ok(lines(parts.flatten().map(Ok)))
    }
}

/// A recording that a client reads. The recording ends with the client.
struct Recording {
    server: Arc<Server>,
    id: RecordingId,
    /// How many names were read.
    read: usize,
    left_out: u64,
    until: Instant,
    /// Whether the end was told.
    is_over: bool,
}

impl Recording {
    /// Whether the hot thread has begun the recording. Its inputs and its questions come by two ways, and
    /// the question may come first.
    async fn has_begun(&self) -> Result<bool, Refusal> {
        for _ in 0..10 {
            let id = self.id;
            let asked = move |engine: &Engine, _| engine.view().recorded(id, 0, 0).is_some();
            if self
                .server
                .inquiries
                .ask(asked)
                .await
                .ok_or(Refusal::Stuck)?
            {
                return Ok(true);
            }
            sleep(FOLLOW_INTERVAL).await;
        }
        Ok(false)
    }

    /// The next lines; `None` after the last one, and where the hot thread does not answer.
    async fn next(&mut self) -> Option<Vec<Line>> {
        if self.is_over {
            return None;
        }
        loop {
            let is_last = Instant::now() >= self.until;
            let (id, from) = (self.id, self.read);
            let asked =
                move |engine: &Engine, _| engine.view().recorded(id, from, NAMES_PER_INQUIRY);
            let (names, left_out) = self.server.inquiries.ask(asked).await??;
            self.read += names.len();
            self.left_out = left_out;
            if !names.is_empty() {
                let names = names.into_iter().map(|recorded| {
                    Line::Name(LearnedName {
                        name: recorded.name.to_string(),
                        addresses: recorded.addresses,
                    })
                });
                return Some(names.collect());
            }
            if is_last {
                self.is_over = true;
                let left_out = self.left_out;
                return Some(vec![Line::End {
                    left_out,
                    by_address: Vec::new(),
                }]);
            }
            let rest = self.until.saturating_duration_since(Instant::now());
            sleep(rest.min(LEARN_INTERVAL)).await;
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Where there is no room, the recording ends by its time.
        let _no_room = self
            .server
            .inputs
            .try_send(Input::EndRecording { id: self.id });
    }
}
