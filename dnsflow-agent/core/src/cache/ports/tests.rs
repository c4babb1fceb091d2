use super::*;

impl CachedPorts {
    /// All ports.
    pub(in crate::cache) fn iter(&self) -> impl ExactSizeIterator<Item = (&PortId, &CachedPort)> {
        self.ports.iter()
    }

    /// Checks that the totals are the sums over the ports.
    pub(in crate::cache) fn check(&self) {
        let sizes = || self.ports.values().map(|port| port.entries.sizes());
        for port in self.ports.values() {
            port.entries.check();
        }
        assert!(self.ports.keys().eq(self.sandboxes.keys()));
        let of_sandboxes = self.by_sandbox.iter();
        let of_sandboxes = of_sandboxes
            .flat_map(|(sandbox, ports)| ports.iter().map(move |port| (*port, *sandbox)));
        let of_sandboxes: BTreeMap<PortId, SandboxId> = of_sandboxes.collect();
        assert_eq!(of_sandboxes, self.sandboxes);
        for (sandbox, ports) in &self.by_sandbox {
            let all = ports.iter().map(|id| self.get(*id).entries.sizes());
            let sum = |size: fn(Sizes) -> usize| all.clone().map(size).sum::<usize>();
            let (names, denied_names) = (sum(|all| all.names), sum(|all| all.denied_names));
            let totals = &self.totals;
            let counted = [
                totals.denied_names.of(*sandbox),
                totals.other_names.of(*sandbox),
            ];
            let expected = [denied_names, names - denied_names];
            assert_eq!(counted, expected, "{sandbox:?}");
        }
        let names: usize = sizes().map(|sizes| sizes.names).sum();
        let flows: usize = sizes().map(|sizes| sizes.flows).sum();
        assert_eq!((names, flows), (self.totals.names(), self.totals.flows));
    }
}
