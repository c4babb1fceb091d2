//! The floors of the core, of what asks and of the agent: a module imports only what stands before it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use dnsflow_tests::support;
use syn::{
    Attribute, Item, UseTree,
    visit::{self, Visit},
};

/// The modules of a crate from the ground up, by floor. A module imports only modules that stand before it, so that no
/// circle can come.
type Floors = &'static [(&'static str, &'static [&'static str])];

const CORE: Floors = &[
    (
        "tools",
        &[
            "time",
            "deadline",
            "counter_vec",
            "recent",
            "rate",
            "shares",
        ],
    ),
    (
        "values",
        &[
            "ids",
            "name",
            "flow",
            "resolver",
            "verdict",
            "connection",
            "firewall",
            "limits",
            "ovn",
        ],
    ),
    (
        "inputs and outputs",
        &["counters", "input", "report", "output"],
    ),
    ("DNS", &["dns", "fragments", "tcp", "answers"]),
    ("pods", &["budget", "filter", "ports", "recording"]),
    (
        "policy",
        &["pipeline", "rules", "profile", "plan", "refused", "policy"],
    ),
    ("how an address is enforced", &["installed"]),
    ("what pods were told", &["snapshot", "cache"]),
    ("one step over ports, policy and cache", &["access"]),
    (
        "the switch",
        &["blocked", "denied", "hold", "revalidation", "switch"],
    ),
    (
        "what people ask",
        &["attempts", "history", "trial", "sources", "view"],
    ),
    ("the engine", &["engine"]),
];

const ASKING: Floors = &[
    (
        "tools",
        &["exit", "moment", "node", "output", "large_table"],
    ),
    (
        "resources of Kubernetes",
        &["egress_firewall", "convert", "manifests", "dns_service"],
    ),
    ("the command line", &["options"]),
    (
        "questions and answers",
        &["client", "event", "history", "northbound"],
    ),
    ("conclusions", &["learned", "trial", "pruned"]),
    ("for people", &["print", "reported", "page"]),
    ("the subcommands", &["commands", "kubectl"]),
];

const AGENT: Floors = &[
    (
        "tools",
        &["causes", "clock", "memory", "netlink", "rights", "wait"],
    ),
    ("protocols", &["openflow", "k8s"]),
    (
        "the node and the cluster",
        &[
            "databases",
            "vswitch_db",
            "ovn_db",
            "vswitchd",
            "conntrack",
            "capture",
            "manifests",
            "state",
            "one_agent",
        ],
    ),
    ("the log", &["logging"]),
    ("how addresses are opened", &["verdict"]),
    (
        "answering",
        &[
            "inquiries",
            "journal",
            "denials",
            "metrics",
            "api",
            "control",
        ],
    ),
    ("the agent", &["agent"]),
    (
        "other subcommands",
        &["check", "bundle", "cleanup", "replay"],
    ),
];

/// The modules that the files of a module import, seen from the root of the crate.
#[derive(Default)]
struct Imports {
    /// How many modules the present code is in.
    depth: usize,
    found: BTreeSet<String>,
}

impl Imports {
    /// Notes the module that a path leads to, if it begins at the root of the crate.
    fn note(&mut self, path: &[String]) {
        let up = path.iter().take_while(|part| *part == "super").count();
        let from_root = match path.first().map(String::as_str) {
            Some("crate") => path.get(1),
            Some("super") if up == self.depth => path.get(up),
            _ => None,
        };
        self.found.extend(from_root.cloned());
    }

    fn note_tree(&mut self, before: &mut Vec<String>, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.note_tree(before, &path.tree);
                before.pop();
            }
            UseTree::Name(name) => {
                before.push(name.ident.to_string());
                self.note(before);
                before.pop();
            }
            UseTree::Rename(rename) => {
                before.push(rename.ident.to_string());
                self.note(before);
                before.pop();
            }
            UseTree::Glob(_) => self.note(before),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.note_tree(before, tree);
                }
            }
        }
    }
}

fn is_of_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let meta = attribute.meta.require_list();
        let is_test = |tokens: String| tokens.starts_with("test") || tokens.contains("(test");
        attribute.path().is_ident("cfg") && meta.is_ok_and(|meta| is_test(meta.tokens.to_string()))
    })
}

impl<'ast> Visit<'ast> for Imports {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, is_module) = match item {
            Item::Fn(item) => (&item.attrs, false),
            Item::Impl(item) => (&item.attrs, false),
            Item::Mod(item) => (&item.attrs, true),
            Item::Use(item) => (&item.attrs, false),
            _ => return visit::visit_item(self, item),
        };
        if !is_of_tests(attributes) {
            self.depth += usize::from(is_module);
            visit::visit_item(self, item);
            self.depth -= usize::from(is_module);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.note_tree(&mut Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts = path.segments.iter().map(|part| part.ident.to_string());
        self.note(&parts.collect::<Vec<_>>());
        visit::visit_path(self, path);
    }
}

/// The files of a crate by module, but for those of tests.
fn files(directory: &Path) -> BTreeMap<String, Vec<(usize, PathBuf)>> {
    let mut files: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for file in super::tidy::rust_files(directory) {
        let place = file.strip_prefix(directory).expect("a file in it");
        let place = place.with_extension("");
        let mut parts: Vec<_> = place.iter().filter_map(|part| part.to_str()).collect();
        parts.pop_if(|last| *last == "mod");
        let is_of_tests = parts
            .iter()
            .any(|part| ["tests", "testing", "fixtures"].contains(part));
        if parts != ["lib"] && parts != ["main"] && !is_of_tests {
            let of_module = files.entry(parts[0].to_owned()).or_default();
            of_module.push((parts.len(), file));
        }
    }
    files
}

/// The imports that lead upward, in words.
fn upward_imports(directory: &str, floors: Floors) -> Vec<String> {
    let workspace = support::workspace().expect("a workspace");
    let files = files(&workspace.join(directory));
    let order: Vec<&str> = floors
        .iter()
        .flat_map(|(_, modules)| *modules)
        .copied()
        .collect();
    let known: BTreeSet<&str> = order.iter().copied().collect();
    let there: BTreeSet<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(there, known, "each module has a place");
    let mut wrong = Vec::new();
    for (place, module) in order.iter().enumerate() {
        let mut imports = Imports::default();
        for (depth, file) in &files[*module] {
            let text = fs::read_to_string(file).expect("a text");
            imports.depth = *depth;
            imports.visit_file(&syn::parse_file(&text).expect("it parses"));
        }
        let imported = imports.found.iter().map(String::as_str);
        let upward = imported.filter(|other| order[place + 1..].contains(other));
        wrong.extend(upward.map(|other| format!("{module} imports {other}")));
    }
    wrong
}

#[test]
fn a_module_of_the_core_imports_only_what_stands_before_it() {
    let wrong = upward_imports("dnsflow-agent/core/src", CORE);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_module_of_what_asks_imports_only_what_stands_before_it() {
    let wrong = upward_imports("dnsflow-agent/asking/src", ASKING);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_module_of_the_agent_imports_only_what_stands_before_it() {
    let wrong = upward_imports("dnsflow-agent/src", AGENT);
    assert!(wrong.is_empty(), "{wrong:#?}");
}
