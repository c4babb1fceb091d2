//! Why this checkout is no release.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use super::{matrix, notes};
use crate::image::Source;

/// Contacts and hosts that the project does not have yet are names below this one.
const PLACEHOLDER: &str = concat!("dnsflow", ".invalid");

/// The reasons, in an order that people can follow.
pub(super) fn of(workspace: &Path, source: &Source) -> Result<Vec<String>> {
    let mut refusals = Vec::new();
    refusals.extend(of_commit(workspace, source));
    refusals.extend(of_versions(workspace, &source.version)?);
    refusals.extend(placeholders(&tracked(workspace)?, |file| {
        fs::read_to_string(workspace.join(file)).unwrap_or_default()
    }));
    refusals.extend(matrix::faults(workspace)?);
    Ok(refusals)
}

fn of_commit(workspace: &Path, source: &Source) -> Option<String> {
    match source.commit.as_deref() {
        None => return Some("git names no commit".to_owned()),
        Some(commit) if commit.ends_with("-modified") => {
            return Some("the checkout has changes: a release is made from a commit".to_owned());
        }
        Some(_) => {}
    }
    let tag = format!("v{}", source.version);
    let commit_of = format!("refs/tags/{tag}^{{commit}}");
    let tagged = git(workspace, &["rev-parse", "--verify", "--quiet", &commit_of])?;
    let is_other = source.commit.as_deref() != Some(tagged.trim());
    is_other.then(|| format!("the tag {tag} is another commit: {}", tagged.trim()))
}

/// The version stands in `Cargo.toml`, in the chart and in the changelog.
fn of_versions(workspace: &Path, version: &str) -> Result<Vec<String>> {
    let read = |name: &str| {
        fs::read_to_string(workspace.join(name)).with_context(|| format!("cannot read {name}"))
    };
    let chart = read("deploy/helm/dnsflow/Chart.yaml")?;
    let mut refusals = Vec::new();
    for field in ["version", "appVersion"] {
        let prefix = format!("{field}: ");
        let mut lines = chart.lines();
        let found = lines.find_map(|line| line.strip_prefix(&prefix));
        let found = found.unwrap_or_default().trim_matches('"');
        if found != version {
            refusals.push(format!(
                "Cargo.toml has the version {version}, and Chart.yaml the {field} {found}"
            ));
        }
    }
    match notes::section(&read("CHANGELOG.md")?, version) {
        None => refusals.push(format!("CHANGELOG.md has no section {version}")),
        Some(section) if !section.has_date() => refusals.push(format!(
            "CHANGELOG.md has no date for {version}: `## {version} - YYYY-MM-DD`"
        )),
        Some(_) => {}
    }
    Ok(refusals)
}

/// The files that git knows.
fn tracked(workspace: &Path) -> Result<Vec<String>> {
    let files = git(workspace, &["ls-files", "-z"]).context("git lists no files")?;
    let files = files.split('\0').filter(|file| !file.is_empty());
    Ok(files.map(str::to_owned).collect())
}

/// The files with a placeholder.
fn placeholders(files: &[String], read: impl Fn(&str) -> String) -> Vec<String> {
    let with = files.iter().filter_map(|file| {
        let places = read(file).matches(PLACEHOLDER).count();
        (places > 0).then(|| format!("{file}: placeholders ({PLACEHOLDER}): {places}"))
    });
    with.collect()
}

fn git(workspace: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    command.args(arguments).current_dir(workspace);
    dnsflow_tests::process::run(&mut command).ok()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use dnsflow_tests::process::run;
    use jiff::Timestamp;

    use super::*;

    /// A repository with one commit of files that are in order.
    struct Repository(PathBuf);

    impl Repository {
        fn new(name: &str) -> Self {
            let name = format!("dnsflow-release-{name}-{}", std::process::id());
            let repository = Self(std::env::temp_dir().join(name));
            repository.write(
                "deploy/helm/dnsflow/Chart.yaml",
                "version: 1.2.3\nappVersion: \"1.2.3\"\n",
            );
            repository.write(
                "CHANGELOG.md",
                "# Changelog\n\n## 1.2.3 - 2026-11-27\n\n- It works.\n",
            );
            for file in ["docs/support.md", ".ci/run"] {
                let workspace = dnsflow_tests::support::workspace().expect("a workspace");
                let text = fs::read_to_string(workspace.join(file)).expect("a text");
                repository.write(file, &text);
            }
            repository.git(&["init", "--quiet"]);
            repository.commit();
            repository
        }

        fn write(&self, file: &str, text: &str) {
            let file = self.0.join(file);
            fs::create_dir_all(file.parent().expect("a directory")).expect("created");
            fs::write(file, text).expect("written");
        }

        fn git(&self, arguments: &[&str]) -> String {
            let mut command = Command::new("git");
            command
                .args([
                    "-c",
                    "user.name=a",
                    "-c",
                    "user.email=a@b",
                    "-c",
                    "commit.gpgsign=false",
                ])
                .args(arguments)
                .current_dir(&self.0);
            run(&mut command).expect("git works")
        }

        fn commit(&self) {
            self.git(&["add", "--all"]);
            self.git(&["commit", "--quiet", "--message", "a"]);
        }

        fn refusals(&self) -> Vec<String> {
            let changed = !self.git(&["status", "--porcelain"]).is_empty();
            let commit = self.git(&["rev-parse", "HEAD"]).trim().to_owned();
            let source = Source {
                version: "1.2.3".to_owned(),
                commit: Some(if changed {
                    commit + "-modified"
                } else {
                    commit
                }),
                time: Timestamp::UNIX_EPOCH,
            };
            of(&self.0, &source).expect("readable files")
        }
    }

    impl Drop for Repository {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("it was made");
        }
    }

    #[test]
    fn a_checkout_in_order_is_not_refused() {
        let repository = Repository::new("order");
        assert_eq!(repository.refusals(), [""; 0]);
        repository.git(&["tag", "v1.2.3"]);
        assert_eq!(repository.refusals(), [""; 0]);
    }

    #[test]
    fn a_change_and_another_commits_tag_are_refused() {
        let repository = Repository::new("commit");
        repository.write("new", "a");
        let refusals = repository.refusals();
        assert!(refusals[0].contains("has changes"), "{refusals:?}");
        repository.git(&["tag", "v1.2.3"]);
        repository.commit();
        let refusals = repository.refusals();
        assert!(refusals[0].contains("another commit"), "{refusals:?}");
        assert_eq!(refusals.len(), 1, "{refusals:?}");
    }

    #[test]
    fn versions_that_differ_are_refused() {
        for (file, text, expected) in [
            (
                "deploy/helm/dnsflow/Chart.yaml",
                "version: 1.2.3\nappVersion: \"1.2.4\"\n",
                "Chart.yaml the appVersion 1.2.4",
            ),
            (
                "CHANGELOG.md",
                "# Changelog\n\n## 1.2.30 - 2026-11-27\n",
                "no section 1.2.3",
            ),
            (
                "CHANGELOG.md",
                "# Changelog\n\n## 1.2.3 - unreleased\n",
                "no date",
            ),
        ] {
            let repository = Repository::new("versions");
            repository.write(file, text);
            repository.commit();
            let refusals = repository.refusals();
            assert_eq!(refusals.len(), 1, "{refusals:?}");
            assert!(refusals[0].contains(expected), "{refusals:?}");
        }
    }

    #[test]
    fn a_placeholder_and_a_wrong_support_matrix_are_refused() {
        let repository = Repository::new("placeholder");
        repository.write("SECURITY.md", &format!("Write to security@{PLACEHOLDER}."));
        repository.write(".ci/run", "cargo xtask test --vm 6.12\n");
        repository.commit();
        let refusals = repository.refusals();
        assert!(
            refusals[0].contains("SECURITY.md: placeholders ("),
            "{refusals:?}"
        );
        assert!(
            refusals[1..].iter().any(|one| one.contains("of 6.12")),
            "{refusals:?}"
        );
    }
}
