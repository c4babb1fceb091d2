//! The web server of the lab's "internet", which says which address it was reached at.
//!
//! It runs as a process of its own (`dnsflow-lab-helper web`), so that a lab outlives the
//! command that brought it up.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::Result;

use crate::{
    lab::Lab,
    process::{spawn_detached, wait_listening},
};

const PORT: u16 = 80;
const REQUEST_BYTES_MAX: u64 = 16 * 1024;
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);

/// Starts the web server in the lab's "internet"; returns when it listens.
pub(crate) fn start(lab: &Lab) -> Result<()> {
    let mut command = Command::new(lab.helper());
    // The directory marks the process as this lab's.
    command
        .args(["web", &PORT.to_string()])
        .arg(lab.base())
        .current_dir("/");
    lab.pod("inet").netns().enter(&mut command)?;
    let log = lab.base().join("log/web.log");
    let pid = spawn_detached(&mut command, &log, &lab.socket("web.pid"))?;
    wait_listening(pid, lab.base(), "tcp", PORT)
}

/// Serves every address of this namespace, until it is killed.
pub fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
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
    stream.set_read_timeout(Some(CONNECTION_LIMIT))?;
    stream.set_write_timeout(Some(CONNECTION_LIMIT))?;
    let mut lines = BufReader::new((&stream).take(REQUEST_BYTES_MAX)).lines();
    // The request ends with an empty line (RFC 9112, section 2.1).
    while !lines.next().transpose()?.unwrap_or_default().is_empty() {}
    let body = format!(
        "{} greets {}\n",
        stream.local_addr()?.ip(),
        stream.peer_addr()?.ip()
    );
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    Ok(())
}
