//! The programs that the kind environment needs, and whether they are present.

use std::process::{Command, Stdio};

use crate::unavailable::Unavailable;

/// Each tool, with a question that it answers only if it works, and what it is for.
///
/// What `contrib/kind-helm.sh` of ovn-kubernetes takes stands in its
/// `docs/installation/launching-ovn-kubernetes-on-kind.md`, and in `check_common_dependencies` of its
/// `contrib/kind-common.sh`; it fetches what it lacks beyond these.
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
    ("jq", "--version", "for ovn-kubernetes' kind-helm.sh"),
    ("openssl", "version", "for ovn-kubernetes' kind-helm.sh"),
    ("curl", "--version", "for ovn-kubernetes' kind-helm.sh"),
];

/// The oldest kind that knows the nodes' image of ovn-kubernetes' script.
const KIND_MIN: (u32, u32) = (0, 27);

/// An error that names everything that is missing.
pub(super) fn check() -> Result<(), Unavailable> {
    let mut missing: Vec<String> = TOOLS
        .iter()
        .filter(|(tool, question, _)| !works(tool, question))
        .map(|(tool, question, purpose)| format!("{tool} ({purpose}; `{tool} {question}` fails)"))
        .collect();
    if works("kind", "version") && !new_enough() {
        missing.push("kind 0.27 or later (this one is older)".to_owned());
    }
    // The script installs the one by the other.
    if !works("jinjanate", "--version") && !works("pipx", "--version") {
        missing.push("jinjanate (of jinjanator), or pipx to install it".to_owned());
    }
    // With podman, the script moves images by it.
    if works("podman", "--version") && !works("skopeo", "--version") {
        missing.push("skopeo (since podman is here)".to_owned());
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(Unavailable(format!(
        "a cluster in containers takes {}",
        missing.join(", ")
    )))
}

/// An error without kubectl, the only program that an existing cluster needs.
pub(super) fn check_kubectl() -> Result<(), Unavailable> {
    if works("kubectl", "version --client") {
        return Ok(());
    }
    Err(Unavailable("talking to a cluster takes kubectl".to_owned()))
}

/// Whether kind is: it says `kind v0.27.0 go1.23.6 linux/amd64`.
fn new_enough() -> bool {
    let said = Command::new("kind").arg("version").output();
    said.is_ok_and(|said| {
        let said = String::from_utf8_lossy(&said.stdout);
        let mut words = said.split_whitespace();
        let version = words.find_map(|word| word.strip_prefix('v'));
        let mut numbers = version.into_iter().flat_map(|version| version.split('.'));
        let mut number = || numbers.next()?.parse::<u32>().ok();
        matches!((number(), number()), (Some(major), Some(minor)) if (major, minor) >= KIND_MIN)
    })
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
