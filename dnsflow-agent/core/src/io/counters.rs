//! The counters: every answer and every loss.

/// One number per thing that can happen. They only grow.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counters {
    /// Frames that came from the TC program.
    pub frames: u64,
    /// Frames that hold no DNS answer after all.
    pub frames_not_dns: u64,
    /// Frames of interfaces that are not known (any more).
    pub frames_unknown_interface: u64,
    /// Frames of DNS servers that were trusted when the kernel saw them, and are not now.
    pub frames_untrusted_server: u64,
    /// Messages that could not be decoded. For a name that a rule denies, as much is read as can be, and not counted.
    pub answers_malformed: u64,
    /// Messages that are no usable answer: truncated, other questions, endless CNAMEs, too many names. Likewise.
    pub answers_unusable: u64,
    /// Answers that no rule of the pod's namespace matches.
    pub answers_unmatched: u64,
    /// Those of them whose name no rule of the pod's namespace mentions: nothing of them is remembered.
    pub answers_unmentioned: u64,
    /// Answers that came before the rules of their pod were known, and that a rule which comes later does not see.
    pub answers_not_deferred: u64,
    /// Answers whose addresses were all open already.
    pub answers_known: u64,
    /// Addresses of answers that the kernel has opened by itself, and that stay open.
    pub addresses_opened_by_kernel: u64,
    /// Answers that would have opened an address if this were no dry run.
    pub answers_dry_run: u64,
    /// Answers that opened an address.
    pub answers_opening: u64,
    /// Addresses whose time is over, and whose established connections go on.
    pub addresses_ended: u64,
    /// Addresses forgotten because of the limit per port.
    pub addresses_evicted: u64,
    /// Addresses not remembered because everything within the limit is in use, or because they stand behind the
    /// limit of addresses in an answer.
    pub addresses_refused: u64,
    /// Names not remembered, or forgotten for others, because of the limit per address.
    pub names_dropped: u64,
    /// Addresses not opened because the answers to a pod change too many flows.
    pub addresses_over_budget: u64,
    /// Plans of addresses that have not all flows of their rules: counted each time that one is made.
    pub addresses_cut: u64,
    /// Reports left out because the answers to a pod, or flows that the switch refuses, lead to too many.
    pub reports_left_out: u64,
    /// Flows written.
    pub flows_added: u64,
    /// Flows removed.
    pub flows_removed: u64,
    /// Marks that the kernel should have had, and had not: set again.
    pub marks_restored: u64,
    /// Marks in the kernel that no address has: removed.
    pub marks_removed: u64,
    /// Marks that the kernel refused: their addresses got flows.
    pub marks_refused: u64,
    /// Flows restored after someone else had removed them.
    pub flows_restored: u64,
    /// Flow changes that the switch refused.
    pub flows_refused: u64,
    /// Records that are missing in the journal.
    pub records_lost: u64,
    /// Connections that OVN had blocked in a gap of our flows and that were unblocked.
    pub connections_unblocked: u64,
    /// Such connections that could not be unblocked.
    pub connections_left_blocked: u64,
}
