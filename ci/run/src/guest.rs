// SPDX-License-Identifier: Apache-2.0
//! Boots a guest to run commands in it, or starts it as a copy.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use patchbay_lab::step::dying_with_us;
use patchbay_proto::EXEC_WORD;
use patchbay_proto::agent::v1::ExecStart;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::console::Console;
use crate::keys::{self, Keys};
use crate::monitor::{self, cannot_write};
use crate::overlay;
use crate::place::patience;
use crate::session::{End, Session, Sink};

/// The time limit for the console to deliver the output that the kernel printed before a command
/// ended.
const CONSOLE_TIME: Duration = Duration::from_secs(10);
/// The number of console lines shown when a guest does not boot.
const SHOWN_LINES: usize = 25;

/// The configuration of a guest.
#[derive(Debug)]
pub struct Config {
    pub monitor: PathBuf,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub vcpus: u8,
    pub memory: String,
    /// Words added to the kernel's command line.
    pub command_line: String,
    pub allow_guarded: bool,
    /// The kernel finds virtio-mmio devices only by ACPI, not by its command line.
    pub acpi_devices: bool,
    pub boot_limit: Duration,
    /// Copy the console to standard error.
    pub show_console: bool,
    /// Environment variables of the commands, NAME=value.
    pub environment: Vec<String>,
    /// The working folder of commands.
    pub directory: PathBuf,
}

/// The outcome of a command.
#[derive(Debug)]
pub struct Outcome {
    pub end: End,
    /// The kernel's reports.
    pub reports: Vec<String>,
    pub time: Duration,
}

/// A guest that runs. Dropping it kills the monitor.
#[derive(Debug)]
pub struct Guest {
    monitor: Child,
    console: Console,
    session: Session,
    folder: TempDir,
    environment: Vec<String>,
    directory: String,
    commands: u32,
}

impl Guest {
    /// Boots a guest, or starts a copy of the one in a snapshot, and waits for its agent.
    ///
    /// # Errors
    /// The monitor does not start, or the guest's agent does not connect; the message contains the
    /// end of the console's output.
    pub async fn start(config: &Config, snapshot: Option<&Path>) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("patchbay-ci-")
            .tempdir()
            .context("cannot create a temporary directory")?;
        let listener = monitor::listen(folder.path())?;
        let log = folder.path().join("monitor.log");
        let mut monitor = start_monitor(config, snapshot, folder.path(), &log)?;
        let stdout = monitor
            .stdout
            .take()
            .context("the monitor's output is a pipe")?;
        let console = Console::read(stdout, config.show_console);
        let greeted = async {
            let (stream, _) = listener.accept().await?;
            Session::start(stream).await
        };
        let greeted = tokio::select! {
            greeted = greeted => greeted,
            error = console.boot_error() => Err(match error {
                Some(error) if snapshot.is_some() => {
                    anyhow::anyhow!("the copy of the guest did not start: {error}")
                }
                Some(error) => anyhow::anyhow!("the guest did not boot: {error}"),
                None => ended(&mut monitor, &console, &log).await,
            }),
            () = tokio::time::sleep(config.boot_limit) => Err(anyhow::anyhow!(
                "the agent in the guest did not connect and greet within {} s",
                config.boot_limit.as_secs()
            )),
        };
        let (session, _) = match greeted {
            Ok(greeted) => greeted,
            Err(error) => {
                let tail = console.tail(SHOWN_LINES);
                return Err(match tail.is_empty() {
                    true => error,
                    false => error.context(format!("the guest's console ends with:\n{tail}\n")),
                });
            }
        };
        Ok(Self {
            monitor,
            console,
            session,
            folder,
            environment: config.environment.clone(),
            directory: config.directory.display().to_string(),
            commands: 0,
        })
    }

    /// Runs a command and collects the kernel's reports during the run.
    ///
    /// # Errors
    /// The command and its environment are too long, or the agent breaks the protocol.
    pub async fn run(
        &mut self,
        argv: &[String],
        limit: Duration,
        sink: &mut (impl Sink + Send),
    ) -> Result<Outcome> {
        self.commands += 1;
        let mark = self.commands.to_string();
        let start = ExecStart {
            argv: argv.to_vec(),
            environment: self.environment.clone(),
            directory: self.directory.clone(),
            mark: mark.clone(),
        };
        let begin = Instant::now();
        let end = self.session.run(start, limit, sink).await?;
        let time = begin.elapsed();
        let connected = self.session.is_connected();
        let shown = async {
            match end {
                End::NotStarted(_) => {}
                // A kernel that crashes prints the reason before the monitor ends.
                _ if !connected => {
                    let _ = self.monitor.wait().await;
                    self.console.end().await;
                }
                _ => self.console.mark(&format!("{mark} ends")).await,
            }
        };
        // After a timeout, the run continues with the output so far.
        let limit = match connected {
            true => CONSOLE_TIME,
            false => CONSOLE_TIME / 5,
        };
        let _ = tokio::time::timeout(patience(limit), shown).await;
        Ok(Outcome {
            end,
            reports: self.console.take_reports(),
            time,
        })
    }

    /// Returns the kernel's reports since the last call, or since the last command.
    pub fn take_reports(&self) -> Vec<String> {
        self.console.take_reports()
    }

    /// Returns whether the agent is connected, so that another command can run.
    pub fn is_connected(&self) -> bool {
        self.session.is_connected()
    }

    /// Returns the reason why the connection to the agent ended.
    pub fn loss(&mut self) -> String {
        match (self.console.panic(), self.monitor.try_wait()) {
            (Some(panic), _) => panic,
            (None, Ok(Some(status))) if status.success() => {
                "the guest powered off or reset while the command ran".to_owned()
            }
            (None, Ok(Some(status))) => format!("the monitor ended with {status}"),
            _ => "the agent in the guest ended, or was killed, while the command ran".to_owned(),
        }
    }

    /// Copies a file or folder of the guest to `into`, and returns the number of files.
    ///
    /// # Errors
    /// The file or folder cannot be read or written.
    pub async fn collect(&mut self, path: &str, into: &Path) -> Result<usize> {
        self.session.fetch(path, into).await
    }

    /// Returns a client of the guest's static keys.
    ///
    /// # Errors
    /// The monitor does not answer, or the kernel's keys are not known.
    pub async fn keys(&self) -> Result<Keys> {
        Keys::connect(&self.socket()).await
    }

    /// Saves the guest in a new folder. The guest runs on.
    ///
    /// # Errors
    /// The monitor cannot save the guest, or the folder exists or cannot be written.
    pub async fn save(&self, folder: &Path) -> Result<()> {
        monitor::save(keys::channel(&self.socket()).await?, folder).await
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join(monitor::API_SOCKET)
    }

    /// Ends the guest at once, and returns the kernel's reports since the last command. The guest
    /// has no disks, so nothing is lost.
    pub async fn end(mut self) -> Vec<String> {
        let _ = self.monitor.kill().await;
        let _ = tokio::time::timeout(patience(CONSOLE_TIME), self.console.end()).await;
        self.console.take_reports()
    }
}

/// Starts the monitor with the devices of every guest: a console and vsock, and no disks.
fn start_monitor(
    config: &Config,
    snapshot: Option<&Path>,
    folder: &Path,
    log: &Path,
) -> Result<Child> {
    let log = std::fs::File::create(log).with_context(|| cannot_write(log))?;
    let mut command = match snapshot {
        Some(snapshot) => monitor::copy(&config.monitor, folder, snapshot),
        None => boot_command(config, folder),
    };
    command
        .args(["--console", "stdout"])
        .arg("--vsock")
        .arg(folder.join(monitor::VSOCK));
    if config.allow_guarded {
        command.arg("--allow-guarded");
    }
    // The kernel kills the monitor even if this process is killed.
    Command::from(dying_with_us(&command))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .context("cannot start setpriv(1), which starts the monitor")
}

fn boot_command(config: &Config, folder: &Path) -> std::process::Command {
    let command_line = format!(
        "console=ttyS0 loglevel=5 panic=-1 reboot=k printk.devkmsg=on rdinit={} {EXEC_WORD} {}",
        overlay::INIT_PATH,
        config.command_line
    );
    let kernel = (&*config.kernel, &*command_line);
    let vcpus = config.vcpus.into();
    let mut command = monitor::command(&config.monitor, folder, kernel, &config.memory, vcpus);
    command.arg("--initrd").arg(&config.initramfs);
    if config.acpi_devices {
        command.arg("--acpi-devices");
    }
    command
}

/// Returns the reason why a monitor ended before its guest's agent had connected.
async fn ended(monitor: &mut Child, console: &Console, log: &Path) -> anyhow::Error {
    let status = monitor.wait().await;
    console.end().await;
    let log = std::fs::read_to_string(log).unwrap_or_default();
    let log = crate::console::printable(log.trim_end());
    match status {
        Ok(status) if status.success() => {
            anyhow::anyhow!("the guest powered off or reset before its agent connected")
        }
        Ok(status) => anyhow::anyhow!("{}", monitor_failure(status, &log)),
        Err(error) => anyhow::anyhow!("the monitor cannot be awaited: {error}"),
    }
}

fn monitor_failure(status: ExitStatus, log: &str) -> String {
    if status.code() == Some(127) {
        return format!("the monitor cannot be started: {log}; name it with --monitor");
    }
    format!("the monitor failed ({status}):\n{log}")
}

/// Fails unless the file is a kernel that this machine's monitor boots.
///
/// # Errors
/// The message names the architecture, or says that it is no kernel.
pub fn check_kernel(path: &Path) -> Result<()> {
    let describe = || format!("cannot read the kernel {}", path.display());
    let mut head = vec![];
    let file = std::fs::File::open(path).with_context(describe)?;
    std::io::Read::read_to_end(&mut std::io::Read::take(file, 4096), &mut head)
        .with_context(describe)?;
    match architecture(&head) {
        Some("x86_64") => Ok(()),
        Some(other) => bail!(
            "{} is a kernel for {other}, and guests are x86_64",
            path.display()
        ),
        None => bail!(
            "{} is not a kernel: expected a bzImage or an ELF file (vmlinux)",
            path.display()
        ),
    }
}

/// Returns the architecture of a kernel image, by its first bytes.
fn architecture(head: &[u8]) -> Option<&'static str> {
    let at = |offset: usize, length: usize| head.get(offset..offset.checked_add(length)?);
    let half = |offset| Some(u16::from_le_bytes(at(offset, 2)?.try_into().ok()?));
    if at(0, 4) == Some(b"\x7fELF") {
        let big_endian = at(5, 1) == Some(&[2]);
        return match half(18)? {
            62 => Some("x86_64"),
            3 => Some("i386"),
            183 => Some("arm64"),
            243 => Some("riscv"),
            _ if big_endian => Some("a big-endian machine"),
            _ => Some("another machine"),
        };
    }
    // Documentation/arch/x86/boot.rst: the 64-bit entry point is bit 0 of xloadflags.
    if at(0x202, 4) == Some(b"HdrS") {
        let is_64_bit = half(0x206)? >= 0x20c && half(0x236)? & 1 != 0;
        return Some(if is_64_bit { "x86_64" } else { "i386" });
    }
    // Documentation/arch/arm64/booting.rst, Documentation/arch/riscv/boot-image-header.rst.
    if at(56, 4) == Some(b"ARM\x64") {
        return Some("arm64");
    }
    (at(56, 4) == Some(b"RSC\x05")).then_some("riscv")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_apart() {
        let with = |patches: &[(usize, &[u8])]| {
            let mut head = vec![0; 4096];
            for (at, bytes) in patches {
                head[*at..at + bytes.len()].copy_from_slice(bytes);
            }
            head
        };
        let boot = |version: &[u8], flags: &[u8]| {
            with(&[(0x202, b"HdrS"), (0x206, version), (0x236, flags)])
        };
        for (head, expected) in [
            (boot(&[0x0f, 2], &[0x7f, 0]), Some("x86_64")),
            (boot(&[0x0f, 2], &[0, 0]), Some("i386")),
            (boot(&[0x04, 2], &[1, 0]), Some("i386")),
            (with(&[(56, b"ARM\x64")]), Some("arm64")),
            (with(&[(56, b"RSC\x05")]), Some("riscv")),
            (
                with(&[(0, b"\x7fELF\x02\x01"), (18, &[62, 0])]),
                Some("x86_64"),
            ),
            (
                with(&[(0, b"\x7fELF\x02\x01"), (18, &[183, 0])]),
                Some("arm64"),
            ),
            (with(&[(0, b"#!/bin/sh")]), None),
            (vec![], None),
            (b"\x7fELF".to_vec(), None),
        ] {
            assert_eq!(architecture(&head), expected);
        }
    }

    /// Connects to a run in place of the agent, and sends nothing.
    #[tokio::test]
    async fn the_limit_of_a_boot_includes_the_hello() {
        let folder = tempfile::tempdir().unwrap();
        let monitor = folder.path().join("monitor");
        let script = "#!/bin/sh\nwhile [ \"$1\" != --vsock ]; do shift; done\n\
                      echo \"$2\" >\"$0.new\"; mv \"$0.new\" \"$0.vsock\"; exec sleep 600\n";
        std::fs::write(&monitor, script).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&monitor, mode).unwrap();
        let config = Config {
            monitor,
            kernel: "kernel".into(),
            initramfs: "initramfs".into(),
            vcpus: 1,
            memory: "64M".to_owned(),
            command_line: String::new(),
            allow_guarded: false,
            acpi_devices: false,
            boot_limit: Duration::from_secs(2),
            show_console: false,
            environment: vec![],
            directory: "/".into(),
        };
        let vsock = folder.path().join("monitor.vsock");
        let silent = async {
            // Without inotify, there is no event for the creation of the file.
            loop {
                if let Ok(path) = std::fs::read_to_string(&vsock) {
                    let socket = format!("{}_{}", path.trim_end(), patchbay_proto::EXEC_PORT);
                    let _stream = tokio::net::UnixStream::connect(socket).await.unwrap();
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let error = tokio::select! {
            started = Guest::start(&config, None) => started.unwrap_err(),
            () = silent => unreachable!(),
            () = tokio::time::sleep(Duration::from_secs(30)) => panic!("no limit"),
        };
        let error = format!("{error:#}");
        assert!(error.contains("greet within 2 s"), "{error}");
        assert!(vsock.exists(), "the agent did not connect");
    }

    #[test]
    fn a_missing_kernel_is_named() {
        let error = check_kernel(Path::new("/no/such/kernel")).unwrap_err();
        assert!(error.to_string().contains("/no/such/kernel"), "{error}");
    }
}
