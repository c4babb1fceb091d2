//! A DNS server that answers every question at once.

use std::{
    io::ErrorKind,
    net::{Ipv4Addr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Result;
use dnsflow_tests::lab::Lab;

use super::wire;

/// How often the server looks whether it should stop.
const TURN: Duration = Duration::from_millis(50);
const QUERY_BYTES_MAX: usize = 1500;

/// The server. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Answers on this port of a pod, or of the "internet".
    pub(crate) fn start(lab: &Lab, pod: &str, port: u16) -> Result<Self> {
        let socket = lab
            .pod(pod)
            .netns()
            .run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?))?;
        socket.set_read_timeout(Some(TURN))?;
        super::room(&socket)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("bench-dns".into())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    serve_one(&socket);
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

fn serve_one(socket: &UdpSocket) {
    let mut buffer = [0; QUERY_BYTES_MAX];
    match socket.recv_from(&mut buffer) {
        Ok((length, client)) => {
            if let Some(answer) = wire::answer(&buffer[..length])
                && let Err(error) = socket.send_to(&answer, client)
            {
                eprintln!("the DNS server cannot answer: {error}");
            }
        }
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
            ) => {}
        Err(error) => eprintln!("the DNS server cannot receive: {error}"),
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            eprintln!("the DNS server has panicked");
        }
    }
}
