// SPDX-License-Identifier: Apache-2.0
//! `patchbay guests`, `guest`, `console` and `run`.

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::Duration;

use patchbay_proto::v1;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use crate::args::{ConsoleArgs, GuestCommand, Output, RunArgs, Target};
use crate::client::{self, Monitor};
use crate::failure::Failure;
use crate::print::print;
use crate::view;

/// A monitor that does not answer within this time is listed as such.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(3);
/// A guest that is asked to power itself off may take so long, unless --timeout says otherwise.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
/// Ctrl-].
const DETACH: u8 = 0x1d;

/// Lists the sockets in the folder, and who answers on them.
///
/// # Errors
/// If the folder cannot be read.
pub async fn list(output: Output) -> Result<(), Failure> {
    let mut guests = vec![];
    for (name, socket) in client::sockets()? {
        let path = socket.display().to_string();
        let guest = match Monitor::open(&socket, DESCRIBE_TIMEOUT).await {
            Err(_) => view::Guest {
                name,
                socket: path,
                state: "dead",
                details: None,
            },
            Ok(monitor) => {
                let request = monitor.request(v1::DescribeGuestRequest::default());
                match monitor.guest().describe_guest(request).await {
                    Ok(response) => view::Guest::described(name, path, response.into_inner()),
                    Err(_) => view::Guest {
                        name,
                        socket: path,
                        state: "not answering",
                        details: None,
                    },
                }
            }
        };
        guests.push(guest);
    }
    print(output, &guests)
}

/// Runs one verb of `patchbay guest`.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(
    monitor: &Monitor,
    command: GuestCommand,
    timeout: Option<Duration>,
    output: Output,
) -> Result<(), Failure> {
    match command {
        GuestCommand::Describe => {
            let request = monitor.request(v1::DescribeGuestRequest::default());
            let response = monitor.guest().describe_guest(request).await?.into_inner();
            let name = response.status.clone().unwrap_or_default().guest;
            print(
                output,
                &view::Guest::described(name, String::new(), response),
            )
        }
        GuestCommand::Pause { ttl } => {
            let request = v1::PauseGuestRequest {
                timeout: timeout.and_then(|timeout| timeout.try_into().ok()),
                ttl: ttl.and_then(|ttl| ttl.try_into().ok()),
                ..Default::default()
            };
            let mut guest = monitor.guest();
            let response = guest.pause_guest(monitor.request(request)).await?;
            print(output, &view::Power::paused(response.into_inner()))
        }
        GuestCommand::Resume => {
            monitor
                .guest()
                .resume_guest(monitor.request(v1::ResumeGuestRequest::default()))
                .await?;
            print(output, &view::Power::running())
        }
        GuestCommand::Shutdown { force, cut } => {
            let timeout = timeout.unwrap_or(SHUTDOWN_TIMEOUT);
            if !force && std::io::stderr().is_terminal() {
                eprintln!("patchbay: waiting up to {timeout:?} for the guest to power itself off");
            }
            let mut request = tonic::Request::new(v1::ShutdownGuestRequest {
                force,
                timeout: timeout.try_into().ok(),
                cut_after_timeout: cut,
                ..Default::default()
            });
            request.set_timeout(timeout + client::ANSWER_TIME);
            let response = monitor.guest().shutdown_guest(request).await?;
            print(output, &view::Power::off(response.into_inner()))
        }
    }
}

/// Terminal settings, given back when dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    /// `None` if standard input is no terminal.
    fn enter() -> Option<Self> {
        let stdin = std::io::stdin();
        if !isatty(&stdin) {
            return None;
        }
        let before = tcgetattr(&stdin).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).ok()?;
        Some(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Attaches standard input and output to the guest's console.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn console(monitor: &Monitor, arguments: &ConsoleArgs) -> Result<(), Failure> {
    let (sender, receiver) = mpsc::channel(16);
    let first = v1::StreamConsoleRequest {
        offset: 0,
        input: vec![],
        no_follow: arguments.dump,
        ..Default::default()
    };
    // The channel is new, so there is room.
    let _ = sender.send(first).await;
    let request = tonic::Request::new(ReceiverStream::new(receiver));
    let mut output = monitor.guest().stream_console(request).await?.into_inner();
    let terminal = if arguments.dump {
        None
    } else {
        RawTerminal::enter()
    };
    let typing = async {
        let mut stdin = tokio::io::stdin();
        let mut bytes = [0; 1024];
        loop {
            let count = if arguments.dump {
                0
            } else {
                stdin.read(&mut bytes).await.unwrap_or(0)
            };
            let typed = &bytes[..count];
            if count == 0 {
                // The output goes on after the end of the input.
                std::future::pending::<()>().await;
            }
            let detach = terminal
                .as_ref()
                .and_then(|_| typed.iter().position(|&byte| byte == DETACH));
            let input = typed[..detach.unwrap_or(count)].to_vec();
            let message = v1::StreamConsoleRequest {
                input,
                ..Default::default()
            };
            if sender.send(message).await.is_err() || detach.is_some() {
                return;
            }
        }
    };
    let printing = async {
        while let Some(message) = output.next().await {
            let bytes = message?.output;
            let mut out = std::io::stdout().lock();
            std::io::Write::write_all(&mut out, &bytes)?;
            std::io::Write::flush(&mut out)?;
        }
        Ok::<(), Failure>(())
    };
    let result = tokio::select! {
        () = typing => Ok(()),
        result = printing => result,
    };
    drop(terminal);
    result
}

/// Becomes `patchbay-vmm`, with the socket where the other commands look for it.
///
/// # Errors
/// If it cannot be started; otherwise this does not return.
pub fn become_monitor(target: &Target, mut arguments: RunArgs) -> Result<(), Failure> {
    let name = target.guest.clone().or(arguments.name);
    let name = name
        .or_else(|| take_name(&mut arguments.arguments))
        .unwrap_or_else(|| "default".to_owned());
    let mut rest = arguments.arguments.iter();
    if rest.any(|argument| is_option(argument, "--api-socket")) {
        return Err(Failure::usage(
            "--api-socket is set by this command; say `patchbay --socket PATH run …`",
        ));
    }
    let socket = match &target.socket {
        Some(socket) => socket.clone(),
        None => {
            let socket = client::socket_of(&name)?;
            let folder = client::socket_folder();
            std::fs::create_dir_all(&folder).map_err(|error| {
                Failure::error(format!(
                    "folder {} cannot be made: {error}; set XDG_RUNTIME_DIR or give --socket",
                    folder.display()
                ))
            })?;
            socket
        }
    };
    let program = monitor_program();
    let error = std::process::Command::new(&program)
        .arg("--name")
        .arg(&name)
        .arg("--api-socket")
        .arg(&socket)
        .args(&arguments.arguments)
        .exec();
    Err(Failure::error(format!(
        "{} cannot be started: {error}; install patchbay-vmm beside patchbay or in a folder of PATH",
        program.display()
    )))
}

/// Whether an argument is the option, with or without `=` and a value.
fn is_option(argument: &OsStr, option: &str) -> bool {
    let rest = argument.as_encoded_bytes().strip_prefix(option.as_bytes());
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"="))
}

/// Takes `--name NAME` or `--name=NAME` out of the monitor's arguments.
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

/// The monitor beside this program, or by its name on PATH.
fn monitor_program() -> PathBuf {
    const NAME: &str = "patchbay-vmm";
    std::env::current_exe()
        .ok()
        .map(|program| program.with_file_name(NAME))
        .filter(|program| program.is_file())
        .unwrap_or_else(|| PathBuf::from(NAME))
}
