use clap::CommandFactory;

use super::*;

fn parse(arguments: &[&str]) -> Result<AgentOptions, String> {
    let arguments = ["dnsflow", "agent"]
        .into_iter()
        .chain(arguments.iter().copied());
    match Cli::try_parse_from(arguments) {
        Ok(Cli {
            command: Command::Agent(options),
        }) => Ok(options),
        Ok(cli) => Err(format!("another command: {cli:?}")),
        Err(error) => Err(error.to_string()),
    }
}

fn remotes(text: &str) -> Remotes {
    text.parse().expect("remotes")
}

#[test]
fn the_command_line_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn without_arguments_the_defaults_hold() {
    assert_eq!(
        parse(&[]),
        Ok(AgentOptions {
            manifests: None,
            kubeconfig: None,
            dns_service: DnsService::usual(),
            ovs_db: None,
            ovn_nb: None,
            ovn_sb: None,
            openflow_socket: "/var/run/openvswitch/br-int.mgmt".into(),
            subdomains: true,
            listen: None,
            log_format: LogFormat::Text,
        })
    );
}

#[test]
fn every_option_is_taken() {
    let arguments = [
        "--manifests=/m",
        "--dns-service=a/b,c/d.e/f=g",
        "--listen=127.0.0.1:9473",
        "--ovs-db=tcp:127.0.0.1:6640",
        "--ovn-nb=unix:/nb.sock",
        "--ovn-sb=tcp:[::1]:6642",
        "--openflow-socket=/of",
        "--subdomains=false",
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
            openflow_socket: "/of".into(),
            subdomains: false,
            listen: Some("127.0.0.1:9473".parse().expect("an address")),
            log_format: LogFormat::Json,
        })
    );
    assert_eq!(
        parse(&["--kubeconfig", "/k"]).map(|options| options.kubeconfig),
        Ok(Some("/k".into()))
    );
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
    assert!(parse(&["--log-format=xml"]).is_err());
}

#[test]
fn each_option_has_a_line_of_help_and_a_variable() {
    let mut command = Cli::command();
    command.build();
    let agent = command.find_subcommand("agent").expect("the subcommand");
    let help = agent.clone().term_width(0).render_help().to_string();
    for argument in agent
        .get_arguments()
        .filter(|argument| argument.get_id() != "help")
    {
        let name = argument.get_long().expect("a long name");
        let line = help
            .lines()
            .find(|line| line.trim_start().starts_with(&format!("--{name} ")))
            .unwrap_or_else(|| panic!("no help for --{name} in\n{help}"));
        let variable = format!("[env: DNSFLOW_{}", name.to_uppercase().replace('-', "_"));
        assert!(line.contains(&variable), "{line}");
        let text = argument.get_help().expect("help").to_string();
        assert!(!text.contains('\n') && text.len() < 100, "{text}");
    }
}
