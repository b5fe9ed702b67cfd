// SPDX-License-Identifier: Apache-2.0
//! Runs Debian's own kernel in our monitor, in QEMU with KVM, and with libkrun, a monitor that
//! knows nothing of Patchbay. No kernel is built, nothing is installed in the guests, and the same
//! commands have the same effect in all. Debug lines and trace events are read from the guests'
//! memory, while their consoles print none of them. The exit status is 0 if every step had its
//! effect in every guest. The guest of libkrun is left out if its crates cannot be built, or if
//! this user may not read the memory of the host's kernel, which tells where the memory of such a
//! guest is.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use patchbay_examples::{open_shell, step, typed};
use patchbay_host_kernel::HostKernel;
use patchbay_tests::{Foreign, Guest, StockKernel, TestGuest, programs};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// A command that executes pr_debug() lines of a module: it registers an interpreter and removes it
/// again.
const REGISTER: &str =
    "cd /proc/sys/fs/binfmt_misc; echo ':demo:M::demo:/bin/true:' >register; echo -1 >demo; cd /";
const LINES: &str = "module binfmt_misc";
const PRINTED: &str = "binfmt_misc: ";
const EVENT: &str = "sched_process_exec";
const TRACING: &str = "/sys/kernel/tracing";
/// The name of a program that is run while the tracepoint is off, and of one that is run while it
/// is on.
const PROGRAMS: [&str; 2] = ["/parked", "/fired"];
/// The limit on the time to print a line, in the lab.
const PATIENCE: Duration = Duration::from_secs(120);
/// The number of lines shown of a long output.
const SHOWN: usize = 6;

/// Boots Debian's kernel in our monitor, in QEMU and with libkrun, and flips its static keys from
/// outside.
#[derive(Parser)]
struct Arguments {
    /// Keep the guests running afterwards and open a shell to play with them
    #[arg(long)]
    keep: bool,
}

/// A guest with its monitor.
enum Place {
    Ours(Guest),
    /// A guest of the monitor with this name.
    Other(&'static str, Foreign),
}

impl Place {
    fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => "our monitor",
            Self::Other(name, _) => name,
        }
    }

    async fn shell(&mut self, command: &str) -> Result<String> {
        match self {
            Self::Ours(guest) => guest.shell(command).await,
            Self::Other(_, guest) => guest.shell(command).await,
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
            Self::Other(_, guest) => guest.shell(command).await,
        }
    }

    /// Returns the output of the program that serves the API.
    fn log(&self) -> String {
        match self {
            Self::Ours(guest) => guest.monitor_log(),
            Self::Other(_, guest) => guest.attacher_log(),
        }
    }

    fn socket(&self) -> PathBuf {
        match self {
            Self::Ours(guest) => guest.socket().to_owned(),
            Self::Other(_, guest) => guest.socket(),
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

    /// Starts a command that prints lines until it is stopped.
    fn follow(&self, place: &Place, arguments: &[&str]) -> Result<Following> {
        let mut child = Command::new(&self.0)
            .arg("--socket")
            .arg(place.socket())
            .args(arguments)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = child.stdout.take().context("no pipe")?;
        let lines = BufReader::new(output).lines();
        Ok(Following { child, lines })
    }
}

/// A command that prints lines until it is stopped.
struct Following {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Following {
    /// Returns the lines up to the first one that contains a text.
    async fn until(&mut self, text: &str) -> Result<Vec<String>> {
        let mut all = vec![];
        let read = async {
            while let Some(line) = self.lines.next_line().await? {
                all.push(line);
                if all.last().is_some_and(|line| line.contains(text)) {
                    return Ok(());
                }
            }
            bail!("the command has ended")
        };
        let read = tokio::time::timeout(PATIENCE, read).await;
        let read = read.unwrap_or_else(|_| bail!("no line within {PATIENCE:?}"));
        read.with_context(|| format!("waiting for {text:?}, after {all:?}"))?;
        Ok(all)
    }

    async fn stop(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let kernel = StockKernel::named("6_12")
        .context("no Linux guest can run here; start this with `cargo xtask demo`, or run `cargo xtask doctor`")?;
    let patchbay = Patchbay(kernel.cli.clone());

    step("Boot Debian's kernel, as it is, in our monitor, in QEMU with KVM, and with libkrun");
    let mut places = boot(&kernel).await?;
    for place in &mut places {
        println!(
            "   {:<12} {}",
            place.name(),
            place.shell("uname -rv").await?.trim()
        );
    }

    step("In each guest: load a module of Debian's, and trace programs that start");
    for place in &mut places {
        place
            .shell("insmod /lib/modules/*-binfmt_misc.ko; mount -t binfmt_misc none /proc/sys/fs/binfmt_misc; dmesg -n 4")
            .await?;
        let enable = format!("echo 1 >{TRACING}/events/sched/{EVENT}/enable");
        place.shell(&enable).await?;
        for program in PROGRAMS {
            place
                .shell(&format!("ln -s /bin/busybox {program}"))
                .await?;
        }
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

    debug_lines(&patchbay, &mut places).await?;
    trace_events(&patchbay, &mut places).await?;
    println!("\nAll {} guests followed every step.", places.len());
    if arguments.keep {
        step("The guests are yours until you leave this shell");
        println!("   patchbay debug list 'file drivers/*'");
        println!("   patchbay guest console");
        for place in &places[1..] {
            println!(
                "   patchbay --socket {} guest describe   # the guest of {}",
                place.socket().display(),
                place.name()
            );
        }
        open_shell(&kernel.cli, &places[0].socket()).await?;
    }
    Ok(())
}

/// Boots all guests and attaches to those of other monitors. The guest of our monitor is the first.
async fn boot(kernel: &StockKernel) -> Result<Vec<Place>> {
    let libkrun = match programs::libkrun() {
        // The attacher reads the host's kernel in the same way.
        Ok(program) => match HostKernel::open() {
            Ok(_) => Some(Foreign::libkrun(&program, kernel)?),
            Err(error) => {
                println!("   without libkrun: {error}");
                None
            }
        },
        Err(reason) => {
            println!("   without libkrun: {reason}");
            None
        }
    };
    let mut qemu = Foreign::qemu(kernel, &kernel.initramfs, &[])?;
    let ours = Guest::stock(kernel).boot().await?;
    qemu.wait_for_shell().await?;
    println!("   patchbay attach qemu --qmp SOCKET &");
    qemu.attach(&kernel.cli, &[]).await?;
    let mut places = vec![Place::Ours(ours), Place::Other("QEMU", qemu)];
    if let Some(mut libkrun) = libkrun {
        libkrun.wait_for_shell().await?;
        println!("   patchbay attach process {} &", libkrun.pid);
        libkrun.attach(&kernel.cli, &[]).await?;
        places.push(Place::Other("libkrun", libkrun));
    }
    Ok(places)
}

/// Turns debug lines on and off. They are read from the guest's memory, and the console, whose log
/// level is not raised, stays silent.
async fn debug_lines(patchbay: &Patchbay, places: &mut [Place]) -> Result<()> {
    let on = ["debug", "on", LINES, "--follow"];
    step(&format!("patchbay {}", typed(&on)));
    for place in &mut *places {
        let mut following = patchbay.follow(place, &on)?;
        // The table of the changed keys is printed after the change.
        following.until("binfmt_misc:").await?;
        silent(place).await?;
        let lines = following.until(PRINTED).await?;
        let lines = lines.iter().filter(|line| line.contains(PRINTED));
        show(place, &lines.cloned().collect::<Vec<_>>().join("\n"));
        println!("      (the console is silent)");
        following.stop().await?;
    }
    let off = ["debug", "off", LINES];
    step(&format!("patchbay {}", typed(&off)));
    for place in &mut *places {
        patchbay.run(place, &off).await?;
        let log = ["guest", "log", "--grep", PRINTED];
        let before = patchbay.run(place, &log).await?;
        silent(place).await?;
        let after = patchbay.run(place, &log).await?;
        ensure!(before == after, "{}: {before} {after}", place.name());
        show(place, "the kernel's log has no further line");
    }
    Ok(())
}

/// Executes the debug lines, and checks that the console prints none of them.
async fn silent(place: &mut Place) -> Result<()> {
    let console = place.console(REGISTER).await?;
    let has_line = console.lines().any(|line| line.contains(PRINTED));
    ensure!(!has_line, "{}: the console has {console:?}", place.name());
    Ok(())
}

/// Turns a tracepoint off and on that the guest itself traces. Its events are read from the guest's
/// memory.
async fn trace_events(patchbay: &Patchbay, places: &mut [Place]) -> Result<()> {
    let tail = ["trace", "tail", "--source", "memory", EVENT];
    // The guest itself holds the reference, so `--force` is needed.
    let [park, fire] = ["disable", "enable"].map(|op| ["keys", op, "--force", EVENT]);
    let [parked, fired] = PROGRAMS;
    step(&format!(
        "patchbay {} &\n   patchbay {}; patchbay {}",
        typed(&tail),
        typed(&park),
        typed(&fire)
    ));
    for place in &mut *places {
        // The events of earlier programs are read, too, so it does not matter when the command has
        // begun.
        let mut following = patchbay.follow(place, &[&tail[..], &["--buffered"]].concat())?;
        patchbay.run(place, &park).await?;
        place.shell(&format!("{parked} true; true")).await?;
        patchbay.run(place, &fire).await?;
        place.shell(&format!("{fired} true; true")).await?;
        let lines = following.until(fired).await?;
        following.stop().await?;
        let has_parked = lines.iter().any(|line| line.contains(parked));
        ensure!(!has_parked, "{}: {lines:?}", place.name());
        show(place, lines.last().map_or("", String::as_str));
        println!("      (no event of {parked}, which ran while the key was off)");
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
