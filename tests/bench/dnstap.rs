//! The reading end of a dnstap socket: Frame Streams (the protocol of the fstrm library) around
//! protobuf messages (dnstap.proto). Read at once; how late a message comes is the sender's doing.

use std::{
    io::{ErrorKind, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::process::wait_until;
use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};

/// How long the DNS server may take to connect, and for the rest of a frame.
const LIMIT: Duration = Duration::from_secs(10);
/// How often the reader looks whether it should stop.
const TURN: Duration = Duration::from_millis(50);

// Control frames (fstrm's fstrm/control.h).
const CONTROL_ACCEPT: u32 = 1;
const CONTROL_START: u32 = 2;
const CONTROL_READY: u32 = 4;
const FIELD_CONTENT_TYPE: u32 = 1;
const CONTENT_TYPE: &[u8] = b"protobuf:dnstap.Dnstap";

/// Far above a message with its answer.
const FRAME_BYTES_MAX: u32 = 1 << 17;

// Fields (dnstap.proto).
const DNSTAP_MESSAGE: u64 = 14;
const MESSAGE_RESPONSE: u64 = 14;

/// The stream of one DNS server.
#[derive(Debug)]
pub(crate) struct Stream {
    stream: UnixStream,
}

impl Stream {
    /// Waits for the DNS server to connect, and agrees with it on what follows.
    pub(crate) fn accept(listener: &UnixListener) -> Result<Self> {
        listener.set_nonblocking(true)?;
        let mut found = None;
        wait_until("the DNS server's dnstap connection", LIMIT, || {
            found = match listener.accept() {
                Ok((stream, _)) => Some(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => None,
                Err(error) => return Err(error.into()),
            };
            Ok(found.is_some())
        })?;
        let stream = found.context("it was waited for")?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut this = Self { stream };
        ensure!(
            this.frame()?.control == Some(CONTROL_READY),
            "the DNS server does not say what it would send"
        );
        let mut accept = Vec::new();
        accept.extend(CONTROL_ACCEPT.to_be_bytes());
        accept.extend(FIELD_CONTENT_TYPE.to_be_bytes());
        accept.extend((CONTENT_TYPE.len() as u32).to_be_bytes());
        accept.extend(CONTENT_TYPE);
        let mut frame = 0u32.to_be_bytes().to_vec();
        frame.extend((accept.len() as u32).to_be_bytes());
        frame.extend(accept);
        this.stream.write_all(&frame)?;
        ensure!(
            this.frame()?.control == Some(CONTROL_START),
            "the DNS server does not start"
        );
        Ok(this)
    }

    /// The next DNS answer that the server says it has given; `None` once `stop` is set.
    pub(crate) fn answer(&mut self, stop: &AtomicBool) -> Result<Option<Vec<u8>>> {
        loop {
            if !self.readable(stop)? {
                return Ok(None);
            }
            let frame = self.frame()?;
            if frame.control.is_some() {
                return Ok(None);
            }
            let message = field(&frame.payload, DNSTAP_MESSAGE);
            if let Some(answer) = message.and_then(|message| field(message, MESSAGE_RESPONSE)) {
                return Ok(Some(answer.to_vec()));
            }
        }
    }

    /// Waits until there is something to read, and says whether there is.
    fn readable(&mut self, stop: &AtomicBool) -> Result<bool> {
        self.stream.set_read_timeout(Some(TURN))?;
        let readable = loop {
            match recv(&self.stream, &mut [0; 1], RecvFlags::PEEK) {
                Ok((_, length)) => break length > 0,
                Err(Errno::AGAIN | Errno::INTR) if !stop.load(Ordering::Relaxed) => {}
                Err(Errno::AGAIN | Errno::INTR) => break false,
                Err(error) => return Err(error.into()),
            }
        };
        self.stream.set_read_timeout(Some(LIMIT))?;
        Ok(readable)
    }

    fn number(&mut self) -> Result<u32> {
        let mut bytes = [0; 4];
        self.stream.read_exact(&mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    fn frame(&mut self) -> Result<Frame> {
        let mut length = self.number()?;
        // A length of zero escapes a control frame.
        let is_control = length == 0;
        if is_control {
            length = self.number()?;
        }
        ensure!(length <= FRAME_BYTES_MAX, "a frame of {length} bytes");
        let mut payload = vec![0; usize::try_from(length)?];
        self.stream.read_exact(&mut payload)?;
        let first = payload.first_chunk().copied().map(u32::from_be_bytes);
        Ok(Frame {
            control: first.filter(|_| is_control),
            payload,
        })
    }
}

struct Frame {
    control: Option<u32>,
    payload: Vec<u8>,
}

/// The bytes of a length-delimited field of a protobuf message (protobuf's encoding: a varint of
/// field number and wire type, then the value).
fn field(mut message: &[u8], wanted: u64) -> Option<&[u8]> {
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let length = match key & 7 {
            0 => {
                varint(&mut message)?;
                0
            }
            1 => 8,
            2 => usize::try_from(varint(&mut message)?).ok()?,
            5 => 4,
            _ => return None,
        };
        let (value, rest) = message.split_at_checked(length)?;
        if key >> 3 == wanted && key & 7 == 2 {
            return Some(value);
        }
        message = rest;
    }
    None
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Listens at this path.
pub(crate) fn listen(path: &Path) -> Result<UnixListener> {
    UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))
}
