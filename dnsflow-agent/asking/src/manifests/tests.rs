use super::*;

/// What is wrong with a YAML text.
fn refusal(text: &str) -> String {
    match documents::<Value>(Path::new("a.yaml"), text) {
        Ok(documents) => panic!("{} documents were taken", documents.len()),
        Err(reason) => reason,
    }
}

#[test]
fn a_refusal_names_document_line_and_column() {
    let broken = "# comment\n---\na: 1\n---\nb: 2\n---\nc:\n  - d\n e: [\n";
    let reason = refusal(broken);
    assert!(
        reason.starts_with("document 3, line 9, column "),
        "{reason}"
    );
    let reason = refusal("to:\n  dnsName: *.example.com\n");
    assert!(
        reason.starts_with("document 1, line 2, column 12"),
        "{reason}"
    );
    assert!(reason.ends_with("must be quoted"), "{reason}");
    let reason = refusal("a: 1\na: 2\n");
    assert!(
        reason.starts_with("document 1, line 2, column 1"),
        "{reason}"
    );
    let json =
        documents::<Value>(Path::new("a.json"), "{\"a\": 1}\n{\"b\": }\n").expect_err("a refusal");
    assert!(json.starts_with("document 2, line 2, column 7"), "{json}");
}

#[test]
fn documents_are_counted_from_one() {
    let text = "---\na: |\n  --- no\n---\nb: 1\n--- {c: 1}\n";
    for (line, number) in [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (99, 3)] {
        assert_eq!(document_at(text, line), number, "line {line}");
    }
    assert_eq!(document_at("a: 1\n---\nb: 1", 3), 2);
}

#[test]
fn texts_that_look_like_booleans_stay_texts() {
    let documents: Vec<Value> =
        documents(Path::new("a.yaml"), "a: no\nb: y\nc: true").expect("YAML");
    assert_eq!(
        documents,
        [serde_json::json!({"a": "no", "b": "y", "c": true})]
    );
}

#[test]
fn bombs_are_refused() {
    // Each line holds ten times what the line before holds.
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..9 {
        let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
        laughs += &format!("a{level}: &a{level} [{aliases}]\n");
    }
    refusal(&laughs);
    // One long text, many times.
    let long = "x".repeat(1 << 20);
    refusal(&format!(
        "a: &a {long}\nb: [{}]\n",
        vec!["*a"; 20].join(", ")
    ));
    // Many lists, a few times each.
    let items = vec!["x"; 600].join(",");
    let lists: String = (0..20)
        .map(|n| {
            format!(
                "a{n}: &a{n} [{items}]\nb{n}: [{}]\n",
                vec![format!("*a{n}"); 9].join(",")
            )
        })
        .collect();
    refusal(&lists);
    // Depth and number.
    refusal(&"[".repeat(10_000));
    refusal(&format!("{}{}", "[".repeat(100), "]".repeat(100)));
    refusal(&"--- {}\n".repeat(2_000));
    refusal(&format!("[{}]", vec!["a"; 600_000].join(",")));
    let deep = documents::<Value>(Path::new("a.json"), &"[".repeat(10_000));
    assert!(deep.is_err());
}

#[test]
fn the_largest_firewall_is_read() {
    let mut text = String::from(
        "apiVersion: k8s.ovn.org/v1\nkind: EgressFirewall\n\
         metadata: {namespace: ns1, name: default}\nspec:\n  egress:\n",
    );
    for index in 0..convert::MAX_RULES {
        text += &format!(
            "  - type: Allow\n    to:\n      dnsName: name-{index}.example.com\n    \
             ports: [{{protocol: TCP, port: 443}}]\n"
        );
    }
    assert!((text.len() as u64) < MAX_FILE_BYTES);
    let content = Content::of(Path::new("a.yaml"), &text).expect("YAML");
    let [converted] = &content.firewalls[..] else {
        panic!("not one firewall");
    };
    assert!(converted.reasons.is_empty(), "{:?}", converted.reasons);
}

#[test]
fn an_object_that_is_not_in_force_is_told_from_one_with_a_mistake() {
    let directory = std::env::temp_dir().join(format!("dnsflow-unusable-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let egress = "spec: {egress: []}";
    let head = "apiVersion: k8s.ovn.org/v1, kind: EgressFirewall";
    let of = |metadata: &str| format!("{{{head}, metadata: {{{metadata}}}, {egress}}}");
    for (file, text) in [
        ("a.yaml", of("namespace: ns1, name: default")),
        (
            "annotation.yaml",
            of("namespace: ns2, name: default, annotations: {dnsflow.io/dry-run: maybe}"),
        ),
        ("broken.yaml", "spec: [egress".to_owned()),
        ("name.yaml", of("namespace: ns3, name: mine")),
        ("namespace.yaml", of("name: default")),
        ("second.yaml", of("namespace: ns1, name: default")),
        (
            "version.yaml",
            of("namespace: ns4, name: default").replace("/v1", "/v2"),
        ),
    ] {
        std::fs::write(directory.join(file), text).expect("a file");
    }
    let snapshot = Directory::new(directory.clone()).read();
    std::fs::remove_dir_all(&directory).expect("it is there");
    let Snapshot {
        reasons, unusable, ..
    } = snapshot.expect("it can be read");
    let with_reasons = reasons.iter().filter(|(_, reasons)| !reasons.is_empty());
    let names: Vec<String> = with_reasons
        .filter_map(|(object, _)| {
            let object = object
                .strip_prefix(directory.to_str()?)?
                .strip_prefix('/')?;
            let file = object.split(": ").next()?;
            Some(format!(
                "{file} {}",
                unusable.iter().any(|one| one.contains(file))
            ))
        })
        .collect();
    assert_eq!(
        names,
        [
            "annotation.yaml false",
            "broken.yaml true",
            "name.yaml true",
            "namespace.yaml true",
            "second.yaml true",
            "version.yaml true",
        ]
    );
}
