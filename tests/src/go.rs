//! Programs of the tests that Go builds once below `target/`, of a module of its proxy.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

use crate::{process::run, support::root_directory};

/// Helm 3.
pub const HELM: Program = Program {
    directory: "helm",
    package: "helm.sh/helm/v3/cmd/helm@v3.22.0",
    name: "helm",
};

/// The cluster for which Helm renders without asking one. Helm 3 as Go builds it takes 1.20
/// (`kubeVersionMajor` in `pkg/chartutil/capabilities.go`).
pub const KUBE_VERSION: &str = "--kube-version=1.36.0";

/// Helm 4.
pub const HELM_4: Program = Program {
    directory: "helm-4",
    package: "helm.sh/helm/v4/cmd/helm@v4.3.1",
    name: "helm",
};

/// It writes the README of a chart.
pub const HELM_DOCS: Program = Program {
    directory: "helm-docs",
    package: "github.com/norwoodj/helm-docs/cmd/helm-docs@v1.14.2",
    name: "helm-docs",
};

/// It compares objects with the schemas of [`schemas`](crate::schemas).
pub const KUBECONFORM: Program = Program {
    directory: "kubeconform",
    package: "github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0",
    name: "kubeconform",
};

/// A program.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Its directory below `target/`.
    pub directory: &'static str,
    /// Its main package, with the version.
    pub package: &'static str,
    /// Its name, as Go gives it.
    pub name: &'static str,
}

impl Program {
    /// The file. Fetches and builds what is not there yet.
    ///
    /// # Errors
    ///
    /// Without Go 1.26 or its proxy.
    pub fn ensure(&self, say: &dyn Fn(&str)) -> Result<PathBuf> {
        let home = root_directory("")?.with_file_name(self.directory);
        fs::create_dir_all(&home)?;
        let _lock = lock(&home.join("lock"))?;
        let program = home.join("bin").join(self.name);
        if !program.is_file() {
            say(&format!("building {} (a few minutes, once)", self.package));
            let mut go = Command::new("go");
            go.args(["install", self.package])
                .env("GOBIN", home.join("bin"))
                .current_dir(&home);
            run(&mut go).with_context(|| format!("{} is built by Go 1.26", self.package))?;
        }
        Ok(program)
    }
}

/// The lock of a file, as long as the value is there. Tests run side by side, and one of them does the work.
pub(crate) fn lock(file: &Path) -> Result<File> {
    let lock = File::create(file)?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}
