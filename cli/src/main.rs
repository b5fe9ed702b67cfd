// SPDX-License-Identifier: Apache-2.0
//! `patchbay`, the operator's command.
#![forbid(unsafe_code)]

mod args;
mod client;
mod debug;
mod failure;
mod guest;
mod holds;
mod inspect;
mod keys;
mod names;
mod print;
mod progress;
mod trace;
mod view;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::args::guest::GuestCommand;
use crate::args::{Cli, Command};
use crate::client::fleet::Fleet;
use crate::failure::Failure;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => {
            let result = runtime.block_on(run(cli));
            // A read of standard input may still be blocked.
            runtime.shutdown_background();
            result
        }
        Err(error) => Err(error.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!(
                "{}",
                print::harmless(&format!("patchbay: {}", failure.message))
            );
            ExitCode::from(failure.exit_code)
        }
    }
}

async fn run(cli: Cli) -> Result<(), Failure> {
    let (target, timeout) = (cli.target, cli.timeout);
    let output = cli.output.format();
    let fleet = || Fleet::select(&target, timeout);
    let guest = |command| guest::run(&target, command, timeout, output);
    match cli.command {
        Command::Guest(command) => guest(command).await,
        Command::Run(arguments) => guest(GuestCommand::Run(arguments)).await,
        Command::Guests { patterns } => guest(GuestCommand::List { patterns }).await,
        Command::Console(arguments) => guest(GuestCommand::Console(arguments)).await,
        Command::Attach { arguments } => guest::run::become_attacher(&arguments),
        Command::Keys(command) => keys::run(fleet().await?, command, timeout, output).await,
        Command::Holds(command) => holds::run(fleet().await?, command, output).await,
        Command::Debug(command) => debug::run(fleet().await?, command, output).await,
        Command::Trace(command) => trace::run(fleet().await?, command, output).await,
        Command::Inspect(arguments) => inspect::run(arguments, output).await,
        Command::Completion { shell } => {
            clap_complete::generate(
                shell,
                &mut Cli::command(),
                "patchbay",
                &mut std::io::stdout(),
            );
            Ok(())
        }
    }
}
