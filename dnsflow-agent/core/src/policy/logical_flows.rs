//! OVN's logical flows in the switch: in which tables they are, and which of their actions are copied.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Command, Timestamp,
    io::{
        input::{FlowQuestion, FoundFlow, LOGICAL_FLOW_SAMPLE_MAX},
        output::Output,
    },
    ovn::{
        rows::{Pipeline, RowId, Stage},
        template::ActionText,
    },
    policy::{
        Policy,
        rules::{ACL_PRIORITY_OFFSET, RuleSet},
    },
    tools::deadline::{self, Deadline, Why},
    values::limits::{ACTION_TEXTS_MAX, COPY_INTERVAL},
};

impl Policy {
    /// Whether a plan can be trusted to be complete.
    pub(crate) fn can_plan(&self) -> bool {
        self.stage().is_none() || self.tables.first().is_some() && self.tags_end().is_some()
    }

    /// The OpenFlow table in which tags end, if they end in one; `None` if that is not known yet.
    pub(crate) fn tags_end(&self) -> Option<Option<u8>> {
        self.tables.tags_end()
    }

    /// Has the tables of the rules sent to the switch again.
    pub(crate) fn tables_are_unknown(&mut self) {
        self.tables_changed = true;
    }

    /// Takes the OpenFlow tables of the rules, if they may have changed since they were last taken.
    pub(crate) fn take_changed_tables(&mut self) -> Option<BTreeSet<u8>> {
        std::mem::take(&mut self.tables_changed).then(|| self.rule_tables())
    }

    fn rule_tables(&self) -> BTreeSet<u8> {
        let Some(first) = self.tables.first() else {
            return BTreeSet::new();
        };
        self.all_sets()
            .flat_map(RuleSet::places)
            .map(|(_, table_id)| first.saturating_add(table_id))
            .chain(self.tags_end().flatten())
            .collect()
    }

    /// Asks for the logical flows of every ACL. Those of rules without a name are asked for, too:
    /// their actions may be copied.
    pub(crate) fn watch_logical_flows(&mut self, out: &mut Output) {
        let changed = self.ovn.take_changed_priorities();
        // Without any ACL, too, it is asked once.
        let first = self.watched.is_none().then(BTreeSet::new);
        let offset = |priority: u16| priority.saturating_add(ACL_PRIORITY_OFFSET);
        let changed = changed.map(|priorities| priorities.map(offset).collect());
        let Some(priorities): Option<BTreeSet<u16>> = changed.or(first) else {
            return;
        };
        if self.watched.as_ref() != Some(&priorities) {
            self.watched = Some(priorities.clone());
            out.command(Command::WatchLogicalFlows { priorities });
        }
    }

    /// Whether these are the logical flows that were last asked for.
    pub(crate) fn watches(&self, priorities: &BTreeSet<u16>) -> bool {
        self.watched.as_ref() == Some(priorities)
    }

    /// A stage in which rules are enforced. The pipeline's first table is found by this stage.
    fn stage(&self) -> Option<Stage> {
        let mut flows = self.ovn.logical_flows().map(|(_, flow)| flow);
        flows
            .find(|flow| flow.stage_hint.is_some() && flow.pipeline == Pipeline::Egress)
            .map(|flow| Stage::Table(flow.pipeline, flow.table_id))
    }

    /// Looks for the pipeline's first table and for the one in which tags end, unless they are known or are being
    /// looked for.
    pub(crate) fn locate(&mut self, out: &mut Output) {
        if let Some(stage) = self.stage() {
            self.tables.locate(stage, out);
        }
    }

    /// The switch has new flows: the pipeline's first table may have changed, and more actions may
    /// be found to copy.
    pub(crate) fn verify(&mut self, out: &mut Output) {
        self.tables.verify(out);
        self.copy_soon(out.now());
    }

    /// Open questions will get no answer.
    pub(crate) fn interrupted(&mut self) {
        self.tables.interrupted();
    }

    pub(super) fn copy_soon(&mut self, now: Timestamp) {
        self.copy_at.get_or_insert(now);
    }

    /// When [`Policy::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        deadline::first([
            deadline::at(self.tables.deadline(), Why::Pipeline),
            deadline::at(self.copy_at, Why::Copy),
            deadline::at(self.firewalls.late_at(), Why::Takeover),
        ])
    }

    /// Asks the switch the due questions again, if there is a connection.
    pub(crate) fn timeout(&mut self, switch_is_up: bool, out: &mut Output) {
        let now = out.now();
        if self.copy_at.take_if(|at| *at <= now).is_some() && switch_is_up {
            self.look_for_actions(out);
        }
        self.tables.retry(self.stage(), out);
        // Only the reports on what is late change.
        for namespace in self.firewalls.take_late(now) {
            self.pair_namespace(&namespace, &BTreeSet::new(), now);
        }
    }

    /// Takes in some logical flows of a stage. Returns whether plans may have changed.
    pub(crate) fn sampled(
        &mut self,
        stage: Stage,
        mut flows: Vec<RowId>,
        out: &mut Output,
    ) -> bool {
        let Stage::Table(_, table_id) = stage else {
            return self.tables.end_sampled(&flows, out);
        };
        // The logical flows of rules come first. They are installed, since the namespace has a pod
        // here. The exceptions are those whose address set is empty.
        let mut ours: Vec<(bool, RowId)> = self
            .ovn
            .logical_flows()
            .filter(|(_, flow)| flow.table_id == table_id)
            .map(|(id, flow)| (flow.matches.contains('$'), id))
            .collect();
        ours.sort_unstable();
        let ours = ours.into_iter().map(|(_, id)| id);
        let mut sample: Vec<RowId> = ours.take(LOGICAL_FLOW_SAMPLE_MAX).collect();
        sample.append(&mut flows);
        self.tables.sampled(stage, &sample, out);
        false
    }

    /// Takes in flows that were looked up by cookie. They show the pipeline's first table, and
    /// actions to copy. Returns whether plans may have changed.
    pub(crate) fn learn(&mut self, found: &[FoundFlow], now: Timestamp) -> bool {
        let tables = found.iter().map(|flow| (flow.cookie, flow.table));
        let moved = self.tables.found(tables, now);
        let mut learned = BTreeMap::new();
        for made in found {
            for flow in self.ovn.flows_of_cookie(made.cookie) {
                let source = ActionText::of(flow);
                if self.is_source(&source)
                    && self.cached_actions.get(&source) != Some(&made.actions)
                {
                    learned.insert(source, made.actions.clone());
                }
            }
        }
        let has_learned = !learned.is_empty();
        self.cached_actions.extend(learned);
        if has_learned {
            // Actions that can be copied are no problem any more.
            let namespaces: Vec<String> = self.locals.keys().cloned().collect();
            for namespace in namespaces {
                if let Some(local) = self.locals.get_mut(&namespace) {
                    local.pairing.actions_changed();
                }
                self.pair_namespace(&namespace, &BTreeSet::new(), now);
            }
        }
        self.tables_changed |= has_learned || moved;
        has_learned || moved
    }

    /// The actions that rules would copy.
    fn sources(&self) -> BTreeSet<ActionText> {
        self.all_sets()
            .flat_map(RuleSet::sources)
            .cloned()
            .collect()
    }

    fn is_source(&self, source: &ActionText) -> bool {
        self.all_sets().any(|set| set.has_source(source))
    }

    /// Looks for OVN's own flows whose actions rules would copy. Known ones are looked up again,
    /// because a restarted ovn-controller numbers its meters anew.
    fn look_for_actions(&mut self, out: &mut Output) {
        let now = out.now();
        let wanted = self.sources();
        self.cached_actions
            .retain(|source, _| wanted.contains(source));
        if wanted.is_empty() {
            return;
        }
        let cookies: Vec<u32> = self
            .ovn
            .logical_flows()
            .filter(|(_, flow)| wanted.contains(&ActionText::of(flow)))
            .map(|(id, _)| id.prefix())
            .take(ACTION_TEXTS_MAX)
            .collect();
        if !cookies.is_empty() {
            out.command(Command::Ask(FlowQuestion::Find(cookies)));
        }
        if !wanted
            .iter()
            .all(|source| self.cached_actions.contains_key(source))
        {
            self.copy_at = Some(now + COPY_INTERVAL);
        }
    }
}
