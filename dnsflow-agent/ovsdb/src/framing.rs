//! Cuts a byte stream into pieces of JSON: each row of an update, and the rest of each message.
//!
//! JSON-RPC 1.0 over a stream has no delimiter (RFC 7047, section 4): a message ends at its outermost closing brace.
//! The first content of a database is one message, of any size. So the framer takes the rows out of a message as they
//! arrive, and gives the rest behind them:
//!
//! ```text
//! {"id":0,"result":{"ACL":{"26f8…":{"initial":{…}},"9b8f…":{"initial":{…}}}},"error":null}
//!     row      ACL 26f8… {"initial":{…}}
//!     row      ACL 9b8f… {"initial":{…}}
//!     message  {"id":0,"result":{"ACL":{}},"error":null}
//! ```
//!
//! Rows are in places of a `<table-updates>` (RFC 7047, sections 4.1.5 and 4.1.6; ovsdb-server(7), 4.1.12 and
//! 4.1.14): two objects deep in `result`, or in an element of `params`. The server chooses the order of a message's
//! members, so the method or id may follow the rows.
//!
//! The framer knows braces, brackets and strings, and the bytes between two rows. The parser decides whether a piece
//! is valid JSON. The framer examines each byte once, however the stream was split. It never holds more than one
//! piece of each kind, each within the limit, and the bytes of one read.

use bytes::{Buf, BytesMut};

use super::{quoted, uuid::Uuid};

/// The longest row, and the longest rest of a message, in bytes. A Service of 100 ports in front of 1,000 pods is a row
/// of about 2 MB, a port group of 100,000 ports one of 6 MB.
pub const PIECE_MAX_BYTES: usize = 16 << 20;

/// The room of a longer piece is given back.
const KEPT_MAX_BYTES: usize = 1 << 20;

/// The length of a row id in text (RFC 4122).
const ID_BYTES: usize = 36;

/// Why a stream cannot be cut any further. The connection has to be closed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FramingError {
    /// A message does not begin with an opening brace.
    #[error("a message starts with the byte {0:#04x}, not with an opening brace")]
    NotAnObject(u8),
    /// The rest of a message is longer than the limit.
    #[error("a message is longer than {limit_bytes} bytes")]
    TooLong {
        /// The limit.
        limit_bytes: usize,
    },
    /// Where a row should be, there is something else.
    #[error("table {table}: malformed update")]
    Malformed {
        /// The table as the message names it.
        table: String,
    },
}

/// Where in a message a row was.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// In the result of an answer.
    Result,
    /// In a parameter of a notification or a request.
    Params,
}

/// A row of an update.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FramedRow<'a> {
    /// Where it was.
    pub place: Place,
    /// The table as the message names it.
    pub table: &'a str,
    /// The row.
    pub id: Uuid,
    /// The text of the `<row-update>`, an object; nothing if it is longer than the limit.
    pub update: Option<&'a [u8]>,
}

/// A piece of the stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Piece<'a> {
    /// A row of the message that is arriving.
    Row(FramedRow<'a>),
    /// The text of a whole message, without its rows.
    Message(&'a [u8]),
}

/// Collects bytes and gives back pieces.
#[derive(Debug)]
pub struct Framer {
    buffer: BytesMut,
    /// The message that is arriving, without its rows.
    message: Vec<u8>,
    /// Where the message has its last string, without the quotes.
    string: (usize, usize),
    structure: Structure,
    /// Whether the innermost bracket is that of `params`, or within it.
    in_params: bool,
    /// The object with the tables, and its depth.
    tables: Option<(Place, usize)>,
    state: State,
    id: Vec<u8>,
    row: Vec<u8>,
    row_is_too_long: bool,
    limit_bytes: usize,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// The rest of a message, or a new one.
    Message,
    /// A row's id, or the table's end if there is no row.
    FirstId,
    /// A row's id.
    NextId,
    /// The id, within the quotes.
    Id,
    Colon,
    /// The row's opening brace.
    Update,
    /// The row.
    Row,
    /// A comma, or the table's end.
    Comma,
}

/// A piece that is whole.
enum Ended {
    Row,
    Message,
}

/// The structure of JSON up to some byte.
#[derive(Debug, Default)]
struct Structure {
    /// Open braces and brackets.
    depth: usize,
    in_string: bool,
    is_escaped: bool,
}

impl Structure {
    fn step(&mut self, byte: u8) {
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' if self.in_string => self.is_escaped = true,
            b'"' => self.in_string = !self.in_string,
            _ if self.in_string => {}
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth -= 1,
            _ => {}
        }
    }
}

impl Default for Framer {
    fn default() -> Self {
        Self::with_limit(PIECE_MAX_BYTES)
    }
}

impl Framer {
    /// A framer that leaves out rows, and refuses messages, longer than `limit_bytes`.
    pub fn with_limit(limit_bytes: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            message: Vec::new(),
            string: (0, 0),
            structure: Structure::default(),
            in_params: false,
            tables: None,
            state: State::Message,
            id: Vec::with_capacity(ID_BYTES),
            row: Vec::new(),
            row_is_too_long: false,
            limit_bytes,
        }
    }

    /// The buffer to which received bytes are appended. The caller must not remove bytes.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The next piece, or `None` until more bytes arrive.
    pub fn next_piece(&mut self) -> Result<Option<Piece<'_>>, FramingError> {
        // What the last call gave is not needed any more.
        if self.structure.depth == 0 {
            clear(&mut self.message);
        }
        if self.state == State::Comma {
            clear(&mut self.row);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut unread = &buffer[..];
        let ended = self.take(&mut unread);
        let read = buffer.len() - unread.len();
        buffer.advance(read);
        self.buffer = buffer;
        match ended? {
            None => Ok(None),
            Some(Ended::Row) => self.framed().map(|row| Some(Piece::Row(row))),
            Some(Ended::Message) => Ok(Some(Piece::Message(&self.message))),
        }
    }

    /// Takes bytes up to the end of a piece.
    fn take(&mut self, bytes: &mut &[u8]) -> Result<Option<Ended>, FramingError> {
        while let Some((&byte, rest)) = bytes.split_first() {
            match self.state {
                State::Row => {
                    if self.row_ends(bytes) {
                        return Ok(Some(Ended::Row));
                    }
                }
                State::Message => {
                    *bytes = rest;
                    if self.message_ends(byte)? {
                        return Ok(Some(Ended::Message));
                    }
                }
                _ => {
                    *bytes = rest;
                    self.between_rows(byte)?;
                }
            }
        }
        Ok(None)
    }

    /// Takes a byte of the rest of a message.
    fn message_ends(&mut self, byte: u8) -> Result<bool, FramingError> {
        let before = &self.structure;
        match (before.depth, byte) {
            (0, b'{') => {}
            (0, _) if byte.is_ascii_whitespace() => return Ok(false),
            (0, other) => return Err(FramingError::NotAnObject(other)),
            _ => {}
        }
        let was_in_string = before.in_string;
        self.structure.step(byte);
        self.message.push(byte);
        let (depth, in_string) = (self.structure.depth, self.structure.in_string);
        match (was_in_string, in_string) {
            (false, true) => self.string.0 = self.message.len(),
            (true, false) => self.string.1 = self.message.len() - 1,
            (true, true) => {}
            (false, false) => self.bracket(byte),
        }
        if depth == 0 {
            return Ok(true);
        }
        if self.message.len() >= self.limit_bytes {
            return Err(FramingError::TooLong {
                limit_bytes: self.limit_bytes,
            });
        }
        Ok(false)
    }

    /// Follows the way to the rows.
    fn bracket(&mut self, byte: u8) {
        // In valid JSON, the last string before a bracket is the member's name, unless the bracket is in an array.
        let name = self.message.get(self.string.0..self.string.1);
        let depth = self.structure.depth;
        match (byte, depth, self.tables) {
            (b'[', 2, _) => self.in_params = name == Some(b"params"),
            (b'{', 2, _) if name == Some(b"result") => self.tables = Some((Place::Result, depth)),
            (b'{', 3, None) if self.in_params => self.tables = Some((Place::Params, depth)),
            (b'{', _, Some((_, tables))) if depth == tables + 1 => self.state = State::FirstId,
            (b'}' | b']', ..) => {
                self.in_params &= depth > 1;
                self.tables = self.tables.filter(|(_, tables)| depth >= *tables);
            }
            _ => {}
        }
    }

    /// Takes a byte of a table that is in no row.
    fn between_rows(&mut self, byte: u8) -> Result<(), FramingError> {
        self.state = match (self.state, byte) {
            (State::Id, b'"') => State::Colon,
            (State::Id, _) if self.id.len() < ID_BYTES => {
                self.id.push(byte);
                State::Id
            }
            (state, b' ' | b'\t' | b'\n' | b'\r') if state != State::Id => state,
            (State::FirstId | State::NextId, b'"') => {
                self.id.clear();
                State::Id
            }
            (State::Colon, b':') => State::Update,
            (State::Update, b'{') => {
                self.row.push(byte);
                self.row_is_too_long = false;
                self.structure.step(byte);
                State::Row
            }
            (State::Comma, b',') => State::NextId,
            (State::FirstId | State::Comma, b'}') => {
                self.structure.step(byte);
                self.message.push(byte);
                State::Message
            }
            _ => return Err(self.malformed()),
        };
        Ok(())
    }

    /// Takes the bytes of a row up to its end.
    fn row_ends(&mut self, bytes: &mut &[u8]) -> bool {
        let outside = self.tables.map_or(0, |(_, tables)| tables + 1);
        let last = bytes.iter().position(|byte| {
            self.structure.step(*byte);
            self.structure.depth == outside
        });
        let (row, rest) = bytes.split_at(last.map_or(bytes.len(), |last| last + 1));
        *bytes = rest;
        self.row_is_too_long |= self.row.len() + row.len() > self.limit_bytes;
        if self.row_is_too_long {
            clear(&mut self.row);
        } else {
            self.row.extend_from_slice(row);
        }
        if last.is_some() {
            self.state = State::Comma;
        }
        last.is_some()
    }

    /// The row that has ended.
    fn framed(&self) -> Result<FramedRow<'_>, FramingError> {
        let id = std::str::from_utf8(&self.id).ok().and_then(Uuid::parse);
        let row = self.tables.zip(id).zip(self.table());
        let ((place, _), id, table) = match row {
            Some(((tables, id), table)) => (tables, id, table),
            None => return Err(self.malformed()),
        };
        Ok(FramedRow {
            place,
            table,
            id,
            update: (!self.row_is_too_long).then_some(&self.row),
        })
    }

    /// The name of the table whose rows arrive.
    fn table(&self) -> Option<&str> {
        let name = self.message.get(self.string.0..self.string.1)?;
        std::str::from_utf8(name).ok()
    }

    fn malformed(&self) -> FramingError {
        FramingError::Malformed {
            table: quoted(self.table().unwrap_or("?")),
        }
    }
}

/// Empties a buffer, and gives its room back if that is large.
fn clear(bytes: &mut Vec<u8>) {
    if bytes.capacity() > KEPT_MAX_BYTES {
        *bytes = Vec::new();
    }
    bytes.clear();
}

#[cfg(test)]
mod tests;
