//! The `dnsflow` program.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use dnsflow_agent::{
    agent,
    check::{self, Status},
    cleanup,
    k8s::egress_firewall::DEFINITION,
    options::{Cli, Command, LogFormat},
    wait,
};
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _};

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Agent(options) => {
            start_log(options.log_format);
            agent::run(*options).context("the agent stops")?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Check(options) => {
            let worst = check::run(*options, &mut std::io::stdout()).context("cannot check")?;
            Ok(match worst {
                Status::Ok | Status::Warning => ExitCode::SUCCESS,
                Status::Failed => ExitCode::FAILURE,
            })
        }
        Command::Wait => {
            wait::run().context("cannot wait")?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Crd => {
            print!("{DEFINITION}");
            Ok(ExitCode::SUCCESS)
        }
        Command::Cleanup(options) => {
            let removed = cleanup::run(options.openflow_socket, options.state_dir)
                .context("flows may be left")?;
            println!("{removed} flows removed");
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Logs to standard error what `RUST_LOG` asks for; by default, what people should know.
fn start_log(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(format!("info,{}", dnsflow_agent::k8s::QUIET_TARGETS)));
    let registry = tracing_subscriber::registry().with(filter);
    let writer = std::io::stderr;
    match format {
        LogFormat::Text => registry.with(fmt::layer().with_writer(writer)).init(),
        LogFormat::Json => registry
            .with(fmt::layer().json().with_writer(writer))
            .init(),
    }
}
