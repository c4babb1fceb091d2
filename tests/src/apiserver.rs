//! An API server for custom resources: upstream's own, built once by Go below `target/`, and the etcd of a Debian
//! release.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

use crate::{
    process::run,
    root::{Contents, Root},
    support::root_directory,
};

/// The module whose main package is the server, of Kubernetes 1.36.
const MODULE: &str = "k8s.io/apiextensions-apiserver@v0.36.2";
const PROGRAM: &str = "apiextensions-apiserver";

/// The etcd of this Debian release, and the server. Fetches and builds what is not there yet.
pub fn ensure(suite: &str, say: &dyn Fn(&str)) -> Result<(Root, PathBuf)> {
    let home = root_directory("")?.with_file_name("apiserver");
    fs::create_dir_all(&home)?;
    // Tests run side by side; one of them does the work.
    let lock = File::create(home.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let contents = Contents {
        suite,
        packages: &["etcd-server"],
    };
    let directory = root_directory(&format!("etcd-{suite}"))?;
    let etcd = Root::ensure(&directory, contents, say)?;
    let server = home.join("bin").join(PROGRAM);
    if !server.is_file() {
        say("building the API server for custom resources (a few minutes, once)");
        let mut go = Command::new("go");
        go.args(["install", MODULE])
            .env("GOBIN", home.join("bin"))
            .current_dir(&home);
        run(&mut go).context("upstream's API server is built by Go 1.26")?;
    }
    Ok((etcd, server))
}
