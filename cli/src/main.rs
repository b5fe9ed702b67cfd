// SPDX-License-Identifier: Apache-2.0
//! `patchbay`, the operator's command.
#![forbid(unsafe_code)]

mod args;
mod client;
mod complete;
mod debug;
mod failure;
mod guest;
mod holds;
mod host;
mod inspect;
mod keys;
mod lab;
mod names;
mod print;
mod progress;
mod rollout;
mod text;
mod trace;
mod view;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use patchbay_ci::compare::Comparison;
use patchbay_kernel_image::Patterns;

use crate::args::guest::GuestCommand;
use crate::args::{CiCommand, Cli, Command, HostCommand};
use crate::client::selected::Selected;
use crate::client::sockets::SOCKET_VARIABLE;
use crate::failure::Failure;

const MANUAL: patchbay_manual::Program = patchbay_manual::Program {
    name: "patchbay",
    command: Cli::command,
    front: None,
};

fn main() -> ExitCode {
    MANUAL.answer_if_asked();
    let mut cli = Cli::parse();
    let checked = cli.check();
    // A monitor that this command starts creates its own socket.
    if cli.target.socket.is_none() && !cli.command.starts_a_guest() {
        let socket = std::env::var_os(SOCKET_VARIABLE).filter(|socket| !socket.is_empty());
        cli.target.socket = socket.map(Into::into);
    }
    let result = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => {
            let result = runtime.block_on(async {
                checked.map_err(Failure::usage)?;
                run(cli).await
            });
            // A thread may still be blocked in a read of standard input.
            runtime.shutdown_background();
            result
        }
        Err(error) => Err(error.into()),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            print::complain(&failure.message);
            ExitCode::from(failure.exit_code)
        }
    }
}

/// Runs the command and returns the exit code.
async fn run(cli: Cli) -> Result<u8, Failure> {
    match cli.command {
        Command::Ci(CiCommand::Run(arguments)) => {
            Patterns::parse(&arguments.matrix)
                .map_err(|error| Failure::usage(error.to_string()))?;
            Ok(patchbay_ci::run(*arguments, cli.timeout).await)
        }
        Command::Ci(CiCommand::Compare(arguments)) => {
            Patterns::parse(&arguments.matrix)
                .map_err(|error| Failure::usage(error.to_string()))?;
            let format = cli.output.format();
            let render = |comparison: &Comparison| {
                print::text(format, comparison).map_err(|failure| failure.message)
            };
            Ok(patchbay_ci::compare(*arguments, cli.timeout, render).await)
        }
        Command::Lab(arguments) => lab::run(arguments, cli.timeout),
        _ => run_on_guests(cli).await.map(|()| 0),
    }
}

async fn run_on_guests(cli: Cli) -> Result<(), Failure> {
    let (target, timeout) = (cli.target, cli.timeout);
    let output = cli.output.format();
    let selected = || Selected::select(&target, timeout);
    let guest = |command| guest::run(&target, command, timeout, output);
    match cli.command {
        Command::Ci(_) | Command::Lab(_) => unreachable!("they need no guest that runs"),
        Command::Guest(command) => guest(command).await,
        Command::Run(arguments) => guest(GuestCommand::Run(arguments)).await,
        Command::Guests { patterns } => guest(GuestCommand::List { patterns }).await,
        Command::Console(arguments) => guest(GuestCommand::Console(arguments)).await,
        Command::Attach { arguments } => guest::run::become_attacher(target.all, &arguments),
        Command::Keys(command) => keys::run(target, command, timeout, output).await,
        Command::Holds(command) => holds::run(selected().await?, command, output).await,
        Command::Debug(command) => debug::run(selected().await?, command, timeout, output).await,
        Command::Trace(command) => trace::run(selected().await?, command, timeout, output).await,
        Command::Host(HostCommand::List) => host::list(output).await,
        Command::Inspect(arguments) => inspect::run(arguments, output).await,
        Command::Rollout(arguments) => rollout::run(cli.fleet, arguments, timeout, output).await,
        Command::Policy { arguments } => guest::run::become_host_program("policy", &arguments),
        Command::Audit { arguments } => guest::run::become_host_program("audit", &arguments),
        Command::Certs { arguments } => guest::run::become_host_program("certs", &arguments),
        Command::Completion { shell } => print::write(&MANUAL.completion(shell)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_names_every_option() {
        assert_eq!(MANUAL.missing_options(), Vec::<String>::new());
        assert_eq!(MANUAL.without_range(), Vec::<String>::new());
    }
}
