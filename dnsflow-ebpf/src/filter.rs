//! The names that the rules for a pod mention.

use dnsflow_common::{
    Reason,
    key::{NAME_SET_EMPTY, NAME_SET_UNHELD, NameKey},
    question::{NameHash, Names},
};

use crate::{found::put_down_name_set, maps};

/// No name at all, for questions that are hashed and not judged.
pub struct Nothing;

impl Names for Nothing {
    #[inline(always)]
    fn all(&self) -> bool {
        false
    }

    #[inline(always)]
    fn mentions(&self, _: NameHash) -> bool {
        false
    }
}

/// Checks whether the rules for an interface mention any name, or its names are recorded. They may, if the
/// interface has no name set yet.
#[inline(always)]
pub fn any_name(ifindex: u32) -> Result<(), Reason> {
    // SAFETY: the value is one word, of this key or of another one (`maps`).
    match unsafe { maps::NAME_SETS.get(&ifindex) } {
        Some(name_set) if *name_set & NAME_SET_EMPTY != 0 && !is_recorded(ifindex) => {
            Err(Reason::NoRule)
        }
        _ => Ok(()),
    }
}

/// Whether the agent wants every answer at an interface, whatever the rules mention.
#[inline(always)]
pub fn is_recorded(ifindex: u32) -> bool {
    maps::RECORDED.get_ptr(ifindex).is_some()
}

/// The names that the rules for an interface mention.
pub struct Mentioned {
    name_set: u32,
    /// Whether the interface has no name set. Then nothing is filtered.
    all: bool,
}

impl Mentioned {
    #[inline(always)]
    pub fn by_rules_for(ifindex: u32) -> Self {
        // SAFETY: the value is one word, of this key or of another one (`maps`).
        let name_set = unsafe { maps::NAME_SETS.get(&ifindex) };
        // An empty name set has no names under any number.
        let number = name_set.copied().unwrap_or(0) & !NAME_SET_UNHELD;
        Self {
            name_set: put_down_name_set(number),
            all: name_set.is_none(),
        }
    }
}

impl Names for Mentioned {
    #[inline(always)]
    fn all(&self) -> bool {
        self.all
    }

    #[inline(always)]
    fn mentions(&self, hash: NameHash) -> bool {
        maps::NAMES
            .get_ptr(NameKey::new(self.name_set, hash))
            .is_some()
    }
}
