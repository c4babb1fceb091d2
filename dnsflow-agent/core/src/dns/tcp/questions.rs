//! The questions of one connection that wait for their answers.

use std::collections::VecDeque;

use dnsflow_common::question::{Buffer, NameHash, Names, QUESTION_MAX, question};

use super::TcpEvent;
use crate::{
    tools::counter_vec::CounterVec,
    values::limits::{DNS_MESSAGE_MIN, TCP_QUESTIONS_MAX},
};

/// QR in the third byte: a response (RFC 1035, section 4.1.1).
const DNS_QR: u8 = 0x80;
/// The opcode in the third byte; QUERY is 0 (RFC 1035, section 4.1.1).
const DNS_OPCODE: u8 = 0x78;

/// The questions of the pod, oldest first.
#[derive(Debug, Default)]
pub(super) struct Questions(VecDeque<Question>);

#[derive(Clone, Copy, Debug)]
struct Question {
    header: Header,
    /// The place behind its last byte in the pod's stream.
    end: u64,
}

/// The parts of a query that its answer repeats.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Header {
    id: u16,
    /// The hash of name, type and class, as for UDP.
    question: u64,
}

impl Questions {
    /// Remembers a query of the pod whose last byte stands before `end`. Other messages are
    /// ignored.
    pub(super) fn ask(&mut self, message: &[u8], end: u64, events: &mut CounterVec<TcpEvent>) {
        let Some(header) = header(message, 0) else {
            return;
        };
        events.count(TcpEvent::Question);
        if self.0.len() >= TCP_QUESTIONS_MAX {
            self.0.pop_front();
            events.count(TcpEvent::QuestionForgotten);
        }
        self.0.push_back(Question { header, end });
    }

    /// The hashes of those that wait.
    pub(super) fn open(&self) -> Vec<u64> {
        self.0.iter().map(|it| it.header.question).collect()
    }

    /// Whether this message answers a question that ends before `acknowledged`. The question is
    /// then used up.
    pub(super) fn is_answered(&mut self, message: &[u8], acknowledged: u64) -> bool {
        let Some(answered) = header(message, DNS_QR) else {
            return false;
        };
        let is_answered = |it: &Question| it.header == answered && it.end <= acknowledged;
        let place = self.0.iter().position(is_answered);
        place.and_then(|place| self.0.remove(place)).is_some()
    }
}

/// Reads id and question of a message to a standard query, with this QR bit and one question (RFC
/// 9619).
fn header(message: &[u8], qr: u8) -> Option<Header> {
    let [id_high, id_low, flags, _, 0, 1, ..] = *message else {
        return None;
    };
    if flags & (DNS_QR | DNS_OPCODE) != qr {
        return None;
    }
    let bytes = message.get(DNS_MESSAGE_MIN..)?;
    let len = bytes.len().min(QUESTION_MAX as usize);
    let mut buffer = Buffer::default();
    buffer
        .bytes
        .get_mut(..len)?
        .copy_from_slice(bytes.get(..len)?);
    let question = question(&mut buffer, u32::try_from(len).ok()?, &Nothing).ok()?;
    Some(Header {
        id: u16::from_be_bytes([id_high, id_low]),
        question: question.hash,
    })
}

/// The name is not needed: the question is only hashed.
struct Nothing;

impl Names for Nothing {
    fn all(&self) -> bool {
        false
    }

    fn mentions(&self, _: NameHash) -> bool {
        false
    }
}
