//! What is in the program, as a CycloneDX 1.5 document: the crates that are linked into the agent
//! and into its BPF object, Rust's standard library, and the C library.
//!
//! Made from `cargo metadata` and the lock files. Crates that only build or test are left out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::process::run;
use serde_json::{Value, json};

use super::{compiler::Compiler, program::Target, source::Source};

/// The workspaces whose crates are in the program: their directory, their crate, and whether it is
/// compiled for the image's target (the other one is for the BPF machine).
const PARTS: &[(&str, &str, bool)] = &[
    ("", "dnsflow-agent", true),
    ("dnsflow-ebpf", "dnsflow-ebpf", false),
];

/// The document, in JSON.
pub(super) fn document(
    workspace: &Path,
    target: &Target,
    compiler: &Compiler,
    source: &Source,
) -> Result<String> {
    let mut components = BTreeMap::new();
    let mut dependencies = BTreeMap::new();
    let mut linked = BTreeSet::new();
    for &(directory, name, for_target) in PARTS {
        let directory = workspace.join(directory);
        let mut metadata = Command::new("cargo");
        metadata
            .args(["metadata", "--format-version", "1", "--locked"])
            .current_dir(&directory);
        if for_target {
            metadata.args(["--filter-platform", &target.triple]);
        }
        let metadata: Value = serde_json::from_str(&run(&mut metadata)?)?;
        let checksums = checksums(&fs::read_to_string(directory.join("Cargo.lock"))?);
        let crates = Crates::new(&metadata)?;
        let root = crates.workspace_member(name)?;
        linked.insert(crates.purl(root)?);
        for id in crates.reached(root) {
            let purl = crates.purl(id)?;
            components.insert(purl.clone(), crates.component(id, &checksums)?);
            let on: BTreeSet<String> = crates
                .linked(id)
                .map(|id| crates.purl(id))
                .collect::<Result<_>>()?;
            dependencies.insert(purl, on);
        }
    }
    for (purl, component) in [rust_library(compiler)?, c_library(target)] {
        linked.insert(purl.clone());
        components.insert(purl.clone(), component);
        dependencies.insert(purl, BTreeSet::new());
    }

    let program = format!("pkg:generic/dnsflow@{}", source.version);
    dependencies.insert(program.clone(), linked);
    let mut properties = vec![json!({"name": "target", "value": target.triple})];
    if let Some(commit) = &source.commit {
        properties.push(json!({"name": "commit", "value": commit}));
    }
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": source.time.to_string(),
            "component": {
                "type": "application",
                "bom-ref": program,
                "name": "dnsflow",
                "version": source.version,
                "purl": program,
                "licenses": [{"expression": "Apache-2.0"}],
            },
            "properties": properties,
        },
        "components": components.into_values().collect::<Vec<Value>>(),
        "dependencies": dependencies
            .into_iter()
            .map(|(of, on)| json!({"ref": of, "dependsOn": on}))
            .collect::<Vec<Value>>(),
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// The packages of a `cargo metadata`, and what each of them is linked with.
struct Crates<'a> {
    packages: BTreeMap<&'a str, &'a Value>,
    linked: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Crates<'a> {
    fn new(metadata: &'a Value) -> Result<Self> {
        let list = |value: &'a Value| value.as_array().context("not a list");
        let mut packages = BTreeMap::new();
        for package in list(&metadata["packages"])? {
            packages.insert(text(&package["id"])?, package);
        }
        let mut linked = BTreeMap::new();
        for node in list(&metadata["resolve"]["nodes"])? {
            let mut on = Vec::new();
            for dependency in list(&node["deps"])? {
                // No kind is the normal one; the others are `dev` and `build`.
                let kinds = list(&dependency["dep_kinds"])?;
                let id = text(&dependency["pkg"])?;
                let is_macro = packages.get(id).is_some_and(|package| is_macro(package));
                if kinds.iter().any(|kind| kind["kind"].is_null()) && !is_macro {
                    on.push(id);
                }
            }
            linked.insert(text(&node["id"])?, on);
        }
        Ok(Self { packages, linked })
    }

    fn workspace_member(&self, name: &str) -> Result<&'a str> {
        let is_it = |package: &&&Value| package["name"] == name && package["source"].is_null();
        let package = self.packages.values().find(is_it);
        text(&package.with_context(|| format!("no crate {name}"))?["id"])
    }

    fn linked(&self, id: &str) -> impl Iterator<Item = &'a str> {
        self.linked.get(id).into_iter().flatten().copied()
    }

    /// This crate and everything that it is linked with.
    fn reached(&self, root: &'a str) -> BTreeSet<&'a str> {
        let mut reached = BTreeSet::from([root]);
        let mut open = vec![root];
        while let Some(id) = open.pop() {
            open.extend(self.linked(id).filter(|id| reached.insert(id)));
        }
        reached
    }

    fn name_and_version(&self, id: &str) -> Result<(&'a str, &'a str)> {
        let package = self.packages.get(id).with_context(|| format!("no {id}"))?;
        Ok((text(&package["name"])?, text(&package["version"])?))
    }

    /// The crate's package URL (purl-spec, type `cargo`).
    fn purl(&self, id: &str) -> Result<String> {
        let (name, version) = self.name_and_version(id)?;
        Ok(format!("pkg:cargo/{name}@{version}"))
    }

    fn component(&self, id: &str, checksums: &BTreeMap<(String, String), String>) -> Result<Value> {
        let (name, version) = self.name_and_version(id)?;
        let purl = self.purl(id)?;
        let mut component = json!({
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
            "scope": "required",
        });
        if let Some(license) = self.packages[id]["license"].as_str() {
            // Older crates separate licences by a slash, which means `OR` (The Cargo Book).
            let expression = license.replace('/', " OR ");
            component["licenses"] = json!([{"expression": expression}]);
        }
        if let Some(checksum) = checksums.get(&(name.to_owned(), version.to_owned())) {
            component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
        }
        Ok(component)
    }
}

/// Macros run in the compiler; what they write is the crate's that calls them.
fn is_macro(package: &Value) -> bool {
    let kinds = package["targets"].as_array().into_iter().flatten();
    kinds
        .flat_map(|target| target["kind"].as_array().into_iter().flatten())
        .any(|kind| kind == "proc-macro")
}

/// The checksums of a lock file, by name and version. It is written by cargo, a key a line.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    for package in lock.split("[[package]]") {
        let value = |key: &str| {
            let mut lines = package.lines();
            let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""))?;
            Some(value.strip_suffix('"')?.to_owned())
        };
        if let (Some(name), Some(version), Some(checksum)) =
            (value("name"), value("version"), value("checksum"))
        {
            found.insert((name, version), checksum);
        }
    }
    found
}

fn rust_library(compiler: &Compiler) -> Result<(String, Value)> {
    let version = run(Command::new(compiler.rustc()).arg("-vV"))?;
    let field = |name: &str| {
        let mut lines = version.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    };
    let release = field("release").context("rustc -vV names no release")?;
    let purl = format!("pkg:generic/rust-std@{release}");
    let component = json!({
        "type": "library",
        "bom-ref": purl,
        "name": "rust-std",
        "version": release,
        "purl": purl,
        "scope": "required",
        "licenses": [{"expression": "MIT OR Apache-2.0"}],
        "properties": [{"name": "commit", "value": field("commit-hash").unwrap_or("unknown")}],
    });
    Ok((purl, component))
}

/// The C library of this machine's compiler, by Debian's package where there is one.
fn c_library(target: &Target) -> (String, Value) {
    let cross = format!("libc6-dev-{}-cross", target.architecture);
    let debian = [&*cross, "libc6-dev"].into_iter().find_map(|package| {
        let mut query = Command::new("dpkg-query");
        query.args(["--show", "--showformat", "${Version}", package]);
        run(&mut query).ok().filter(|version| !version.is_empty())
    });
    let (purl, version) = match debian {
        Some(version) => {
            let architecture = target.architecture;
            let quoted = version.replace('+', "%2B");
            let purl = format!("pkg:deb/debian/glibc@{quoted}?arch={architecture}");
            (purl, version)
        }
        None => {
            let version = run(Command::new("getconf").arg("GNU_LIBC_VERSION"));
            let version = version.unwrap_or_default();
            let version = version.trim().trim_start_matches("glibc ").to_owned();
            (format!("pkg:generic/glibc@{version}"), version)
        }
    };
    let component = json!({
        "type": "library",
        "bom-ref": purl,
        "name": "glibc",
        "version": version,
        "purl": purl,
        "scope": "required",
        "licenses": [{"expression": "LGPL-2.1-or-later"}],
    });
    (purl, component)
}

fn text(value: &Value) -> Result<&str> {
    let text = value.as_str();
    ensure!(text.is_some(), "not a text: {value}");
    Ok(text.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_read_from_a_lock_file() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\n\n[[package]]\n\
                    name = \"b\"\nversion = \"2.0.0\"\nchecksum = \"00ff\"\n";
        let found = checksums(lock);
        let b = ("b".to_owned(), "2.0.0".to_owned());
        assert_eq!(found, BTreeMap::from([(b, "00ff".to_owned())]));
    }

    #[test]
    fn only_what_is_linked_is_listed() {
        let package = |name: &str, kind: &str| {
            let source = (name != "root").then_some("registry");
            json!({"id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0",
                   "source": source, "targets": [{"kind": [kind]}]})
        };
        let on = |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [package("root", "lib"), package("used", "lib"), package("deep", "lib"),
                         package("tested", "lib"), package("macros", "proc-macro")],
            "resolve": {"nodes": [
                {"id": "root", "deps": [on("used", Value::Null), on("tested", "dev".into()),
                                        on("macros", Value::Null)]},
                {"id": "used", "deps": [on("deep", Value::Null)]},
                {"id": "deep", "deps": []}, {"id": "tested", "deps": []},
                {"id": "macros", "deps": []},
            ]},
        });
        let crates = Crates::new(&metadata).expect("metadata");
        let root = crates.workspace_member("root").expect("a member");
        assert_eq!(crates.reached(root), ["deep", "root", "used"].into());
        let component = crates
            .component("deep", &BTreeMap::new())
            .expect("a component");
        assert_eq!(component["purl"], "pkg:cargo/deep@1.0.0");
        assert_eq!(component["licenses"][0]["expression"], "MIT OR Apache-2.0");
    }
}
