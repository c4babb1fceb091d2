//! The floors of the core, of what asks and of the agent: a module imports only what stands before it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use dnsflow_tests::support;
use syn::{
    Attribute, Item, UseTree,
    visit::{self, Visit},
};

/// The modules of a crate from the ground up. A module imports only modules that stand before it, so that no circle can
/// come. A module stands for all below it that have no place of their own.
type Floors = &'static [&'static str];

const CORE: Floors = &[
    "tools::time",
    "tools::table",
    "tools::deadline",
    "tools::counter_vec",
    "tools::recent",
    "tools::rate",
    "tools::shares",
    "values::ids",
    "values::name",
    "values::flow",
    "values::resolver",
    "values::class",
    "values::verdict",
    "values::connection",
    "values::firewall",
    "values::limits",
    "ovn",
    "io::counters",
    "io::input",
    "io::report",
    "io::output",
    "dns",
    "dns::fragments",
    "dns::tcp",
    "dns::answers",
    "pods::budget",
    "pods::filter",
    "pods::ports",
    "pods::recording",
    "policy::pipeline",
    "policy::rules",
    "policy::plan",
    "policy::refused",
    "policy",
    "installed",
    "cache::journal",
    "cache",
    "access",
    "switch::blocked",
    "switch::deny_counters",
    "switch::hold",
    "switch::revalidation",
    "switch",
    "ask::attempts",
    "ask::history",
    "ask::judge",
    "ask::trial",
    "sources",
    "ask::view",
    "engine",
];

const ASKING: Floors = &[
    "exit",
    "moment",
    "nearest",
    "node",
    "output",
    "large_table",
    "lenient",
    "egress_firewall",
    "convert",
    "manifests",
    "dns_service",
    "event",
    "rollout",
    "options",
    "client",
    "history",
    "northbound",
    "learn",
    "trial",
    "unused",
    "print",
    "report",
    "page",
    "commands",
    "kubectl",
];

const AGENT: Floors = &[
    "causes",
    "clock",
    "memory",
    "netlink",
    "rights",
    "wait",
    "openflow",
    "k8s",
    "databases",
    "vswitch_db",
    "ovn_db",
    "vswitchd",
    "conntrack",
    "capture",
    "node_addresses",
    "manifests",
    "state",
    "one_agent",
    "logging",
    "open_by",
    "inquiries",
    "journal",
    "denied_connections",
    "metrics",
    "api",
    "control",
    "agent",
    "check",
    "bundle",
    "cleanup",
    "replay",
];

/// Folders without code of their own: their files only list modules.
const FOLDERS: &[&str] = &["tools", "values", "io", "pods", "ask"];

/// The place of a module.
fn place(floors: Floors, module: &[String]) -> Option<usize> {
    let path = module.join("::");
    let above = floors.iter().enumerate().filter(|(_, floor)| {
        let below = path.strip_prefix(**floor);
        below.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    });
    let nearest = above.max_by_key(|(_, floor)| floor.len());
    nearest.map(|(place, _)| place)
}

/// The modules that a file imports.
struct Imports {
    floors: Floors,
    /// The module that the present code is in, from the root of the crate.
    module: Vec<String>,
    /// The places of what it imports.
    found: BTreeSet<usize>,
}

impl Imports {
    /// Notes the place of the module that a path leads to.
    fn note(&mut self, path: &[String]) {
        let up = path.iter().take_while(|part| *part == "super").count();
        let from_root = match path.first().map(String::as_str) {
            Some("crate") => path[1..].to_vec(),
            Some("super") if up <= self.module.len() => {
                let kept = self.module.len() - up;
                [&self.module[..kept], &path[up..]].concat()
            }
            _ => return,
        };
        self.found.extend(place(self.floors, &from_root));
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
        let (attributes, module) = match item {
            Item::Fn(item) => (&item.attrs, None),
            Item::Impl(item) => (&item.attrs, None),
            Item::Mod(item) => (&item.attrs, Some(item.ident.to_string())),
            Item::Use(item) => (&item.attrs, None),
            _ => return visit::visit_item(self, item),
        };
        if !is_of_tests(attributes) {
            let depth = self.module.len();
            self.module.extend(module);
            visit::visit_item(self, item);
            self.module.truncate(depth);
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

/// The files of a crate with their modules, but for those of tests and of folders.
fn files(directory: &Path) -> Vec<(Vec<String>, PathBuf)> {
    let files = super::tidy::rust_files(directory).into_iter();
    let with_modules = files.map(|file| {
        let place = file.strip_prefix(directory).expect("a file in it");
        let place = place.with_extension("");
        let parts = place.iter().filter_map(|part| part.to_str());
        let mut parts: Vec<_> = parts.map(str::to_owned).collect();
        parts.pop_if(|last| *last == "mod");
        (parts, file)
    });
    let is_of_tests = |part: &String| ["tests", "testing", "fixtures"].contains(&part.as_str());
    let is_listing = |parts: &[String]| {
        let path = parts.join("::");
        ["lib", "main"].contains(&path.as_str()) || FOLDERS.contains(&path.as_str())
    };
    with_modules
        .filter(|(parts, _)| !is_listing(parts) && !parts.iter().any(is_of_tests))
        .collect()
}

/// The imports that lead upward, in words.
fn upward_imports(directory: &str, floors: Floors) -> Vec<String> {
    let workspace = support::workspace().expect("a workspace");
    let mut without_file: BTreeSet<usize> = (0..floors.len()).collect();
    let mut wrong = Vec::new();
    for (module, file) in files(&workspace.join(directory)) {
        let name = module.join("::");
        let Some(own) = place(floors, &module) else {
            wrong.push(format!("{name} has no place"));
            continue;
        };
        without_file.remove(&own);
        let text = fs::read_to_string(file).expect("a text");
        let mut imports = Imports {
            floors,
            module,
            found: BTreeSet::new(),
        };
        imports.visit_file(&syn::parse_file(&text).expect("it parses"));
        let upward = imports.found.range(own + 1..);
        wrong.extend(upward.map(|other| format!("{name} imports {}", floors[*other])));
    }
    let names = without_file.iter().map(|place| floors[*place]);
    wrong.extend(names.map(|name| format!("{name} is no module")));
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
