//! The text of `docs/keys.md`: the keys of what the commands print as JSON, as the types and their documentation have them.

use std::{collections::BTreeMap, fmt::Write as _, fs};

use dnsflow_tests::support;
use syn::{
    Attribute, Expr, Fields, GenericArgument, Item, ItemEnum, Lit, Meta, PathArguments, Type,
};

const HEAD: &str = "\
# Keys in JSON

`DNSFLOW_BLESS=1 cargo test -p dnsflow-tests --test files` makes this file from the types. [asking.md](asking.md) explains
the answers. Each object also has `format_version`, and by `kubectl dnsflow` its `node`. `a[].b` is the key `b` of each
object in the list `a`. A key can be missing where it has nothing to say.
";

/// The commands, with the type of the object that each prints, and the files that have the types of its fields.
const COMMANDS: [(&str, &str, &[&str]); 11] = [
    ("status", "Status", FILES),
    ("cache list", "EntryView", FILES),
    ("flows list", "FlowRow", FILES),
    ("explain", "Explanation", FILES),
    ("observe", "Event", FILES),
    ("learn", "LearnedName", FILES),
    ("try", "Trialled", FILES),
    ("unused", "FirewallUse", FILES),
    ("check", "Summary", &["dnsflow-agent/src/check.rs"]),
    ("log-level", "Levels", FILES),
    ("report", "NodeReport", FILES),
];

const FILES: &[&str] = &[
    "dnsflow-agent/asking/src/event.rs",
    "dnsflow-agent/asking/src/learn.rs",
    "dnsflow-agent/asking/src/lib.rs",
    "dnsflow-agent/asking/src/print.rs",
    "dnsflow-agent/asking/src/report.rs",
    "dnsflow-agent/asking/src/trial.rs",
    "dnsflow-agent/asking/src/unused.rs",
    "dnsflow-agent/core/src/ask/view.rs",
    "dnsflow-agent/core/src/ask/view/explain.rs",
    "dnsflow-agent/core/src/cache/entries/names.rs",
    "dnsflow-agent/core/src/values/firewall.rs",
    "dnsflow-agent/core/src/values/flow.rs",
    "dnsflow-agent/core/src/values/verdict.rs",
];

/// At most this many words of a key are listed: `docs/asking.md` has the reasons.
const WORDS_MAX: usize = 8;

/// A field of a type.
struct Field {
    key: String,
    of: Type,
    meaning: String,
    is_flat: bool,
}

/// The types, by name.
#[derive(Default)]
struct Types {
    structs: BTreeMap<String, Vec<Field>>,
    /// The words of enumerations without values.
    words: BTreeMap<String, Vec<String>>,
}

/// The whole document.
pub(crate) fn text() -> String {
    let workspace = support::workspace().expect("a workspace");
    let mut text = HEAD.to_owned();
    for (command, of, files) in COMMANDS {
        let mut types = Types::default();
        for file in files {
            let text = fs::read_to_string(workspace.join(file)).expect(file);
            for item in syn::parse_file(&text).expect(file).items {
                types.add(item);
            }
        }
        let _ = write!(text, "\n## {command}\n\n| key | meaning |\n|---|---|\n");
        types.rows(of, "", &mut text);
    }
    text
}

impl Types {
    fn add(&mut self, item: Item) {
        match item {
            Item::Struct(item) => {
                let Fields::Named(named) = item.fields else {
                    return;
                };
                let fields = named.named.into_iter().map(|field| Field {
                    key: field.ident.expect("a named field").to_string(),
                    meaning: meaning(&field.attrs),
                    is_flat: serde(&field.attrs).any(|word| word == "flatten"),
                    of: field.ty,
                });
                self.structs
                    .insert(item.ident.to_string(), fields.collect());
            }
            Item::Enum(item) => {
                if let Some(words) = words(&item) {
                    self.words.insert(item.ident.to_string(), words);
                }
            }
            _ => {}
        }
    }

    /// The rows of the keys of a type, each behind this path.
    fn rows(&self, of: &str, path: &str, text: &mut String) {
        let fields = self
            .structs
            .get(of)
            .unwrap_or_else(|| panic!("no type {of}"));
        for field in fields {
            let (inner, is_list) = inner(&field.of);
            let nested = self.structs.contains_key(&inner);
            if field.is_flat {
                self.rows(&inner, path, text);
                continue;
            }
            let key = format!("{path}{}{}", field.key, if is_list { "[]" } else { "" });
            let words = self
                .words
                .get(&inner)
                .filter(|words| words.len() <= WORDS_MAX);
            let words = words.map_or_else(String::new, |words| format!(" ({})", words.join(", ")));
            let meaning = field.meaning.replace('|', "\\|").replace('*', "\\*");
            let _ = writeln!(text, "| `{key}` | {meaning}{words} |");
            if nested {
                self.rows(&inner, &format!("{key}."), text);
            }
        }
    }
}

/// The name of the type within options, boxes and lists, and whether there is a list.
fn inner(of: &Type) -> (String, bool) {
    let path = match of {
        Type::Path(path) => &path.path,
        Type::Reference(reference) => return inner(&reference.elem),
        Type::Slice(slice) => return (inner(&slice.elem).0, true),
        _ => return (String::new(), false),
    };
    let last = path.segments.last().expect("a name");
    let name = last.ident.to_string();
    match &last.arguments {
        PathArguments::AngleBracketed(arguments) => match arguments.args.last() {
            Some(GenericArgument::Type(of)) if name != "BTreeMap" => {
                let (inner, is_list) = inner(of);
                (
                    inner,
                    is_list || ["Vec", "BTreeSet"].contains(&name.as_str()),
                )
            }
            _ => (name, false),
        },
        _ => (name, false),
    }
}

/// The words of an enumeration whose variants have no values.
fn words(item: &ItemEnum) -> Option<Vec<String>> {
    let renaming =
        serde(&item.attrs).find_map(|word| word.strip_prefix("rename_all=").map(str::to_owned))?;
    let variants = item.variants.iter().map(|variant| {
        let name = variant.ident.to_string();
        let is_unit = matches!(variant.fields, Fields::Unit);
        is_unit.then(|| format!("`{}`", word(&name, &renaming)))
    });
    variants.collect()
}

fn word(name: &str, renaming: &str) -> String {
    let mut word = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !word.is_empty() && renaming == "snake_case" {
            word.push('_');
        }
        word.extend(letter.to_lowercase());
    }
    word
}

/// The words in `#[serde(…)]`, as `flatten` or `rename_all=snake_case`.
fn serde(attributes: &[Attribute]) -> impl Iterator<Item = String> {
    let lists = attributes
        .iter()
        .filter_map(|attribute| match &attribute.meta {
            Meta::List(list) if list.path.is_ident("serde") => Some(list.tokens.to_string()),
            _ => None,
        });
    let words: Vec<String> = lists
        .flat_map(|tokens| {
            let words = tokens.split(',');
            let words = words.map(|word| word.replace([' ', '"'], ""));
            words.collect::<Vec<_>>()
        })
        .collect();
    words.into_iter()
}

/// The documentation of a field, in one line.
fn meaning(attributes: &[Attribute]) -> String {
    let lines = attributes
        .iter()
        .filter_map(|attribute| match &attribute.meta {
            Meta::NameValue(value) if value.path.is_ident("doc") => match &value.value {
                Expr::Lit(lit) => match &lit.lit {
                    Lit::Str(text) => Some(text.value().trim().to_owned()),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        });
    let text = lines.collect::<Vec<_>>().join(" ");
    // Links of rustdoc are names of types here.
    text.replace("[`", "`").replace("`]", "`")
}
