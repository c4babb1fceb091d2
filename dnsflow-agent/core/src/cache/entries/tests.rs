use super::*;
use crate::values::limits::NAMES_PER_ADDRESS_MAX;

impl Entries {
    /// Checks that all that is known of the entries agrees with them.
    pub(in crate::cache) fn check(&self) {
        let entries = || self.by_address.values();
        let names = || entries().flat_map(|entry| entry.names.iter());
        let by_name: usize = self.by_name.values().map(|all| all.as_slice().len()).sum();
        assert_eq!(by_name, names().count());
        let counted = Sizes {
            names: names().count(),
            denied_names: names().filter(|(_, term)| term.is_denied).count(),
            ended: entries().filter(|entry| entry.has_ended()).count(),
            flows: entries().map(|entry| entry.installed.len()).sum(),
        };
        assert_eq!(self.sizes(), counted);
        let is_denied = |entry: &Entry| !self.all_are_denied || entry.is_denied();
        assert!(entries().all(|entry| is_denied(entry)));
        let mut unplanned = self.unplanned.iter();
        assert!(unplanned.all(|address| self.by_address.contains_key(address)));
        let translated = self.by_address.keys().filter_map(|address| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(form) => Some(self.translation.inner(*form).map(|inner| (inner, *form))),
        });
        let translated: BTreeSet<_> = translated.flatten().collect();
        assert_eq!(translated, self.translated);
        for (address, entry) in &self.by_address {
            entry.names.check();
            let others = entry.names.len() - entry.names.denied();
            assert!(others <= NAMES_PER_ADDRESS_MAX, "{address}");
        }
    }
}
