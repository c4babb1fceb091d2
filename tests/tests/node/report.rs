//! The page of `dnsflow report`. The witness is a browser's parser: what it makes of the page, with names in
//! the DNS that mean to be markup.

use std::{fs, os::unix::fs::PermissionsExt as _, time::Duration};

use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::Lab,
    process::{PATIENT, wait_until},
    support::is_by_marks,
};
use html5ever::{parse_document, tendril::TendrilSink as _};
use markup5ever_rcdom::{Handle, NodeData, RcDom};
use serde_json::Value;

/// Longer than the second after which a lost SYN is sent again.
const BLOCKED: Duration = Duration::from_secs(2);
/// Names that end an element, begin a script, and end an attribute.
const HOSTILE: [(&str, &str); 3] = [
    ("</td><script>alert(1)</script>.example.com", "203.0.113.3"),
    ("\"onload='x'&lt;.example.com", "203.0.113.4"),
    ("<img/src=x>.example.org", "203.0.113.6"),
];

fn ask(lab: &Lab, arguments: &[&str]) -> (String, Option<i32>) {
    lab.ask_agent(arguments).expect("the program runs")
}

fn fetches(lab: &Lab, address: &str, limit: Duration) -> bool {
    let url = format!("http://{address}/");
    let fetched = lab.pod("ns1_pod1").fetch(&url, limit);
    fetched.expect("curl runs").result.is_ok()
}

/// An element's name, its attributes, and the text directly in it.
type Element = (String, Vec<(String, String)>, String);

/// Each element below a node.
fn elements(node: &Handle, found: &mut Vec<Element>) {
    if let NodeData::Element { name, attrs, .. } = &node.data {
        let attributes = attrs.borrow();
        let attributes = attributes
            .iter()
            .map(|one| (one.name.local.to_string(), one.value.to_string()));
        let children = node.children.borrow();
        let texts = children.iter().filter_map(|child| match &child.data {
            NodeData::Text { contents } => Some(contents.borrow().to_string()),
            _ => None,
        });
        found.push((
            name.local.to_string(),
            attributes.collect(),
            texts.collect(),
        ));
    }
    for child in node.children.borrow().iter() {
        elements(child, found);
    }
}

#[test]
fn a_report_is_one_sound_page_whatever_names_hold() {
    let lab = lab!("report", agent);
    let rules = [
        RuleSpec::allow_name("mail.example.net").ports(&[("tcp", 25)]),
        RuleSpec::allow("203.0.113.5/32").expect("a CIDR"),
        RuleSpec::allow_name("example.com"),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ];
    lab.set_firewall("ns1", &rules)
        .expect("the rows are written");
    let records = [
        ("www.example.com", "203.0.113.1"),
        ("www.example.com", "203.0.113.2"),
        ("mail.example.net", "203.0.113.7"),
    ];
    // In a zone file, a character with a meaning of its own stands behind a backslash (RFC 1035, section 5.1).
    let records = records.iter().chain(&HOSTILE).map(|(name, address)| {
        let label = |byte: char| match byte {
            'a'..='z' | '0'..='9' | '.' => byte.to_string(),
            other => format!("\\{:03}", u32::from(other)),
        };
        let name: String = name.chars().map(label).collect();
        format!("{name}. 300 IN A {address}")
    });
    let records: Vec<String> = records.collect();
    lab.serve_dns(&records.iter().map(String::as_str).collect::<Vec<_>>())
        .expect("the server starts");
    let _agent = lab.start_agent(&[]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let names = ["www.example.com", "mail.example.net"].into_iter();
    for name in names.chain(HOSTILE.iter().map(|(name, _)| *name)) {
        pod.resolve(name).expect("the name is known");
    }
    assert!(fetches(&lab, "203.0.113.1", PATIENT));
    let denied = ["203.0.113.6", "203.0.113.7", "203.0.113.8"];
    for address in denied {
        assert!(!fetches(&lab, address, BLOCKED), "{address}");
    }
    let mut report = Value::Null;
    wait_until("the counters and the denials", PATIENT, || {
        let (text, code) = ask(&lab, &["report", "-o", "json"]);
        assert_eq!(code, Some(0), "{text}");
        report = serde_json::from_str(&text)?;
        let namespace = &report["namespaces"][0];
        let names = namespace["names"].as_array();
        let mut names = names.into_iter().flatten();
        let denials = namespace["denials"].as_array();
        // By marks, the use of an address is known, and the number of its packets is not.
        let is_used = |name: &Value| match is_by_marks() {
            true => name["last_s"].is_u64(),
            false => name["packets"].as_u64() > Some(0),
        };
        Ok(names.any(is_used) && denials.is_some_and(|denials| denials.len() == denied.len()))
    })
    .expect("they come");

    let file = lab.base().join("report.html");
    let path = file.to_str().expect("text");
    let (text, code) = ask(&lab, &["report", "--html", path]);
    assert_eq!((&*text, code), ("", Some(0)));
    let mode = fs::metadata(&file)
        .expect("it is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let (_, code) = ask(&lab, &["report", "--html", path]);
    assert_eq!(code, Some(1), "the file is there");
    let page = fs::read_to_string(&file).expect("a text");
    let dom = parse_document(RcDom::default(), Default::default()).one(&*page);
    assert!(dom.errors.borrow().is_empty(), "{:?}", dom.errors);
    let mut found = Vec::new();
    elements(&dom.document, &mut found);
    let known = "html head meta title style body header h1 small p section h2 h3 h4 dl div dt dd table thead tbody \
                 tr th td code figure figcaption svg rect text footer";
    for (name, attributes, _) in &found {
        assert!(known.split(' ').any(|known| known == name), "{name}");
        for (attribute, value) in attributes {
            let is_known = match (&**attribute, &**name) {
                ("class" | "lang" | "charset" | "name" | "content" | "http-equiv", _) => true,
                (_, "svg" | "rect" | "text") => {
                    !attribute.starts_with("on") && !attribute.contains("href")
                }
                _ => false,
            };
            assert!(is_known, "{name} {attribute}={value}");
        }
    }
    let policy = found.iter().find(|(name, attributes, _)| {
        name == "meta"
            && attributes
                .iter()
                .any(|(_, value)| value == "Content-Security-Policy")
    });
    assert!(
        policy.is_some(),
        "nothing forbids the page to load anything"
    );
    let style = found.iter().find(|(name, ..)| name == "style");
    let (_, _, style) = style.expect("it is there");
    assert!(
        !style.contains("url(") && !style.contains("@import"),
        "{style}"
    );
    // The names are there as they are.
    let cells: Vec<&str> = found
        .iter()
        .filter(|(name, ..)| name == "td")
        .map(|(_, _, text)| text.as_str())
        .collect();
    for (name, _) in HOSTILE {
        assert!(cells.contains(&name), "{name}: {cells:#?}");
    }
    let has = |wanted: &str| cells.iter().any(|cell| cell.contains(wanted));
    assert!(has("203.0.113.1, 203.0.113.2"), "{cells:#?}");
    assert!(has("with `cidrSelector: "), "no dnsName: {cells:#?}");
    let uses: Vec<&str> = found
        .iter()
        .filter_map(|(name, attributes, text)| {
            let class = attributes.iter().find(|(key, _)| key == "class");
            let is_use =
                class.is_some_and(|(_, class)| class.starts_with("t ") && class != "t wide");
            (name == "td" && is_use).then_some(text.as_str())
        })
        .collect();
    assert_eq!(uses.len(), rules.len(), "{uses:?}");
    assert_eq!(uses[1], "never", "{uses:?}");
    assert!(uses[2].ends_with(" ago"), "{uses:?}");

    // Another namespace's reader gets nothing of this one.
    let (page, code) = ask(&lab, &["report", "--html", "-", "--namespace", "ns2"]);
    assert_eq!(code, Some(0));
    assert!(page.contains("No namespace with pods on this node has an EgressFirewall."));
    assert!(!page.contains("example.com"), "{page}");
    let (page, code) = ask(&lab, &["report", "--html", "-", "--namespace", "nope"]);
    assert_eq!((&*page, code), ("", Some(1)));
}
