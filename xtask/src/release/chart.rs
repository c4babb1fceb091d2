//! The chart as a package, as `helm package` makes it, but with the same bytes each time.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use crate::{
    image::Source,
    tarball::{self, Tarball},
};

/// The lines of `values.yaml` that name the image.
const REGISTRY: &str = "\n  registry: \"\"\n";
const REPOSITORY: &str = "\n  repository: dnsflow\n";

/// The files of the chart that are for its authors: the lines of `.helmignore` that name one of them.
const NOT_PACKED: [&str; 2] = [".helmignore", "README.md.gotmpl"];

/// The package of the chart in this directory, whose values name this image, and with this license.
pub(super) fn package(
    chart: &Path,
    license: &Path,
    image: &str,
    source: &Source,
) -> Result<Vec<u8>> {
    let name = chart.file_name().and_then(|name| name.to_str());
    let name = name.context("a chart without a name")?;
    let mut out = Tarball::new(Vec::new(), source.seconds());
    let mut packed = Vec::new();
    for file in files(chart)? {
        let inside = file.strip_prefix(chart)?.display().to_string();
        packed.push((file, inside));
    }
    packed.push((license.to_owned(), "LICENSE".to_owned()));
    for (file, inside) in packed {
        let content = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let content = match &*inside {
            "values.yaml" => with_image(&String::from_utf8(content)?, image)?.into_bytes(),
            _ => content,
        };
        out.file(&format!("{name}/{inside}"), 0o644, &content)?;
    }
    tarball::gzip(&out.finish()?)
}

fn with_image(values: &str, image: &str) -> Result<String> {
    for line in [REGISTRY, REPOSITORY] {
        ensure!(
            values.matches(line).count() == 1,
            "values.yaml has no line `{}`",
            line.trim()
        );
    }
    let (registry, repository) = image
        .split_once('/')
        .context("an image without a registry")?;
    let values = values.replace(REGISTRY, &format!("\n  registry: {registry}\n"));
    Ok(values.replace(REPOSITORY, &format!("\n  repository: {repository}\n")))
}

/// The files below a directory, but for those that `.helmignore` keeps out. Helm wants Chart.yaml first
/// (`LoadArchiveFiles` finds the chart's name by any file, older versions by the first).
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if NOT_PACKED.iter().any(|name| path.ends_with(name)) {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    found.sort_by_key(|path| (!path.ends_with("Chart.yaml"), path.clone()));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use dnsflow_tests::{
        go,
        process::run,
        support::{not_run, this_test, workspace},
    };
    use jiff::Timestamp;

    use super::*;

    #[test]
    fn helm_reads_the_package_and_its_image_is_the_releases() {
        let helm = match go::HELM.ensure(&|text| eprintln!("{text}")) {
            Ok(helm) => helm,
            Err(error) => return not_run(&this_test(), format!("{error:#}")),
        };
        let source = Source {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: None,
            time: Timestamp::UNIX_EPOCH,
        };
        let workspace = workspace().expect("a workspace");
        let chart = workspace.join("deploy/helm/dnsflow");
        let image = "registry.example/team/dnsflow";
        let pack = || package(&chart, &workspace.join("LICENSE"), image, &source);
        let packed = pack().expect("a package");
        assert!(packed == pack().expect("a package"), "the bytes differ");
        let ignored = fs::read_to_string(chart.join(".helmignore")).expect("a text");
        for name in NOT_PACKED {
            assert!(ignored.lines().any(|line| line == name), "{name}");
        }

        let file = std::env::temp_dir().join(format!("dnsflow-chart-{}.tgz", std::process::id()));
        fs::write(&file, packed).expect("written");
        let mut template = Command::new(helm);
        template
            .args(["template", "dnsflow", go::KUBE_VERSION])
            .arg(&file);
        let rendered = run(&mut template);
        let names = run(Command::new("tar").arg("--list").arg("--file").arg(&file));
        fs::remove_file(&file).expect("removed");
        let rendered = rendered.expect("Helm reads it");
        let names = names.expect("tar reads it");
        for name in [
            "LICENSE",
            "README.md",
            "values.schema.json",
            "monitoring/rules.yaml",
        ] {
            let line = format!("dnsflow/{name}");
            assert!(names.lines().any(|found| found == line), "{names}");
        }
        for name in NOT_PACKED {
            assert!(!names.contains(name), "{names}");
        }
        let image = format!(
            "image: \"registry.example/team/dnsflow:{}\"\n",
            source.version
        );
        // The agent's, those of the two hooks.
        assert_eq!(rendered.matches(&image).count(), 3, "{rendered}");
    }
}
