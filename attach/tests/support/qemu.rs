// SPDX-License-Identifier: Apache-2.0
//! QEMUs whose guest only counts.

use std::fs;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_attach::guest::QemuGuest;
use patchbay_attach::memory::Access;
use patchbay_attach::qmp::{Qmp, QmpError};
use patchbay_attach::{Options, PauseWay, Target, attach};
use patchbay_service::keys::Keys;
use serde_json::Value;

use super::{BOOT_SECTOR, DEADLINE, counts_on, keys_of, tcg, until};

/// The accelerator that runs the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    Tcg,
    Kvm,
}

/// The backend of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    Private,
    SharedMemfd,
    SharedFile,
    /// A memfd of huge pages, which does not support write().
    Hugetlb,
}

/// A process, killed on drop.
pub struct Process(pub Child);

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running QEMU.
pub struct Qemu {
    pub child: Process,
    folder: tempfile::TempDir,
    disk: Option<tempfile::NamedTempFile>,
    pub accelerator: Accelerator,
}

impl Qemu {
    /// Starts a QEMU. Prints a message and returns `None` if QEMU is not installed.
    pub fn start(accelerator: Accelerator, memory: Memory) -> Option<Self> {
        Self::start_program(accelerator, memory, &BOOT_SECTOR, &[])
    }

    /// Starts a QEMU with a program in the boot sector.
    pub fn start_program(
        accelerator: Accelerator,
        memory: Memory,
        program: &[u8],
        arguments: &[&str],
    ) -> Option<Self> {
        let mut sector = program.to_vec();
        sector.resize(510, 0);
        sector.extend([0x55, 0xaa]);
        sector.resize(1 << 20, 0);
        let disk = tempfile::NamedTempFile::new().expect("temporary file");
        fs::write(disk.path(), sector).expect("room");
        let drive = format!("file={},format=raw,if=ide", disk.path().display());
        let arguments = [&["-drive", &drive], arguments].concat();
        let mut qemu = Self::start_with(accelerator, memory, "64M", &arguments)?;
        qemu.disk = Some(disk);
        Some(qemu)
    }

    /// Starts a QEMU with other memory and other devices.
    pub fn start_with(
        accelerator: Accelerator,
        memory: Memory,
        size: &str,
        arguments: &[&str],
    ) -> Option<Self> {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let accel = match accelerator {
            Accelerator::Tcg => "tcg",
            Accelerator::Kvm => "kvm",
        };
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-accel",
            accel,
            "-m",
            size,
            "-smp",
            "2",
            "-nodefaults",
            "-display",
            "none",
        ]);
        command.args([
            "-name",
            "counter",
            "-machine",
            if memory == Memory::Private {
                "pc"
            } else {
                "pc,memory-backend=ram0"
            },
        ]);
        match memory {
            Memory::Private => {}
            Memory::SharedMemfd => {
                command.args([
                    "-object",
                    &format!("memory-backend-memfd,id=ram0,size={size},share=on"),
                ]);
            }
            Memory::Hugetlb => {
                let object = format!(
                    "memory-backend-memfd,id=ram0,size={size},share=on,hugetlb=on,hugetlbsize=2M"
                );
                command.args(["-object", &object]);
            }
            Memory::SharedFile => {
                let object = format!(
                    "memory-backend-file,id=ram0,size={size},share=on,mem-path={}",
                    path("ram")
                );
                command.args(["-object", &object]);
            }
        }
        command.args(arguments);
        for socket in ["qmp", "other"] {
            command.args(["-qmp", &format!("unix:{},server=on,wait=off", path(socket))]);
        }
        let child = match command.spawn() {
            Ok(child) => Process(child),
            Err(error) => {
                eprintln!("SKIPPED: qemu-system-x86_64 cannot be started ({error})");
                return None;
            }
        };
        let qemu = Self {
            child,
            folder,
            disk: None,
            accelerator,
        };
        until("QEMU listens", || {
            Qmp::connect(&qemu.socket("other"), DEADLINE, Box::new(|_| ())).is_ok()
        });
        Some(qemu)
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn options(&self, pause: PauseWay) -> Options {
        options(self.socket("qmp"), pause, self.accelerator)
    }

    /// Attaches, and waits until the guest's counter runs.
    pub fn attach(&self, pause: PauseWay) -> Arc<QemuGuest> {
        let guest = Arc::new(attach(&self.options(pause)).expect("attached"));
        self.runs(&guest);
        // The firmware, which has ended now, changes the memory slots.
        let _ = guest.memory_changes(true);
        guest
    }

    /// Waits until the guest has counted further.
    pub fn runs(&self, guest: &QemuGuest) {
        counts_on(guest);
    }

    /// Attaches, and returns the service for the guest's keys too.
    pub fn keys(&self, pause: PauseWay) -> (Arc<QemuGuest>, Keys) {
        let guest = Arc::new(attach(&self.options(pause)).expect("attached"));
        let keys = keys_of(&guest);
        (guest, keys)
    }

    /// Carries out a command as another client.
    pub fn other(&self, command: &str, arguments: Value) -> Value {
        self.try_other(command, arguments).expect(command)
    }

    /// Carries out a command that QEMU may refuse as another client.
    pub fn try_other(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let qmp = Qmp::connect(&self.socket("other"), DEADLINE, Box::new(|_| ()))
            .expect("a second monitor");
        qmp.execute(command, arguments, DEADLINE)
    }
}

/// Returns options to attach to a QEMU that may lack KVM.
pub fn options(socket: PathBuf, pause: PauseWay, accelerator: Accelerator) -> Options {
    Options {
        target: Target::Qmp(socket, None),
        name: None,
        access: Access::Auto,
        pause,
        watchdog: PathBuf::from(env!("CARGO_BIN_EXE_patchbay-attach")),
        accept_tcg: (accelerator == Accelerator::Tcg).then_some(tcg::registers),
    }
}

/// Attaches as soon as an earlier attacher and its watchdog have ended.
pub fn attached(options: &Options, patience: Duration, what: &str) -> QemuGuest {
    let end = Instant::now() + patience;
    loop {
        match attach(options) {
            Ok(guest) => return guest,
            Err(error) => assert!(Instant::now() < end, "{what}: {error}"),
        }
    }
}
