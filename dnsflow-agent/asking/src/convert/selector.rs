//! Judges the shape of a LabelSelector, and keeps nothing of it.

use serde::de::{IgnoredAny, MapAccess, SeqAccess};

use super::{MAX_QUOTED, Quoted, shorten};
use crate::lenient::{Any, Reader, Seen, key, skip};

/// The shape of a LabelSelector and of its parts, which ovn-kubernetes evaluates (`LabelSelector` in
/// apimachinery/pkg/apis/meta/v1/types.go).
#[derive(Clone, Copy)]
pub(super) enum Shape {
    Selector,
    Labels,
    Expressions,
    Expression,
    Texts,
    Text,
}

impl Shape {
    fn field(self, key: &str) -> Option<Self> {
        match (self, key) {
            (Self::Selector, "matchLabels") => Some(Self::Labels),
            (Self::Selector, "matchExpressions") => Some(Self::Expressions),
            (Self::Expression, "values") => Some(Self::Texts),
            (Self::Labels, _) | (Self::Expression, "key" | "operator") => Some(Self::Text),
            _ => None,
        }
    }

    fn item(self) -> Option<Self> {
        match self {
            Self::Expressions => Some(Self::Expression),
            Self::Texts => Some(Self::Text),
            _ => None,
        }
    }

    fn is(self, seen: &Seen) -> bool {
        match seen {
            Seen::Mapping => matches!(self, Self::Selector | Self::Labels | Self::Expression),
            Seen::List => matches!(self, Self::Expressions | Self::Texts),
            Seen::Text(_) => matches!(self, Self::Text),
            _ => false,
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::Selector => "matchLabels or matchExpressions",
            Self::Labels => "a mapping of texts",
            Self::Expressions => "a list of key, operator and values",
            Self::Expression => "key, operator and values",
            Self::Texts => "a list of texts",
            Self::Text => "a text",
        }
    }
}

/// Says what is wrong, with the path in front; `None` for a value that is missing.
impl Reader for Shape {
    type Value = Option<Option<String>>;

    fn other(self, seen: Seen) -> Self::Value {
        if seen == Seen::Null {
            return None;
        }
        let wrong = format!(" is {}; write {}", Quoted(&seen), self.remedy());
        Some((!self.is(&seen)).then_some(wrong))
    }

    fn list<'de, A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut wrong = self.other(Seen::List).flatten();
        let (mut index, shape) = (0, self.item());
        while wrong.is_none()
            && let Some(shape) = shape
            && let Some(found) = items.next_element_seed(Any(shape))?
        {
            wrong = found.flatten().map(|found| format!("[{index}]{found}"));
            index += 1;
        }
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Some(wrong))
    }

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut wrong = self.other(Seen::Mapping).flatten();
        while let Some(key) = key(&mut fields)? {
            match self.field(&key).filter(|_| wrong.is_none()) {
                Some(shape) => {
                    let found = fields.next_value_seed(Any(shape))?.flatten();
                    let key = shorten(&key, MAX_QUOTED).escape_debug().to_string();
                    wrong = found.map(|found| format!(".{key}{found}"));
                }
                None => skip(&mut fields)?,
            }
        }
        Ok(Some(wrong))
    }
}
