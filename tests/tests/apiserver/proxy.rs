//! A TCP proxy on loopback that can be cut.

use std::net::SocketAddr;

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// The proxy; dropping it cuts its connections.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// Where clients connect.
    pub(crate) address: SocketAddr,
    open: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// A proxy to this port.
    pub(crate) async fn start(port: u16) -> Self {
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (open, state) = watch::channel(true);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, to, state.clone()));
            }
        });
        Self {
            address,
            open,
            task,
        }
    }

    /// Ends every connection, and each new one at once.
    pub(crate) fn cut(&self) {
        self.open.send_replace(false);
    }

    /// Lets connections pass again.
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }
}

async fn pass(mut client: TcpStream, to: SocketAddr, mut open: watch::Receiver<bool>) {
    let passing = async {
        if let Ok(mut server) = TcpStream::connect(to).await {
            // Either side may end it.
            let _ended = copy_bidirectional(&mut client, &mut server).await;
        }
    };
    tokio::select! {
        biased;
        _ = open.wait_for(|open| !open) => {}
        () = passing => {}
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}
