//! Questions of people to the hot thread, one small one at a time.
//!
//! The hot thread owns the state that people ask for. Whoever asks waits; a list is asked for in parts.

use std::time::Duration;

use dnsflow_core::{Timestamp, engine::Engine};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

/// One question waits while another is answered: each costs the hot thread some microseconds, and an
/// answer to a pod must not wait for many of them.
const INQUIRIES_MAX: usize = 1;
/// After this time, the hot thread is stuck, and `/livez` says so.
const PATIENCE: Duration = Duration::from_secs(10);

/// A question to the hot thread, with the way back.
pub type Inquiry = Box<dyn FnOnce(&Engine, Timestamp) + Send>;

/// Where questions to the hot thread are asked.
#[derive(Clone, Debug)]
pub struct Inquiries(mpsc::Sender<Inquiry>);

/// The way of questions to the hot thread.
pub fn channel() -> (Inquiries, mpsc::Receiver<Inquiry>) {
    let (sender, receiver) = mpsc::channel(INQUIRIES_MAX);
    (Inquiries(sender), receiver)
}

impl Inquiries {
    /// Asks the hot thread; `None` where it does not answer in time. What `question` does takes the hot
    /// thread's time: little.
    pub async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Engine, Timestamp) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let inquiry: Inquiry = Box::new(move |engine, now| {
            // Whoever has asked may have gone.
            let _gone = reply.send(question(engine, now));
        });
        let answered = async {
            self.0.send(inquiry).await.ok()?;
            answer.await.ok()
        };
        timeout(PATIENCE, answered).await.ok()?
    }
}
