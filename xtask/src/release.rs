//! `cargo xtask release`: the files of a release, in one directory.
//!
//! It pushes nothing and signs nothing: `publish.sh`, which it writes, does. The same commit gives the same bytes, as far
//! as compiler and C library are the same.

mod chart;
mod krew;
mod manifests;
mod matrix;
mod notes;
mod provenance;
mod refusals;
mod settings;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dnsflow_tests::support::{root_directory, workspace};
use serde_json::Value;

use self::{manifests::Kustomize, settings::Settings};
use crate::{
    image::{self, Part, Source, Target},
    interrupt,
    tarball::{self, Tarball, sha256},
};

/// The targets of a release.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];
/// The directories of `deploy/` that become a file, and how its name ends.
const MANIFESTS: [(&str, &str); 2] = [("base", ""), ("overlays/openshift", "-openshift")];
/// The file of a dry run, and of a release that is not finished. `publish.sh` refuses both.
const NOT_A_RELEASE: &str = "NOT-A-RELEASE.txt";
/// `publish.sh`, which asks for its variables.
const PUBLISH: &str = include_str!("release/publish.sh");
/// The line of `publish.sh` in whose place the variables are set.
const VARIABLES: &str = "\n: \"${VERSION:?}\" \"${IMAGE:?}\" \"${DIGEST:?}\"\n";

/// Makes the files of a release.
#[derive(Debug, Args)]
pub(crate) struct ReleaseCommand {
    /// The directory of the files; it must not be there yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Make them although the checkout is no release: NOT-A-RELEASE.txt has the reasons
    #[arg(long)]
    dry_run: bool,
}

/// Makes the files.
pub(crate) fn run(command: &ReleaseCommand) -> Result<()> {
    let ReleaseCommand { out, dry_run } = command;
    let workspace = workspace()?;
    let source = Source::of(&workspace)?;
    let settings = Settings::of(&workspace)?;
    let kustomize = Kustomize::find()?;
    ensure!(
        !out.exists(),
        "{} is there already: a release gets a new directory",
        out.display()
    );
    let mut refusals = refusals::of(&workspace, &source)?;
    let (targets, missing) = targets()?;
    refusals.extend(missing.iter().cloned());
    for refusal in &refusals {
        eprintln!("no release: {refusal}");
    }
    ensure!(!targets.is_empty(), "no program can be built here");
    ensure!(
        *dry_run || refusals.is_empty(),
        "this checkout is no release; nothing was made (--dry-run makes the files all the same)"
    );
    fs::create_dir(out).with_context(|| format!("cannot create {}", out.display()))?;
    let release = Release {
        out: fs::canonicalize(out)?,
        workspace,
        source,
        settings,
        missing,
    };
    release.write(
        NOT_A_RELEASE,
        "The files are not complete: the command has not ended.\n",
    )?;
    release.make(kustomize, &targets)?;
    if refusals.is_empty() {
        fs::remove_file(out.join(NOT_A_RELEASE))?;
    } else {
        let reasons: String = refusals.iter().map(|one| format!("- {one}\n")).collect();
        let text = format!("A dry run: do not publish these files.\n\n{reasons}");
        release.write(NOT_A_RELEASE, text)?;
        println!("a dry run: {}", out.join(NOT_A_RELEASE).display());
    }
    println!("the files of {} are in {}", release.tag(), out.display());
    Ok(())
}

/// The targets that can be built here, and why the others cannot.
fn targets() -> Result<(Vec<Target>, Vec<String>)> {
    let mut possible = Vec::new();
    let mut missing = Vec::new();
    for triple in TARGETS {
        let target = Target::named(Some(triple))?;
        match image::ensure_possible(&target) {
            Ok(()) => possible.push(target),
            Err(error) => missing.push(format!("{}: {error:#}", target.architecture)),
        }
        interrupt::check()?;
    }
    Ok((possible, missing))
}

/// A release that is being made.
struct Release {
    out: PathBuf,
    workspace: PathBuf,
    source: Source,
    settings: Settings,
    /// The architectures that cannot be built here, with the reasons.
    missing: Vec<String>,
}

impl Release {
    fn version(&self) -> &str {
        &self.source.version
    }

    fn tag(&self) -> String {
        format!("v{}", self.version())
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<()> {
        let file = self.out.join(name);
        fs::write(&file, content).with_context(|| format!("cannot write {}", file.display()))
    }

    fn make(&self, kustomize: Kustomize, targets: &[Target]) -> Result<()> {
        let version = self.version();
        let tag = format!("{}:{version}", self.settings.image);
        let file = self.out.join(format!("dnsflow-{version}.tar"));
        let archive = image::write_archive(&file, &tag, targets)?;
        let image = format!("{}@{}", self.settings.image, archive.digest);

        let chart = self.workspace.join("deploy/helm/dnsflow");
        let license = self.workspace.join("LICENSE");
        let package = chart::package(&chart, &license, &self.settings.image, &self.source)?;
        self.write(&format!("dnsflow-{version}.tgz"), package)?;
        let home = root_directory("")?.with_file_name("release");
        for (directory, ending) in MANIFESTS {
            let text = kustomize.render(
                &self.workspace,
                &home,
                directory,
                &self.settings.image,
                &archive.digest,
            )?;
            self.write(&format!("dnsflow-{version}{ending}.yaml"), text)?;
        }
        let mut downloads = Vec::new();
        for part in &archive.parts {
            downloads.push(self.write_program(part)?);
        }
        let krew = krew::manifest(&self.settings, version, &downloads);
        self.write_json("dnsflow.yaml", &krew)?;

        let commit = self.source.commit.as_deref().unwrap_or("unknown");
        let changelog = fs::read_to_string(self.workspace.join("CHANGELOG.md"))?;
        let notes = notes::text(
            &changelog,
            version,
            commit,
            &image,
            &archive.parts,
            &self.missing,
        );
        self.write("RELEASE-NOTES.md", notes)?;
        let variables = format!(
            "\nVERSION={version} IMAGE={} DIGEST={}\n",
            self.settings.image, archive.digest
        );
        self.write("publish.sh", PUBLISH.replace(VARIABLES, &variables))?;
        self.write_provenance(&archive)?;
        self.write_checksums()
    }

    /// The program as people download it.
    fn write_program(&self, part: &Part) -> Result<krew::Download> {
        let mut out = Tarball::new(Vec::new(), self.source.seconds());
        out.file("dnsflow", 0o755, &part.program)?;
        out.file("LICENSE", 0o644, &fs::read(self.workspace.join("LICENSE"))?)?;
        let content = tarball::gzip(&out.finish()?)?;
        let name = format!(
            "dnsflow-{}-linux-{}.tar.gz",
            self.version(),
            part.architecture
        );
        self.write(&name, &content)?;
        Ok((part.architecture, name, sha256(&content)))
    }

    fn write_json(&self, name: &str, value: &Value) -> Result<()> {
        self.write(name, serde_json::to_string_pretty(value)? + "\n")
    }

    fn write_provenance(&self, archive: &image::Archive) -> Result<()> {
        let mut subjects = self.checksums()?;
        let Some(digest) = archive.digest.strip_prefix("sha256:") else {
            bail!("{}: not a SHA-256", archive.digest);
        };
        subjects.push((self.settings.image.clone(), digest.to_owned()));
        let architectures: Vec<&str> = archive.parts.iter().map(|part| part.architecture).collect();
        let statement = provenance::statement(
            &self.workspace,
            &self.settings,
            &self.source,
            &architectures,
            &subjects,
        )?;
        self.write_json(
            &format!("dnsflow-{}.provenance.json", self.version()),
            &statement,
        )
    }

    fn write_checksums(&self) -> Result<()> {
        let lines = self.checksums()?.into_iter();
        let lines: String = lines
            .map(|(name, sha256)| format!("{sha256}  {name}\n"))
            .collect();
        print!("{lines}");
        self.write("SHA256SUMS", lines)
    }

    /// The files of the release that are there, with their SHA-256, by name.
    fn checksums(&self) -> Result<Vec<provenance::Subject>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.out)? {
            let entry = entry?;
            if entry.file_name() == NOT_A_RELEASE {
                continue;
            }
            let content = fs::read(entry.path())?;
            found.push((
                entry.file_name().to_string_lossy().into_owned(),
                sha256(&content),
            ));
        }
        found.sort();
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_that_publishes_gets_its_variables() {
        assert_eq!(PUBLISH.matches(VARIABLES).count(), 1);
    }
}
