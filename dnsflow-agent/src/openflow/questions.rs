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
        // The answer about ports comes before that about flows, which ends the dump.
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

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{UnixListener, UnixStream},
    };

    use super::*;

    /// A connection, behind the greetings.
    async fn greeted(listener: &UnixListener) -> UnixStream {
        let (mut switch, _) = listener.accept().await.expect("it connects");
        let mut hello = [0; 16];
        switch.read_exact(&mut hello).await.expect("a hello");
        switch.write_all(&hello).await.expect("it reads");
        switch
    }

    /// The switch goes before it has told of all flows. A later question is answered later.
    #[tokio::test]
    async fn a_dump_of_which_only_a_part_was_told_is_refused() {
        let name = format!("dnsflow-questions-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("a socket");
        let (questions, asked) = mpsc::channel(1);
        let (found, mut inputs) = mpsc::channel(4);
        let asking = tokio::spawn(ask(path.clone(), asked, found));
        let dump = FlowQuestion::Dump { number: 7 };
        questions.send(dump).await.expect("it takes questions");
        let mut switch = greeted(&listener).await;
        let mut request = [0; 56];
        switch.read_exact(&mut request).await.expect("a question");
        // No flow, and there is more.
        let (version, xid) = (request[0], &request[4..8]);
        let body = [0, 1, 0, 1, 0, 0, 0, 0];
        let reply = [&[version, 19, 0, 16][..], xid, &body].concat();
        switch.write_all(&reply).await.expect("it reads");
        assert!(matches!(
            inputs.recv().await,
            Some(Input::Reply(FlowReply::Flows { more: true, .. }))
        ));
        drop(switch);
        let _switch = greeted(&listener).await;
        let nothing = FlowQuestion::Find(Vec::new());
        questions.send(nothing).await.expect("it takes questions");
        assert!(matches!(inputs.recv().await, Some(Input::QuestionRefused)));
        asking.abort();
        fs::remove_file(&path).expect("the socket");
    }
}
