use clap::CommandFactory;
use dnsflow_core::values::limits::FLOW_CHANGES_PER_SECOND;

use super::*;
use crate::event::Kind;

fn parse(arguments: &[&str]) -> Result<AgentOptions, String> {
    let arguments = ["dnsflow", "agent"]
        .into_iter()
        .chain(arguments.iter().copied());
    match Cli::try_parse_from(arguments) {
        Ok(Cli {
            command: Command::Agent(options),
        }) => Ok(*options),
        Ok(cli) => Err(format!("another command: {cli:?}")),
        Err(error) => Err(error.to_string()),
    }
}

fn remotes(text: &str) -> Remotes {
    text.parse().expect("remotes")
}

fn network(text: &str) -> IpNet {
    text.parse().expect("a network")
}

#[test]
fn the_command_line_is_sound() {
    Cli::command().debug_assert();
}

fn mask(bits: u32) -> NonZeroU32 {
    NonZeroU32::new(bits).expect("some bits")
}

#[test]
fn a_mark_mask_is_bits_in_one_piece() {
    for (text, wanted) in [
        ("0xffe00000", Ok(0xffe0_0000)),
        ("0x1", Ok(1)),
        ("0xfff", Ok(0xfff)),
        ("0xfff00000", Ok(0xfff0_0000)),
        ("4080", Err("a mask begins with 0x")),
        ("0x0", Err("a mask has at least one bit")),
        (
            "0xf0f",
            Err("the bits of the mask are not all in one piece"),
        ),
        (
            "0x1fff",
            Err("a mask has at most 12 bits, as 0xfff00000 has, and this one has 13"),
        ),
        (
            "0xffffffff",
            Err("a mask has at most 12 bits, as 0xfff00000 has, and this one has 32"),
        ),
    ] {
        let read = parse_mark_mask(text).map(NonZeroU32::get);
        assert_eq!(read, wanted.map_err(str::to_owned), "{text}");
    }
}

#[test]
fn without_arguments_the_defaults_hold() {
    assert_eq!(
        parse(&[]),
        Ok(AgentOptions {
            manifests: None,
            kubeconfig: None,
            dns_service: ["kube-system/k8s-app=kube-dns", "openshift-dns/dns-default"]
                .map(|text| text.parse().expect(text))
                .into(),
            ovs_db: None,
            ovn_nb: None,
            ovn_sb: None,
            openflow_socket: OpenflowSocket {
                path: "/var/run/openvswitch/br-int.mgmt".into(),
            },
            subdomains: true,
            hold: true,
            hold_max: Duration::from_millis(500),
            keep_flows_s: 300,
            min_ttl: Duration::from_secs(60),
            max_ttl: Duration::from_secs(3600),
            idle_grace: Duration::from_secs(60),
            max_addresses_per_name: 256,
            max_addresses_per_pod: 4096,
            max_flow_changes: 256,
            state_dir: None,
            pin_dir: None,
            resolver: Vec::new(),
            dns_port: vec![53],
            cluster_networks: Vec::new(),
            deny_answers: Vec::new(),
            nat64_prefix: Vec::new(),
            allow_answers: Vec::new(),
            dry_run: false,
            open_by: None,
            verdict: None,
            mark_mask: mask(0xffe0_0000),
            denied_events: true,
            listen: None,
            control_socket: ControlSocket {
                path: "/run/dnsflow/dnsflow.sock".into(),
            },
            log_format: LogFormat::Text,
        })
    );
}

/// It had no value until it was on by default.
#[test]
fn events_of_denied_connections_are_on_unless_switched_off() {
    let on = |arguments: &[&str]| parse(arguments).map(|options| options.denied_events);
    assert_eq!(on(&[]), Ok(true));
    assert_eq!(on(&["--denied-events", "--dry-run"]), Ok(true));
    assert_eq!(on(&["--denied-events=true"]), Ok(true));
    assert_eq!(on(&["--denied-events=false"]), Ok(false));
    assert!(on(&["--denied-events=no"]).is_err());
}

#[test]
fn every_option_is_taken() {
    let arguments = [
        "--manifests=/m",
        "--dns-service=a/b,c/d.e/f=g",
        "--dry-run",
        "--denied-events=false",
        "--listen=127.0.0.1:9473",
        "--ovs-db=tcp:127.0.0.1:6640",
        "--ovn-nb=unix:/nb.sock",
        "--ovn-sb=tcp:[::1]:6642",
        "--openflow-socket=/of",
        "--subdomains=false",
        "--hold=false",
        "--hold-max=50ms",
        "--keep-flows=18h",
        "--min-ttl=1s",
        "--max-ttl=2m",
        "--idle-grace=3s",
        "--max-addresses-per-name=4",
        "--max-addresses-per-pod=5",
        "--max-flow-changes=6",
        "--state-dir=/s",
        "--pin-dir=/sys/fs/bpf/dnsflow",
        "--resolver=10.96.0.10",
        "--resolver=[fd00::a]:5353,10.0.0.1:54",
        "--dns-port=53",
        "--dns-port=5353",
        "--cluster-networks=10.244.0.0/16,10.96.0.0/12",
        "--nat64-prefix=2001:db8:64::/96",
        "--deny-answers=private,198.51.100.0/24",
        "--allow-answers=10.1.0.0/16",
        "--open-by=marks",
        "--mark-mask=0xf00000",
        "--control-socket=/c",
        "--log-format=json",
    ];
    assert_eq!(
        parse(&arguments),
        Ok(AgentOptions {
            manifests: Some("/m".into()),
            kubeconfig: None,
            dns_service: vec![
                "a/b".parse().expect("a Service"),
                "c/d.e/f=g".parse().expect("a Service"),
            ],
            ovs_db: Some(remotes("tcp:127.0.0.1:6640")),
            ovn_nb: Some(remotes("unix:/nb.sock")),
            ovn_sb: Some(remotes("tcp:[::1]:6642")),
            openflow_socket: OpenflowSocket { path: "/of".into() },
            subdomains: false,
            hold: false,
            hold_max: Duration::from_millis(50),
            keep_flows_s: 64_800,
            min_ttl: Duration::from_secs(1),
            max_ttl: Duration::from_secs(120),
            idle_grace: Duration::from_secs(3),
            max_addresses_per_name: 4,
            max_addresses_per_pod: 5,
            max_flow_changes: 6,
            state_dir: Some("/s".into()),
            pin_dir: Some("/sys/fs/bpf/dnsflow".into()),
            resolver: ["10.96.0.10:53", "[fd00::a]:5353", "10.0.0.1:54"]
                .map(|text| text.parse().expect("a resolver"))
                .to_vec(),
            dns_port: vec![53, 5353],
            cluster_networks: vec![network("10.244.0.0/16"), network("10.96.0.0/12")],
            deny_answers: vec![
                DeniedNetwork::Private,
                DeniedNetwork::Network(network("198.51.100.0/24")),
            ],
            nat64_prefix: vec!["2001:db8:64::/96".parse().expect("a prefix")],
            allow_answers: vec![network("10.1.0.0/16")],
            dry_run: true,
            open_by: Some(OpenBy::Marks),
            verdict: None,
            mark_mask: mask(0x00f0_0000),
            denied_events: false,
            listen: Some("127.0.0.1:9473".parse().expect("an address")),
            control_socket: ControlSocket { path: "/c".into() },
            log_format: LogFormat::Json,
        })
    );
    assert_eq!(
        parse(&["--kubeconfig", "/k"]).map(|options| options.kubeconfig),
        Ok(Some("/k".into()))
    );
}

#[test]
fn the_defaults_are_those_of_the_core() {
    let cache_limits = parse(&[]).map(|options| options.cache_limits());
    assert_eq!(cache_limits, Ok(CacheLimits::default()));
    let changes = parse(&[]).map(|options| options.max_flow_changes);
    assert_eq!(changes, Ok(FLOW_CHANGES_PER_SECOND));
    assert!(parse(&["--max-flow-changes=0"]).is_err());
}

#[test]
fn impossible_options_are_refused_with_the_cure() {
    for bad in ["ssl:1.2.3.4:5", "/sock", "tcp:host:0", "tcp::1"] {
        let error = parse(&["--ovs-db", bad]).expect_err(bad);
        assert!(error.contains("use unix:PATH or tcp:HOST:PORT"), "{error}");
    }
    let error = parse(&["--manifests=/m", "--kubeconfig=/k"]).expect_err("a conflict");
    assert!(error.contains("cannot be used with"), "{error}");
    let error = parse(&["--dns-service=kube-dns"]).expect_err("no namespace");
    assert!(error.contains("NAMESPACE/LABEL=VALUE"), "{error}");
    assert!(parse(&["--subdomains=maybe"]).is_err());
    assert!(parse(&["--dns-port=0"]).is_err());
    for (bad, remedy) in [
        ("--resolver=dns", "use IP, IP:PORT or [IPv6]:PORT"),
        ("--cluster-networks=pods", "use an address or a CIDR"),
        ("--deny-answers=all", "or `private`"),
        ("--allow-answers=private", "use an address or a CIDR"),
        ("--nat64-prefix=64:ff9b::/80", "with a length of 32, 40"),
    ] {
        let error = parse(&[bad]).expect_err(bad);
        assert!(error.contains(remedy), "{error}");
    }
    assert!(parse(&["--log-format=xml"]).is_err());
}

#[test]
fn what_is_no_target_is_a_wrong_command_line() {
    let exit_code = |target: &str| {
        let parsed = Cli::try_parse_from(["dnsflow", "explain", "ns1/pod1", target]);
        parsed.map_or_else(|error| error.exit_code(), |_| 0)
    };
    for target in [
        "www.example.com.",
        "[2001:db8::1]:443",
        "203.0.113.1:53/udp",
    ] {
        assert_eq!(exit_code(target), 0, "{target}");
    }
    for wrong in [
        "example.com/udp",
        "a..b",
        "203.0.113.300",
        "203.0.113.1/icmp",
    ] {
        assert_eq!(exit_code(wrong), 2, "{wrong}");
    }
    let with_port = |port: &str| {
        let parsed = Cli::try_parse_from(["dnsflow", "explain", "ns1/pod1", "example.com", port]);
        match parsed.map(|cli| cli.command) {
            Ok(Command::Explain(options)) => options.whole_target(),
            Ok(other) => panic!("{other:?}"),
            Err(error) => error.exit_code().to_string(),
        }
    };
    assert_eq!(with_port("443"), "example.com 443");
    assert_eq!(with_port("0"), "2");
}

#[test]
fn an_unknown_kind_of_event_is_refused_with_the_list() {
    let parse =
        |kind| Cli::try_parse_from(["dnsflow", "observe", "--since", "10m", "--event", kind]);
    let Command::Observe(options) = parse("denied").expect("a kind").command else {
        panic!("another command");
    };
    assert_eq!(options.event, Some(Kind::Denied));
    assert_eq!(options.since, Some(Duration::from_secs(600)));
    let error = parse("blocked").expect_err("no kind");
    assert_eq!(error.exit_code(), 2);
    let error = error.to_string();
    assert!(
        error.contains("[possible values: opened, would_open, denied, "),
        "{error}"
    );
    assert!(!error.contains("events_missed"), "{error}");
}

#[test]
fn the_former_name_of_open_by_is_taken_and_not_shown() {
    let open_by = |arguments: &[&str]| parse(arguments).map(|options| options.open_by());
    assert_eq!(open_by(&[]), Ok(OpenBy::Auto));
    assert_eq!(open_by(&["--open-by=marks"]), Ok(OpenBy::Marks));
    for (former, way) in [
        ("kernel", OpenBy::Marks),
        ("flows", OpenBy::Flows),
        ("auto", OpenBy::Auto),
    ] {
        assert_eq!(open_by(&["--verdict", former]), Ok(way));
    }
    let both = ["--verdict=kernel", "--open-by=flows"];
    assert_eq!(open_by(&both), Ok(OpenBy::Flows));
    let mut command = Cli::command();
    let agent = command.find_subcommand_mut("agent").expect("it is there");
    let help = agent.render_long_help().to_string();
    assert!(
        !help.contains("verdict") && !help.contains("kernel,"),
        "{help}"
    );
}

#[test]
fn the_former_name_of_unused_is_taken_and_not_shown() {
    let parsed =
        Cli::try_parse_from(["dnsflow", "prune", "--namespace", "ns1"]).expect("a command");
    assert!(matches!(parsed.command, Command::Unused(_)), "{parsed:?}");
    let help = Cli::command().render_long_help().to_string();
    assert!(help.contains("unused") && !help.contains("prune"), "{help}");
}

#[test]
fn options_come_to_ports_and_refusals() {
    let options = parse(&["--dns-port=53,5353", "--deny-answers=198.51.100.0/24"]).expect("right");
    assert_eq!(options.ports(), Ok(Ports::new(&[53, 5353]).expect("ports")));
    let refusals = options.refusals().expect("few");
    assert!(refusals.check([198, 51, 100, 1].into()).is_err());
    assert!(refusals.check([203, 0, 113, 1].into()).is_ok());

    let many = parse(&["--dns-port=1,2,3,4,5,6,7,8,9"]).expect("each is right");
    let error = many.ports().expect_err("too many");
    assert_eq!(
        error.to_string(),
        "--dns-port: 9 ports given, 8 are possible"
    );
    let networks = vec!["10.0.0.0/8"; 257].join(",");
    let many = parse(&["--allow-answers", &networks]).expect("each is right");
    assert!(matches!(
        many.refusals(),
        Err(OptionsError::TooManyNetworks(TooManyNetworks(257)))
    ));
}

#[test]
fn each_option_has_a_line_of_help_and_a_variable() {
    let mut command = Cli::command();
    command.build();
    let agent = command.find_subcommand("agent").expect("the subcommand");
    let help = agent.clone().term_width(0).render_help().to_string();
    for argument in agent
        .get_arguments()
        .filter(|argument| argument.get_id() != "help" && !argument.is_hide_set())
    {
        let name = argument.get_long().expect("a long name");
        let line = help
            .lines()
            .find(|line| {
                let rest = line.trim_start().strip_prefix(&format!("--{name}"));
                rest.is_some_and(|rest| rest.starts_with([' ', '[']))
            })
            .unwrap_or_else(|| panic!("no help for --{name} in\n{help}"));
        let variable = format!("[env: DNSFLOW_{}", name.to_uppercase().replace('-', "_"));
        assert!(line.contains(&variable), "{line}");
        let text = argument.get_help().expect("help").to_string();
        assert!(!text.contains('\n') && text.len() < 100, "{text}");
    }
}
