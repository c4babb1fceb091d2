//! An API server for custom resources: upstream's own, built once by Go below `target/`, and the etcd of a Debian
//! release.

use std::path::PathBuf;

use anyhow::Result;

use crate::{
    go::{self, Program},
    root::{Contents, Root},
    support::root_directory,
};

/// The server, of Kubernetes 1.36.
const SERVER: Program = Program {
    directory: "apiserver",
    package: "k8s.io/apiextensions-apiserver@v0.36.2",
    name: "apiextensions-apiserver",
};

/// The etcd of this Debian release, and the server. Fetches and builds what is not there yet.
pub fn ensure(suite: &str, say: &dyn Fn(&str)) -> Result<(Root, PathBuf)> {
    let contents = Contents {
        suite,
        packages: &["etcd-server"],
    };
    let directory = root_directory(&format!("etcd-{suite}"))?;
    let lock = root_directory("")?.with_file_name(format!("etcd-{suite}.lock"));
    let _lock = go::lock(&lock)?;
    let etcd = Root::ensure(&directory, contents, say)?;
    Ok((etcd, SERVER.ensure(say)?))
}
