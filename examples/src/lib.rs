// SPDX-License-Identifier: Apache-2.0
//! Code that the demos share.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use patchbay_tests::Environment;
use tokio::process::Command;

/// Returns the environment of a Linux guest. `demo` is the argument of `cargo xtask demo`.
pub fn environment(demo: &str) -> Result<Environment> {
    Environment::linux_guest().with_context(|| {
        format!("no Linux guest can run here; start this with `cargo xtask demo {demo}`, or run `cargo xtask doctor`")
    })
}

/// Prints the heading of a step.
pub fn step(text: &str) {
    println!("\n── {text}");
}

/// Runs the operator's command for one guest, and prints each command line and its output.
pub struct Operator {
    cli: PathBuf,
    socket: PathBuf,
}

impl Operator {
    /// Creates the command for the guest behind this socket.
    pub fn new(cli: &Path, socket: &Path) -> Self {
        Self {
            cli: cli.to_owned(),
            socket: socket.to_owned(),
        }
    }

    /// Prints the command as a user types it, and runs it.
    ///
    /// # Errors
    /// The command fails.
    pub async fn run(&self, words: &[&str]) -> Result<String> {
        println!("   $ patchbay {}", typed(words));
        let output = Command::new(&self.cli)
            .args(words)
            .env("PATCHBAY_SOCKET", &self.socket)
            .output()
            .await
            .with_context(|| format!("{} cannot be started", self.cli.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "`patchbay {}` ended with {}: {said}",
            typed(words),
            output.status
        );
        let text = String::from_utf8(output.stdout)?;
        for line in text.lines() {
            println!("   {line}");
        }
        Ok(text)
    }
}

/// Joins words as a user types them.
pub fn typed(words: &[&str]) -> String {
    let quoted = |word: &&str| match word.contains(['*', ' ']) {
        true => format!("'{word}'"),
        false => (*word).to_owned(),
    };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

/// Formats a count, such as "1 site" or "2 sites".
pub fn counted(count: u32, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Opens a shell for the user, in which `patchbay` is the program `cli` and uses the guest behind
/// `socket`. Returns when the shell ends.
///
/// # Errors
/// The shell cannot be started.
pub async fn open_shell(cli: &Path, socket: &Path) -> Result<()> {
    let programs = cli.parent().unwrap_or(Path::new("")).display();
    let path = std::env::var("PATH").unwrap_or_default();
    let shell = std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned());
    Command::new(&shell)
        .env("PATH", format!("{programs}:{path}"))
        .env("PATCHBAY_SOCKET", socket)
        .status()
        .await
        .with_context(|| format!("{shell} cannot be started"))?;
    Ok(())
}
