//! The web server of the lab's "internet", which says which address it was reached at.
//!
//! It runs as a process of its own (`dnsflow-lab-helper web`), so that a lab outlives the
//! command that brought it up.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{
    lab::Lab,
    process::{PATIENT, spawn_detached, wait_listening},
};

/// The ports that it listens on.
pub const PORTS: [u16; 2] = [80, 8080];

const REQUEST_BYTES_MAX: u64 = 16 * 1024;

/// The page that goes on for minutes, for connections that are to last: so many pieces of so
/// many bytes, one after each pause.
pub const LONG_PAGE: &str = "/long";
const LONG_PIECES: usize = 4096;
const LONG_PIECE: [u8; 16 << 10] = [b'.'; 16 << 10];
const LONG_PAUSE: Duration = Duration::from_millis(50);

/// Starts the web server in the lab's "internet"; returns when it listens.
pub(crate) fn start(lab: &Lab) -> Result<()> {
    let mut command = Command::new(lab.helper());
    // A socket of IPv6 takes connections of both families (ipv6(7), IPV6_V6ONLY).
    let (any, table) = if lab.cluster().dual_stack {
        ("[::]", "tcp6")
    } else {
        ("0.0.0.0", "tcp")
    };
    command.arg("web");
    command.args(PORTS.map(|port| format!("{any}:{port}")));
    // The directory marks the process as this lab's.
    command.arg(lab.base()).current_dir("/");
    lab.pod("inet").netns().enter(&mut command)?;
    let log = lab.base().join("log/web.log");
    let pid = spawn_detached(&mut command, &log, &lab.socket("web.pid"))?;
    for port in PORTS {
        wait_listening(pid, table, port)?;
    }
    Ok(())
}

/// Serves these addresses and ports, until it is killed.
pub fn serve(sockets: &[SocketAddr]) -> Result<()> {
    let mut servers = Vec::new();
    for socket in sockets {
        let listener =
            TcpListener::bind(socket).with_context(|| format!("cannot listen on {socket}"))?;
        servers.push(thread::spawn(move || accept(&listener)));
    }
    for server in servers {
        server
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    }
    Ok(())
}

fn accept(listener: &TcpListener) -> Result<()> {
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || {
            if let Err(error) = answer(stream) {
                eprintln!("{error:#}");
            }
        });
    }
    Ok(())
}

fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(PATIENT))?;
    stream.set_write_timeout(Some(PATIENT))?;
    let mut lines = BufReader::new((&stream).take(REQUEST_BYTES_MAX)).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    // The request ends with an empty line (RFC 9112, section 2.1).
    while !lines.next().transpose()?.unwrap_or_default().is_empty() {}
    if request.split(' ').nth(1) == Some(LONG_PAGE) {
        stream.write_all(head(LONG_PIECES * LONG_PIECE.len()).as_bytes())?;
        for _ in 0..LONG_PIECES {
            stream.write_all(&LONG_PIECE)?;
            thread::sleep(LONG_PAUSE);
        }
        return Ok(());
    }
    let body = format!(
        "{} greets {}\n",
        stream.local_addr()?.ip().to_canonical(),
        stream.peer_addr()?.ip().to_canonical()
    );
    stream.write_all(head(body.len()).as_bytes())?;
    stream.write_all(body.as_bytes())?;
    Ok(())
}

fn head(length: usize) -> String {
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    )
}
