// SPDX-License-Identifier: Apache-2.0
//! `patchbay`, the operator's command.
#![forbid(unsafe_code)]

mod args;
mod client;
mod failure;
mod guest;
mod inspect;
mod keys;
mod print;
mod trace;
mod view;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::args::{Cli, Command};
use crate::client::Monitor;
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
            eprintln!("patchbay: {}", failure.message);
            ExitCode::from(failure.exit_code)
        }
    }
}

async fn run(cli: Cli) -> Result<(), Failure> {
    let connect = || Monitor::connect(&cli.target, cli.timeout);
    let output = cli.output.format();
    match cli.command {
        Command::Run(arguments) => guest::become_monitor(&cli.target, arguments),
        Command::Guests => guest::list(output).await,
        Command::Guest(command) => {
            guest::run(&connect().await?, command, cli.timeout, output).await
        }
        Command::Console(arguments) => guest::console(&connect().await?, &arguments).await,
        Command::Keys(command) => keys::run(&connect().await?, command, output).await,
        Command::Trace(command) => trace::run(&connect().await?, command, output).await,
        Command::Inspect(arguments) => inspect::run(&arguments, output),
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
