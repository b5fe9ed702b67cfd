// SPDX-License-Identifier: Apache-2.0
//! The shell of a guest whose serial console is the standard input and output of its monitor.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use patchbay_testing::SHELL_READS;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};

/// Timeout for the boot and for each command. It is long, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(480);
/// The mark that is printed after the output of a command.
const END: &str = "end of output";

/// The serial console of a guest.
#[derive(Debug)]
pub struct SerialConsole {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl SerialConsole {
    /// Takes the pipes of a monitor. Its standard input stays open, because the guest's shell ends
    /// at the end of its input.
    pub fn of(monitor: &mut Child) -> Result<Self> {
        let (Some(input), Some(output)) = (monitor.stdin.take(), monitor.stdout.take()) else {
            bail!("the monitor has no standard input or output");
        };
        let output = BufReader::new(output);
        Ok(Self { input, output })
    }

    /// Waits until the guest's shell reads the console.
    pub async fn wait_for_shell(&mut self) -> Result<()> {
        self.wait_for(SHELL_READS).await.map(drop)
    }

    /// Runs a command in the guest's shell and returns its output.
    pub async fn shell(&mut self, command: &str) -> Result<String> {
        // The quotes split the mark, so that an echo of the line does not contain it.
        let line = format!("{command}\necho 'end of'' output'\n");
        self.input.write_all(line.as_bytes()).await?;
        let output = self.wait_for(END).await?;
        Ok(output.replace('\r', "").replace(END, ""))
    }

    async fn wait_for(&mut self, text: &str) -> Result<String> {
        let read = async {
            let mut seen = String::new();
            while !seen.contains(text) {
                let mut bytes = Vec::new();
                if self.output.read_until(b'\n', &mut bytes).await? == 0 {
                    bail!("the monitor ended before its guest printed {text:?}:\n{seen}");
                }
                seen.push_str(&String::from_utf8_lossy(&bytes));
            }
            Ok(seen)
        };
        tokio::time::timeout(PATIENCE, read)
            .await
            .with_context(|| format!("the guest did not print {text:?}"))?
    }
}
