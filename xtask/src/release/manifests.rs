//! The manifests as one file, with the image by its digest.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};
use dnsflow_tests::process::run;

use crate::unavailable::Unavailable;

/// What builds a kustomization.
const BUILDERS: [[&str; 2]; 2] = [["kubectl", "kustomize"], ["kustomize", "build"]];

/// Who builds here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kustomize([&'static str; 2]);

impl Kustomize {
    /// The first program that works.
    pub(super) fn find() -> Result<Self, Unavailable> {
        let works = |[program, verb]: &[&str; 2]| {
            let mut help = Command::new(program);
            run(help.args([verb, "--help"])).is_ok()
        };
        let found = BUILDERS.into_iter().find(works);
        let missing = "the manifests take kubectl or kustomize".to_owned();
        found.map(Self).ok_or(Unavailable(missing))
    }

    /// The objects of a directory in `deploy/`, with this image. `home` is a directory for files of its own.
    pub(super) fn render(
        self,
        workspace: &Path,
        home: &Path,
        directory: &str,
        image: &str,
        digest: &str,
    ) -> Result<String> {
        fs::create_dir_all(home).with_context(|| format!("cannot create {}", home.display()))?;
        let home = fs::canonicalize(home)?;
        let base = fs::canonicalize(workspace.join("deploy").join(directory))?;
        // kustomize takes directories by relative paths only.
        let up = "../".repeat(home.components().count() - 1);
        let base = base.strip_prefix("/")?;
        let kustomization = format!(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n  - {up}{}\n\
             images:\n  - name: dnsflow\n    newName: {image}\n    digest: {digest}\n",
            base.display()
        );
        fs::write(home.join("kustomization.yaml"), kustomization)?;
        let Self([program, verb]) = self;
        run(Command::new(program).arg(verb).arg(home))
    }
}

#[cfg(test)]
mod tests {
    use dnsflow_tests::support::{not_run, this_test, workspace};

    use super::*;

    #[test]
    fn the_image_is_named_by_its_digest() {
        let Ok(kustomize) = Kustomize::find() else {
            return not_run(&this_test(), "neither kubectl nor kustomize is here");
        };
        let home = std::env::temp_dir().join(format!("dnsflow-manifests-{}", std::process::id()));
        let digest = format!("sha256:{}", "0a".repeat(32));
        let image = "registry.example/dnsflow";
        for directory in ["base", "overlays/openshift"] {
            let workspace = workspace().expect("a workspace");
            let text = kustomize.render(&workspace, &home, directory, image, &digest);
            let text = text.expect("kustomize works");
            let line = format!("image: {image}@{digest}\n");
            assert_eq!(text.matches(&line).count(), 1, "{directory}: {text}");
        }
        fs::remove_dir_all(home).expect("it was made");
    }
}
