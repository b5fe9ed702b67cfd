// SPDX-License-Identifier: Apache-2.0
//! Replaces this process by another program: `guest run`, `attach`, `policy`, `audit` and `certs`.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::CommandFactory;

use crate::args::Cli;
use crate::args::guest::RunArgs;
use crate::args::target::Target;
use crate::client::selected::only_one;
use crate::client::sockets;
use crate::failure::Failure;
use crate::names::is_glob;
use crate::print::write;

pub const MONITOR: &str = "patchbay-vmm";
pub const ATTACHER: &str = "patchbay-attach";
pub const HOST_DAEMON: &str = "patchbayd";
/// The command as typed, for the usage messages of the other programs.
const AS_MONITOR: &str = "patchbay guest run";
const AS_ATTACHER: &str = "patchbay attach";

/// Becomes `patchbay-vmm`, with its socket at the path where the other commands look for it. If
/// help is requested, prints the help and returns instead.
///
/// # Errors
/// The arguments are wrong, or the program cannot be started.
pub fn become_monitor(target: &Target, mut arguments: RunArgs) -> Result<(), Failure> {
    if arguments.help {
        return help();
    }
    let name = match target.guest.as_slice() {
        _ if target.all => return Err(only_one("guest run")),
        [] => arguments.name,
        [name] if !is_glob(name) => Some(name.clone()),
        _ => return Err(only_one("guest run")),
    };
    let name = name
        .or_else(|| take_name(&mut arguments.arguments))
        .unwrap_or_else(|| "default".to_owned());
    let mut rest = arguments.arguments.iter();
    if rest.any(|argument| is_option(argument, "--api-socket")) {
        return Err(Failure::usage(
            "--api-socket is set by this command; give `patchbay --socket PATH guest run …`",
        ));
    }
    let socket = match &target.socket {
        Some(socket) => socket.clone(),
        None => {
            let socket = sockets::of(&name)?;
            let folder = sockets::folder();
            std::fs::create_dir_all(&folder).map_err(|error| {
                Failure::error(format!(
                    "the folder {} cannot be made: {error}; set XDG_RUNTIME_DIR or give --socket",
                    folder.display()
                ))
            })?;
            socket
        }
    };
    let mut monitor = Command::new(program(MONITOR));
    monitor.arg0(AS_MONITOR);
    monitor.arg("--name").arg(&name);
    monitor.arg("--api-socket").arg(&socket);
    become_program(monitor.args(&arguments.arguments))
}

/// Becomes `patchbay-attach`. `all` is set if `--all` was given: this program has an option of the
/// same name, so it is not among `arguments`.
///
/// # Errors
/// The program cannot be started; otherwise this function does not return.
pub fn become_attacher(all: bool, arguments: &[OsString]) -> Result<(), Failure> {
    let mut attacher = Command::new(program(ATTACHER));
    attacher.arg0(AS_ATTACHER).args(all.then_some("--all"));
    become_program(attacher.args(arguments))
}

/// Becomes `patchbayd` for one of its commands. The program that enforces a policy, writes the
/// audit log and reads certificates also answers questions about them, so the answers match its
/// behaviour.
///
/// # Errors
/// The program cannot be started; otherwise this function does not return.
pub fn become_host_program(noun: &str, arguments: &[OsString]) -> Result<(), Failure> {
    let mut command = Command::new(program(HOST_DAEMON));
    // The program's help and errors show the command as it was typed.
    command.arg0("patchbay").arg(noun).args(arguments);
    become_program(&mut command)
}

fn become_program(command: &mut Command) -> Result<(), Failure> {
    let error = command.exec();
    let program = PathBuf::from(command.get_program());
    Err(Failure::error(format!(
        "{} cannot be started: {error}; {}",
        program.display(),
        install(&program)
    )))
}

fn install(program: &Path) -> String {
    let name = program.file_name().unwrap_or_default().display();
    format!("install {name} beside patchbay or in a folder of PATH")
}

/// Returns whether `argument` is `option`, alone or followed by `=` and a value.
fn is_option(argument: &OsStr, option: &str) -> bool {
    let rest = argument.as_encoded_bytes().strip_prefix(option.as_bytes());
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"="))
}

/// Removes `--name NAME` or `--name=NAME` from the monitor's arguments and returns the name.
fn take_name(arguments: &mut Vec<OsString>) -> Option<String> {
    let text = |argument: &OsString| Some(argument.to_str()?.to_owned());
    let at = arguments
        .iter()
        .position(|argument| is_option(argument, "--name"))?;
    if let Some((_, name)) = text(&arguments[at])?.split_once('=') {
        arguments.remove(at);
        return Some(name.to_owned());
    }
    let name = text(arguments.get(at + 1)?)?;
    arguments.drain(at..at + 2);
    Some(name)
}

/// Returns the path of a program next to this one, or its name, to be found on PATH.
pub fn program(name: &str) -> PathBuf {
    std::env::current_exe()
        .ok()
        .map(|program| program.with_file_name(name))
        .filter(|program| program.is_file())
        .unwrap_or_else(|| PathBuf::from(name))
}

/// Prints the help of this command and, below it, the monitor's own.
fn help() -> Result<(), Failure> {
    let mut cli = Cli::command();
    cli.build();
    let run = cli
        .find_subcommand_mut("guest")
        .and_then(|guest| guest.find_subcommand_mut("run"));
    let ours = run.map_or_else(String::new, |run| run.render_long_help().to_string());
    let program = program(MONITOR);
    let output = Command::new(&program)
        .arg0(AS_MONITOR)
        .arg("--help")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let theirs = match output {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            format!("The monitor, {}:\n\n{text}", program.display())
        }
        Ok(output) => format!(
            "The monitor's options are not known: `{} --help` ended with {}; {}\n",
            program.display(),
            output.status,
            install(&program)
        ),
        Err(error) => format!(
            "The monitor's options are not known: {} cannot be started: {error}; {}\n",
            program.display(),
            install(&program)
        ),
    };
    write(format!("{ours}\n{theirs}"))
}
