// SPDX-License-Identifier: Apache-2.0
//! Configures and boots a guest, or starts it from a snapshot.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    DescribeGuestRequest, DescribeGuestResponse, GetStaticKeyRequest, KeyOp, KeyUpdate,
    RegistrationState, StaticKey, UpdateStaticKeysRequest, UpdateStaticKeysResponse,
};
use patchbay_proto::{EXEC_WORD, client};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tonic::transport::Channel;

use patchbay_ci::overlay::{self, SHELL_WORD};
use patchbay_ci::{monitor, place, programs};

use crate::commands::{CommandOutput, Commands, INITRAMFS};
use crate::console::{SHELL_READS, Shell, patience};

/// The time limit for the boot of a distribution from a disk.
const DISTRIBUTION_LIMIT: Duration = Duration::from_secs(480);

/// The time limit for the end of a monitor that has closed its API.
const ENDING: Duration = Duration::from_secs(10);

const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 reboot=k";

/// The root file system of a guest.
#[derive(Debug, Clone)]
enum Root {
    /// An initramfs that is made at boot: busybox, the agent and the copied files.
    Made(Made),
    Initramfs(PathBuf),
    Disk(PathBuf),
}

/// The contents of an initramfs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Made {
    pub(crate) copies: Vec<(PathBuf, PathBuf)>,
    pub(crate) modules: Option<PathBuf>,
    pub(crate) agent: Option<PathBuf>,
}

/// Configuration of a [`Guest`].
#[derive(Debug, Clone)]
pub struct GuestBuilder {
    kernel: PathBuf,
    root: Root,
    monitor: Option<PathBuf>,
    /// A file with the kernel's symbols, for kernels that register their keys.
    symbols: Option<PathBuf>,
    patience: Duration,
    vcpus: u32,
    memory: String,
    command_line: String,
    acpi: bool,
    arguments: Vec<String>,
    agent: bool,
    /// The folder of the snapshot from which the guest is started.
    snapshot: Option<PathBuf>,
}

impl<P: AsRef<Path> + ?Sized> From<&P> for GuestBuilder {
    fn from(kernel: &P) -> Self {
        Self::new(kernel.as_ref())
    }
}

impl GuestBuilder {
    /// Creates a guest with this kernel, a bzImage or an ELF file (vmlinux): 1 vCPU, 512 MiB, and
    /// an initramfs with busybox and the agent.
    pub fn new(kernel: impl Into<PathBuf>) -> Self {
        Self {
            kernel: kernel.into(),
            root: Root::Made(Made::default()),
            monitor: None,
            symbols: None,
            patience: patience(),
            vcpus: 1,
            memory: "512M".to_owned(),
            command_line: format!("{COMMAND_LINE}{}", place::kernel_words()),
            acpi: true,
            arguments: Vec::new(),
            agent: false,
            snapshot: None,
        }
    }

    /// Sets the kernel.
    pub fn kernel(mut self, kernel: &Path) -> Self {
        self.kernel = kernel.to_owned();
        self
    }

    /// Sets the monitor; the default is `PATCHBAY_VMM`, or `patchbay-vmm` beside this program or in
    /// PATH.
    pub fn monitor(mut self, program: &Path) -> Self {
        self.monitor = Some(program.to_owned());
        self
    }

    /// Sets the agent, a static program; the default is `PATCHBAY_AGENT`, or `patchbay-agent`
    /// beside this program, in /usr/lib/patchbay or in PATH.
    pub fn agent_program(mut self, program: &Path) -> Self {
        self.made().agent = Some(program.to_owned());
        self
    }

    /// Copies a file or folder into the guest, with the libraries that its programs need.
    pub fn copy(mut self, from: &Path, to: &str) -> Self {
        self.made().copies.push((from.to_owned(), to.into()));
        self
    }

    /// Sets the kernel's `lib/modules/VERSION`, for kernels whose drivers for virtio-mmio and vsock
    /// are modules.
    pub fn modules(mut self, folder: &Path) -> Self {
        self.made().modules = Some(folder.to_owned());
        self
    }

    fn made(&mut self) -> &mut Made {
        if !matches!(self.root, Root::Made(_)) {
            self.root = Root::Made(Made::default());
        }
        match &mut self.root {
            Root::Made(made) => made,
            _ => unreachable!("it was set above"),
        }
    }

    /// Boots from a disk. Its system must run a shell that reads the console, and print
    /// [`SHELL_READS`] there. [`Guest::run`] is not available.
    pub fn root_disk(mut self, image: &Path) -> Self {
        self.root = Root::Disk(image.to_owned());
        // The limit is longer, because a distribution starts many programs.
        self.patience = DISTRIBUTION_LIMIT;
        self.command_line("root=/dev/vda rw")
    }

    /// Boots with this initramfs and runs its own init, which must start a shell on the console and
    /// print [`SHELL_READS`]. [`Guest::run`] is not available.
    pub fn initramfs(mut self, initramfs: &Path) -> Self {
        self.root = Root::Initramfs(initramfs.to_owned());
        self
    }

    /// Sets a file with the symbols of a kernel that registers its keys, such as its vmlinux.
    pub fn symbols(mut self, file: &Path) -> Self {
        self.symbols = Some(file.to_owned());
        self
    }

    /// Sets the time limit of a boot; the default is two minutes, or eight in the lab or from a
    /// disk.
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.patience = limit;
        self
    }

    /// Sets the guest's memory, in the monitor's format; the default is 512M.
    pub fn memory(mut self, memory: &str) -> Self {
        self.memory = memory.to_owned();
        self
    }

    /// Sets the number of vCPUs, 1 to 16; the default is 1.
    pub fn vcpus(mut self, vcpus: u32) -> Self {
        self.vcpus = vcpus;
        self
    }

    /// Adds words to the kernel's command line.
    pub fn command_line(mut self, words: &str) -> Self {
        self.command_line.push(' ');
        self.command_line.push_str(words);
        self
    }

    /// Enables ACPI, through which the guest finds its processors and powers off. This is the
    /// default.
    pub fn acpi(mut self) -> Self {
        self.acpi = true;
        self
    }

    /// Disables ACPI. The guest then finds its processors in the MP table.
    pub fn no_acpi(mut self) -> Self {
        self.acpi = false;
        self
    }

    /// Adds an argument of the monitor.
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Starts the agent in the guest, with a connection to the monitor.
    pub fn agent(mut self) -> Self {
        self.agent = true;
        self.command_line("patchbay.agent")
    }

    /// Starts a copy of a guest that [`Guest::snapshot`] has saved, which takes less time than a
    /// boot. The copy has that guest's kernel, command line, memory and vCPUs, and the builder's
    /// values for these are ignored. Commands, agent and disks must match the saved guest, and the
    /// disks must have the content that they had when it was saved.
    pub fn from_snapshot(mut self, folder: &Path) -> Self {
        self.snapshot = Some(folder.to_owned());
        self
    }

    /// Boots the guest and waits for the shell on its console, or starts a copy. Waits for the
    /// agent if the guest runs commands.
    ///
    /// # Errors
    /// A program or file is missing, or the guest does not boot; the message contains the guest's
    /// console or the monitor's log.
    pub async fn boot(mut self) -> Result<Guest> {
        let folder = tempfile::tempdir()?;
        let mut commands = None;
        if let Root::Made(made) = &self.root {
            let prepared = Commands::prepare(made, folder.path())?;
            if prepared.acpi_devices && self.snapshot.is_none() {
                self.arguments.push("--acpi-devices".to_owned());
            }
            commands = Some(prepared);
            let words = format!(" rdinit={} {EXEC_WORD} {SHELL_WORD}", overlay::INIT_PATH);
            self.command_line.push_str(&words);
        }
        let socket = folder.path().join(monitor::API_SOCKET);
        let log = folder.path().join("monitor.log");
        let process = self.start_monitor(folder.path(), &log)?;
        let mut guest = Guest {
            process,
            folder,
            socket,
            log,
            patience: self.patience,
            connection: None,
            commands: None,
        };
        let channel = guest.connect().await?;
        let shell = match Shell::attach(channel.clone()).await {
            Ok(shell) => shell,
            // The socket exists before the monitor has read the kernel or the snapshot.
            Err(error) => match tokio::time::timeout(ENDING, guest.process.wait()).await {
                Ok(status) => bail!(
                    "the monitor ended with {}:\n{}",
                    status?,
                    guest.monitor_log()
                ),
                Err(_) => return Err(error),
            },
        };
        guest.connection = Some(Connection { channel, shell });
        if let Some(mut commands) = commands {
            let connected = commands.connect(guest.console());
            match tokio::time::timeout(self.patience, connected).await {
                Ok(connected) => connected?,
                Err(_) => bail!(
                    "the agent in the guest did not connect within {} s; its console:\n{}",
                    self.patience.as_secs(),
                    guest.console().transcript()
                ),
            }
            guest.commands = Some(commands);
        }
        // Opening the serial port clears its receiver (serial8250_do_startup()), so input that is
        // typed before the shell has opened the port is lost. The shell of a copy has done so.
        if self.snapshot.is_none() {
            guest.wait_for_shell().await?;
        }
        Ok(guest)
    }

    fn start_monitor(&self, folder: &Path, log: &Path) -> Result<Child> {
        let program = programs::monitor(self.monitor.as_deref())?;
        let log_file = std::fs::File::create(log)?;
        let mut command = match &self.snapshot {
            Some(snapshot) => monitor::copy(&program, folder, snapshot),
            None => self.boot_command(&program, folder),
        };
        if self.agent || matches!(self.root, Root::Made(_)) {
            command.arg("--vsock").arg(folder.join(monitor::VSOCK));
        }
        if let Root::Disk(image) = &self.root {
            command.arg("--disk").arg(image);
        }
        if let Some(symbols) = &self.symbols {
            command.arg("--symbols").arg(symbols);
        }
        command.args(["--console", "api"]).args(&self.arguments);
        Command::from(command)
            .kill_on_drop(true)
            .stdout(log_file.try_clone()?)
            .stderr(log_file)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))
    }

    fn boot_command(&self, program: &Path, folder: &Path) -> std::process::Command {
        let acpi = if self.acpi { "" } else { " acpi=off" };
        let command_line = format!("{}{acpi}", self.command_line);
        let kernel = (&*self.kernel, &*command_line);
        let mut command = monitor::command(program, folder, kernel, &self.memory, self.vcpus);
        match &self.root {
            Root::Disk(_) => &mut command,
            Root::Initramfs(initramfs) => command.arg("--initrd").arg(initramfs),
            Root::Made(_) => command.arg("--initrd").arg(folder.join(INITRAMFS)),
        };
        command
    }
}

/// A booted guest; killed when dropped.
#[derive(Debug)]
pub struct Guest {
    process: Child,
    folder: TempDir,
    socket: PathBuf,
    log: PathBuf,
    /// Time limit of a boot.
    patience: Duration,
    connection: Option<Connection>,
    commands: Option<Commands>,
}

#[derive(Debug)]
struct Connection {
    channel: Channel,
    shell: Shell,
}

impl Guest {
    /// Starts the configuration of a guest. A path as argument names the guest's kernel; see
    /// [`GuestBuilder::new`].
    pub fn builder(kernel: impl Into<GuestBuilder>) -> GuestBuilder {
        kernel.into()
    }

    /// Runs a program in the guest and waits at most ten minutes for its end. The program is
    /// searched in the guest's PATH.
    ///
    /// # Errors
    /// The program could not be started, was killed after ten minutes, or the guest is lost. An
    /// exit status other than 0 is no error.
    pub async fn run(&mut self, command: &[&str]) -> Result<CommandOutput> {
        let commands = self.commands.as_mut().context(
            "this guest runs no commands: it boots from an initramfs or disk of its own; use `shell`",
        )?;
        match commands.run(command).await {
            Ok(output) => Ok(output),
            Err(error) => Err(error.context(format!(
                "`{}` in the guest failed; its console:\n{}",
                command.join(" "),
                self.console().transcript()
            ))),
        }
    }

    /// Copies a file or folder of the guest to `into`. Returns the number of files.
    ///
    /// # Errors
    /// The file or folder cannot be read in the guest or written here, it exceeds the limits, or
    /// the guest was not booted to run commands.
    pub async fn collect(&mut self, path: &str, into: &Path) -> Result<usize> {
        let commands = self.commands.as_mut();
        let commands =
            commands.context("files are collected only from guests that run commands")?;
        commands.collect(path, into).await
    }

    /// Saves the guest in a new folder, which only this user may read.
    /// [`GuestBuilder::from_snapshot`] starts copies of it. The guest runs on. The folder appears
    /// when it is complete.
    ///
    /// # Errors
    /// The monitor cannot save the guest, or the folder exists or cannot be written.
    pub async fn snapshot(&mut self, folder: &Path) -> Result<()> {
        monitor::save(self.channel(), folder).await
    }

    /// Returns the path of the monitor's API socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns a directory that lives as long as the guest.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the process id of the monitor.
    pub fn monitor_pid(&self) -> Option<u32> {
        self.process.id()
    }

    /// Returns the output of the monitor.
    pub fn monitor_log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    async fn connect(&mut self) -> Result<Channel> {
        let deadline = tokio::time::Instant::now() + patience();
        loop {
            // There is no event for a socket that becomes connectable, so this polls until the
            // deadline.
            if let Ok(channel) = connect(&self.socket).await {
                return Ok(channel);
            }
            if let Some(status) = self.process.try_wait()? {
                bail!("the monitor ended with {status}:\n{}", self.monitor_log());
            }
            ensure!(
                tokio::time::Instant::now() < deadline,
                "the monitor opened no socket:\n{}",
                self.monitor_log()
            );
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    fn connection(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("boot() connected")
    }

    /// Returns the connection to the monitor, for further clients.
    pub fn channel(&mut self) -> Channel {
        self.connection().channel.clone()
    }

    /// Returns the guest's console.
    pub fn console(&mut self) -> &mut Shell {
        &mut self.connection().shell
    }

    /// Waits until a kernel has booted and its shell reads the console.
    pub async fn wait_for_shell(&mut self) -> Result<()> {
        let patience = self.patience;
        self.console()
            .wait_longer_for(SHELL_READS, patience)
            .await?;
        self.shell("dmesg -n 1").await.map(drop)
    }

    /// Returns a client of the static keys service.
    pub fn static_keys(&mut self) -> StaticKeysServiceClient<Channel> {
        StaticKeysServiceClient::new(self.channel())
    }

    /// Returns a client of the guest service.
    pub fn guest_service(&mut self) -> GuestServiceClient<Channel> {
        GuestServiceClient::new(self.channel())
    }

    /// Runs a command in the guest, which must succeed, and returns its output.
    pub async fn shell(&mut self, command: &str) -> Result<String> {
        let (status, output) = match self.console().run(command).await {
            Ok(answer) => answer,
            Err(error) => {
                let ended = match self.process.try_wait() {
                    Ok(None) => "runs".to_owned(),
                    Ok(Some(status)) => format!("has ended with {status}"),
                    Err(error) => error.to_string(),
                };
                let log = self.monitor_log();
                return Err(error.context(format!("the monitor {ended}; its log:\n{log}")));
            }
        };
        if output.contains("Oops: ") {
            // The last line of the report may be printed after the command has ended.
            let _ = self.console().wait_for("---[ end trace").await;
            bail!(
                "the guest's kernel has failed; its console:\n{}",
                self.console().transcript()
            );
        }
        ensure!(
            status == 0,
            "`{command}` in the guest ended with {status}: {output}"
        );
        Ok(output)
    }

    /// Describes the guest.
    pub async fn describe(&mut self) -> Result<DescribeGuestResponse> {
        Ok(self
            .guest_service()
            .describe_guest(DescribeGuestRequest::default())
            .await?
            .into_inner())
    }

    /// Fails unless the guest's kernel has registered its keys.
    pub async fn assert_registered(&mut self) -> Result<DescribeGuestResponse> {
        let guest = self.describe().await?;
        let status = guest.status.clone().unwrap_or_default();
        ensure!(
            status.registration() == RegistrationState::Registered,
            "the guest has not registered: {:?} {}",
            status.registration(),
            status.registration_error
        );
        Ok(guest)
    }

    /// Returns one key with its sites.
    pub async fn key(&mut self, name: &str) -> Result<StaticKey> {
        let request = GetStaticKeyRequest {
            name: name.to_owned(),
            ..Default::default()
        };
        let response = self
            .static_keys()
            .get_static_key(request)
            .await?
            .into_inner();
        response.key.context("the answer has no key")
    }

    /// Changes keys in one transaction. Guarded keys are allowed if the monitor permits them.
    pub async fn update(
        &mut self,
        updates: &[(&str, KeyOp)],
    ) -> Result<UpdateStaticKeysResponse, tonic::Status> {
        let updates = updates
            .iter()
            .map(|(name, op)| KeyUpdate {
                name: (*name).to_owned(),
                op: (*op).into(),
                ..Default::default()
            })
            .collect();
        let request = UpdateStaticKeysRequest {
            updates,
            allow_guarded: true,
            ..Default::default()
        };
        Ok(self
            .static_keys()
            .update_static_keys(request)
            .await?
            .into_inner())
    }

    /// Fails if the guest's kernel has printed a warning or a worse report since boot.
    pub async fn assert_no_warnings(&mut self) -> Result<()> {
        let log = self.shell("dmesg").await?;
        let reports = patchbay_ci::console::reports(&log);
        ensure!(
            reports.is_empty(),
            "the guest's kernel complains: {}\n{log}",
            reports.join("\n")
        );
        Ok(())
    }

    /// Makes the guest reset itself and waits for the monitor to end. The guest resets, because a
    /// guest without ACPI cannot power off.
    pub async fn power_off(mut self) -> Result<ExitStatus> {
        self.console().type_line("reboot -f").await?;
        self.wait().await
    }

    /// Waits for the monitor to end.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        match tokio::time::timeout(patience(), self.process.wait()).await {
            Ok(status) => Ok(status?),
            Err(_) => bail!("the monitor did not end:\n{}", self.monitor_log()),
        }
    }
}

/// Connects to the API on a unix socket.
pub async fn connect(socket: &Path) -> Result<Channel> {
    let channel = client::endpoint()
        .connect_with_connector(client::unix_socket(socket))
        .await?;
    Ok(channel)
}
