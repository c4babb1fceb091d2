//! The part of the chart's schema that is made of the agent's options: their names, and what a value looks like. What
//! only the agent can judge, as a limit, is left to it.

use std::{collections::BTreeMap, ffi::OsStr};

use anyhow::{Context, Result};
use clap::{Arg, CommandFactory as _, Parser as _};
use dnsflow_agent::options::Cli;
use serde_json::{Value, json};

/// The line of the schema behind which the options stand, and that before which they end.
const BEGIN: &str = concat!(
    "    \"options\": {\n",
    "      \"type\": [\"object\", \"null\"],\n",
    "      \"additionalProperties\": false,\n",
    "      \"properties\": {\n",
);
const END: &str = "      }\n    },\n";

/// The options that the chart sets by a value of its own.
const OF_CHART: [&str; 1] = ["DNSFLOW_LISTEN"];

/// The schema with these options in place of those that it has.
pub(crate) fn within(schema: &str) -> Result<String> {
    let (before, rest) = schema.split_once(BEGIN).context("options")?;
    let (_, after) = rest.split_once(END).context("an end of the options")?;
    let mut options = of_options();
    options.insert("RUST_LOG".to_owned(), json!({"type": ["string", "null"]}));
    let lines = options
        .iter()
        .map(|(name, schema)| format!("        {}: {schema}", json!(name)));
    let lines = lines.collect::<Vec<_>>().join(",\n");
    Ok(format!("{before}{BEGIN}{lines}\n{END}{after}"))
}

/// The schema of each option, by its environment variable.
fn of_options() -> BTreeMap<String, Value> {
    let cli = Cli::command();
    let agent = cli.find_subcommand("agent").expect("it is there");
    let options = agent.get_arguments().filter_map(|option| {
        let variable = option.get_env().and_then(OsStr::to_str)?;
        let is_own = !OF_CHART.contains(&variable);
        is_own.then(|| (variable.to_owned(), of_option(option)))
    });
    options.collect()
}

/// Whether the agent takes an option with this value.
fn takes(option: &Arg, value: &str) -> bool {
    let name = option.get_long().expect("each option has a long name");
    let word = match option.get_action().takes_values() {
        true => format!("--{name}={value}"),
        // By its variable, it is one word or the other.
        false => return ["true", "false"].contains(&value),
    };
    Cli::try_parse_from(["dnsflow", "agent", &word]).is_ok()
}

/// What a value of this option looks like. A keyword of JSON Schema restricts its own types alone.
fn of_option(option: &Arg) -> Value {
    let about = option.get_help().map(ToString::to_string);
    let about = about.unwrap_or_default();
    let possible = option.get_possible_values();
    let is_flag = !option.get_action().takes_values();
    let names = option.get_value_names().into_iter().flatten();
    let names: Vec<&str> = names.map(|name| name.as_str()).collect();
    if is_flag || names == ["BOOL"] {
        return json!({"description": about, "enum": [true, false, "true", "false", null]});
    }
    if !possible.is_empty() {
        let names = possible.iter().flat_map(|one| one.get_name_and_aliases());
        let names: Vec<Value> = names.map(Value::from).chain([Value::Null]).collect();
        return json!({"description": about, "enum": names});
    }
    let pattern = match names[..] {
        ["TIME"] => "([0-9]+ *[A-Za-z]+ *)+",
        ["COUNT" | "PORT"] => "[0-9]+",
        ["CIDR"] if takes(option, "private") => "([0-9A-Fa-f.:]+(/[0-9]{1,3})?|private)",
        ["CIDR"] => "[0-9A-Fa-f.:]+(/[0-9]{1,3})?",
        ["MASK"] => "0x[0-9A-Fa-f]{1,8}",
        ["SERVICE"] => "[^/ ,]+/[^/ ,]+",
        ["IP[:PORT]"] => r"\[?[0-9A-Fa-f.:]+(\]:[0-9]+)?",
        ["DIR" | "FILE" | "PATH" | "REMOTE"] => ".+",
        ref other => panic!("the schema knows no value {other:?}"),
    };
    let is_list = option.get_value_delimiter().is_some();
    let is_number = matches!(names[..], ["COUNT" | "PORT"]);
    let mut types = vec!["string", "null"];
    let mut schema = json!({"description": about});
    let mut item = json!({"type": "string", "pattern": format!("^{pattern}$")});
    if is_number {
        let of = |numbers: &[u32]| {
            let mut numbers = numbers.iter();
            numbers
                .find(|number| takes(option, &number.to_string()))
                .copied()
        };
        let limits = [
            ("minimum", of(&[0, 1])),
            ("maximum", of(&[u32::MAX, u16::MAX.into()])),
        ];
        types.push("integer");
        for (name, limit) in limits {
            schema[name] = limit.into();
            item[name] = limit.into();
        }
        item["type"] = json!(["string", "integer"]);
    }
    schema["pattern"] = match is_list {
        true => format!("^{pattern}(,{pattern})*$").into(),
        false => format!("^{pattern}$").into(),
    };
    if is_list {
        types.push("array");
        schema["items"] = item;
    }
    schema["type"] = types.into();
    schema
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    /// Whether a value is of a schema that has these keywords alone.
    fn is_valid(schema: &Value, value: &Value) -> bool {
        let fields = schema.as_object().expect("a schema");
        fields
            .iter()
            .all(|(keyword, wanted)| match (&**keyword, value) {
                ("enum", _) => wanted.as_array().expect("values").contains(value),
                ("type", _) => {
                    let found = match value {
                        Value::Null => "null",
                        Value::String(_) => "string",
                        Value::Number(_) => "integer",
                        Value::Array(_) => "array",
                        Value::Bool(_) => "boolean",
                        Value::Object(_) => "object",
                    };
                    let one = wanted == found;
                    one || wanted
                        .as_array()
                        .is_some_and(|types| types.contains(&json!(found)))
                }
                ("pattern", Value::String(text)) => {
                    let pattern = wanted.as_str().expect("a pattern");
                    Regex::new(pattern).expect("a pattern").is_match(text)
                }
                ("minimum", Value::Number(number)) => number.as_u64() >= wanted.as_u64(),
                ("maximum", Value::Number(number)) => number.as_u64() <= wanted.as_u64(),
                ("items", Value::Array(items)) => items.iter().all(|item| is_valid(wanted, item)),
                ("description" | "pattern" | "minimum" | "maximum" | "items", _) => true,
                (other, _) => panic!("the keyword {other}"),
            })
    }

    /// Values of all kinds, good and bad ones.
    const TEXTS: &[&str] = &[
        "",
        " ",
        "x",
        "true",
        "false",
        "yes",
        "0",
        "1",
        "-1",
        "53",
        "256",
        "65535",
        "65536",
        "4294967295",
        "4294967296",
        "1.5",
        "53,5353",
        "30",
        "30s",
        "500ms",
        "5m",
        "1h",
        "1h 30m",
        "2min",
        "1day",
        "s",
        "10.0.0.0/8",
        "10.0.0.0/8,192.168.0.0/16",
        "10.0.0.0/33",
        "10.0.0.1",
        "64:ff9b::/96",
        "fd00::/8",
        "private",
        "10.0.0.1:53",
        "[fd00::1]:53",
        "0xffe00000",
        "0x0",
        "ffe00000",
        "kube-system/k8s-app=kube-dns",
        "kube-system/k8s-app=kube-dns,openshift-dns/dns-default",
        "kube-dns",
        "a/b/c",
        "flows",
        "marks",
        "kernel",
        "auto",
        "text",
        "json",
        "unix:/var/run/ovn/ovnnb_db.sock",
        "tcp:127.0.0.1:6641",
        "/run/dnsflow-state",
    ];

    /// A schema that refuses what the agent takes would be worse than none.
    #[test]
    fn the_schema_takes_what_the_agent_takes_and_refuses_other_kinds_of_values() {
        let cli = Cli::command();
        let agent = cli.find_subcommand("agent").expect("it is there");
        let schemas = of_options();
        assert!(schemas.len() > 25, "{schemas:#?}");
        for (variable, schema) in &schemas {
            let mut options = agent.get_arguments();
            let option = options.find(|one| one.get_env() == Some(OsStr::new(variable)));
            let option = option.expect("it is there");
            let (mut taken, mut refused) = (0, 0);
            for text in TEXTS {
                let (by_agent, by_schema) = (takes(option, text), is_valid(schema, &json!(text)));
                assert!(!by_agent || by_schema, "{variable}={text:?}: {schema}");
                taken += usize::from(by_agent);
                refused += usize::from(!by_schema);
                if option.get_value_delimiter().is_some() {
                    let list: Vec<&str> = text.split(',').collect();
                    assert_eq!(
                        is_valid(schema, &json!(list)),
                        by_schema,
                        "{variable}={list:?}"
                    );
                }
            }
            assert!(taken > 0, "{variable}");
            // A path may be anything but nothing.
            assert!(refused > 0, "{variable}");
            for number in [0_u64, 1, 65_535, 65_536, 4_294_967_295, 4_294_967_296] {
                let by_schema = is_valid(schema, &json!(number));
                assert!(
                    !by_schema || takes(option, &number.to_string()),
                    "{variable}={number}"
                );
            }
            assert!(is_valid(schema, &Value::Null), "{variable}");
            assert!(!is_valid(schema, &json!({})), "{variable}");
        }
    }
}
