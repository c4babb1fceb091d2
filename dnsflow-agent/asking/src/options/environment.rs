//! Environment variables that look like options and are none.

use clap::CommandFactory as _;

use super::Cli;
use crate::nearest::nearest;

/// How the variables of dnsflow's options begin.
const PREFIX: &str = "DNSFLOW_";

/// A warning for each of these variables that begins like one of an option and is none.
pub fn unknown_variables(variables: impl IntoIterator<Item = (String, String)>) -> Vec<String> {
    let mut cli = Cli::command();
    cli.build();
    let mut known = Vec::new();
    for command in cli.get_subcommands() {
        let variables = command
            .get_arguments()
            .filter_map(|option| option.get_env());
        known.extend(variables.filter_map(|name| name.to_str()));
    }
    let unknown = variables.into_iter().filter(|(name, value)| {
        name.starts_with(PREFIX) && !known.contains(&name.as_str()) && !is_of_service(name, value)
    });
    let warnings = unknown.map(|(name, _)| {
        let nearest = nearest(&name, known.iter().copied()).unwrap_or_default();
        format!("the environment variable {name} is no option and has no effect; the nearest one is {nearest}")
    });
    warnings.collect()
}

/// Whether Kubernetes has set the variable for a Service whose name begins with `dnsflow` (`FromServices` and
/// `makeLinkVariables` in pkg/kubelet/envvars/envvars.go).
fn is_of_service(name: &str, value: &str) -> bool {
    let is_url = ["tcp://", "udp://", "sctp://"]
        .iter()
        .any(|scheme| value.starts_with(scheme));
    let is_of_port = name
        .rsplit_once("_PORT_")
        .is_some_and(|(_, port)| port.starts_with(|c: char| c.is_ascii_digit()));
    name.contains("_SERVICE_HOST") || name.contains("_SERVICE_PORT") || is_url || is_of_port
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(variables: &[(&str, &str)]) -> Vec<String> {
        let variables = variables.iter();
        unknown_variables(variables.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn a_misspelt_variable_is_named_with_the_nearest_option() {
        assert_eq!(
            warnings(&[
                ("DNSFLOW_DRYRUN", "true"),
                ("DNSFLOW_DRY_RUN", "true"),
                ("DNSFLOW_CONTROL_SOCKET", "/s"),
                ("DRY_RUN", "true"),
            ]),
            [
                "the environment variable DNSFLOW_DRYRUN is no option and has no effect; the nearest one is DNSFLOW_DRY_RUN"
            ]
        );
    }

    #[test]
    fn what_kubernetes_sets_for_a_service_is_no_option() {
        let of_service = [
            ("DNSFLOW_SERVICE_HOST", "10.96.0.7"),
            ("DNSFLOW_SERVICE_PORT", "9473"),
            ("DNSFLOW_METRICS_SERVICE_PORT_METRICS", "9473"),
            ("DNSFLOW_PORT", "tcp://10.96.0.7:9473"),
            ("DNSFLOW_PORT_9473_TCP", "tcp://10.96.0.7:9473"),
            ("DNSFLOW_PORT_9473_TCP_ADDR", "10.96.0.7"),
            ("DNSFLOW_PORT_9473_TCP_PROTO", "tcp"),
        ];
        assert!(warnings(&of_service).is_empty());
    }
}
