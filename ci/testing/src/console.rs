// SPDX-License-Identifier: Apache-2.0
//! Uses the shell on the guest's serial console.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use patchbay_ci::place;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::{StreamConsoleRequest, StreamConsoleResponse};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// Returns the time limit of any step in the guest. It is generous, because a guest on a busy
/// machine is slow.
pub(crate) fn patience() -> Duration {
    place::patience(Duration::from_secs(120))
}

/// The text that a guest's init prints when its shell reads the console.
pub const SHELL_READS: &str = "init: the shell reads the console";

/// The guest's console: the transcript of its output, and a way to type.
#[derive(Debug)]
pub struct Shell {
    input: mpsc::Sender<StreamConsoleRequest>,
    output: Streaming<StreamConsoleResponse>,
    /// All output since boot.
    transcript: Vec<u8>,
    /// The start of the output that no wait has consumed yet.
    seen: usize,
    commands: u32,
}

impl Shell {
    /// Attaches to the console. The output includes what was printed before.
    pub async fn attach(channel: Channel) -> Result<Self> {
        let (input, requests) = mpsc::channel(16);
        input.send(StreamConsoleRequest::default()).await?;
        let output = GuestServiceClient::new(channel)
            .stream_console(ReceiverStream::new(requests))
            .await?
            .into_inner();
        Ok(Self {
            input,
            output,
            transcript: Vec::new(),
            seen: 0,
            commands: 0,
        })
    }

    /// Returns all output so far.
    pub fn transcript(&self) -> String {
        String::from_utf8_lossy(&self.transcript).into_owned()
    }

    /// Waits until `text` appears in output that no earlier call has consumed, and returns the
    /// output up to the end of `text`.
    pub async fn wait_for(&mut self, text: &str) -> Result<String> {
        self.wait_longer_for(text, patience()).await
    }

    pub(crate) async fn wait_longer_for(
        &mut self,
        text: &str,
        patience: Duration,
    ) -> Result<String> {
        match tokio::time::timeout(patience, self.read_until(text)).await {
            Ok(found) => found,
            Err(_) => bail!(
                "the guest did not print {text:?}; its console so far:\n{}",
                self.transcript()
            ),
        }
    }

    pub(crate) async fn read_until(&mut self, text: &str) -> Result<String> {
        loop {
            let unseen = &self.transcript[self.seen..];
            let found = unseen
                .windows(text.len())
                .position(|window| window == text.as_bytes());
            if let Some(at) = found {
                let end = self.seen + at + text.len();
                let passed = String::from_utf8_lossy(&self.transcript[self.seen..end]).into_owned();
                self.seen = end;
                return Ok(passed);
            }
            let message = self.output.message().await?;
            let message = message.with_context(|| {
                format!(
                    "the console ended before {text:?}; its output:\n{}",
                    self.transcript()
                )
            })?;
            self.transcript.extend_from_slice(&message.output);
        }
    }

    /// Types a line and its newline into the console.
    pub async fn type_line(&self, line: &str) -> Result<()> {
        let input = format!("{line}\n").into_bytes();
        self.input
            .send(StreamConsoleRequest {
                input,
                ..Default::default()
            })
            .await
            .context("the guest's console is closed")
    }

    /// Runs a command in the guest's shell and returns its exit status and output.
    pub async fn run(&mut self, command: &str) -> Result<(i32, String)> {
        self.commands += 1;
        let id = self.commands;
        // The quotes split the markers, so that the console's echo of the typed line does not
        // contain them.
        self.type_line(&format!(
            "echo 'be''gin {id}'\n{command}\necho \"en\"\"d {id} $?.\""
        ))
        .await?;
        self.wait_for(&format!("begin {id}")).await?;
        let output = self.wait_for(&format!("end {id} ")).await?;
        let status = self.wait_for(".").await?;
        let status = status
            .trim_end_matches('.')
            .parse()
            .context("exit status of a guest command")?;
        let output = output
            .trim_end_matches(&format!("end {id} "))
            .replace('\r', "");
        Ok((status, output.trim_matches('\n').to_owned()))
    }
}
