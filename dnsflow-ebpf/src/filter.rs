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

/// The names that the rules for an interface mention: a name set, or [`EVERY_NAME`]. It is one number, so that the
/// verifier has one case where both are put down.
pub struct Mentioned(u32);

/// In place of the name set of an interface that has none: nothing is filtered. No name set has this bit here.
const EVERY_NAME: u32 = NAME_SET_UNHELD;

impl Mentioned {
    #[inline(always)]
    pub fn by_rules_for(ifindex: u32) -> Self {
        // SAFETY: the value is one word, of this key or of another one (`maps`).
        let name_set = unsafe { maps::NAME_SETS.get(&ifindex) };
        // An empty name set has no names under any number.
        let number = name_set.map_or(EVERY_NAME, |name_set| name_set & !NAME_SET_UNHELD);
        Self(put_down_name_set(number))
    }
}

impl Names for Mentioned {
    #[inline(always)]
    fn all(&self) -> bool {
        self.0 == EVERY_NAME
    }

    #[inline(always)]
    fn mentions(&self, hash: NameHash) -> bool {
        maps::NAMES.get_ptr(NameKey::new(self.0, hash)).is_some()
    }
}
