// SPDX-License-Identifier: Apache-2.0
//! Runs Debian's own kernel in our monitor and in QEMU with KVM. No kernel is built, nothing is
//! installed in the guests, and the same three commands have the same effect in both. The exit
//! status is 0 if every step had its effect in every guest.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use patchbay_examples::{open_shell, step, typed};
use patchbay_tests::{Guest, Qemu, StockKernel, TestGuest};
use tokio::process::Command;

/// A command that executes pr_debug() lines of a module: it registers an interpreter and removes it
/// again.
const REGISTER: &str =
    "cd /proc/sys/fs/binfmt_misc; echo ':demo:M::demo:/bin/true:' >register; echo -1 >demo; cd /";
const LINES: &str = "module binfmt_misc";
const PRINTED: &str = "binfmt_misc: ";
const EVENT: &str = "sched_process_exec";
const TRACING: &str = "/sys/kernel/tracing";
const RUN: &str =
    "echo >/sys/kernel/tracing/trace; busybox true; grep -v '^#' /sys/kernel/tracing/trace; true";
/// The number of lines shown of a long output.
const SHOWN: usize = 6;

/// Boots Debian's kernel in our monitor and in QEMU, and flips its static keys from outside.
#[derive(Parser)]
struct Arguments {
    /// Keep the guests running afterwards and open a shell to play with them
    #[arg(long)]
    keep: bool,
}

/// A guest with its monitor.
enum Place {
    Ours(Guest),
    Qemu(Qemu),
}

impl Place {
    fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => "our monitor",
            Self::Qemu(_) => "QEMU",
        }
    }

    async fn shell(&mut self, command: &str) -> Result<String> {
        match self {
            Self::Ours(guest) => guest.shell(command).await,
            Self::Qemu(guest) => guest.shell(command).await,
        }
    }

    /// Returns the text that the kernel prints on the console while a command runs.
    async fn console(&mut self, command: &str) -> Result<String> {
        match self {
            Self::Ours(guest) => {
                // The whole transcript of the time is returned, because the kernel's lines may
                // precede the start of the command's output.
                let before = guest.console().transcript().len();
                guest.shell(command).await?;
                let transcript = guest.console().transcript();
                Ok(transcript.get(before..).unwrap_or_default().to_owned())
            }
            Self::Qemu(guest) => guest.shell(command).await,
        }
    }

    /// Returns the output of the program that serves the API.
    fn log(&self) -> String {
        match self {
            Self::Ours(guest) => guest.monitor_log(),
            Self::Qemu(guest) => guest.attacher_log(),
        }
    }

    fn socket(&self) -> PathBuf {
        match self {
            Self::Ours(guest) => guest.socket().to_owned(),
            Self::Qemu(guest) => guest.socket(),
        }
    }
}

/// Runs the CLI, on each guest in turn.
struct Patchbay(PathBuf);

impl Patchbay {
    async fn run(&self, place: &Place, arguments: &[&str]) -> Result<String> {
        let Output {
            status,
            stdout,
            stderr,
        } = Command::new(&self.0)
            .arg("--socket")
            .arg(place.socket())
            .args(arguments)
            .output()
            .await?;
        let errors = String::from_utf8_lossy(&stderr);
        ensure!(
            status.success(),
            "patchbay {arguments:?}: {errors}{}",
            place.log()
        );
        Ok(String::from_utf8_lossy(&stdout).into_owned())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let kernel = StockKernel::named("6_12")
        .context("no Linux guest can run here; start this with `cargo xtask demo`, or run `cargo xtask doctor`")?;
    let patchbay = Patchbay(kernel.cli.clone());

    step("Boot Debian's kernel, as it is, in our monitor and in QEMU with KVM");
    let mut qemu = Qemu::stock(&kernel, &kernel.initramfs, &[])?;
    let ours = Guest::stock(&kernel).boot().await?;
    qemu.wait_for_shell().await?;
    qemu.attach(&kernel.cli, &[]).await?;
    let mut places = [Place::Ours(ours), Place::Qemu(qemu)];
    for place in &mut places {
        println!(
            "   {:<12} {}",
            place.name(),
            place.shell("uname -rv").await?.trim()
        );
    }

    step("In both guests: load a module of Debian's, and trace programs that start");
    for place in &mut places {
        place
            .shell("insmod /lib/modules/*-binfmt_misc.ko; mount -t binfmt_misc none /proc/sys/fs/binfmt_misc; dmesg -n 8")
            .await?;
        let enable = format!("echo 1 >{TRACING}/events/sched/{EVENT}/enable");
        place.shell(&enable).await?;
    }

    let list = ["keys", "list", "binfmt_misc:*", EVENT];
    step(&format!("patchbay {}", typed(&list)));
    for place in &places {
        let keys = patchbay.run(place, &list).await?;
        show(place, &keys);
        let described = patchbay.run(place, &["guest", "describe"]).await?;
        for fact in ["tables", "discovered by", "discovery ms", "keys", "sites"] {
            let line = described.lines().find(|line| line.trim().starts_with(fact));
            println!("   {}", line.unwrap_or_default());
        }
        ensure!(described.contains("discovered"), "{described}");
    }

    for (op, on) in [("on", true), ("off", false)] {
        let flip = ["debug", op, LINES];
        step(&format!("patchbay {}", typed(&flip)));
        for place in &mut places {
            patchbay.run(place, &flip).await?;
            let console = place.console(REGISTER).await?;
            let lines: Vec<&str> = console
                .lines()
                .filter(|line| line.contains(PRINTED))
                .collect();
            show(
                place,
                &if on {
                    lines.join("\n")
                } else {
                    "the console is silent".to_owned()
                },
            );
            ensure!(
                lines.is_empty() != on,
                "{}: the console has {console:?}",
                place.name()
            );
        }
    }

    for (op, on) in [("disable", false), ("enable", true)] {
        // The guest itself holds the reference, so `--force` is needed.
        let flip = ["keys", op, "--force", EVENT];
        step(&format!("patchbay {}", typed(&flip)));
        for place in &mut places {
            patchbay.run(place, &flip).await?;
            let trace = place.shell(RUN).await?;
            let events: Vec<&str> = trace.lines().filter(|line| line.contains(EVENT)).collect();
            show(
                place,
                &if on {
                    events.join("\n")
                } else {
                    "no event".to_owned()
                },
            );
            ensure!(
                events.is_empty() != on,
                "{}: the trace has {trace:?}",
                place.name()
            );
        }
    }
    println!("\nBoth guests followed every step.");
    if arguments.keep {
        step("The guests are yours until you leave this shell");
        println!("   patchbay debug list 'file drivers/*'");
        println!("   patchbay guest console");
        let [ours, qemu] = &places;
        println!(
            "   patchbay --socket {} guest describe   # QEMU's guest",
            qemu.socket().display()
        );
        open_shell(&kernel.cli, &ours.socket()).await?;
    }
    Ok(())
}

fn show(place: &Place, text: &str) {
    println!("   {}:", place.name());
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    for line in lines.iter().take(SHOWN) {
        println!("      {line}");
    }
    if let more @ 1.. = lines.len().saturating_sub(SHOWN) {
        println!("      … and {more} more");
    }
}
