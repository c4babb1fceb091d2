//! Waiting for a signal, in the containers of a DaemonSet that have no other work: `dnsflow wait`, and `dnsflow cleanup
//! --stay`. The image has no other program that could wait.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    runtime, select,
    signal::unix::{SignalKind, signal},
    time::{sleep, timeout},
};

/// An HTTP answer that says yes and nothing else.
const YES: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
/// The longest request that is read, in bytes. The kubelet's is shorter.
const REQUEST_MAX: usize = 4096;
/// A client has so long for its request.
const REQUEST_LIMIT: Duration = Duration::from_secs(1);
/// The pause after a connection that could not be taken.
const PAUSE: Duration = Duration::from_secs(1);

/// Returns when SIGTERM or SIGINT comes. Answers every HTTP request at `listen` with 200 until then.
///
/// # Errors
///
/// Where the signals cannot be watched, or the address is taken.
pub fn run(listen: Option<SocketAddr>) -> io::Result<()> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let listener = match listen {
            Some(address) => Some(TcpListener::bind(address).await?),
            None => None,
        };
        select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = answer(listener) => {}
        }
        Ok(())
    })
}

/// Says yes to whoever asks, one client after the other, for ever.
async fn answer(listener: Option<TcpListener>) {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        match listener.accept().await {
            // A client that breaks off, or is too slow, is its own loss.
            Ok((stream, _)) => drop(timeout(REQUEST_LIMIT, say_yes(stream)).await),
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Answers when the request has come: a connection that is closed with unread bytes is reset.
async fn say_yes(mut stream: TcpStream) -> io::Result<()> {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") && request.len() < REQUEST_MAX {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    stream.write_all(YES).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ask(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        let request = "GET /readyz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
        stream
            .write_all(request.as_bytes())
            .await
            .expect("it reads");
        let mut answer = String::new();
        stream
            .read_to_string(&mut answer)
            .await
            .expect("it answers");
        answer
    }

    #[tokio::test(start_paused = true)]
    async fn every_request_is_answered_also_behind_a_client_that_says_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let answering = tokio::spawn(answer(Some(listener)));
        assert!(ask(address).await.starts_with("HTTP/1.1 200 OK\r\n"));
        let _silent = TcpStream::connect(address).await.expect("it listens");
        assert!(ask(address).await.starts_with("HTTP/1.1 200 OK\r\n"));
        answering.abort();
    }
}
