//! What the subcommands print for people.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    iter,
    net::IpAddr,
};

use dnsflow_core::{
    ask::view::{
        Attachment, EntryView, ExplainedAddress, Explanation, FlowView, NameView, PortView,
        StepOutcome, Verdict,
    },
    values::firewall::IpVersions,
};
use serde::{Deserialize, Serialize};
use tabwriter::TabWriter;

use super::{
    Status,
    event::Event,
    trial::{Change, Changed, Trialled},
    unused::{FirewallUse, RuleUse, Since, Used},
};
use crate::Levels;

/// The cells of a row, one for each head of its table.
pub(crate) type Row = Vec<String>;

/// A table that is being written.
pub(crate) struct Table<W: Write>(TabWriter<W>);

impl<W: Write> Table<W> {
    /// Begins a table with these heads.
    pub(crate) fn begin(heads: &[&str], output: W) -> io::Result<Self> {
        let mut output = TabWriter::new(output).padding(3);
        writeln!(output, "{}", heads.join("\t"))?;
        Ok(Self(output))
    }

    /// Adds rows.
    pub(crate) fn extend(&mut self, rows: impl IntoIterator<Item = Row>) -> io::Result<()> {
        let mut rows = rows.into_iter();
        rows.try_for_each(|row| writeln!(self.0, "{}", row.join("\t")))
    }

    /// Ends the table.
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Writes a whole table.
pub(crate) fn table(
    heads: &[&str],
    rows: impl IntoIterator<Item = Row>,
    output: &mut impl Write,
) -> io::Result<()> {
    let mut table = Table::begin(heads, output)?;
    table.extend(rows)?;
    table.end()
}

/// The heads of [`cache_rows`].
pub(crate) const CACHE: &[&str] = &[
    "POD", "NAME", "ADDRESS", "TTL", "SOURCE", "RULES", "PACKETS", "USED",
];

/// The rows of a cache entry: one for each name that leads the pod to the address.
pub(crate) fn cache_rows(entry: &EntryView) -> Vec<Row> {
    let row = |name: &NameView| {
        vec![
            pod(&entry.namespace, &entry.pod),
            name.name.clone(),
            entry.address.to_string(),
            seconds(name.ttl_left_s),
            match &entry.refused {
                Some(reason) => format!("refused ({reason})"),
                None => text(&name.origin),
            },
            numbers(&name.rules),
            packets(entry.packets),
            match (entry.used_s, &entry.flows[..]) {
                (Some(used_s), _) => format!("{} ago", seconds(used_s)),
                (None, []) => "no flow".to_owned(),
                (None, _) => "never".to_owned(),
            },
        ]
    };
    entry.names.iter().map(row).collect()
}

/// A flow, with what it is for.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct FlowRow {
    /// The namespace of the pod.
    namespace: String,
    /// The pod.
    pod: String,
    /// The names that led the pod to its address.
    names: Vec<String>,
    /// The rules that match these names, by their index in `spec.egress`.
    rules: Vec<u32>,
    #[serde(flatten)]
    flow: FlowView,
}

/// The flows of groups that were printed. Many addresses have the same.
#[derive(Debug, Default)]
pub(crate) struct Printed(BTreeSet<String>);

impl Printed {
    /// Whether a flow is printed now: one of a group is once.
    fn is_next(&mut self, flow: &FlowView) -> bool {
        !flow.is_of_group || self.0.insert(flow.flow.clone())
    }
}

impl FlowRow {
    /// The flows of an entry, without those of its group that were printed.
    pub(crate) fn of(entry: &EntryView, printed: &mut Printed) -> Vec<Self> {
        let names = entry.names.iter();
        let mut rules: Vec<u32> = names
            .clone()
            .flat_map(|name| &name.rules)
            .copied()
            .collect();
        rules.sort_unstable();
        rules.dedup();
        let row = |flow: &FlowView| Self {
            namespace: entry.namespace.clone(),
            pod: entry.pod.clone(),
            names: names.clone().map(|name| name.name.clone()).collect(),
            rules: rules.clone(),
            flow: flow.clone(),
        };
        let flows = entry.flows.iter().filter(|flow| printed.is_next(flow));
        flows.map(row).collect()
    }

    /// The heads of the cells.
    pub(crate) const HEADS: &'static [&'static str] =
        &["POD", "NAMES", "RULES", "PACKETS", "USED", "FLOW"];

    pub(crate) fn cells(&self) -> Row {
        vec![
            pod(&self.namespace, &self.pod),
            self.names.join(","),
            numbers(&self.rules),
            match self.flow.is_of_group {
                true => format!("{} (group)", self.flow.packets),
                false => self.flow.packets.to_string(),
            },
            used_text(&self.flow),
            match self.flow.is_missing {
                true => format!("{} (missing)", self.flow.flow),
                false => self.flow.flow.clone(),
            },
        ]
    }
}

/// The heads of [`port_rows`].
pub(crate) const PORTS: &[&str] = &["POD", "INTERFACE", "STATE"];

/// What there is to say of a port.
pub(crate) fn port_rows(port: &PortView) -> Vec<Row> {
    let attachment = match &port.attachment {
        Attachment::Attached => None,
        Attachment::Pending => Some("not attached yet".to_owned()),
        Attachment::Failed(reason) => Some(format!("not attached: {reason}")),
    };
    let not_trusted = port.not_trusted.iter();
    let not_trusted = not_trusted.map(|why| format!("its DNS answers are ignored: {why}"));
    let states = attachment.into_iter().chain(not_trusted);
    let states = states.chain(port.limits.iter().cloned());
    let pod = pod(&port.namespace, &port.pod);
    states
        .map(|state| vec![pod.clone(), port.interface.clone(), state])
        .collect()
}

/// What there is to say of the agent as a whole: heads, and a text for each.
pub(crate) fn status_lines(status: &Status) -> [(&'static str, String); 8] {
    let Status {
        version,
        up_s,
        node,
        ..
    } = status;
    let unread: Vec<_> = node
        .sources
        .iter()
        .filter(|source| !source.is_read)
        .collect();
    let unread: Vec<_> = unread.iter().map(|source| &*source.source).collect();
    let attached = node.ports.iter();
    let attached = attached.filter(|port| port.attachment == Attachment::Attached);
    [
        ("agent", format!("{version}, up {}", seconds(*up_s))),
        ("ready", yes_or(node.is_ready, "not yet")),
        (
            "switch",
            match (node.switch_is_connected, node.switch_is_compared) {
                (false, _) => "not connected".to_owned(),
                (true, false) => "connected, not compared yet".to_owned(),
                (true, true) => "connected".to_owned(),
            },
        ),
        ("sources", {
            let read = match unread[..] {
                [] => "all read".to_owned(),
                _ => format!("not read yet: {}", unread.join(", ")),
            };
            let large = node.large_tables.iter().cloned();
            Vec::from_iter(iter::once(read).chain(large)).join("; ")
        }),
        (
            "resolvers",
            match node.resolvers[..] {
                [] => "none is trusted: see --resolver and --dns-service".to_owned(),
                _ => node.resolvers.join(", "),
            },
        ),
        (
            "ports",
            format!("{} of {} attached", attached.count(), node.ports.len()),
        ),
        ("firewalls", firewalls_text(status)),
        (
            "cache",
            format!("{} addresses, {} flows", node.addresses, node.flows),
        ),
    ]
}

/// How many EgressFirewalls there are, and how many of them are in force.
fn firewalls_text(status: &Status) -> String {
    let (mut in_force, mut waiting, mut partly, mut dry_runs) = (0, 0, 0, 0);
    for firewall in &status.node.firewalls {
        let has = |severity: &str| {
            let mut problems = firewall.problems.iter();
            problems.any(|problem| problem.severity == severity)
        };
        let count = if firewall.is_dry_run {
            &mut dry_runs
        } else if has("not_in_force") {
            &mut partly
        } else if has("waiting") {
            &mut waiting
        } else {
            &mut in_force
        };
        *count += 1;
    }
    let objects = status.object_problems.iter();
    let unusable = objects.filter(|object| !object.is_in_force).count();
    let counts = [
        (in_force, "in force"),
        (waiting, "waiting for OVN"),
        (partly, "with rules not in force"),
        (dry_runs, "dry run"),
        (unusable, "not usable"),
    ];
    let all: usize = counts.iter().map(|(count, _)| count).sum();
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    let counts: Vec<String> = counts
        .map(|(count, text)| format!("{count} {text}"))
        .collect();
    match all {
        0 => "no EgressFirewall".to_owned(),
        1 => format!("1 EgressFirewall: {}", counts.join(", ")),
        _ => format!("{all} EgressFirewalls: {}", counts.join(", ")),
    }
}

/// `dnsflow status`.
pub(super) fn status(status: &Status, mut output: impl Write) -> io::Result<()> {
    let node = &status.node;
    for (head, text) in status_lines(status) {
        writeln!(output, "{head:<10} {text}")?;
    }
    let ports: Vec<_> = node.ports.iter().flat_map(port_rows).collect();
    if !ports.is_empty() {
        writeln!(output)?;
        table(PORTS, ports, &mut output)?;
    }
    let mut problems = problems(status);
    problems.try_for_each(|problem| writeln!(output, "\n{problem}"))
}

/// What is wrong with EgressFirewalls and their rules.
pub(crate) fn problems(status: &Status) -> impl Iterator<Item = String> {
    let firewalls = status.node.firewalls.iter();
    let rules = firewalls.clone().flat_map(|firewall| {
        firewall.problems.iter().map(move |problem| {
            format!(
                "namespace {}, rule {} ({}): {}",
                firewall.namespace, problem.rule, problem.severity, problem.text
            )
        })
    });
    // What is wrong with a single rule stands there already.
    let of_rules = firewalls.flat_map(|firewall| &firewall.problems);
    let is_of_rule = move |reason: &String| {
        let end = format!(": {reason}");
        of_rules.clone().any(|problem| problem.text.ends_with(&end))
    };
    let objects = status.object_problems.iter().filter_map(move |object| {
        let reasons = object.reasons.iter();
        let reasons: Vec<&str> = reasons
            .filter(|reason| !is_of_rule(reason))
            .map(String::as_str)
            .collect();
        let name = &object.object;
        let reasons = Some(reasons.join("; ")).filter(|reasons| !reasons.is_empty())?;
        Some(match object.is_in_force {
            true => format!("{name}: {reasons}"),
            false => format!("{name} is not usable: {reasons}"),
        })
    });
    let open = status.node.firewalls.iter().filter_map(|firewall| {
        // Of a version that the cluster does not have, nobody has an address.
        let ports = status.node.ports.iter();
        let mut ports = ports.filter(|port| port.namespace == firewall.namespace);
        let IpVersions { v4, v6 } = firewall.open_beside;
        let is_open = |address: &IpAddr| if address.is_ipv4() { v4 } else { v6 };
        let is_met = ports.any(|port| port.addresses.iter().any(is_open));
        let (open, remedy) = open_over(v6);
        is_met.then(|| format!("namespace {}: {open}; {remedy}", firewall.namespace))
    });
    let left_out = match status.object_problems_left_out {
        0 => None,
        count => Some(format!(
            "{count} further objects are not usable as written: see the log"
        )),
    };
    objects.chain(left_out).chain(open).chain(rules)
}

/// What passes over IPv6, or over IPv4, because the rules deny all else over the other version alone; and the remedy.
pub fn open_over(is_v6: bool) -> (String, String) {
    let (denied, open, all) = match is_v6 {
        true => ("IPv4", "IPv6", "::/0"),
        false => ("IPv6", "IPv4", "0.0.0.0/0"),
    };
    (
        format!("the rules deny over {denied} what they do not mention, and over {open} it passes"),
        format!("add a Deny of cidrSelector {all} as the last rule"),
    )
}

/// The heads of [`changed_row`].
pub(crate) const CHANGED: &[&str] = &[
    "CHANGE",
    "POD",
    "DESTINATION",
    "NAMES",
    "NOW",
    "THEN",
    "LAST",
];

/// A connection of a namespace for which a tried EgressFirewall changes something.
pub(crate) fn changed_row(namespace: &str, changed: &Changed) -> Row {
    vec![
        changed.change.text().to_owned(),
        pod(namespace, &changed.pod),
        changed.target.clone(),
        match changed.names[..] {
            [] => "-".to_owned(),
            _ => changed.names.join(","),
        },
        changed.now.text.clone(),
        changed.then.text.clone(),
        format!("{} ago", seconds(changed.last_s)),
    ]
}

/// `dnsflow try`.
pub(crate) fn trialled(trialled: &Trialled, output: &mut impl Write) -> io::Result<()> {
    let namespace = &trialled.namespace;
    trial_counts(trialled, "this node", output)?;
    if !trialled.changed.is_empty() {
        writeln!(output)?;
        let changed = trialled.changed.iter();
        let rows = changed.map(|changed| changed_row(namespace, changed));
        table(CHANGED, rows, output)?;
    }
    trial_notes(trialled, output)
}

/// How many connections of these nodes change in which way.
pub(crate) fn trial_counts(
    trialled: &Trialled,
    nodes: &str,
    output: &mut impl Write,
) -> io::Result<()> {
    let now = match trialled.rules_now {
        Some(count) => format!("{count} rules now"),
        None => "no EgressFirewall now".to_owned(),
    };
    writeln!(
        output,
        "namespace {}: {now}, {} rules then; connections of the last {}, on {nodes}",
        trialled.namespace,
        trialled.rules_then,
        seconds(trialled.known_s)
    )?;
    for (head, count) in [
        ("would deny", trialled.count(Change::WouldDeny)),
        ("would allow", trialled.count(Change::WouldAllow)),
        ("not known", trialled.count(Change::NotKnown)),
        ("stay allowed", trialled.stay_allowed),
        ("stay denied", trialled.stay_denied),
    ] {
        writeln!(output, "{head:<13} {count}")?;
    }
    Ok(())
}

/// What is wrong with a manifest, and what else there is to know.
pub(crate) fn trial_notes(trialled: &Trialled, output: &mut impl Write) -> io::Result<()> {
    let problems = trialled.problems.iter().map(|text| ("problem", text));
    let notes = trialled.notes.iter().map(|text| ("note", text));
    let mut lines = problems.chain(notes);
    lines.try_for_each(|(head, text)| writeln!(output, "{head}: {text}"))
}

/// What is known of a rule.
fn rule_row(rule: &RuleUse) -> Row {
    let names = rule.names.iter().map(|name| match name.last_s {
        Some(last_s) => format!("{} ({} ago)", name.name, seconds(last_s)),
        None => format!("{} (told)", name.name),
    });
    let names: Vec<_> = names.collect();
    vec![
        rule.rule.to_string(),
        rule.text.clone(),
        rule_used(rule),
        rule.places.to_string(),
        match names[..] {
            [] => "-".to_owned(),
            _ => names.join(", "),
        },
    ]
}

/// Whether and when a rule was used.
pub(crate) fn rule_used(rule: &RuleUse) -> String {
    match (rule.used, rule.last_s) {
        (Used::Connected, Some(last_s)) => format!("{} ago", seconds(last_s)),
        (Used::Connected, None) => "yes".to_owned(),
        (Used::Told, _) => "told only".to_owned(),
        (Used::Never, _) => "never".to_owned(),
        (Used::Closes, _) => "denies the rest".to_owned(),
        (Used::NotKnown, _) => "not known".to_owned(),
    }
}

/// What limits the time that is known of.
pub(crate) fn since(since: Since) -> &'static str {
    match since {
        Since::AgentStart => "since the agent has started",
        Since::FirewallChange => "since the EgressFirewall has changed",
        Since::AnHour => "nothing older is remembered",
    }
}

/// `dnsflow unused`, of these nodes.
pub(crate) fn unused(found: &FirewallUse, nodes: &str, output: &mut impl Write) -> io::Result<()> {
    let FirewallUse {
        namespace,
        known_s,
        known_since,
        rules,
        only_by_answer,
    } = found;
    let since = since(*known_since);
    writeln!(
        output,
        "namespace {namespace}: what its pods on {nodes} have done for {} ({since})\n",
        seconds(*known_s)
    )?;
    let heads = ["RULE", "TEXT", "USED", "PLACES", "NAMES"];
    table(&heads, rules.iter().map(rule_row), output)?;
    writeln!(output)?;
    let unused: Vec<u32> = found.unused().map(|rule| rule.rule).collect();
    writeln!(output, "never used: rules {}", numbers(&unused))?;
    for rule in rules.iter().filter(|rule| !rule.narrower.is_empty()) {
        writeln!(
            output,
            "instead of the wildcard of rule {}: {}",
            rule.rule,
            rule.narrower.join(", ")
        )?;
    }
    let Some(only) = only_by_answer else {
        return Ok(());
    };
    writeln!(
        output,
        "connections that ovn-kubernetes alone would deny now: {}",
        only.len()
    )?;
    for one in only {
        writeln!(
            output,
            "  {} to {} ({}), rule {}, {} ago",
            pod(namespace, &one.pod),
            one.target,
            one.names.join(", "),
            one.rule,
            seconds(one.last_s)
        )?;
    }
    Ok(())
}

/// `dnsflow log-level`.
pub(crate) fn levels(levels: &Levels, output: &mut impl Write) -> io::Result<()> {
    let Levels {
        level,
        started_with,
    } = levels;
    writeln!(output, "{level}")?;
    if level != started_with {
        writeln!(output, "the agent has started with {started_with}")?;
    }
    Ok(())
}

/// An event, in one line.
pub fn event(event: &Event, output: &mut impl Write) -> io::Result<()> {
    let mut parts = vec![event.time.clone()];
    match (&event.namespace, &event.pod) {
        (Some(namespace), Some(name)) => parts.push(pod(namespace, name)),
        (Some(namespace), None) => parts.push(namespace.clone()),
        _ => {}
    }
    parts.push(event.event.clone());
    if let Some(target) = &event.target {
        // The text of what has a name begins with the name.
        match event.name.is_some() {
            true => parts.push(format!("{target} = {}", event.text)),
            false => parts.extend([target.clone(), event.text.clone()]),
        }
        return writeln!(output, "{}", parts.join("  "));
    }
    parts.extend(event.name.clone());
    if !event.addresses.is_empty() {
        let addresses: Vec<_> = event.addresses.iter().map(ToString::to_string).collect();
        parts.push(format!("-> {}", addresses.join(", ")));
    }
    match (&event.rules[..], &event.text) {
        ([], text) if text.is_empty() => {}
        ([], text) => parts.push(text.clone()),
        (rules, text) if text.is_empty() => parts.push(format!("(rules {})", numbers(rules))),
        (_, text) => parts.push(text.clone()),
    }
    if let Some(activation) = event.activation_us {
        parts.push(format!("in {activation} µs"));
    }
    writeln!(output, "{}", parts.join("  "))
}

/// `dnsflow explain`.
pub(crate) fn explanations(
    explained: &[Explanation],
    target: &str,
    output: &mut impl Write,
) -> io::Result<()> {
    let mut printed = Printed::default();
    for explanation in explained {
        let Explanation {
            port,
            verdict,
            addresses,
            hints,
        } = explanation;
        let network = port.network.as_deref();
        let network = network.map_or_else(String::new, |name| format!(" on network {name}"));
        let pod = pod(&port.namespace, &port.pod);
        writeln!(output, "pod {pod}{network} to {target}")?;
        if addresses.len() > 1 {
            writeln!(output, "all addresses: {}", verdict_text(*verdict))?;
        }
        for address in addresses {
            explained_address(address, &mut printed, output)?;
        }
        for hint in hints {
            writeln!(output, "  hint: {hint}")?;
        }
    }
    Ok(())
}

fn verdict_text(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Allowed => "ALLOWED",
        Verdict::NotYet => "NOT YET",
        Verdict::Depends => "DEPENDS",
        Verdict::NotKnown => "NOT KNOWN",
        Verdict::Blocked => "BLOCKED",
    }
}

fn explained_address(
    address: &ExplainedAddress,
    printed: &mut Printed,
    output: &mut impl Write,
) -> io::Result<()> {
    let verdict = verdict_text(address.verdict);
    let to = address
        .address
        .map_or_else(String::new, |to| format!("{to} "));
    let reason = text(&address.reason);
    writeln!(output, "\n{to}{verdict} ({reason}): {}", address.text)?;
    if let Some(remedy) = &address.remedy {
        writeln!(output, "  remedy: {remedy}")?;
    }
    if let Some(entry) = &address.entry {
        for name in &entry.names {
            let resolver = name.resolver.as_ref();
            let by = resolver.map_or_else(String::new, |resolver| format!(" by {resolver}"));
            writeln!(
                output,
                "  told {} ago{by}: {}, for {} more ({}), rules {}",
                seconds(name.told_s),
                name.name,
                seconds(name.ttl_left_s),
                text(&name.origin),
                numbers(&name.rules)
            )?;
        }
    }
    for heard in &address.heard {
        writeln!(
            output,
            "  told {} ago by {}: {}, which no rule mentions",
            seconds(heard.told_s),
            heard.resolver,
            heard.name
        )?;
    }
    for step in &address.steps {
        let ports = match step.ports[..] {
            [] => String::new(),
            _ => format!(" {}", step.ports.join(",")),
        };
        let outcome = match step.outcome {
            StepOutcome::NoMatch => "does not match",
            StepOutcome::Decides => "decides",
            StepOutcome::OnceAsked => "once asked",
            StepOutcome::NotInForce => "not in force",
            StepOutcome::SomePorts => "for some ports",
            StepOutcome::SomeAddresses => "for some addresses",
            StepOutcome::TooLate => "too late",
            StepOutcome::Unknown => "unknown",
        };
        let why = match step.why.is_empty() {
            true => String::new(),
            false => format!(": {}", step.why),
        };
        writeln!(
            output,
            "  rule {} {} {}{ports}  {outcome}{why}",
            step.rule, step.action, step.destination
        )?;
    }
    for flow in address.entry.iter().flat_map(|entry| &entry.flows) {
        if printed.is_next(flow) {
            let to = match flow.is_of_group {
                true => " to all addresses of its group",
                false => "",
            };
            writeln!(
                output,
                "  flow {}, {} packets{to}, used: {}",
                flow.flow,
                flow.packets,
                used_text(flow)
            )?;
        }
    }
    Ok(())
}

fn used_text(flow: &FlowView) -> String {
    match flow.packets {
        0 => "never".to_owned(),
        _ => format!("{} ago", seconds(flow.idle_s)),
    }
}

/// How many packets there were, where they are counted.
pub(crate) fn packets(packets: Option<u64>) -> String {
    packets.map_or_else(|| "-".to_owned(), |packets| packets.to_string())
}

fn pod(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

/// Numbers on one line.
pub fn numbers(numbers: &[u32]) -> String {
    match numbers {
        [] => "none".to_owned(),
        _ => {
            let texts: Vec<_> = numbers.iter().map(ToString::to_string).collect();
            texts.join(",")
        }
    }
}

pub(crate) fn yes_or(is_so: bool, otherwise: &str) -> String {
    if is_so { "yes" } else { otherwise }.to_owned()
}

/// The word that stands in JSON for a value.
pub(crate) fn text(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).ok();
    let text = value.as_ref().and_then(|value| value.as_str());
    text.unwrap_or_default().to_owned()
}

/// A time in its two largest units.
pub(crate) fn seconds(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests;
