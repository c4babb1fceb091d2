use std::path::PathBuf;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixListener,
    task::JoinHandle,
};

use super::*;

/// A database that gives these rows to whoever monitors it, and then the request that it got.
struct Northbound {
    path: PathBuf,
    table: &'static str,
    request: JoinHandle<Value>,
}

impl Northbound {
    fn start(test: &str, sets: &[(String, &[&str])]) -> Self {
        Self::start_slow(test, sets, Duration::ZERO)
    }

    /// One that says nothing for so long before.
    fn start_slow(test: &str, sets: &[(String, &[&str])], silence: Duration) -> Self {
        let rows = sets.iter();
        let rows =
            rows.map(|(name, addresses)| json!({"name": name, "addresses": ["set", addresses]}));
        Self::of_table(ADDRESS_SET, test, rows, silence)
    }

    fn of_table(
        table: &'static str,
        test: &str,
        rows: impl Iterator<Item = Value>,
        silence: Duration,
    ) -> Self {
        let name = format!("dnsflow-sets-{}-{test}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).expect("nobody is there");
        let rows = (1..).zip(rows).map(|(number, row)| {
            let id = format!("00000000-0000-4000-8000-{number:012}");
            (id, json!({"initial": row}))
        });
        let rows: serde_json::Map<_, _> = rows.collect();
        let answer = json!({"id": 0, "result": {table: rows}, "error": null}).to_string();
        let request = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut request = vec![0; 65_536];
            let len = stream.read(&mut request).await.expect("a request");
            tokio::time::sleep(silence).await;
            let written = stream.write_all(answer.as_bytes()).await;
            written.expect("the client reads");
            let rest = stream.read(&mut [0; 16]).await;
            assert_eq!(rest.expect("it closes"), 0);
            serde_json::from_slice(&request[..len]).expect("JSON")
        });
        Self {
            path,
            table,
            request,
        }
    }

    fn remotes(&self) -> Option<Remotes> {
        Some(Remotes::unix(&[self.path.to_str().expect("text")]))
    }

    /// The conditions that were asked by (RFC 7047, section 4.1.5; ovsdb-server(7), section 4.1.12).
    async fn end(self) -> Value {
        let request = self.request.await.expect("no panic");
        std::fs::remove_file(&self.path).expect("it is there");
        request["params"][2][self.table][0]["where"].clone()
    }
}

fn set_of(name: &DnsName, family: Family) -> String {
    let [hash, _] = address_set_hashes(name, family);
    format!("a{hash}")
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

#[tokio::test]
async fn names_have_the_addresses_of_both_families_and_rules_may_share_a_name() {
    let [one, other]: [DnsName; 2] = ["a.test", "b.test"].map(|name| name.parse().expect("a name"));
    let sets = [
        (set_of(&one, Family::V4), &["203.0.113.1"][..]),
        (set_of(&one, Family::V6), &["2001:db8::1"]),
        (set_of(&other, Family::V4), &["203.0.113.2", "203.0.113.3"]),
    ];
    let server = Northbound::start("names", &sets);
    let names = [(0, one.clone()), (2, other), (5, one)];
    let found = of_names(server.remotes(), &names)
        .await
        .expect("it answers");
    let of_one: BTreeSet<IpAddr> = ["203.0.113.1", "2001:db8::1"].map(address).into();
    let of_other = ["203.0.113.2", "203.0.113.3"].map(address).into();
    assert_eq!(
        found,
        [(0, of_one.clone()), (2, of_other), (5, of_one)].into()
    );
    let conditions = server.end().await;
    let asked = conditions.as_array().expect("a list");
    for (set, _) in sets {
        let clause = json!(["name", "==", set]);
        assert!(asked.contains(&clause), "{clause} in {asked:?}");
    }
}

#[tokio::test]
async fn an_address_has_the_sets_of_names_that_have_it() {
    let sets = [
        ("a17".to_owned(), &["203.0.113.1", "203.0.113.9"][..]),
        ("a18".to_owned(), &["203.0.113.1", "2001:db8::1"]),
        ("pod_ips".to_owned(), &["203.0.113.1"]),
    ];
    let server = Northbound::start("addresses", &sets);
    let asked = ["203.0.113.1", "2001:db8::1", "203.0.113.5"].map(address);
    let found = with(server.remotes(), &asked).await.expect("it answers");
    let expected = [(asked[0], [17, 18].into()), (asked[1], [18].into())];
    assert_eq!(found, expected.into());
    let conditions = server.end().await;
    assert_eq!(
        conditions[1],
        json!(["addresses", "includes", "2001:db8::1"])
    );
}

#[tokio::test]
async fn a_service_has_its_ports_and_their_endpoints() {
    let row = |name: &str, protocol: Value, vips: Value| {
        let owner = json!([["k8s.ovn.org/owner", "ns1/web"]]);
        json!({"name": name, "protocol": protocol, "vips": ["map", vips], "external_ids": ["map", owner]})
    };
    let rows = [
        row(
            "Service_ns1/web_TCP_cluster",
            json!("tcp"),
            json!([
                ["10.96.0.7:80", "10.244.0.3:8080,203.0.113.7:8080"],
                ["[fd00:10:96::7]:80", ""],
            ]),
        ),
        row(
            "Service_ns1/web_UDP_node_switch_template_IPv4",
            json!("udp"),
            json!([
                ["10.96.0.7:53", "^Service_ns1_web_UDP_53_node_local"],
                ["^NODEIP_IPv4_0:31080", "10.244.0.3:53"],
            ]),
        ),
        row(
            "Service_ns1/web_TCP_node_router_node1",
            json!("tcp"),
            json!([["198.51.100.8:80", ""]]),
        ),
        row(
            "other",
            json!(["set", []]),
            json!([["198.51.100.9", "203.0.113.9"]]),
        ),
    ];
    let rows = rows.into_iter();
    let server = Northbound::of_table(LOAD_BALANCER, "services", rows, Duration::ZERO);
    let asked = ["ns1/web".to_owned()].into();
    let found = frontends(server.remotes(), &asked).await;
    let frontend = |text: &str, protocol, backends: Option<&[&str]>| {
        let (address, port) = endpoint(text).expect("an endpoint");
        let backend = |text: &&str| {
            let (address, port) = endpoint(text).expect("an endpoint");
            Backend { address, port }
        };
        Frontend {
            service: "ns1/web".to_owned(),
            network: None,
            address,
            protocol,
            port,
            backends: backends.map(|all| all.iter().map(backend).collect()),
        }
    };
    let both = ["10.244.0.3:8080", "203.0.113.7:8080"];
    assert_eq!(
        found,
        Ok(vec![
            frontend("10.96.0.7:80", Protocol::Tcp, Some(&both)),
            frontend("[fd00:10:96::7]:80", Protocol::Tcp, Some(&[])),
            frontend("10.96.0.7:53", Protocol::Udp, None),
            frontend("198.51.100.9", Protocol::Tcp, Some(&["203.0.113.9"])),
        ])
    );
    let owner = json!(["map", [["k8s.ovn.org/owner", "ns1/web"]]]);
    let clause = json!(["external_ids", "includes", owner]);
    assert_eq!(server.end().await, json!([clause]));
}

#[tokio::test(start_paused = true)]
async fn a_database_that_is_there_may_take_as_long_as_for_any_other_reader() {
    let sets = [("a17".to_owned(), &["203.0.113.1"][..])];
    // Shorter than the wait for an answer to an echo request.
    let silence = FIRST_CONTENT_WAIT / 2 - Duration::from_secs(1);
    let server = Northbound::start_slow("slow", &sets, silence);
    let asked = address("203.0.113.1");
    let found = with(server.remotes(), &[asked]).await;
    assert_eq!(found, Ok([(asked, [17].into())].into()));
    server.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_database_that_does_not_answer_is_named() {
    let nowhere = Some(Remotes::unix(&["/nonexistent/nb.sock"]));
    let error = with(nowhere, &[address("203.0.113.1")]).await;
    let error = error.expect_err("nobody is there");
    assert!(error.contains("does not answer within 5 s"), "{error}");
}
