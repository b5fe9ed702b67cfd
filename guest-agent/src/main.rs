// SPDX-License-Identifier: Apache-2.0
//! `patchbay-agent`, the daemon in the guest.
//!
//! It connects to the monitor and retries when the connection ends. It enables and disables events
//! in its own tracefs instance, forwards their ring-buffer pages, and reports the guest's health.
//! It makes no decisions: the monitor records which events are armed, and the keys, which the
//! monitor flips without the agent, determine whether they fire.
//!
//! In a guest that was booted with `patchbay.exec` on its command line it also runs commands for
//! the program that booted the guest. There is no option for this, so only the program that boots a
//! guest can request it.
#![forbid(unsafe_code)]

mod address;
mod exec;
mod health;
mod kmsg;
mod pump;
mod session;
mod tracefs;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::address::Address;
use crate::session::Ending;
use crate::tracefs::Tracefs;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LAST_BACKOFF: Duration = Duration::from_secs(5);

const HELP: &str = "\
patchbay-agent: arms tracepoints for the Patchbay monitor of this guest

Options:
  --connect ADDRESS  vsock:CID:PORT or unix:PATH [default: vsock:2:1024]
  --tracefs PATH     where tracefs is mounted [default: /sys/kernel/tracing, mounted if need be]
  --version
  --help
";

/// The request of a command line.
enum Request {
    Serve(Options),
    Print(String),
}

struct Options {
    address: Address,
    tracefs: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(Request::Serve(options)) => options,
        Ok(Request::Print(text)) => return print(&text),
        Err(message) => {
            eprintln!("patchbay-agent: {message}; see --help");
            return ExitCode::from(2);
        }
    };
    let command_line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    if exec::allowed(&command_line) {
        std::thread::spawn(|| exec::serve(&Address::exec()));
    }
    let tracefs = Tracefs::open(options.tracefs);
    if let Err(error) = &tracefs {
        eprintln!("patchbay-agent: {error}");
    }
    let mut backoff = FIRST_BACKOFF;
    let mut printed = String::new();
    loop {
        let ending = match options.address.connect() {
            Ok(connection) => session::run(connection, tracefs.as_ref()),
            Err(error) => Ending::Failed(format!("{} cannot be reached: {error}", options.address)),
        };
        let message = match ending {
            Ending::Served(why) => {
                backoff = FIRST_BACKOFF;
                why
            }
            Ending::Failed(why) => why,
        };
        // A repeated message is printed only once, so that a guest without a monitor does not fill
        // its log.
        if message != printed {
            eprintln!("patchbay-agent: {message}; trying again");
            printed = message;
        }
        std::thread::sleep(backoff);
        backoff = (backoff * 2).min(LAST_BACKOFF);
    }
}

/// Prints to standard output. A closed pipe is no failure, because its reader has read enough.
fn print(text: &str) -> ExitCode {
    let mut output = std::io::stdout().lock();
    let written = output.write_all(text.as_bytes());
    match written.and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            eprintln!("patchbay-agent: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Parses the arguments.
fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let mut options = Options {
        address: Address::default(),
        tracefs: None,
    };
    while let Some(argument) = arguments.next() {
        let mut value = || {
            arguments
                .next()
                .ok_or_else(|| format!("{argument} needs a value"))
        };
        match argument.as_str() {
            "--connect" => options.address = value()?.parse()?,
            "--tracefs" => options.tracefs = Some(value()?.into()),
            "--version" => {
                let version = env!("CARGO_PKG_VERSION");
                return Ok(Request::Print(format!("patchbay-agent {version}\n")));
            }
            "--help" => return Ok(Request::Print(HELP.to_owned())),
            _ => return Err(format!("{argument:?} is not an option")),
        }
    }
    Ok(Request::Serve(options))
}
