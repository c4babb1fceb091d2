//! The `dnsflow` program.

use std::{io, process::ExitCode};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use dnsflow_agent::{
    agent,
    check::{self, Status},
    cleanup,
    control::commands::{self, CommandError},
    k8s::egress_firewall::DEFINITION,
    logging::Log,
    options::{CacheCommand, Cli, Command, FlowsCommand},
    rights::{TO_START, WHILE_RUNNING, keep_only, without_any},
    wait,
};
use dnsflow_core::view::Verdict;

/// The exit code of `dnsflow explain` where something is blocked. 1 is a failure, 2 a wrong command line.
const BLOCKED: u8 = 3;

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
            let worst = check::run(*options, &mut io::stdout()).context("cannot check")?;
            Ok(match worst {
                Status::Ok | Status::Warning => ExitCode::SUCCESS,
                Status::Failed => ExitCode::FAILURE,
            })
        }
        Command::Status(options) => asked(commands::status(&options, &mut io::stdout().lock())),
        Command::Cache(CacheCommand::List(options)) => {
            asked(commands::cache_list(&options, &mut io::stdout().lock()))
        }
        Command::Flows(FlowsCommand::List(options)) => {
            asked(commands::flows_list(&options, &mut io::stdout().lock()))
        }
        Command::Observe(options) => asked(commands::observe(&options, &mut io::stdout().lock())),
        Command::Explain(options) => match commands::explain(&options, &mut io::stdout().lock())? {
            Verdict::Allowed => Ok(ExitCode::SUCCESS),
            Verdict::Blocked => Ok(ExitCode::from(BLOCKED)),
        },
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "dnsflow", &mut io::stdout());
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { command } => {
            let mut page = Cli::command();
            if let Some(name) = command {
                let found = page.find_subcommand(&name).context("no such subcommand")?;
                page = found.clone().name(format!("dnsflow-{name}"));
            }
            clap_mangen::Man::new(page).render(&mut io::stdout())?;
            Ok(ExitCode::SUCCESS)
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

/// A reader who has seen enough, as `head`, is no failure.
fn asked(result: Result<(), CommandError>) -> anyhow::Result<ExitCode> {
    match result {
        Err(error) if error.is_closed_pipe() => Ok(ExitCode::SUCCESS),
        result => {
            result?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
