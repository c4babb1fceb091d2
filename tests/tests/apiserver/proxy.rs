//! A TCP proxy on loopback that can be cut.

use std::net::SocketAddr;

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
};

/// The proxy; dropping it cuts its connections.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// Where clients connect.
    pub(crate) address: SocketAddr,
    to: SocketAddr,
    task: Option<JoinHandle<()>>,
}

impl Proxy {
    /// A proxy to this port.
    pub(crate) async fn start(port: u16) -> Self {
        let mut proxy = Self {
            address: ([127, 0, 0, 1], 0).into(),
            to: ([127, 0, 0, 1], port).into(),
            task: None,
        };
        proxy.open().await;
        proxy
    }

    /// Takes connections, at the same address as before.
    pub(crate) async fn open(&mut self) {
        let listener = TcpListener::bind(self.address).await.expect("the port");
        self.address = listener.local_addr().expect("an address");
        let to = self.to;
        self.task = Some(tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                connections.spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(to).await {
                        // Either side may end it.
                        let _ended = copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        }));
    }

    /// Ends every connection and takes no more.
    pub(crate) async fn cut(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            // Its sockets are closed when it has ended.
            let _cancelled = task.await;
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}
