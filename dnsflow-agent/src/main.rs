//! The `dnsflow` program.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use dnsflow_agent::{
    agent,
    check::{self, Status},
    cleanup,
    k8s::egress_firewall::DEFINITION,
    logging::Log,
    options::{Cli, Command},
    rights::{TO_START, WHILE_RUNNING, keep_only, without_any},
    wait,
};

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Agent(options) => {
            // No other thread is there yet.
            keep_only(TO_START | WHILE_RUNNING).context("cannot give up capabilities")?;
            let log = without_any(|| Log::start(options.log_format))
                .context("cannot start the log's thread")?;
            let lost = log.lost_lines();
            let result = agent::run(*options, lost.clone());
            let code = match result {
                Ok(()) => ExitCode::SUCCESS,
                // Not returned: standard error may be what nobody reads.
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::error!(error, "the agent stops");
                    ExitCode::FAILURE
                }
            };
            lost.report();
            drop(log);
            Ok(code)
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
