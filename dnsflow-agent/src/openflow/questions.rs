//! What is asked of the switch in bulk, over a connection of its own: reading and judging the
//! reply to a dump must not keep an answer's flows waiting.
//!
//! It never writes a flow. The flow monitor leaves out only what its own connection writes, so
//! that it belongs to the one that writes.

use std::path::PathBuf;

use dnsflow_core::Input;
use tokio::sync::mpsc;
use tracing::{debug, warn};

use super::{Connection, Event};

/// A question.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Question {
    /// Every dnsflow flow; [`Input::Flows`] answers.
    Dump,
    /// Flows with these cookies; [`Input::CookiesFound`] answers.
    FindCookies(Vec<u32>),
}

/// Asks `questions` of the switch at `path`, as long as `inputs` takes the answers: no faster than they
/// are taken. One that gets no answer is told as [`Input::QuestionRefused`].
pub async fn ask(
    path: PathBuf,
    mut questions: mpsc::Receiver<Question>,
    inputs: mpsc::Sender<Input<'static>>,
) {
    let mut connection = Connection::new(path);
    let mut up = false;
    let mut waiting: Vec<Question> = Vec::new();
    let mut asked = 0_usize;
    loop {
        let event = tokio::select! {
            event = connection.next() => event,
            // A question that came too early waits; the next one waits in the channel.
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
            Event::Flows { flows, more } => Input::Flows { flows, more },
            Event::CookiesFound(found) => Input::CookiesFound(found),
            Event::Refused { request, reason } => {
                warn!(request, reason, "the switch refused a question");
                Input::QuestionRefused
            }
            // Nothing is written, counted or monitored here.
            Event::Applied { .. }
            | Event::Counted { .. }
            | Event::CountLost { .. }
            | Event::FlowLost { .. }
            | Event::ForeignFlow { .. }
            | Event::ForeignFlowGone { .. }
            | Event::MonitorGap => continue,
        };
        let is_last = !matches!(input, Input::Flows { more: true, .. });
        asked = asked.saturating_sub(usize::from(is_last));
        if inputs.send(input).await.is_err() {
            return;
        }
    }
}

fn put(connection: &mut Connection, waiting: &mut Vec<Question>) -> usize {
    let asked = waiting.len();
    for question in waiting.drain(..) {
        match question {
            Question::Dump => connection.dump(),
            Question::FindCookies(cookies) => connection.find_cookies(cookies),
        }
    }
    asked
}
