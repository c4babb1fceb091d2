//! Cuts a byte stream into JSON objects.
//!
//! JSON-RPC 1.0 over a stream has no delimiter (RFC 7047, section 4): a message ends where its
//! outermost brace closes. The framer only knows braces, brackets and strings; the parser decides
//! whether the object is valid JSON. The framer examines each byte once, however the stream was
//! split.

use bytes::{Buf, Bytes, BytesMut};

/// The longest message accepted, in bytes. A southbound database with 100,000 ports answers
/// the first request with about 25 MB.
const MESSAGE_MAX_BYTES: usize = 64 << 20;

/// After a longer message, the buffer is freed: the first answer of a large database is far longer
/// than all later messages.
const KEPT_MAX_BYTES: usize = 1 << 20;

/// Why a stream cannot be cut any further. The connection has to be closed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FramingError {
    /// A message does not begin with an opening brace.
    #[error("a message starts with the byte {0:#04x}, not with an opening brace")]
    NotAnObject(u8),
    /// A message is longer than the limit.
    #[error("a message is longer than {limit_bytes} bytes")]
    TooLong {
        /// The limit.
        limit_bytes: usize,
    },
}

/// Collects bytes and gives back whole messages.
#[derive(Debug)]
pub struct Framer {
    buffer: BytesMut,
    /// The number of bytes of `buffer` that were examined.
    scanned: usize,
    /// Open braces and brackets.
    depth: usize,
    in_string: bool,
    escaped: bool,
    limit_bytes: usize,
}

impl Default for Framer {
    fn default() -> Self {
        Self::with_limit(MESSAGE_MAX_BYTES)
    }
}

impl Framer {
    /// A framer that refuses messages longer than `limit_bytes`.
    pub fn with_limit(limit_bytes: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            scanned: 0,
            depth: 0,
            in_string: false,
            escaped: false,
            limit_bytes,
        }
    }

    /// The buffer to which received bytes are appended. The caller must not remove bytes.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The next whole message, or `None` until more bytes arrive.
    pub fn next_message(&mut self) -> Result<Option<Bytes>, FramingError> {
        if self.depth == 0 {
            let blank = self
                .buffer
                .iter()
                .take_while(|byte| byte.is_ascii_whitespace());
            let blank = blank.count();
            self.buffer.advance(blank);
            match self.buffer.first() {
                None => return Ok(None),
                Some(b'{') => {
                    self.depth = 1;
                    self.scanned = 1;
                }
                Some(&other) => return Err(FramingError::NotAnObject(other)),
            }
        }
        let end = self.buffer.len().min(self.limit_bytes);
        while self.scanned < end {
            let byte = self.buffer[self.scanned];
            self.scanned += 1;
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        let length = std::mem::take(&mut self.scanned);
                        let message = self.buffer.split_to(length).freeze();
                        if length > KEPT_MAX_BYTES {
                            self.buffer = BytesMut::from(&self.buffer[..]);
                        }
                        return Ok(Some(message));
                    }
                }
                _ => {}
            }
        }
        if self.scanned >= self.limit_bytes {
            return Err(FramingError::TooLong {
                limit_bytes: self.limit_bytes,
            });
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
