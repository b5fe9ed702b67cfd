// SPDX-License-Identifier: Apache-2.0
//! Patchbay's developer commands. `cargo xtask help` lists them.
#![forbid(unsafe_code)]

mod cache;
mod cpio;
mod host;
mod lab;
mod lab_image;
mod modules;
mod shell;
mod step;
mod terminal;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about, disable_help_subcommand = false)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run a command where KVM works on every machine: in an emulated computer that sees this
    /// one's files
    Lab {
        /// Give up if the command has not ended after this many seconds
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
        /// The lab's memory
        #[arg(long, value_name = "MIB", default_value_t = 4096)]
        memory: u32,
        /// The command and its arguments
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    match task {
        Task::Lab {
            timeout,
            memory,
            command,
        } => {
            let mut job = lab::Job::new(command)?;
            job.timeout = timeout.map(Duration::from_secs);
            job.memory_mib = memory;
            Ok(ExitCode::from(lab::run(&job, lab::Streams::Inherit)?))
        }
    }
}
