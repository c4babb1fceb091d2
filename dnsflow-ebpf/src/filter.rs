//! Which names matter to a pod.

use dnsflow_common::{
    key::NameKey,
    question::{NameHash, Names},
};

use crate::{found::put_down_scope, maps};

/// No name: for questions that are only hashed.
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

/// The names that the rules for an interface mention.
pub struct Mentioned {
    scope: u32,
    /// Whether the interface has no scope, and so no filter.
    all: bool,
}

impl Mentioned {
    #[inline(always)]
    pub fn by_rules_for(ifindex: u32) -> Self {
        // SAFETY: the value is a number that is only ever replaced.
        let scope = unsafe { maps::SCOPES.get(&ifindex) };
        Self {
            scope: put_down_scope(scope.copied().unwrap_or(0)),
            all: scope.is_none(),
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
            .get_ptr(NameKey::new(self.scope, hash))
            .is_some()
    }
}
