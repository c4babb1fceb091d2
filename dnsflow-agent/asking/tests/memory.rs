//! The memory for reading an EgressFirewall is that of what is kept of it, however large it is. Each large object has a
//! small twin that comes to the same firewall. Bytes are counted, not time.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    fs,
    path::PathBuf,
};

use dnsflow_asking::{
    convert::{Converted, MAX_RULES, Reading, Stored},
    manifests::{Directory, Files},
};
use dnsflow_core::values::firewall::PORTS_PER_RULE_MAX;
use serde_json::{Value, json};

/// Counts the bytes that this thread has in use, and the most of them.
struct Counting;

thread_local! {
    static USED: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    USED.set(USED.get() + change);
    PEAK.set(PEAK.get().max(USED.get()));
}

// SAFETY: the system's allocator does the work. The counters are constants at first, so that they allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What a function returns, and the bytes that it had in use at most.
fn peak<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = USED.get();
    PEAK.set(before);
    let value = run();
    let peak = PEAK.get() - before;
    (value, usize::try_from(peak).expect("no less than before"))
}

fn object(rules: &Value) -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "metadata": {"name": "default", "namespace": "ns1", "resourceVersion": "5"},
        "spec": {"egress": rules},
    })
}

fn rule(kind: &str, ports: usize) -> Value {
    let ports = (1..=ports).map(|port| json!({"protocol": "TCP", "port": port}));
    json!({"type": kind, "to": {"dnsName": "a.b"}, "ports": ports.collect::<Vec<_>>()})
}

/// By what an object is large: the object with so many of these.
type Large = (&'static str, fn(usize) -> Value);

const LARGE: &[Large] = &[
    ("ports of a rule that allows", |size| {
        object(&json!([rule("Allow", PORTS_PER_RULE_MAX + size)]))
    }),
    ("ports of a rule that denies", |size| {
        object(&json!([rule("Deny", PORTS_PER_RULE_MAX + size)]))
    }),
    ("rules", |size| {
        object(&json!(vec![rule("Allow", 0); MAX_RULES + size]))
    }),
    ("labels of a nodeSelector", |size| {
        let labels = (0..size).map(|number| (format!("label-{number}"), json!("value")));
        let labels = Value::Object(labels.collect());
        object(&json!([{"type": "Allow", "to": {"nodeSelector": {"matchLabels": labels}}}]))
    }),
    ("expressions of a nodeSelector", |size| {
        let one = json!({"key": "a", "operator": "In", "values": ["b"]});
        let all = vec![one; size];
        object(&json!([{"type": "Allow", "to": {"nodeSelector": {"matchExpressions": all}}}]))
    }),
    ("a text", |size| {
        object(&json!([{"type": "Allow", "to": {"dnsName": "a".repeat(1_024 + 32 * size)}}]))
    }),
    ("a key", |size| {
        let name = "a".repeat(1_024 + 32 * size);
        object(&json!([{"type": "Allow", "to": {"dnsName": "a.b"}, name: 1}]))
    }),
    ("managed fields", |size| {
        let mut object = object(&json!([]));
        object["metadata"]["managedFields"] =
            json!(vec![json!({"fieldsV1": {"f:spec": {}}}); size]);
        object
    }),
    ("annotations", |size| {
        let mut object = object(&json!([]));
        let all = (0..size).map(|number| (format!("annotation-{number}"), json!("value")));
        object["metadata"]["annotations"] = Value::Object(all.collect());
        object["metadata"]["annotations"]["dnsflow.io/dry-run"] = json!("true");
        object
    }),
    ("messages of the status", |size| {
        let mut object = object(&json!([]));
        object["status"] = json!({"messages": vec!["node: EgressFirewall Rules applied"; size]});
        object
    }),
    ("fields that nobody knows", |size| {
        let all = vec![json!({"a": [1, {"b": null}]}); size];
        let mut object =
            object(&json!([{"type": "Deny", "to": {"cidrSelector": "10.0.0.0/8", "x": all}}]));
        object["spec"]["later"] = json!(vec![json!({"": 0}); size]);
        object["later"] = json!(vec![json!([]); size]);
        object
    }),
];

/// More than the numbers in a reason differ by.
const DIGITS: usize = 64;

#[test]
fn a_large_object_takes_no_more_than_its_small_twin() {
    for (name, object) in LARGE {
        let read = |size: usize| {
            let text = object(size).to_string();
            let (stored, peak) = peak(|| serde_json::from_str::<Stored>(&text).expect("an object"));
            (stored.converted, peak, text.len())
        };
        let (small, of_small, _) = read(1);
        let (large, of_large, length) = read(20_000);
        assert!(length > 250_000, "{name}: {length}");
        assert!(
            of_large <= of_small + DIGITS,
            "{name}: {of_large} bytes for one of {length}, {of_small} for its twin"
        );
        same(name, &small, &large);
    }
}

/// The rules are the same, and the reasons but for their numbers.
fn same(name: &str, small: &Converted, large: &Converted) {
    let without_numbers = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
    let text = |converted: &Converted| {
        let Reading::Firewall(..) = converted.reading else {
            panic!("{name}: {converted:?}");
        };
        let mut converted = converted.clone();
        converted.reasons.sort();
        without_numbers(&format!("{converted:?}"))
    };
    assert!(text(small) == text(large), "{name}");
}

/// A directory that goes with the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("dnsflow-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("it is there");
    }
}

/// The text is read in steps, each twice as large as the one before.
const TIMES_TEXT: usize = 3;

#[test]
fn a_large_manifest_takes_little_beside_its_text() {
    let directory = Temporary::new("memory");
    let check = |(name, object): &Large, ending: &str| {
        let file = directory.0.join(format!("a.{ending}"));
        let read = |size: usize| {
            // JSON is YAML. A list, because its items are objects of any kind.
            let list = json!({"items": [object(size)], "kind": "List"}).to_string();
            fs::write(&file, &list).expect("a file");
            let mut watched = Directory::new(directory.0.clone());
            let (snapshot, of_directory) = peak(|| watched.read());
            assert_eq!(snapshot.expect("it can be read").firewalls.len(), 1);
            let (files, of_files) = peak(|| Files::read(std::slice::from_ref(&file)));
            assert_eq!(files.expect("it can be read").firewalls.len(), 1);
            fs::remove_file(&file).expect("it is there");
            (of_directory.max(of_files), list.len())
        };
        let (of_small, _) = read(1);
        let (of_large, length) = read(5_000);
        assert!(
            of_large <= of_small + TIMES_TEXT * length,
            "{name}, {ending}: {of_large} bytes for {length} of text, {of_small} for its twin"
        );
    };
    for large in LARGE {
        check(large, "json");
    }
    // The parser of YAML has the keys of a mapping in memory, to find those that come twice. Its budget limits them.
    check(&LARGE[0], "yaml");
}
