use super::*;

impl CachedPorts {
    /// All ports.
    pub(in crate::cache) fn iter(&self) -> impl ExactSizeIterator<Item = (&PortId, &CachedPort)> {
        self.ports.iter()
    }

    /// Checks that the totals are the sums over the ports.
    pub(in crate::cache) fn check(&self) {
        let sizes = || self.ports.values().map(|port| port.entries.sizes());
        for (id, port) in &self.ports {
            port.entries.check();
            let Sizes {
                names,
                denied_names,
                ..
            } = port.entries.sizes();
            let totals = &self.totals;
            let counted = (totals.denied_names.of(*id), totals.other_names.of(*id));
            assert_eq!(counted, (denied_names, names - denied_names), "{id:?}");
        }
        let names: usize = sizes().map(|sizes| sizes.names).sum();
        let flows: usize = sizes().map(|sizes| sizes.flows).sum();
        assert_eq!((names, flows), (self.totals.names(), self.totals.flows));
        let of_large: usize = sizes().map(|sizes| sizes.flows_of_large).sum();
        assert_eq!(of_large, self.totals.flows_of_large);
    }
}
