//! What the kind environment takes, and whether it is here.

use std::process::{Command, Stdio};

use crate::unavailable::Unavailable;

/// Each tool, with a question that it answers only if it works, and what it is for.
///
/// What `contrib/kind.sh` of ovn-kubernetes takes stands in its
/// `docs/installation/launching-ovn-kubernetes-on-kind.md`; it fetches what it lacks beyond these.
const TOOLS: &[(&str, &str, &str)] = &[
    (
        "docker",
        "info",
        "with its daemon: nodes and web servers are containers",
    ),
    ("kind", "version", "0.27 or later"),
    ("kubectl", "version --client", "to talk to the cluster"),
    ("git", "--version", "to check out ovn-kubernetes"),
    ("go", "version", "to build ovn-kubernetes"),
    ("helm", "version", "to install ovn-kubernetes"),
    ("jq", "--version", "for ovn-kubernetes' kind.sh"),
    ("openssl", "version", "for ovn-kubernetes' kind.sh"),
];

/// An error that names everything that is missing.
pub(super) fn check() -> Result<(), Unavailable> {
    let missing: Vec<String> = TOOLS
        .iter()
        .filter(|(tool, question, _)| !works(tool, question))
        .map(|(tool, question, purpose)| format!("{tool} ({purpose}; `{tool} {question}` fails)"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Unavailable(format!(
        "a cluster in containers takes {}",
        missing.join(", ")
    )))
}

fn works(tool: &str, question: &str) -> bool {
    Command::new(tool)
        .args(question.split(' '))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
