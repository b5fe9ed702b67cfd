// SPDX-License-Identifier: Apache-2.0
//! A guest under the real monitor.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hyper_util::rt::TokioIo;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    DescribeGuestRequest, DescribeGuestResponse, GetStaticKeyRequest, KeyOp, KeyUpdate,
    RegistrationState, StaticKey, UpdateStaticKeysRequest, UpdateStaticKeysResponse,
};
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::console::{PATIENCE, SHELL_READS, Shell};
use crate::environment::{Environment, StockKernel};

/// noxsave: the lab's QEMU does not intercept a nested guest's XSETBV, so its KVM reports the size of
/// an XSAVE area without AVX, and the guest's kernel warns at boot.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 reboot=k noxsave";

/// Configuration of a [`Guest`].
#[derive(Debug, Clone)]
pub struct GuestBuilder {
    monitor: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    /// A file with the kernel's symbols, for kernels that register.
    symbols: Option<PathBuf>,
    patience: Duration,
    root_disk: Option<PathBuf>,
    vcpus: u32,
    memory: String,
    command_line: String,
    arguments: Vec<String>,
    agent: bool,
}

impl GuestBuilder {
    /// Boots another kernel than `Environment::kernel`.
    pub fn kernel(mut self, kernel: &Path) -> Self {
        self.kernel = kernel.to_owned();
        self
    }

    /// Boots from a disk instead of the initramfs. It must have a shell that reads the console.
    pub fn root_disk(mut self, image: &Path) -> Self {
        self.root_disk = Some(image.to_owned());
        // A distribution starts more programs.
        self.patience = 4 * PATIENCE;
        self.command_line("root=/dev/vda rw")
    }

    /// Boots with another initramfs than `Environment::initramfs`.
    pub fn initramfs(mut self, initramfs: &Path) -> Self {
        self.initramfs = initramfs.to_owned();
        self
    }

    /// Guest memory, as the monitor takes it; the default is 256M.
    pub fn memory(mut self, memory: &str) -> Self {
        self.memory = memory.to_owned();
        self
    }

    /// Number of vCPUs, 1 to 16; the default is 1.
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

    /// Enables ACPI, by which the guest finds its processors and can power off.
    pub fn acpi(mut self) -> Self {
        self.command_line = self.command_line.replace(" acpi=off", "");
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

    /// Boots the guest and waits for the shell on the console.
    pub async fn boot(self) -> Result<Guest> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("api.sock");
        let log = folder.path().join("monitor.log");
        let log_file = std::fs::File::create(&log)?;
        let mut command = Command::new(&self.monitor);
        if self.agent {
            command.arg("--vsock").arg(folder.path().join("vsock"));
        }
        match &self.root_disk {
            Some(image) => command.arg("--disk").arg(image),
            None => command.arg("--initrd").arg(&self.initramfs),
        };
        if let Some(symbols) = &self.symbols {
            command.arg("--symbols").arg(symbols);
        }
        let process = command
            .arg("--kernel")
            .arg(&self.kernel)
            .args(["--cmdline", &self.command_line])
            .args(["--memory", &self.memory])
            .args(["--vcpus", &self.vcpus.to_string()])
            .arg("--api-socket")
            .arg(&socket)
            .args(["--console", "api"])
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log_file.try_clone()?)
            .stderr(log_file)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", self.monitor.display()))?;

        let mut guest = Guest {
            process,
            folder,
            socket,
            log,
            patience: self.patience,
            connection: None,
        };
        let channel = guest.connect().await?;
        let shell = Shell::attach(channel.clone()).await?;
        guest.connection = Some(Connection { channel, shell });
        // Opening the port clears its receiver (serial8250_do_startup()), so input typed before the
        // shell has opened it is lost.
        guest.wait_for_shell().await?;
        Ok(guest)
    }
}

/// A booted guest; killed when dropped.
#[derive(Debug)]
pub struct Guest {
    process: Child,
    folder: TempDir,
    socket: PathBuf,
    log: PathBuf,
    /// Time allowed for a boot.
    patience: Duration,
    connection: Option<Connection>,
}

#[derive(Debug)]
struct Connection {
    channel: Channel,
    shell: Shell,
}

impl Guest {
    /// A guest with 1 vCPU, 256 MiB and the patched kernel.
    pub fn builder(environment: &Environment) -> GuestBuilder {
        GuestBuilder {
            monitor: environment.monitor.clone(),
            kernel: environment.kernel.clone(),
            initramfs: environment.initramfs.clone(),
            symbols: Some(environment.vmlinux.clone()),
            patience: PATIENCE,
            root_disk: None,
            vcpus: 1,
            memory: "256M".to_owned(),
            // Most tests cover the MP table; tests of ACPI call `acpi`.
            command_line: format!("{COMMAND_LINE} acpi=off"),
            arguments: Vec::new(),
            agent: false,
        }
    }

    /// A guest with 1 vCPU, 512 MiB, ACPI and a kernel of a distribution, which does not register.
    pub fn stock(kernel: &StockKernel) -> GuestBuilder {
        GuestBuilder {
            monitor: kernel.monitor.clone(),
            kernel: kernel.kernel.clone(),
            initramfs: kernel.initramfs.clone(),
            symbols: None,
            // It has more drivers than the kernel under test.
            patience: 4 * PATIENCE,
            root_disk: None,
            vcpus: 1,
            memory: "512M".to_owned(),
            command_line: COMMAND_LINE.to_owned(),
            arguments: Vec::new(),
            agent: false,
        }
    }

    /// A guest with the keys of the kernel module `patchbay_test`, whose monitor permits changes of
    /// guarded keys; `None`, after printing why, if the test is skipped.
    pub async fn with_test_keys(vcpus: u32) -> Result<Option<Self>> {
        let Some(environment) = Environment::linux_guest() else {
            return Ok(None);
        };
        let mut guest = Self::builder(&environment)
            .vcpus(vcpus)
            .argument("--allow-guarded")
            .boot()
            .await?;
        guest.shell("insmod /lib/modules/patchbay_test.ko").await?;
        guest.assert_registered().await?;
        Ok(Some(guest))
    }

    /// A guest that has registered and whose agent is connected; `None` if none can run here.
    pub async fn with_agent() -> Result<Option<Self>> {
        let Some(environment) = Environment::linux_guest() else {
            return Ok(None);
        };
        let mut guest = Self::builder(&environment).agent().boot().await?;
        guest.assert_registered().await?;
        guest.wait_for_agent().await?;
        Ok(Some(guest))
    }

    /// The monitor's API socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// A directory that lives as long as the guest.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Process id of the monitor.
    pub fn monitor_pid(&self) -> Option<u32> {
        self.process.id()
    }

    /// Output of the monitor.
    pub fn monitor_log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    async fn connect(&mut self) -> Result<Channel> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
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

    /// The connection to the monitor, for further clients.
    pub fn channel(&mut self) -> Channel {
        self.connection().channel.clone()
    }

    /// The guest's console.
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

    /// A client of the static keys service.
    pub fn static_keys(&mut self) -> StaticKeysServiceClient<Channel> {
        StaticKeysServiceClient::new(self.channel())
    }

    /// A client of the guest service.
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
            // Its last line may come after the command's end.
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

    /// One key with its sites.
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

    /// Fails if the guest's kernel has warned or worse since boot.
    pub async fn assert_no_warnings(&mut self) -> Result<()> {
        let log = self.shell("dmesg").await?;
        let alarms = [
            "WARNING:",
            "BUG:",
            "Oops",
            "general protection",
            "invalid opcode",
            "soft lockup",
            "Call Trace",
        ];
        for line in log.lines() {
            ensure!(
                !alarms.iter().any(|alarm| line.contains(alarm)),
                "the guest's kernel complains:\n{log}"
            );
        }
        Ok(())
    }

    /// Resets the guest from inside and waits for the monitor to end. Without ACPI a guest cannot
    /// power off.
    pub async fn power_off(mut self) -> Result<ExitStatus> {
        self.console().type_line("reboot -f").await?;
        self.wait().await
    }

    /// Waits for the monitor to end.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        match tokio::time::timeout(PATIENCE, self.process.wait()).await {
            Ok(status) => Ok(status?),
            Err(_) => bail!("the monitor did not end:\n{}", self.monitor_log()),
        }
    }
}

/// Connects to the API on a unix socket.
pub async fn connect(socket: &Path) -> Result<Channel> {
    let socket = socket.to_owned();
    // The URI is required but unused: the connector opens the socket.
    let channel = Endpoint::from_static("http://monitor")
        .initial_stream_window_size(patchbay_proto::STREAM_WINDOW)
        .initial_connection_window_size(patchbay_proto::CONNECTION_WINDOW)
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        }))
        .await?;
    Ok(channel)
}
