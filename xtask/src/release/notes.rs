//! The notes of a release, cut from the changelog.

use crate::image::Part;

/// The section of a version.
#[derive(Clone, Copy, Debug)]
pub(super) struct Section<'a> {
    /// The rest of its heading.
    date: &'a str,
    text: &'a str,
}

impl Section<'_> {
    /// Whether the heading has a date, as Keep a Changelog writes it.
    pub(super) fn has_date(&self) -> bool {
        let digits: Vec<&str> = self.date.split('-').collect();
        let is_number = |text: &&str| text.bytes().all(|byte| byte.is_ascii_digit());
        digits.iter().map(|part| part.len()).eq([4, 2, 2]) && digits.iter().all(is_number)
    }
}

/// The section of this version: `## VERSION - DATE`.
pub(super) fn section<'a>(changelog: &'a str, version: &str) -> Option<Section<'a>> {
    let heading = format!("\n## {version} - ");
    let (_, rest) = changelog.split_once(&heading)?;
    let (date, rest) = rest.split_once('\n')?;
    let text = rest.split("\n## ").next().unwrap_or_default();
    Some(Section {
        date: date.trim(),
        text: text.trim(),
    })
}

/// The notes.
pub(super) fn text(
    changelog: &str,
    version: &str,
    commit: &str,
    image: &str,
    parts: &[Part],
    missing: &[String],
) -> String {
    let changes = section(changelog, version).map_or("", |section| section.text);
    let architectures: Vec<&str> = parts.iter().map(|part| part.architecture).collect();
    let mut notes = format!(
        "# dnsflow {version}\n\n{}\n\n## Files\n\nBuilt from the commit {commit}.\n\n\
         - Image: `{image}` ({})\n\
         - `dnsflow-{version}.tgz`: the Helm chart\n\
         - `dnsflow-{version}.yaml`, `dnsflow-{version}-openshift.yaml`: the manifests, for `kubectl apply`\n\
         - `dnsflow-{version}-linux-*.tar.gz`: the static program, which is kubectl's plugin, too\n\
         - `*.cdx.json`: the content of each program (CycloneDX), `*.debug`: its line tables\n\
         - `dnsflow-{version}.provenance.json`: the build (in-toto, SLSA), `SHA256SUMS`\n",
        without_links(changes),
        architectures.join(", "),
    );
    for part in missing {
        notes += &format!("- Not in this release: {part}\n");
    }
    notes
}

/// Links into the checkout lead nowhere from a page of notes: the file stands behind the text instead.
fn without_links(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once("](") {
        let Some((target, after)) = link.split_once(')') else {
            break;
        };
        let Some((ahead, label)) = before.rsplit_once('[') else {
            break;
        };
        out += ahead;
        out += &match target {
            _ if target.starts_with("https://") => format!("[{label}]({target})"),
            _ if target == label => label.to_owned(),
            _ => format!("{label} ({target})"),
        };
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGELOG: &str = "# Changelog\n\n## Unreleased\n\n- Later.\n\n## 1.2.3 - 2026-11-27\n\n\
                             - See [rules](docs/rules.md), [README.md](README.md), [k](https://k.example).\n\n\
                             ## 1.2.2 - 2026-11-01\n\n- Earlier.\n";

    #[test]
    fn a_section_ends_where_the_next_one_begins() {
        let found = section(CHANGELOG, "1.2.3").expect("a section");
        assert!(found.has_date());
        assert!(found.text.starts_with("- See") && found.text.ends_with("example)."));
        assert!(section(CHANGELOG, "1.2").is_none());
        let soon = section("\n## 1.2.3 - unreleased\n", "1.2.3").expect("a section");
        assert!(!soon.has_date());
    }

    #[test]
    fn links_into_the_checkout_become_text() {
        let missing = ["arm64".to_owned()];
        let notes = text(
            CHANGELOG,
            "1.2.3",
            "0123abcd",
            "r/dnsflow@sha256:00",
            &[],
            &missing,
        );
        let line = "- See rules (docs/rules.md), README.md, [k](https://k.example).\n";
        assert!(notes.contains(line), "{notes}");
        assert!(
            !notes.contains("Later") && !notes.contains("Earlier"),
            "{notes}"
        );
        assert!(notes.contains("Not in this release: arm64"), "{notes}");
    }
}
