//! Reads values of any kind while they are parsed, and keeps what a [`Reader`] takes.
//!
//! A value of the wrong kind must never end the parsing: the reader gets it as [`Seen`], and the rest is parsed. What no
//! reader takes is parsed and left. So the memory is that of what is kept, however large the text is.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Number;

/// At most so many bytes of a text are kept. No name, network or annotation that means something is longer.
const TEXT_BYTES_MAX: usize = 1_024;

/// A value, without what is in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Seen {
    /// It is missing, or null.
    #[default]
    Null,
    Bool(bool),
    Number(Number),
    /// A text, or the beginning of a long one.
    Text(String),
    List,
    Mapping,
}

impl Seen {
    /// The text, unless it is another kind of value.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// Takes a value of any kind.
pub(crate) trait Reader: Sized {
    /// What becomes of the value.
    type Value;

    /// What becomes of a value of a kind that the reader has no other method for.
    fn other(self, seen: Seen) -> Self::Value;

    /// What becomes of a list.
    fn list<'de, A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(self.other(Seen::List))
    }

    /// What becomes of a mapping.
    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(self.other(Seen::Mapping))
    }
}

/// Takes the value itself.
pub(crate) struct Plain;

impl Reader for Plain {
    type Value = Seen;

    fn other(self, seen: Seen) -> Seen {
        seen
    }
}

/// The name of the next field of a mapping; `None` behind the last one.
pub(crate) fn key<'de, A: MapAccess<'de>>(fields: &mut A) -> Result<Option<String>, A::Error> {
    let key = fields.next_key_seed(Any(Plain))?;
    Ok(key.map(|key| match key {
        Seen::Text(key) => key,
        // YAML has keys of other kinds. No field has such a name.
        _ => String::new(),
    }))
}

/// Leaves the value of a field.
pub(crate) fn skip<'de, A: MapAccess<'de>>(fields: &mut A) -> Result<(), A::Error> {
    fields.next_value::<IgnoredAny>().map(drop)
}

/// Parses a value for a reader.
pub(crate) struct Any<R>(pub(crate) R);

impl<'de, R: Reader> DeserializeSeed<'de> for Any<R> {
    type Value = R::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<R::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, R: Reader> Visitor<'de> for Any<R> {
    type Value = R::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<R::Value, E> {
        Ok(self.0.other(Seen::Bool(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<R::Value, E> {
        Ok(self.0.other(Seen::Number(value.into())))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<R::Value, E> {
        Ok(self.0.other(Seen::Number(value.into())))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<R::Value, E> {
        // JSON has no infinity. In YAML it is no number that anybody reads, and not a missing value.
        let number = Number::from_f64(value).map(Seen::Number);
        Ok(self
            .0
            .other(number.unwrap_or_else(|| Seen::Text(value.to_string()))))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<R::Value, E> {
        let end = value.floor_char_boundary(TEXT_BYTES_MAX);
        Ok(self.0.other(Seen::Text(value[..end].to_owned())))
    }

    fn visit_unit<E: Error>(self) -> Result<R::Value, E> {
        Ok(self.0.other(Seen::Null))
    }

    fn visit_none<E: Error>(self) -> Result<R::Value, E> {
        self.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<R::Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<R::Value, A::Error> {
        self.0.list(items)
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<R::Value, A::Error> {
        self.0.mapping(fields)
    }
}
