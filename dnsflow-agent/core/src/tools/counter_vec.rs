//! A counter with a label: each reason is at once a counter, the label of a metric and a test's name.

use std::{marker::PhantomData, ops::Index};

/// Reasons under which something is counted.
pub trait Label: Copy + 'static {
    /// All of them, in the order of their counters.
    const ALL: &'static [Self];

    /// The label of the metric, in snake case.
    fn as_str(self) -> &'static str;

    /// The index of the reason's counter: its place in [`Label::ALL`].
    fn index(self) -> usize;
}

/// Declares an enum of reasons with their labels.
macro_rules! labels {
    (
        $(#[doc = $enum_doc:literal])+
        $name:ident {
            $($(#[doc = $doc:literal])+ $variant:ident = $label:literal,)+
        }
    ) => {
        $(#[doc = $enum_doc])+
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub enum $name {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl $crate::tools::counter_vec::Label for $name {
            const ALL: &'static [Self] = &[$(Self::$variant),+];

            fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                }
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

pub(crate) use labels;

/// How often each reason has occurred.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CounterVec<L> {
    counts: Vec<u64>,
    reasons: PhantomData<L>,
}

impl<L: Label> CounterVec<L> {
    /// Counts one more.
    pub fn count(&mut self, reason: L) {
        self.counts[reason.index()] += 1;
    }

    /// Every reason with its count, zeros included.
    pub fn iter(&self) -> impl Iterator<Item = (L, u64)> {
        L::ALL.iter().copied().zip(self.counts.iter().copied())
    }
}

impl<L: Label> Default for CounterVec<L> {
    fn default() -> Self {
        Self {
            counts: vec![0; L::ALL.len()],
            reasons: PhantomData,
        }
    }
}

impl<L: Label> Index<L> for CounterVec<L> {
    type Output = u64;

    fn index(&self, reason: L) -> &u64 {
        &self.counts[reason.index()]
    }
}

#[cfg(test)]
mod tests;
