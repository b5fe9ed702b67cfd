// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay guest console`.

use patchbay_proto::v1;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use crate::args::guest::ConsoleArgs;
use crate::client::Client;
use crate::failure::Failure;
use crate::print;

/// The key Ctrl-].
const DETACH: u8 = 0x1d;

/// The terminal's settings, restored on drop.
struct RawTerminal(Termios);

impl RawTerminal {
    /// Enters raw mode; `None` if standard input is not a terminal.
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
pub async fn console(client: &Client, arguments: &ConsoleArgs) -> Result<(), Failure> {
    let (sender, receiver) = mpsc::channel(16);
    let first = v1::StreamConsoleRequest {
        guest: client.guest_name().to_owned(),
        no_follow: arguments.dump,
        ..Default::default()
    };
    // The channel is new, so it has room.
    let _ = sender.send(first).await;
    let request = tonic::Request::new(ReceiverStream::new(receiver));
    let mut output = client.guest().stream_console(request).await?.into_inner();
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
                // The output continues after the end of the input.
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
            if let Err(error) = print::try_write(&bytes) {
                return Ok(Err(error));
            }
        }
        Ok::<std::io::Result<()>, Failure>(Ok(()))
    };
    let result = tokio::select! {
        () = typing => Ok(Ok(())),
        result = printing => result,
    };
    drop(terminal);
    print::written(result?)
}
