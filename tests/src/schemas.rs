//! JSON schemas of Kubernetes' objects, of a package of PyPI that pip fetches once below `target/`.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    go::lock,
    process::run,
    support::{LEFT_TO_OTHERS, root_directory},
};

/// The package.
const PACKAGE: &str = "kubernetes-validate==1.37.0";
/// Those of one version in it, which allow no further fields.
const STRICT: &str = "kubernetes_validate/kubernetes-json-schema/v1.36.0-local-strict";

/// The directory with a file for each kind, as `job-batch-v1.json`. Fetches what is not there yet.
///
/// # Errors
///
/// Without pip or its index.
pub fn ensure(say: &dyn Fn(&str)) -> Result<PathBuf> {
    let home = root_directory("")?.with_file_name("kubernetes-schemas");
    fs::create_dir_all(&home)?;
    let _lock = lock(&home.join("lock"))?;
    let schemas = home.join("schemas");
    if schemas.is_dir() {
        return Ok(schemas);
    }
    say(&format!("fetching {PACKAGE}"));
    let [package, new] = ["package", "new"].map(|name| home.join(name));
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]);
    let fetched = run(pip.arg(&package).arg(PACKAGE));
    fetched.with_context(|| format!("{PACKAGE} takes pip and its index; {LEFT_TO_OTHERS}"))?;
    fs::create_dir_all(&new)?;
    for file in fs::read_dir(package.join(STRICT))? {
        let file = file?.path();
        // References are relative to the identity, below which no server has the definitions.
        let text = fs::read_to_string(&file)?
            .replace("\"$id\": ", "\"x-id\": ")
            .replace("\"/api/_definitions.json#", "\"_definitions.json#");
        fs::write(new.join(file.file_name().context("a name")?), text)?;
    }
    fs::remove_dir_all(package)?;
    fs::rename(new, &schemas)?;
    Ok(schemas)
}
