//! The task that attaches the programs, on a thread of its own: attaching and detaching block for
//! milliseconds, and no answer may wait for them.

use std::time::Duration;

use dnsflow_core::{Input, io::input::AttachCommand};
use futures::FutureExt as _;
use tokio::{
    sync::{mpsc, oneshot},
    time::MissedTickBehavior,
};
use tracing::warn;

use super::{Attach as _, AttachKind, Attachments, LinkEvent, LinkEvents, Program};
use crate::clock::now;

/// For so long, the programs of an earlier agent go on while this agent does not come to know its node. Those of this
/// agent defer answers, and those of the earlier one stop after `--keep-flows`.
pub(super) const GO_ON_MAX: Duration = Duration::from_secs(60);

/// So often, the agent looks whether its programs are still in front of all others: the kernel tells of no change of
/// TCX.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// Who tells the attacher to take the place of earlier agents' programs, and is told when that is done.
#[derive(Debug)]
pub struct TakeOver {
    /// Rules and DNS servers are in the maps of this agent's programs.
    pub begin: oneshot::Receiver<()>,
    /// Programs of earlier agents write no more frames.
    pub done: oneshot::Sender<()>,
}

/// The attachments, and the events of interfaces.
pub struct Attacher {
    /// Attaches and detaches.
    pub attachments: Attachments<Program>,
    /// Interfaces that come and go.
    pub links: LinkEvents,
}

impl Attacher {
    /// Carries out `commands` and sends the results to `inputs`, until one of the two is closed.
    ///
    /// Programs of earlier agents go on until this agent's know what these know. Then nothing is left of them.
    pub async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<AttachCommand>,
        inputs: mpsc::Sender<Input>,
        take_over: TakeOver,
    ) {
        let TakeOver { begin, done } = take_over;
        let begin = begin.fuse();
        let give_up = tokio::time::sleep(GO_ON_MAX).fuse();
        tokio::pin!(begin, give_up);
        let mut look = tokio::time::interval(LOOK_INTERVAL);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut done = Some(done);
        let mut is_last = false;
        loop {
            if is_last
                && !self.attachments.has_work()
                && let Some(done) = done.take()
            {
                self.attachments.program_mut().sweep();
                // Without a receiver, the hot thread has gone.
                let _ = done.send(());
            }
            let news = tokio::select! {
                // Events come first: of many veths that appear together, all are seen before work
                // on one begins.
                biased;
                command = commands.recv() => match command {
                    Some(command) => self.command(command),
                    None => return,
                },
                ready = self.links.readable() => match ready.and_then(|()| self.events()) {
                    Ok(news) => news,
                    Err(error) => {
                        warn!(%error, "cannot read changes of interfaces");
                        self.attachments.link_event(&LinkEvent::Overrun, now())
                    }
                },
                Ok(()) = &mut begin => {
                    self.attachments.take_over();
                    is_last = true;
                    Vec::new()
                }
                () = &mut give_up => {
                    self.attachments.take_over();
                    Vec::new()
                }
                () = std::future::ready(()), if self.attachments.has_work() => {
                    self.attachments.work(now()).into_iter().collect()
                }
                () = self.timeout() => self.attachments.handle_timeout(now()),
                _ = look.tick() => self.attachments.look_at_places(now()),
            };
            for input in news {
                if inputs.send(input).await.is_err() {
                    return;
                }
            }
        }
    }

    fn command(&mut self, command: AttachCommand) -> Vec<Input> {
        match command {
            AttachCommand::Attach {
                interface,
                name,
                policed,
                sources,
            } => {
                let excluded = self.attachments.program().kind() == Some(AttachKind::Clsact);
                if policed && excluded {
                    warn!(
                        name,
                        "ingress_policing_rate has no effect on this pod: on this kernel, its qdisc and the clsact \
                         of the TC programs exclude each other; Linux 6.6 with TCX has no such conflict"
                    );
                }
                vec![self.attachments.attach(interface, name, sources, now())]
            }
            AttachCommand::TrustSources { interface, sources } => {
                self.attachments.trust_sources(interface, sources);
                Vec::new()
            }
            AttachCommand::Detach { interface } => {
                self.attachments.detach(interface);
                Vec::new()
            }
        }
    }

    fn events(&mut self) -> std::io::Result<Vec<Input>> {
        let mut events: Vec<LinkEvent> = Vec::new();
        self.links.drain(|event| events.push(event))?;
        let now = now();
        let news = events
            .iter()
            .flat_map(|event| self.attachments.link_event(event, now));
        Ok(news.collect())
    }

    async fn timeout(&self) {
        match self.attachments.next_deadline() {
            Some(deadline) => tokio::time::sleep(deadline.since(now())).await,
            None => std::future::pending().await,
        }
    }
}
