//! Asks the switch in bulk, over a connection of its own: an answer's flows must not wait for the
//! reply to a dump.
//!
//! This connection never writes a flow. The flow monitor leaves out only the changes of its own
//! connection, and therefore runs on the connection that writes.

use std::path::PathBuf;

use dnsflow_core::{
    Input,
    io::input::{FlowQuestion, FlowReply},
};
use tokio::sync::mpsc;
use tracing::{debug, warn};

use super::{Connection, Event};

/// Asks the switch at `path` the `questions`, no faster than `inputs` takes the answers, until
/// `inputs` is closed. For a question without an answer comes [`Input::QuestionRefused`].
pub async fn ask(
    path: PathBuf,
    mut questions: mpsc::Receiver<FlowQuestion>,
    inputs: mpsc::Sender<Input>,
) {
    let mut connection = Connection::new(path);
    let mut up = false;
    let mut waiting: Vec<FlowQuestion> = Vec::new();
    let mut asked = 0_usize;
    loop {
        let event = tokio::select! {
            event = connection.next() => event,
            // A question that came before the connection waits; the next one waits in the channel.
            question = questions.recv(), if waiting.is_empty() => match question {
                Some(question) => {
                    waiting.push(question);
                    if up {
                        asked += put(&mut connection, &mut waiting);
                    }
                    continue;
                }
                None => return,
            },
        };
        let input = match event {
            Event::Up => {
                up = true;
                asked = put(&mut connection, &mut waiting);
                continue;
            }
            Event::Down { reason } => {
                up = false;
                debug!(reason, "no connection for questions to the switch");
                if std::mem::take(&mut asked) == 0 {
                    continue;
                }
                Input::QuestionRefused
            }
            Event::Reply(reply) => Input::Reply(reply),
            Event::Refused { request, reason } => {
                warn!(request, reason, "the switch refused a question");
                Input::QuestionRefused
            }
            // This connection writes and monitors nothing.
            Event::Applied { .. }
            | Event::CountLost { .. }
            | Event::FlowLost { .. }
            | Event::ForeignFlow { .. }
            | Event::ForeignFlowGone { .. }
            | Event::MonitorGap => continue,
        };
        let is_last = !matches!(input, Input::Reply(FlowReply::Flows { more: true, .. }));
        asked = asked.saturating_sub(usize::from(is_last));
        if inputs.send(input).await.is_err() {
            return;
        }
    }
}

fn put(connection: &mut Connection, waiting: &mut Vec<FlowQuestion>) -> usize {
    let asked = waiting.len();
    for question in waiting.drain(..) {
        connection.ask(question);
    }
    asked
}
