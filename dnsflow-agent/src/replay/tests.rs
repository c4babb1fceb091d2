use std::path::Path;

use clap::Parser as _;

use super::{capture::ETHERNET_ADDRESSES, *};
use crate::options::{Cli, Command};

/// Captured by tcpdump in a pod's network namespace, while dig and curl did this:
/// example.com, www.example.com over TCP, www.example.net, a name that does not exist, and example.com from a
/// server that is not trusted; then a connection to each of five places.
const EXPECTED: &str = "\
06.503870Z  ns1/pod1  opened  example.com  -> 203.0.113.1  (rules 0)
06.545554Z  ns1/pod1  opened  www.example.com  -> 203.0.113.2  (rules 0)
06.695436Z  ns1/pod1  allowed  203.0.113.1:80 = example.com; rule 0 allows it
06.729872Z  ns1/pod1  allowed  203.0.113.2:80 = www.example.com; rule 0 allows it
06.759085Z  ns1/pod1  denied  203.0.113.3:80 = www.example.net, told 0s ago by 10.96.0.10:53; \
rule 1 Deny cidrSelector: 0.0.0.0/0; allow it before rule 1 with `dnsName: www.example.net`
06.786013Z  ns1/pod1  denied  203.0.113.9:80  rule 1 Deny cidrSelector: 0.0.0.0/0: no trusted DNS server \
has returned this address to the pod; it may still be allowed: ovn-kubernetes may have resolved \
dnsName: example.com (rule 0) to it; if the pod connects without a name, allow it before rule 1 with \
`cidrSelector: 203.0.113.9/32`
07.804902Z  ns1/pod1  denied  203.0.113.2:443 = www.example.com, told 1s ago by 10.96.0.10:53; \
rule 1 Deny cidrSelector: 0.0.0.0/0: rule 0 allows it for tcp/80 only; add tcp/443 to the ports of rule 0
ignored  ns1/pod1  no_rule_matches 1, not_judged 1, other_port 31, rcode 1, tcp_without_data 4
";

/// The same capture with the manifests in `order`.
const ORDERED: &str = "\
1970-01-01T00:00:00.000000Z  ns1  rule_problems  rule 3: ns1/default: rule 3: cidrSelector \"not-a-network\" is no \
network; write a network such as 192.0.2.0/24
1970-01-01T00:00:00.000000Z  ns2  rule_problems  rule 0: ns2/default: rule 0: cidrSelector \
\"not-a-network\" is no network; write a network such as 192.0.2.0/24
06.503870Z  ns1/pod1  opened  example.com  -> 203.0.113.1  (rules 2)
06.545554Z  ns1/pod1  opened  www.example.com  -> 203.0.113.2  (rules 0,2)
06.564686Z  ns1/pod1  opened  www.example.net  -> 203.0.113.3  (rules 1)
06.695436Z  ns1/pod1  allowed  203.0.113.1:80 = example.com; rule 2 allows it
06.729872Z  ns1/pod1  denied  203.0.113.2:80 = www.example.com, told 0s ago by 10.96.0.10:53; rule 0 Deny \
dnsName: www.example.com: rule 2 would allow it, but an earlier rule decides; move rule 2 before rule 0; \
rule 0 (Deny dnsName: www.example.com) does not deny it then
06.759085Z  ns1/pod1  allowed  203.0.113.3:80 = www.example.net; rule 1 allows it
06.786013Z  ns1/pod1  denied  203.0.113.9:80  rule 4 Deny cidrSelector: 0.0.0.0/0: no trusted DNS server \
has returned this address to the pod; it may still be allowed: ovn-kubernetes may have resolved \
dnsName: *.example.net (rule 1) to it; if the pod connects without a name, allow it before rule 4 with \
`cidrSelector: 203.0.113.9/32`
07.804902Z  ns1/pod1  denied  203.0.113.2:443 = www.example.com, told 1s ago by 10.96.0.10:53; rule 0 Deny \
dnsName: www.example.com: rule 2 would allow it, but an earlier rule decides; move rule 2 before rule 0; \
rule 0 (Deny dnsName: www.example.com) does not deny it then
ignored  ns1/pod1  not_judged 1, other_port 31, rcode 1, tcp_without_data 4
";

fn fixture(name: &str) -> PathBuf {
    // Tests run in the directory of their package.
    Path::new("src/replay/tests").join(name)
}

/// What `dnsflow replay` prints of a capture.
fn replay(file: &Path, more: &[&str]) -> Result<(String, Exit), ReplayError> {
    replay_with("manifests", file, more)
}

/// The same with these manifests.
fn replay_with(manifests: &str, file: &Path, more: &[&str]) -> Result<(String, Exit), ReplayError> {
    let manifests = fixture(manifests);
    let [file, manifests] = [file, &manifests].map(|path| path.to_str().expect("text"));
    let arguments = ["dnsflow", "replay", file, "--manifests", manifests];
    let arguments = [&arguments, more].concat();
    let cli = Cli::try_parse_from(arguments).expect("right");
    let Command::Replay(options) = cli.command else {
        panic!("{cli:?}");
    };
    let mut output = Vec::new();
    let exit = run(&options, &mut output)?;
    Ok((String::from_utf8(output).expect("text"), exit))
}

const CLUSTER: [&str; 3] = [
    "--resolver=10.96.0.10",
    "--cluster-networks=10.244.0.0/16",
    "--subdomains=true",
];

/// The lines, without what the captures differ in: the microseconds, and the date.
fn without_micros(text: &str) -> String {
    let line = |line: &str| match line.split_once("Z  ") {
        Some((time, rest)) => {
            let second = time.split_once('.').map_or(time, |(second, _)| second);
            format!("{}  {rest}\n", &second[second.len() - 2..])
        }
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[test]
fn a_capture_is_replayed_in_its_own_time() {
    let (text, exit) = replay(&fixture("eth.pcap"), &CLUSTER).expect("it can be read");
    assert_eq!(text.replace("2026-11-22T17:32:", ""), EXPECTED);
    assert_eq!(exit, Exit::Done);
}

/// A Deny before an Allow, a wildcard, several ports, and rules that mean nothing.
#[test]
fn rules_hold_in_their_order() {
    let (text, exit) = replay_with("order", &fixture("eth.pcap"), &CLUSTER).expect("it is read");
    assert_eq!(text.replace("2026-11-22T17:32:", ""), ORDERED);
    assert_eq!(exit, Exit::Done);
}

#[test]
fn cooked_captures_and_pcapng_say_the_same() {
    for name in ["any.pcap", "sll.pcapng"] {
        let (text, exit) = replay(&fixture(name), &CLUSTER).expect("it can be read");
        assert_eq!(without_micros(&text), without_micros(EXPECTED), "{name}");
        assert_eq!(exit, Exit::Done);
    }
}

#[test]
fn only_answers_of_trusted_servers_to_questions_of_pods_count() {
    let capture = fixture("eth.pcap");
    let (text, _) = replay(&capture, &["--resolver=10.96.0.11"]).expect("it can be read");
    assert!(!text.contains("  opened  "), "{text}");
    assert!(text.contains("untrusted_resolver "), "{text}");
    let (text, _) =
        replay(&capture, &["--resolver=10.96.0.10", "-o", "json"]).expect("it can be read");
    let lines: Result<Vec<Line>, _> = text.lines().map(serde_json::from_str).collect();
    let lines = lines.expect("objects");
    let opened = lines.iter().filter(|line| match line {
        Line::Event(event) => event.event == "opened",
        Line::Ignored { .. } => false,
    });
    assert_eq!(opened.count(), 2);
    assert!(matches!(lines.last(), Some(Line::Ignored { .. })));

    // From the first answer on: nobody has seen its question.
    let capture = std::fs::read(capture).expect("it is there");
    let mut records = records(&capture);
    let first = records
        .iter()
        .position(|record| record[4..8] == 503_870_u32.to_le_bytes());
    records.drain(..first.expect("it is there"));
    let (text, _) = replay_of("unasked", &[&capture[..24], &records.concat()].concat());
    assert!(!text.contains("  opened  example.com  "), "{text}");
    assert!(text.contains("not_asked 1,"), "{text}");
}

#[test]
fn a_rule_for_the_name_alone_leaves_its_sub_domains_closed() {
    let more = ["--resolver=10.96.0.10", "--subdomains=false"];
    let (text, _) = replay(&fixture("eth.pcap"), &more).expect("it can be read");
    assert!(text.contains("  opened  example.com  "), "{text}");
    assert!(!text.contains("  opened  www.example.com  "), "{text}");
}

#[test]
fn a_broken_capture_is_read_up_to_there_and_what_is_no_capture_is_refused() {
    let directory = std::env::temp_dir().join(format!("dnsflow-replay-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("there is room");
    let file = directory.join("broken.pcap");
    let whole = std::fs::read(fixture("eth.pcap")).expect("it is there");
    std::fs::write(&file, &whole[..whole.len() - 7]).expect("there is room");
    let (text, exit) = replay(&file, &CLUSTER).expect("it can be read");
    assert!(text.contains("  opened  www.example.com  "), "{text}");
    assert_eq!(exit, Exit::Incomplete);
    std::fs::write(&file, "no capture at all, and long enough for a header").expect("room");
    let error = replay(&file, &CLUSTER).expect_err("it is none");
    assert!(matches!(error, ReplayError::Capture(_)), "{error:?}");
    std::fs::remove_dir_all(&directory).expect("it is there");
}

#[test]
fn pods_come_by_option_and_by_manifest() {
    let pod: PodAddresses = "ns1/web=10.244.0.5,fd00::5".parse().expect("a pod");
    assert_eq!((&*pod.namespace, &*pod.name), ("ns1", "web"));
    assert_eq!(pod.addresses.len(), 2);
    for bad in ["web=10.244.0.5", "ns1/web", "ns1/=10.244.0.5", "ns1/web=x"] {
        assert!(bad.parse::<PodAddresses>().is_err(), "{bad}");
    }
    let object = |host: bool, addresses: &str| {
        let text = format!(
            "{{kind: Pod, metadata: {{namespace: ns1, name: web}}, spec: {{hostNetwork: {host}}}, \
             status: {addresses}}}"
        );
        serde_saphyr::from_str(&text).expect("YAML")
    };
    let both = "{podIP: 10.244.0.5, podIPs: [{ip: 10.244.0.5}, {ip: 'fd00::5'}]}";
    assert_eq!(pods::of_manifest(&object(false, both)), Some(pod));
    assert_eq!(pods::of_manifest(&object(true, both)), None);
    assert_eq!(pods::of_manifest(&object(false, "{}")), None);
    let mut service = object(false, both);
    service["kind"] = "Service".into();
    assert_eq!(pods::of_manifest(&service), None);
}

/// A capture in a file of its own.
fn replay_of(test: &str, capture: &[u8]) -> (String, Exit) {
    let name = format!("dnsflow-replay-{}-{test}.pcap", std::process::id());
    let file = std::env::temp_dir().join(name);
    std::fs::write(&file, capture).expect("there is room");
    let replayed = replay(&file, &CLUSTER).expect("it can be read");
    std::fs::remove_file(&file).expect("it is there");
    replayed
}

/// The headers and the packets of a pcap file, as tcpdump writes it (pcap-savefile(5)).
fn records(capture: &[u8]) -> Vec<Vec<u8>> {
    let mut rest = &capture[24..];
    let mut records = Vec::new();
    while let Some(len) = rest.get(8..12) {
        let len = u32::from_le_bytes(len.try_into().expect("four")) as usize;
        let (record, behind) = rest.split_at(16 + len);
        records.push(record.to_vec());
        rest = behind;
    }
    records
}

/// The record that was captured at this microsecond, `later_s` seconds later.
fn later(records: &[Vec<u8>], micros: u32, later_s: u32) -> Vec<u8> {
    let mut found = records.iter();
    let found = found.find(|record| record[4..8] == micros.to_le_bytes());
    let mut record = found.expect("it is there").clone();
    let at = u32::from_le_bytes(record[..4].try_into().expect("four"));
    record[..4].copy_from_slice(&(at + later_s).to_le_bytes());
    record
}

#[test]
fn packets_that_were_cut_make_the_answer_incomplete() {
    let mut capture = std::fs::read(fixture("eth.pcap")).expect("it is there");
    // The first packet's length on the wire.
    capture[36] += 1;
    let (text, exit) = replay_of("cut", &capture);
    assert_eq!(text.replace("2026-11-22T17:32:", ""), EXPECTED);
    assert_eq!(exit, Exit::Incomplete);
}

#[test]
fn an_attempt_is_told_of_once_in_ten_seconds() {
    let mut capture = std::fs::read(fixture("eth.pcap")).expect("it is there");
    let records = records(&capture);
    for later_s in [5, 15] {
        capture.extend(later(&records, 804_902, later_s));
    }
    let (text, _) = replay_of("told-again", &capture);
    let told = text.lines().filter(|line| line.contains("203.0.113.2:443"));
    assert_eq!(told.count(), 2, "{text}");
}

#[test]
fn an_address_stays_open_while_it_is_used() {
    let mut capture = std::fs::read(fixture("eth.pcap")).expect("it is there");
    let records = records(&capture);
    let of_first = |later_s| later(&records, 695_436, later_s);
    let mut used = capture.clone();
    for later_s in (5..7200).step_by(5) {
        used.extend(of_first(later_s));
    }
    for capture in [&mut capture, &mut used] {
        capture.extend(of_first(7200));
    }
    let last = |capture| {
        let (text, _) = replay_of("used", capture);
        let mut of_it = text.lines().filter(|line| line.contains("203.0.113.1:80"));
        of_it.next_back().expect("it is told of").to_owned()
    };
    let unused = last(&capture);
    assert!(unused.contains("  denied  "), "{unused}");
    let used = last(&used);
    assert!(used.contains("  allowed  "), "{used}");
}

/// A block of a pcapng file (draft-ietf-opsawg-pcapng, section 3.1).
fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len() + 12).expect("short").to_le_bytes();
    [&kind.to_le_bytes()[..], &len, body, &len].concat()
}

#[test]
fn each_section_of_a_pcapng_has_its_interfaces_with_their_time() {
    // Byte-order magic, version 1.0, section of unknown length (section 4.1).
    let head = [
        &0x1a2b_3c4d_u32.to_le_bytes()[..],
        &[1, 0, 0, 0],
        &[0xff; 8],
    ]
    .concat();
    // Ethernet, no limit; nanoseconds, 100 seconds to be added (section 4.2: if_tsresol, if_tsoffset).
    let exact = [
        &[1, 0, 0, 0, 0, 0, 0, 0][..],
        &[9, 0, 1, 0, 9, 0, 0, 0],
        &[14, 0, 8, 0],
        &100_u64.to_le_bytes(),
        &[0; 4],
    ]
    .concat();
    // Linux cooked; microseconds.
    let cooked = [113, 0, 0, 0, 0, 0, 0, 0];
    let packet = |units: u64, bytes: [u8; 16]| {
        let (high, low) = ((units >> 32) as u32, units as u32);
        let words = [0, high, low, 16, 16].map(u32::to_le_bytes).concat();
        block(6, &[&words[..], &bytes].concat())
    };
    let section = block(0x0a0d_0d0a, &head);
    let capture = [
        section.clone(),
        block(1, &exact),
        packet(2_000_000_007, [7; 16]),
        section,
        block(1, &cooked),
        packet(3_000_004, [9; 16]),
    ]
    .concat();
    let name = format!("dnsflow-replay-{}-sections", std::process::id());
    let file = std::env::temp_dir().join(name);
    std::fs::write(&file, capture).expect("there is room");
    let mut capture = Capture::open(&file).expect("it can be read");
    std::fs::remove_file(&file).expect("it is there");
    let mut next = || capture.read().expect("it is whole");
    let first = next().expect("a packet");
    assert_eq!(first.at, Duration::new(102, 7));
    assert_eq!(first.frame, [7; 16]);
    let second = next().expect("a packet");
    assert_eq!(second.at, Duration::from_micros(3_000_004));
    // No Ethernet addresses, and the protocol of the cooked header.
    let frame = [&[0; ETHERNET_ADDRESSES][..], &[9; 2]].concat();
    assert_eq!(second.frame, frame);
    assert_eq!(next(), None);
}

#[test]
fn addresses_stand_behind_the_tags() {
    let packet: Vec<u8> = (0..20).collect();
    for tags in [
        &[][..],
        &[0x81, 0, 0, 5],
        &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 7],
    ] {
        let frame = [&[0; ETHERNET_ADDRESSES], tags, &[8, 0], &packet].concat();
        let expected = ([12, 13, 14, 15].into(), [16, 17, 18, 19].into());
        assert_eq!(kernel::addresses(&frame), Some(expected));
    }
}

/// The walk through a frame's addresses is one of its own: any frame can be handed to it.
#[test]
fn frames_that_are_cut_have_no_addresses() {
    let mut capture = Capture::open(&fixture("eth.pcap")).expect("it can be read");
    let mut packets = 0;
    while let Some(packet) = capture.read().expect("it is whole") {
        packets += 1;
        for len in 0..packet.frame.len() {
            let found = kernel::addresses(&packet.frame[..len]);
            assert!(found.is_none() || len >= 34, "{len}");
        }
    }
    assert!(packets > 40, "{packets}");
}
