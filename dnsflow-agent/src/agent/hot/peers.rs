//! The hot thread's ends of the channels to whatever takes its time: attaching, questions to the switch, connection
//! tracking, the datapath, OVN's databases.
//!
//! The hot thread waits for none of them. For a question that finds no room, the engine gets the answer that nothing
//! was found.

use dnsflow_core::{
    Input,
    engine::Engine,
    io::input::{AttachCommand, FlowQuestion, Looked},
    values::connection::Path,
};
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use crate::{clock::now, conntrack, ovn_db::OvnCommand};

/// The ends.
pub(crate) struct Peers {
    /// To the thread that attaches. It holds little: one command for each interface that comes or
    /// goes.
    pub(crate) attach: mpsc::UnboundedSender<AttachCommand>,
    /// Whether the node is known.
    pub(crate) know_node: bool,
    /// Tells the thread that attaches to take the place of earlier agents' programs.
    pub(crate) take_over: Option<oneshot::Sender<()>>,
    /// It has done so. `None` once this is known.
    pub(crate) taken_over: Option<oneshot::Receiver<()>>,
    pub(crate) questions: mpsc::Sender<FlowQuestion>,
    pub(crate) conntrack: mpsc::Sender<conntrack::Request>,
    /// Questions for the megaflows that drop.
    pub(crate) datapath: mpsc::Sender<Vec<Path>>,
    pub(crate) ovn: mpsc::Sender<OvnCommand>,
}

impl Peers {
    /// Has the thread that attaches take the place of earlier agents' programs, once.
    pub(super) fn take_over(&mut self) {
        if let Some(begin) = self.take_over.take() {
            // Without a receiver, that thread has ended, and with it this agent does.
            let _ = begin.send(());
        }
    }

    /// Waits until the programs of earlier agents write no more frames. May be cancelled.
    pub(super) async fn taken_over(&mut self) {
        match &mut self.taken_over {
            Some(taken_over) => {
                let _ = taken_over.await;
                self.taken_over = None;
            }
            None => std::future::pending().await,
        }
    }

    /// Whether the programs of earlier agents write no more frames.
    pub(super) fn have_taken_over(&self) -> bool {
        self.taken_over.is_none()
    }

    pub(super) fn attach(&self, command: AttachCommand) {
        if let Err(error) = self.attach.send(command) {
            warn!(%error, "the attaching thread has stopped");
        }
    }

    pub(super) fn ask_switch(&self, question: FlowQuestion, engine: &mut Engine) {
        if let Err(error) = self.questions.try_send(question) {
            warn!(%error, "a question to the switch was dropped");
            engine.handle(Input::QuestionRefused, now());
        }
    }

    pub(super) fn find_dropping(&self, paths: Vec<Path>, engine: &mut Engine) {
        if let Err(error) = self.datapath.try_send(paths) {
            engine.handle(Input::Dropping(Looked::unknown(error.into_inner())), now());
        }
    }

    pub(super) fn ask_conntrack(&self, request: conntrack::Request, engine: &mut Engine) {
        let Err(error) = self.conntrack.try_send(request) else {
            return;
        };
        warn!(%error, "cannot find or unblock blocked connections");
        let input = match error.into_inner() {
            conntrack::Request::Find => Input::Blocked {
                connections: Vec::new(),
                more: false,
            },
            conntrack::Request::Unblock(connections) => Input::Unblocked {
                unblocked: 0,
                failed: connections.len(),
            },
        };
        engine.handle(input, now());
    }

    pub(super) fn ask_ovn(&self, command: OvnCommand) {
        if let Err(error) = self.ovn.try_send(command) {
            warn!(%error, "a question to OVN's databases was dropped");
        }
    }
}
