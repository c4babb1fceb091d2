//! How a moment is written for people.

use std::time::SystemTime;

/// A moment, as RFC 3339 writes it, in UTC with microseconds.
pub fn rfc3339_micros(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map_or_else(|_| String::new(), |time| format!("{time:.6}"))
}

/// A moment, as RFC 3339 writes it, in UTC with milliseconds.
pub fn rfc3339(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map_or_else(|_| String::new(), |time| format!("{time:.3}"))
}
