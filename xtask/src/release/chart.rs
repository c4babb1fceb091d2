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

/// The line of `values.yaml` that names the image.
const REPOSITORY: &str = "\n  repository: dnsflow\n";

/// The package of the chart in this directory, whose values name this image.
pub(super) fn package(chart: &Path, image: &str, source: &Source) -> Result<Vec<u8>> {
    let name = chart.file_name().and_then(|name| name.to_str());
    let name = name.context("a chart without a name")?;
    let mut out = Tarball::new(Vec::new(), source.seconds());
    for file in files(chart)? {
        let content = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let inside = file.strip_prefix(chart)?.display().to_string();
        let content = match &*inside {
            "values.yaml" => with_image(&String::from_utf8(content)?, image)?.into_bytes(),
            _ => content,
        };
        out.file(&format!("{name}/{inside}"), 0o644, &content)?;
    }
    tarball::gzip(&out.finish()?)
}

fn with_image(values: &str, image: &str) -> Result<String> {
    ensure!(
        values.matches(REPOSITORY).count() == 1,
        "values.yaml has no line `{}`",
        REPOSITORY.trim()
    );
    Ok(values.replace(REPOSITORY, &format!("\n  repository: {image}\n")))
}

/// The files below a directory. Helm wants Chart.yaml first (`LoadArchiveFiles` finds the chart's name by any file, older
/// versions by the first).
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
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
        let chart = workspace()
            .expect("a workspace")
            .join("deploy/helm/dnsflow");
        let packed = package(&chart, "registry.example/team/dnsflow", &source).expect("a package");
        let again = package(&chart, "registry.example/team/dnsflow", &source).expect("a package");
        assert!(packed == again, "the bytes differ");

        let file = std::env::temp_dir().join(format!("dnsflow-chart-{}.tgz", std::process::id()));
        fs::write(&file, packed).expect("written");
        let mut template = Command::new(helm);
        template.args(["template", "dnsflow"]).arg(&file);
        let rendered = run(&mut template);
        fs::remove_file(&file).expect("removed");
        let rendered = rendered.expect("Helm reads it");
        let image = format!("image: registry.example/team/dnsflow:{}\n", source.version);
        // The agent's, those of the two hooks.
        assert_eq!(rendered.matches(&image).count(), 3, "{rendered}");
    }
}
