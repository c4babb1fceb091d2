//! The `dnsflow` program.

use std::{env, io, process::ExitCode};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use dnsflow_agent::{
    agent, bundle, check, cleanup,
    control::commands::{self, CommandError},
    exit::Exit,
    k8s::egress_firewall::DEFINITION,
    kubectl,
    logging::Log,
    options::{CacheCommand, CleanupOptions, Cli, Command, FlowsCommand, OpenflowSocket},
    rights::{TO_START, WHILE_RUNNING, keep_only, without_any},
    wait,
};
use dnsflow_core::view::Verdict;

fn main() -> anyhow::Result<ExitCode> {
    Ok(run()?.into())
}

fn run() -> anyhow::Result<Exit> {
    if kubectl::is_called(env::args_os().next().as_ref()) {
        return Ok(kubectl::run(&mut io::stdout().lock())?);
    }
    match Cli::parse().command {
        Command::Agent(options) => {
            // No other thread is there yet.
            keep_only(TO_START | WHILE_RUNNING).context("cannot give up capabilities")?;
            let log = without_any(|| Log::start(options.log_format))
                .context("cannot start the log's thread")?;
            let lost = log.lost_lines();
            let result = agent::run(*options, &log);
            let code = match result {
                Ok(()) => Exit::Done,
                // Not returned: standard error may be what nobody reads.
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::error!(error, "the agent stops");
                    Exit::Failed
                }
            };
            lost.report();
            drop(log);
            Ok(code)
        }
        Command::Check(options) => {
            match check::run(*options, &mut io::stdout()).context("cannot check")? {
                true => Ok(Exit::Done),
                false => Ok(Exit::No),
            }
        }
        Command::Status(options) => asked(commands::status(&options, &mut io::stdout().lock())),
        Command::Cache(CacheCommand::List(options)) => {
            asked(commands::cache_list(&options, &mut io::stdout().lock()))
        }
        Command::Flows(FlowsCommand::List(options)) => {
            asked(commands::flows_list(&options, &mut io::stdout().lock()))
        }
        Command::Observe(options) => asked(commands::observe(&options, &mut io::stdout().lock())),
        Command::Learn(options) => Ok(commands::learn(&options, &mut io::stdout().lock())?),
        Command::Try(options) => Ok(commands::try_firewalls(&options, &mut io::stdout().lock())?),
        Command::LogLevel(options) => {
            asked(commands::log_level(&options, &mut io::stdout().lock()))
        }
        Command::Bundle(options) => bundle::run(*options).context("no bundle"),
        Command::Explain(options) => match commands::explain(&options, &mut io::stdout().lock())? {
            Verdict::Allowed => Ok(Exit::Done),
            Verdict::Blocked => Ok(Exit::No),
        },
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "dnsflow", &mut io::stdout());
            Ok(Exit::Done)
        }
        Command::Man { command } => {
            let mut page = Cli::command();
            if let Some(name) = command {
                let found = page.find_subcommand(&name).context("no such subcommand")?;
                page = found.clone().name(format!("dnsflow-{name}"));
            }
            clap_mangen::Man::new(page).render(&mut io::stdout())?;
            Ok(Exit::Done)
        }
        Command::Wait => {
            wait::run().context("cannot wait")?;
            Ok(Exit::Done)
        }
        Command::Crd => {
            print!("{DEFINITION}");
            Ok(Exit::Done)
        }
        Command::Cleanup(options) => {
            let CleanupOptions {
                openflow_socket: OpenflowSocket { path },
                state_dir,
                dry_run,
            } = options;
            let state_dir = state_dir.as_deref();
            if dry_run {
                cleanup::dry_run(path, state_dir, &mut io::stdout().lock())
                    .context("cannot say what would be removed")?;
            } else {
                let removed = cleanup::run(path, state_dir).context("flows may be left")?;
                println!("{removed} flows removed");
            }
            Ok(Exit::Done)
        }
    }
}

/// A reader who has seen enough, as `head`, is no failure.
fn asked(result: Result<(), CommandError>) -> anyhow::Result<Exit> {
    match result {
        Err(error) if error.is_closed_pipe() => Ok(Exit::Done),
        result => {
            result?;
            Ok(Exit::Done)
        }
    }
}
