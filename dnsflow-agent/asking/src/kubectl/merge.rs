//! One answer of the answers of many nodes. Pure but for the writing.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use dnsflow_core::ask::view::{Attachment, EntryView, Explanation};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    agents::{Answer, Said},
    all_nodes,
};
use crate::{
    Levels, Status,
    commands::explained_exit,
    event::Event,
    exit::Exit,
    options::OutputFormat,
    output::{UNWRITTEN, write_json_line, write_yaml},
    page::Page,
    print::{self, FlowRow, Row},
    report::NodeReport,
    trial::Trialled,
    unused::FirewallUse,
};

/// What the agents were asked.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Question {
    /// `status`.
    Status,
    /// `cache list`.
    Cache,
    /// `flows list`.
    Flows,
    /// `explain`, which only the agent of the pod's node can answer.
    Explain {
        /// The pod's namespace.
        namespace: String,
        /// The pod.
        pod: String,
        /// The target.
        target: String,
    },
    /// `observe`.
    Observe {
        /// How many events are wanted at most.
        last: Option<usize>,
    },
    /// `log-level`.
    LogLevel,
    /// `check`.
    Check,
    /// `try`, with the manifests.
    Try(String),
    /// `unused`.
    Unused,
    /// `report`, as a page where one is asked for.
    Report(Option<PathBuf>),
}

/// Writes the answers as one. Names the nodes without an answer on standard error.
pub(super) fn write(
    question: &Question,
    format: OutputFormat,
    answers: Vec<Answer>,
    output: &mut impl Write,
) -> anyhow::Result<Exit> {
    let mut exit = Exit::Done;
    let mut values = Vec::new();
    let mut silent = Vec::new();
    // Of nodes that have answered.
    let mut missing = Vec::new();
    for Answer { node, said } in answers {
        match said {
            Ok(said) => {
                if said.is_no {
                    exit = Exit::No;
                }
                missing.extend(said.missing.clone().map(|part| (node.clone(), part)));
                values.extend(values_of(said).map(|value| (node.clone(), value)));
            }
            Err(reason) => silent.push((node, reason)),
        }
    }
    if let Question::Explain { target, .. } = question {
        // Nothing is missing of an answer that depends.
        let explained = typed::<Explanation>(&values).context(UNWRITTEN)?;
        let explained: Vec<_> = explained.into_iter().map(|(_, one)| one).collect();
        missing.clear();
        exit = explained_exit(&explained, target).unwrap_or(exit);
    }
    if matches!(question, Question::Report(_)) && values.is_empty() {
        let reasons = silent
            .iter()
            .map(|(node, reason)| format!("node {node}: {reason}"));
        bail!(
            "no node has a report: {}",
            reasons.collect::<Vec<_>>().join("; ")
        );
    }
    match question {
        Question::Report(Some(file)) => {
            let nodes = typed::<NodeReport>(&values).context(UNWRITTEN)?.into_iter();
            let nodes = nodes.map(|(node, report)| NodeReport { node, ..report });
            let page = Page::new(nodes.collect(), silent.clone());
            page.write(file, output)?;
        }
        _ => {
            // A rule is unused if no node has used it: of all nodes, there is one answer.
            if *question == Question::Unused {
                let answers = typed(&values).context(UNWRITTEN)?;
                let whole = all_nodes::unused(answers, &mut silent).context(UNWRITTEN)?;
                values = whole.into_iter().collect();
            }
            print_values(question, format, values, output).context(UNWRITTEN)?;
        }
    }
    output.flush().context(UNWRITTEN)?;
    for (node, reason) in silent.iter().chain(&missing) {
        eprintln!("node {node}: {reason}");
    }
    Ok(match silent.is_empty() && missing.is_empty() {
        true => exit,
        false => Exit::Incomplete,
    })
}

/// Prints what the nodes have said, each value with its node.
fn print_values(
    question: &Question,
    format: OutputFormat,
    mut values: Vec<(String, Value)>,
    output: &mut impl Write,
) -> io::Result<()> {
    if let Question::Observe { last } = question {
        // RFC 3339 in UTC, of one length: the order of the texts is that of the times.
        let time = |value: &Value| value["time"].as_str().unwrap_or_default().to_owned();
        values.sort_by_cached_key(|(_, value)| time(value));
        // Each node has sent as many.
        let older = last.map_or(0, |last| values.len().saturating_sub(last));
        values.drain(..older);
    }
    match format {
        OutputFormat::Table => tables(question, &values, output),
        OutputFormat::Json => values
            .into_iter()
            .try_for_each(|(node, value)| write_json_line(&with_node(node, value), output)),
        OutputFormat::Yaml => values
            .into_iter()
            .try_for_each(|(node, value)| write_yaml(&with_node(node, value), output)),
    }
}

/// The objects of an answer: a list is its elements.
fn values_of(said: Said) -> impl Iterator<Item = Value> {
    said.values.into_iter().flat_map(|value| match value {
        Value::Array(values) => values,
        value => vec![value],
    })
}

pub(super) fn with_node(node: String, mut value: Value) -> Value {
    if let Some(object) = value.as_object_mut() {
        object.insert("node".to_owned(), Value::String(node));
    }
    value
}

/// The values, each as what it should be.
fn typed<T: DeserializeOwned>(values: &[(String, Value)]) -> io::Result<Vec<(String, T)>> {
    let typed = values.iter().map(|(node, value)| {
        let value = T::deserialize(value);
        let value = value.map_err(|error| {
            io::Error::other(format!(
                "the agent of node {node} is of another version: {error}"
            ))
        });
        Ok((node.clone(), value?))
    });
    typed.collect()
}

fn tables(
    question: &Question,
    values: &[(String, Value)],
    output: &mut impl Write,
) -> io::Result<()> {
    match question {
        Question::Status => statuses(typed(values)?, output),
        Question::Cache => {
            let entries = typed::<EntryView>(values)?;
            table(print::CACHE, rows(&entries, print::cache_rows), output)
        }
        Question::Flows => {
            let flows = typed::<FlowRow>(values)?;
            let rows = flows.iter().map(|(node, flow)| (node, flow.cells()));
            table(FlowRow::HEADS, rows, output)
        }
        Question::Explain { target, .. } => {
            let explained: Vec<_> = typed::<Explanation>(values)?;
            if let Some((node, _)) = explained.first() {
                writeln!(output, "node {node}")?;
            }
            let explained: Vec<_> = explained.into_iter().map(|(_, one)| one).collect();
            print::explanations(&explained, target, output)
        }
        Question::Observe { .. } => typed::<Event>(values)?
            .iter()
            .try_for_each(|(node, event)| {
                write!(output, "{node}  ")?;
                print::event(event, output)
            }),
        Question::LogLevel => {
            let levels = typed::<Levels>(values)?;
            let rows = levels.iter().map(|(node, levels)| {
                let row = vec![levels.level.clone(), levels.started_with.clone()];
                (node, row)
            });
            table(&["LEVEL", "STARTED WITH"], rows, output)
        }
        Question::Check => table(&["STATUS", "CHECK", "ANSWER"], findings(values), output),
        Question::Try(_) => all_nodes::trials(typed::<Trialled>(values)?, output),
        Question::Unused => typed::<FirewallUse>(values)?
            .iter()
            .try_for_each(|(nodes, found)| print::unused(found, nodes, output)),
        // Without a page, a report is for programs.
        Question::Report(_) => values.iter().try_for_each(|(node, value)| {
            write_json_line(&with_node(node.clone(), value.clone()), output)
        }),
    }
}

/// The rows of each value, with its node.
fn rows<T>(values: &[(String, T)], of: impl Fn(&T) -> Vec<Row>) -> Vec<(&String, Row)> {
    let mut rows = Vec::new();
    for (node, value) in values {
        rows.extend(of(value).into_iter().map(|row| (node, row)));
    }
    rows
}

/// Writes rows with their nodes as a table with these heads.
pub(super) fn table<'a>(
    heads: &[&str],
    rows: impl IntoIterator<Item = (&'a String, Row)>,
    output: &mut impl Write,
) -> io::Result<()> {
    let heads = [&["NODE"], heads].concat();
    let rows = rows.into_iter();
    let rows = rows.map(|(node, row)| [vec![node.clone()], row].concat());
    print::table(&heads, rows, output)
}

fn findings(values: &[(String, Value)]) -> Vec<(&String, Row)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut rows = Vec::new();
    for (node, value) in values {
        for finding in value["findings"].as_array().into_iter().flatten() {
            let mut answer = text(&finding["text"]);
            if let Some(remedy) = finding["remedy"].as_str() {
                answer = format!("{answer}; {remedy}");
            }
            let row = vec![text(&finding["status"]), text(&finding["check"]), answer];
            rows.push((node, row));
        }
    }
    rows
}

fn statuses(statuses: Vec<(String, Status)>, output: &mut impl Write) -> io::Result<()> {
    let heads = [
        "AGENT",
        "UP",
        "READY",
        "SWITCH",
        "ATTACHED",
        "ADDRESSES",
        "FLOWS",
    ];
    let nodes = statuses.iter();
    let nodes = nodes.map(|(node, status)| (node, summary(status)));
    table(&heads, nodes, output)?;
    let ports = rows(&statuses, |status| {
        let ports = status.node.ports.iter();
        ports.flat_map(print::port_rows).collect()
    });
    if !ports.is_empty() {
        writeln!(output)?;
        table(print::PORTS, ports, output)?;
    }
    // Most problems are the same on all nodes.
    let mut problems = BTreeMap::<_, Vec<&str>>::new();
    for (node, status) in &statuses {
        for text in print::problems(status) {
            problems.entry(text).or_default().push(node);
        }
    }
    for (text, nodes) in problems {
        writeln!(output, "\n{text}; on {}", nodes.join(", "))?;
    }
    Ok(())
}

fn summary(status: &Status) -> Row {
    let Status {
        version,
        up_s,
        node,
        ..
    } = status;
    let attached = node.ports.iter();
    let attached = attached.filter(|port| port.attachment == Attachment::Attached);
    let switch = match (node.switch_is_connected, node.switch_is_compared) {
        (false, _) => "not connected",
        (true, false) => "not compared yet",
        (true, true) => "connected",
    };
    vec![
        version.clone(),
        print::seconds(*up_s),
        print::yes_or(node.is_ready, "not yet"),
        switch.to_owned(),
        format!("{} of {}", attached.count(), node.ports.len()),
        node.addresses.to_string(),
        node.flows.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(node: &str, values: &[Value], is_no: bool) -> Answer {
        Answer {
            node: node.to_owned(),
            said: Ok(Said {
                values: values.to_vec(),
                is_no,
                missing: None,
            }),
        }
    }

    fn silent(node: &str) -> Answer {
        Answer {
            node: node.to_owned(),
            said: Err("no route to host".to_owned()),
        }
    }

    fn written(question: &Question, format: OutputFormat, answers: Vec<Answer>) -> (String, Exit) {
        let mut output = Vec::new();
        let exit = write(question, format, answers, &mut output).expect("memory has room");
        (String::from_utf8(output).expect("text"), exit)
    }

    fn event(time: &str, text: &str) -> Value {
        json!({"time": time, "event": "flows_restored", "text": text})
    }

    #[test]
    fn events_of_all_nodes_are_in_the_order_of_their_times() {
        let answers = vec![
            answer(
                "n1",
                &[
                    event("2026-01-01T00:00:01.000Z", "first"),
                    event("2026-01-01T00:00:03.000Z", "third"),
                ],
                false,
            ),
            answer("n2", &[event("2026-01-01T00:00:02.000Z", "second")], false),
        ];
        let observe = |last| Question::Observe { last };
        let (text, exit) = written(&observe(None), OutputFormat::Table, answers.clone());
        assert_eq!(
            text,
            "\
n1  2026-01-01T00:00:01.000Z  flows_restored  first
n2  2026-01-01T00:00:02.000Z  flows_restored  second
n1  2026-01-01T00:00:03.000Z  flows_restored  third
"
        );
        assert_eq!(exit, Exit::Done);
        let (last, _) = written(&observe(Some(1)), OutputFormat::Table, answers);
        assert_eq!(
            last,
            "n1  2026-01-01T00:00:03.000Z  flows_restored  third\n"
        );
    }

    #[test]
    fn rows_have_a_node() {
        let entry = json!({
            "port": "ns1_p1", "namespace": "ns1", "pod": "p1", "network": null,
            "address": "203.0.113.1", "refused": null,
            "names": [{
                "name": "example.com", "origin": "answer", "ttl_left_s": 42, "told_s": 1, "rules": [0]
            }],
            "flows": [{"flow": "cookie=0x1", "packets": 3, "idle_s": 2, "is_missing": false}],
            "packets": 3, "used_s": 2,
        });
        let both = || {
            let entry = [entry.clone()];
            vec![answer("n1", &entry, false), answer("n2", &entry, false)]
        };
        let (text, _) = written(&Question::Cache, OutputFormat::Table, both());
        assert_eq!(
            text,
            "\
NODE   POD      NAME          ADDRESS       TTL   SOURCE   RULES   PACKETS   USED
n1     ns1/p1   example.com   203.0.113.1   42s   answer   0       3         2s ago
n2     ns1/p1   example.com   203.0.113.1   42s   answer   0       3         2s ago
"
        );
        let (text, _) = written(&Question::Cache, OutputFormat::Json, both());
        let nodes = text.lines().map(|line| {
            let value: Value = serde_json::from_str(line).expect("an object");
            assert_eq!(value["address"], "203.0.113.1");
            value["node"].clone()
        });
        assert_eq!(nodes.collect::<Vec<_>>(), ["n1", "n2"]);
    }

    #[test]
    fn findings_and_levels_have_a_node_and_a_no_stays_one() {
        let findings = json!({"status": "failed", "findings": [
            {"check": "openflow", "status": "failed", "text": "no answer", "remedy": "start it"},
        ]});
        let answers = vec![answer("n1", &[findings], true)];
        let (text, exit) = written(&Question::Check, OutputFormat::Table, answers);
        assert_eq!(
            text,
            "\
NODE   STATUS   CHECK      ANSWER
n1     failed   openflow   no answer; start it
"
        );
        assert_eq!(exit, Exit::No);
        let levels = json!({"level": "info", "started_with": "debug"});
        let answers = vec![answer("n1", &[levels], false)];
        let (text, _) = written(&Question::LogLevel, OutputFormat::Table, answers);
        assert_eq!(text, "NODE   LEVEL   STARTED WITH\nn1     info    debug\n");
    }

    #[test]
    fn the_verdict_of_an_explanation_is_the_exit_code() {
        let code = |verdict: &str, target: &str| {
            let port = json!({
                "port": "ns1_pod1", "namespace": "ns1", "pod": "pod1", "interface": "veth0", "network": null,
                "addresses": [], "attachment": "attached", "not_trusted": null, "firewall": null, "told": 0,
                "limits": [],
            });
            let value = json!({"port": port, "verdict": verdict, "addresses": [], "hints": []});
            let mut said = answer("n1", &[value], false);
            if let Ok(said) = &mut said.said {
                said.missing = Some("a part of its answer is missing".to_owned());
            }
            let question = Question::Explain {
                namespace: "ns1".to_owned(),
                pod: "pod1".to_owned(),
                target: target.to_owned(),
            };
            let written = write(&question, OutputFormat::Json, vec![said], &mut Vec::new());
            written.expect("it is written")
        };
        assert_eq!(code("allowed", "example.com"), Exit::Done);
        assert_eq!(code("not_yet", "example.com"), Exit::Done);
        assert_eq!(code("not_yet", "203.0.113.1"), Exit::No);
        assert_eq!(code("blocked", "example.com"), Exit::No);
        assert_eq!(code("depends", "example.com"), Exit::Incomplete);
        assert_eq!(code("not_known", "203.0.113.1"), Exit::Incomplete);
    }

    #[test]
    fn without_a_node_the_answer_is_not_whole() {
        for is_no in [false, true] {
            let answers = vec![answer("n1", &[], is_no), silent("n2")];
            let (_, exit) = written(&Question::Cache, OutputFormat::Json, answers);
            assert_eq!(exit, Exit::Incomplete);
        }
    }

    #[test]
    fn without_any_answer_there_is_no_report() {
        let file = std::env::temp_dir().join(format!("dnsflow-none-{}.html", std::process::id()));
        let question = Question::Report(Some(file.clone()));
        let answers = vec![silent("n1"), silent("n2")];
        let error = write(&question, OutputFormat::Json, answers, &mut Vec::new());
        assert_eq!(
            error.expect_err("there is none").to_string(),
            "no node has a report: node n1: no route to host; node n2: no route to host"
        );
        assert!(!file.exists());
    }

    #[test]
    fn a_node_that_does_not_know_a_part_has_answered_all_the_same() {
        let rule = json!({
            "rule": 0, "text": "a", "used": "never", "places": 0, "last_s": null, "names": [],
            "narrower": [],
        });
        let uses = json!({
            "namespace": "ns1", "known_s": 60, "known_since": "agent_start", "rules": [rule],
            "only_by_answer": null,
        });
        let mut part = answer("n1", std::slice::from_ref(&uses), false);
        if let Ok(said) = &mut part.said {
            said.missing = Some("OVN's database does not answer".to_owned());
        }
        let of = |answers| written(&Question::Unused, OutputFormat::Table, answers);
        let (text, exit) = of(vec![part]);
        assert!(text.contains("never used: rules 0"), "{text}");
        assert_eq!(exit, Exit::Incomplete);
        // Of a node without an answer, nobody knows.
        let (text, exit) = of(vec![answer("n1", &[uses], false), silent("n2")]);
        assert!(text.contains("not known"), "{text}");
        assert_eq!(exit, Exit::Incomplete);
    }

    #[test]
    fn an_answer_of_another_version_is_refused_with_its_node() {
        let answers = vec![answer("n7", &[json!({"what": "else"})], false)];
        let error = write(
            &Question::Status,
            OutputFormat::Table,
            answers,
            &mut Vec::new(),
        );
        let error = format!("{:#}", error.expect_err("it is no status"));
        assert!(
            error.contains("the agent of node n7 is of another version"),
            "{error}"
        );
    }
}
