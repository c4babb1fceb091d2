//! `dnsflow check`: whether an agent with these options could work on this node. One line for each
//! question; the remedy if the answer is no.
//!
//! `gather` asks the kernel, the switch, OVN and Kubernetes, by the agent's own edges; [`judge`]
//! is pure and turns the [`facts`] into findings. It never changes anything: what has to be tried
//! is tried in a network namespace that ends with the trial.

pub mod facts;
mod gather;
pub mod judge;

use std::{fmt, io};

use serde::Serialize;
use tokio::runtime;

use crate::{
    options::{AgentOptions, CheckOptions, OutputFormat, OutputOptions},
    output::{write_json, write_yaml},
};

/// The answer to one question.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Finding {
    /// Which question.
    pub check: &'static str,
    /// The answer in short.
    pub status: Status,
    /// The answer.
    pub text: String,
    /// What to do, if there is something to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// How good an answer is.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// The agent works, but not for everything or not as well as it could; or this is unknown.
    Warning,
    /// The agent cannot work.
    Failed,
}

impl Finding {
    fn ok(check: &'static str, text: impl Into<String>) -> Self {
        Self {
            check,
            status: Status::Ok,
            text: text.into(),
            remedy: None,
        }
    }

    fn warning(check: &'static str, text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            check,
            status: Status::Warning,
            text: text.into(),
            remedy: Some(remedy.into()),
        }
    }

    fn failed(check: &'static str, text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            status: Status::Failed,
            ..Self::warning(check, text, remedy)
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Failed => "failed",
        };
        write!(f, "{status:<7}  {:<12}  {}", self.check, self.text)?;
        match &self.remedy {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

/// What is printed for programs.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    /// The worst answer.
    status: Status,
    /// The answers, in the order of the agent's own start.
    findings: &'a [Finding],
}

/// Asks everything, prints the findings to `output`, and returns whether the agent could work: with
/// `--strict` only without a warning.
///
/// # Errors
///
/// If the output cannot be written, or a thread cannot be started.
pub fn run(options: CheckOptions, output: &mut impl io::Write) -> io::Result<bool> {
    let CheckOptions {
        agent,
        output: OutputOptions { format },
        strict,
    } = options;
    let findings = findings(agent)?;
    print(&findings, format, output)?;
    let worst = if strict { Status::Ok } else { Status::Warning };
    Ok(findings.iter().all(|finding| finding.status <= worst))
}

/// The answers for an agent with these options.
fn findings(agent: AgentOptions) -> io::Result<Vec<Finding>> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let facts = runtime.block_on(gather::gather(agent));
    Ok(judge::judge(&facts))
}

/// What `dnsflow check --output json` prints.
///
/// # Errors
///
/// If a thread cannot be started.
pub(crate) fn json(agent: AgentOptions) -> io::Result<Vec<u8>> {
    let mut output = Vec::new();
    print(&findings(agent)?, OutputFormat::Json, &mut output)?;
    Ok(output)
}

fn print(
    findings: &[Finding],
    format: OutputFormat,
    output: &mut impl io::Write,
) -> io::Result<()> {
    let worst = findings.iter().map(|finding| finding.status).max();
    let summary = Summary {
        status: worst.unwrap_or(Status::Ok),
        findings,
    };
    match format {
        OutputFormat::Table => findings
            .iter()
            .try_for_each(|finding| writeln!(output, "{finding}")),
        OutputFormat::Json => write_json(&summary, output),
        OutputFormat::Yaml => write_yaml(&summary, output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_printed_for_people_and_programs() {
        let findings = [
            Finding::ok("btf", "the kernel describes its types"),
            Finding::warning("offload", "flows may be offloaded", "turn it off"),
        ];
        let printed = |format| {
            let mut output = Vec::new();
            print(&findings, format, &mut output).expect("memory has room");
            String::from_utf8(output).expect("text")
        };
        assert_eq!(
            printed(OutputFormat::Table),
            "\
ok       btf           the kernel describes its types
warning  offload       flows may be offloaded; turn it off
"
        );
        assert_eq!(
            printed(OutputFormat::Json),
            r#"{
  "format_version": 1,
  "status": "warning",
  "findings": [
    {
      "check": "btf",
      "status": "ok",
      "text": "the kernel describes its types"
    },
    {
      "check": "offload",
      "status": "warning",
      "text": "flows may be offloaded",
      "remedy": "turn it off"
    }
  ]
}
"#
        );
        assert_eq!(
            printed(OutputFormat::Yaml),
            "\
---
format_version: 1
status: warning
findings:
- check: btf
  status: ok
  text: the kernel describes its types
- check: offload
  status: warning
  text: flows may be offloaded
  remedy: turn it off
"
        );
    }
}
