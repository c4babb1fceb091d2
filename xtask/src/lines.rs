//! Counts lines of Rust by crate: those of the product, and those of its tests.
//!
//! A line of the product is any line, also a comment or an empty one, of a file below a crate's `src` and outside what
//! `#[cfg(test)]` or `#[cfg(any(test, …))]` leaves out. The ends of items are found by their indentation, which rustfmt
//! keeps. `xtask` and `tests` are no part of the product.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::support::workspace;

use crate::commit;

/// Crates of the product, each before the crate whose folder contains it.
const PRODUCT: [&str; 6] = [
    "dnsflow-agent/core",
    "dnsflow-agent/asking",
    "dnsflow-agent/ovsdb",
    "dnsflow-agent",
    "dnsflow-common",
    "dnsflow-ebpf",
];

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Count {
    product: usize,
    tests: usize,
}

/// Prints a row for each crate, and their sums.
pub(crate) fn run() -> Result<()> {
    let workspace = workspace()?;
    let mut files = BTreeMap::new();
    for name in commit::git(&["ls-files", "--full-name", ":/*.rs"])?.lines() {
        let text = fs::read_to_string(workspace.join(name));
        files.insert(
            name.into(),
            text.with_context(|| format!("cannot read {name}"))?,
        );
    }
    ensure!(!files.is_empty(), "git knows no file of Rust here");

    let counts = count(&files);
    println!("{:<22} {:>8} {:>8}", "crate", "product", "tests");
    let mut sum = Count::default();
    for (name, Count { product, tests }) in &counts {
        println!("{name:<22} {product:>8} {tests:>8}");
        sum.product += product;
        sum.tests += tests;
    }
    println!("{:<22} {:>8} {:>8}", "all", sum.product, sum.tests);
    Ok(())
}

/// The lines of each crate; of a folder that is no crate of the product, all are tests.
fn count(files: &BTreeMap<PathBuf, String>) -> BTreeMap<String, Count> {
    let test_modules: Vec<_> = files
        .iter()
        .flat_map(|(file, text)| test_modules(file, text))
        .collect();
    let mut counts: BTreeMap<_, Count> = BTreeMap::new();
    for (file, text) in files {
        let krate = PRODUCT.into_iter().find(|krate| file.starts_with(krate));
        let name = krate.or_else(|| file.iter().next()?.to_str());
        let count = counts
            .entry(name.unwrap_or_default().to_owned())
            .or_default();
        let lines = text.lines().count();
        let is_product = krate.is_some_and(|krate| file.starts_with(Path::new(krate).join("src")))
            && !test_modules
                .iter()
                .any(|module| file.starts_with(module) || file == &module.with_extension("rs"));
        let product = if is_product {
            lines - gated(text).iter().map(|item| item.len()).sum::<usize>()
        } else {
            0
        };
        count.product += product;
        count.tests += lines - product;
    }
    counts
}

/// Folders of the modules that this file declares for tests alone. Such a module is that folder, or the file beside it.
fn test_modules(file: &Path, text: &str) -> Vec<PathBuf> {
    let folder = match file.file_stem().and_then(|stem| stem.to_str()) {
        Some("lib" | "main" | "mod") => file.parent().unwrap_or(Path::new("")).to_owned(),
        _ => file.with_extension(""),
    };
    let declared = |item: Vec<&str>| {
        let declaration = item.last()?.trim().strip_suffix(';')?;
        let (_, name) = declaration.split_once("mod ")?;
        Some(folder.join(name))
    };
    gated(text).into_iter().filter_map(declared).collect()
}

/// The items that only tests have, with the attributes in front.
fn gated(text: &str) -> Vec<Vec<&str>> {
    let mut items = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let code = line.trim_start();
        if !code.starts_with("#[cfg(test)]") && !code.starts_with("#[cfg(any(test,") {
            continue;
        }
        let indent = &line[..line.len() - code.len()];
        let mut item = vec![line];
        for line in lines.by_ref() {
            item.push(line);
            let ends = line.strip_prefix(indent).is_some_and(|code| {
                !code.starts_with([' ', '#', '/']) && code.ends_with([';', '}', ','])
            });
            if ends {
                break;
            }
        }
        items.push(item);
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(files: &[(&str, &str)]) -> BTreeMap<String, Count> {
        count(
            &files
                .iter()
                .map(|(name, text)| (name.into(), (*text).to_owned()))
                .collect(),
        )
    }

    #[test]
    fn items_of_tests_are_left_out_of_the_product() {
        let text = "use a;\n\nstruct A {\n    one: u8,\n    #[cfg(test)]\n    /// Two,\n    two: u8,\n}\n\n\
                    #[cfg(test)]\n#[allow(b)]\nfn c(\n    d: u8,\n) -> u8 {\n    d;\n}\nfn e() {}\n";
        let counts = counted(&[("dnsflow-common/src/lib.rs", text)]);
        assert_eq!(
            counts["dnsflow-common"],
            Count {
                product: 7,
                tests: 10
            }
        );
    }

    #[test]
    fn files_of_test_modules_are_tests() {
        let counts = counted(&[
            (
                "dnsflow-agent/core/src/lib.rs",
                "mod a;\n#[cfg(any(test, feature = \"test-util\"))]\npub mod testing;\n",
            ),
            (
                "dnsflow-agent/core/src/a.rs",
                "b;\n#[cfg(test)]\nmod tests;\n",
            ),
            ("dnsflow-agent/core/src/a/tests.rs", "c;\n"),
            ("dnsflow-agent/core/src/a/tests/d.rs", "d;\n"),
            ("dnsflow-agent/core/src/testing.rs", "e;\n"),
            ("dnsflow-agent/core/src/testing/f.rs", "f;\n"),
            ("dnsflow-agent/tests/g.rs", "g;\n"),
            ("xtask/src/main.rs", "h;\n"),
        ]);
        let expected = [
            ("dnsflow-agent", 0, 1),
            ("dnsflow-agent/core", 2, 8),
            ("xtask", 0, 1),
        ];
        let expected =
            expected.map(|(name, product, tests)| (name.to_owned(), Count { product, tests }));
        assert_eq!(counts, BTreeMap::from(expected));
    }
}
