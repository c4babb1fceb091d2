//! Classes of names: names that the same rules match.

use std::collections::BTreeSet;

use dnsflow_common::question::{BASE_MAX, Depth};

use crate::values::name::DomainName;

/// The names that lie alike below one name that rules mention, and below no longer one of these, with their addresses
/// of one IP version.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct NameClass {
    /// The name that rules mention.
    pub base: DomainName,
    /// Where the names lie below it.
    pub depth: Depth,
    /// Whether the addresses are of IPv6.
    pub is_ipv6: bool,
}

impl NameClass {
    /// The class of a name, where rules mention these names. `None` if it lies below none of them, or if the base is
    /// too long for the kernel.
    pub(crate) fn of(
        name: &DomainName,
        mentioned: &BTreeSet<DomainName>,
        is_ipv6: bool,
    ) -> Option<Self> {
        let mut suffixes = name.suffixes().enumerate();
        let (labels, base) =
            suffixes.find_map(|(labels, suffix)| Some((labels, mentioned.get(suffix)?)))?;
        let depth = match labels {
            0 => Depth::Itself,
            1 => Depth::Child,
            _ => Depth::Deeper,
        };
        (base.wire().len() <= BASE_MAX as usize).then(|| Self {
            base: base.clone(),
            depth,
            is_ipv6,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_name_that_is_mentioned_counts() {
        let name = |text: &str| text.parse::<DomainName>().expect("a name");
        let mentioned: BTreeSet<_> = ["test", "example.test", "a.b.example.test"]
            .map(name)
            .into();
        for (asked, base, depth) in [
            ("example.test", "example.test", Depth::Itself),
            ("b.example.test", "example.test", Depth::Child),
            ("c.b.example.test", "example.test", Depth::Deeper),
            ("a.b.example.test", "a.b.example.test", Depth::Itself),
            ("notexample.test", "test", Depth::Child),
        ] {
            let wanted = NameClass {
                base: name(base),
                depth,
                is_ipv6: false,
            };
            let class = NameClass::of(&name(asked), &mentioned, false);
            assert_eq!(class, Some(wanted), "{asked}");
        }
        assert_eq!(NameClass::of(&name("example.org"), &mentioned, false), None);
        let long = name(&["a"; 65].join("."));
        assert_eq!(NameClass::of(&long, &[long.clone()].into(), false), None);
    }
}
