//! The `dnsflow` program.

use std::{env, io::Write as _, process::ExitCode};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use dnsflow_agent::{
    agent,
    asking::commands,
    bundle, check, cleanup,
    exit::Exit,
    k8s::egress_firewall::DEFINITION,
    kubectl,
    logging::Log,
    options::{CacheCommand, CleanupOptions, Cli, Command, FlowsCommand, OpenflowSocket},
    output::Stdout,
    replay,
    rights::{TO_START, WHILE_RUNNING, keep_only, without_any},
    wait,
};

fn main() -> ExitCode {
    let mut output = Stdout::of_this_process();
    let exit = match run(&mut output) {
        _ if output.reader_has_gone() => Exit::Done,
        Ok(exit) => exit,
        Err(error) => {
            // Who reads none of it has the exit code.
            let _unread = std::io::stderr().write_all(with_causes(&error).as_bytes());
            Exit::Failed
        }
    };
    exit.into()
}

/// An error for people. A `main` that returns it prints a stack trace, too, where RUST_BACKTRACE is set.
fn with_causes(error: &anyhow::Error) -> String {
    let causes = error.chain().skip(1);
    let causes: String = causes.map(|cause| format!("    {cause}\n")).collect();
    match &*causes {
        "" => format!("Error: {error}\n"),
        causes => format!("Error: {error}\n\nCaused by:\n{causes}"),
    }
}

fn run(output: &mut Stdout) -> anyhow::Result<Exit> {
    if let Some(called) = kubectl::called(env::args_os().next().as_ref()) {
        return kubectl::run(called, output);
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
                    let exit = error.exit();
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::error!(error, "the agent stops");
                    exit
                }
            };
            lost.report();
            drop(log);
            return Ok(code);
        }
        Command::Check(options) => {
            return match check::run(*options, output).context("cannot check")? {
                true => Ok(Exit::Done),
                false => Ok(Exit::No),
            };
        }
        Command::Status(options) => commands::status(&options, output)?,
        Command::Cache(CacheCommand::List(options)) => commands::cache_list(&options, output)?,
        Command::Flows(FlowsCommand::List(options)) => commands::flows_list(&options, output)?,
        Command::Observe(options) => commands::observe(&options, output)?,
        Command::Learn(options) => return commands::learn(&options, output),
        Command::Try(options) => return commands::try_firewalls(&options, output),
        Command::Unused(options) => return commands::unused(&options, output),
        Command::Report(options) => return commands::report(&options, output),
        Command::Replay(options) => return Ok(replay::run(&options, output)?),
        Command::LogLevel(options) => commands::log_level(&options, output)?,
        Command::Bundle(options) => return bundle::run(*options, output).context("no bundle"),
        Command::Explain(options) => return commands::explain(&options, output),
        Command::Completion { shell } => {
            // Not written at once: what writes it panics where nobody reads.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "dnsflow", &mut script);
            output.write_all(&script)?;
        }
        Command::Man { command } => {
            let mut page = Cli::command();
            if let Some(name) = command {
                let found = page.find_subcommand(&name).context("no such subcommand")?;
                page = found.clone().name(format!("dnsflow-{name}"));
            }
            clap_mangen::Man::new(page).render(output)?;
        }
        Command::Wait => wait::run(None).context("cannot wait")?,
        Command::Crd => output.write_all(DEFINITION.as_bytes())?,
        Command::Cleanup(options) => {
            let CleanupOptions {
                openflow_socket: OpenflowSocket { path },
                state_dir,
                pin_dir,
                dry_run,
                stay,
                listen,
            } = options;
            let dirs = cleanup::Dirs {
                state: state_dir.as_deref(),
                pins: pin_dir.as_deref(),
            };
            if dry_run {
                cleanup::dry_run(path, &dirs, output)
                    .context("cannot say what would be removed")?;
            } else {
                let removed = cleanup::run(path, &dirs).context("flows may be left")?;
                let cleanup::Removed { flows, interfaces } = removed;
                writeln!(output, "{flows} flows removed")?;
                if interfaces > 0 {
                    writeln!(
                        output,
                        "the programs are off {interfaces} interfaces (clsact)"
                    )?;
                }
            }
            if stay {
                output.flush()?;
                wait::run(listen).context("the node is clean, but cannot wait")?;
            }
        }
        Command::CleanupNodes(options) => {
            return cleanup::nodes::run(&options, output).context("nodes may not be clean");
        }
    }
    output.flush()?;
    Ok(Exit::Done)
}
