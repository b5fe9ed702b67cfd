// SPDX-License-Identifier: Apache-2.0

//! Snapshots: a stopped guest in two files, from which any number of copies start.
//!
//! ```text
//!  paused guest ─▶ freeze devices ─▶ memory, page by page ─▶ vCPUs, chips, devices ─▶ seal
//!                                        file "memory"              file "state"
//!
//!  open: header, checksum ─▶ memory's digest ─▶ map privately ─▶ create the VM ─▶ set the state
//! ```
//!
//! - `memory` has the guest's RAM without the device gap. Pages of zeros are holes. Copies map it
//!   with `MAP_PRIVATE`, so they share the pages that they do not write.
//! - `state` has everything else, and the digest of the memory ([`file`]). It is written last, so
//!   a folder with a `state` is complete.
//!
//! The state of the chips and the vCPUs is stored in KVM's own structures. They belong to the
//! kernel's interface, so their layout does not change.
//!
//! A copy continues at the next instruction of each vCPU. Connections over vsock are reset. The
//! console of the copy starts empty, and input that the guest had not read is kept.

mod chips;
mod cpu_features;
mod decode;
mod file;
mod memory;
mod state;
mod vcpu;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::VcpuFd;
use patchbay_guest::log_file::{self, LogPath};
use patchbay_guest::snapshot::{ControlState, KeptArray, KeptRequest, SaveError};
use prost::Message;
use rustix::fs::OFlags;

pub use patchbay_proto::{SNAPSHOT_MEMORY as MEMORY_FILE, SNAPSHOT_STATE as STATE_FILE};

pub(crate) use self::chips::{restore as restore_chips, save as save_chips};
pub(crate) use self::memory::{save as save_memory, verify as verify_memory};
pub(crate) use self::state::{
    ActiveQueue, Array, Control, DeviceState, MachineState, PowerState, QueueState, Request,
    SerialState, VcpuState,
};
pub(crate) use self::vcpu::save as save_vcpu;

use crate::devices::{Console, PowerManagement, Virtio};
use crate::probe::Transports;
use crate::x86::cpuid::VCPUS_MAX;

/// Limit on the size of `state` in bytes. 16 vCPUs and 4,096 registered modules need 18 MiB, holds
/// and claims at most 32 MiB.
const STATE_MAX: u64 = 64 << 20;

/// A snapshot cannot be restored.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum SnapshotError {
    #[error("the snapshot's file {} cannot be read ({error}); check the folder and its permissions", path.display())]
    Open {
        path: PathBuf,
        error: std::io::Error,
    },
    #[error(
        "the file is not the state of a snapshot; give a folder that `patchbay guest snapshot` wrote"
    )]
    NotAState,
    #[error(
        "the snapshot has format {0}, and this monitor restores format {current}; take the snapshot again",
        current = file::VERSION
    )]
    Version(u32),
    #[error(
        "the snapshot's state has {found} bytes and should have {expected}; take the snapshot again"
    )]
    Length { expected: u64, found: u64 },
    #[error("the snapshot's state was changed after it was written; take the snapshot again")]
    Checksum,
    #[error("the snapshot's state is not consistent: {0}; take the snapshot again")]
    Invalid(&'static str),
    #[error(
        "the snapshot's memory has {found} bytes and should have {expected}; take the snapshot again"
    )]
    MemoryLength { expected: u64, found: u64 },
    #[error("the snapshot's memory was changed after it was written; take the snapshot again")]
    MemoryChecksum,
    #[error(
        "the snapshot is of a processor of {saved:?}, and this host's is of {here:?}; restore it on a host like its own"
    )]
    Vendor { saved: String, here: String },
    #[error(
        "the snapshot's guest uses processor features that this host lacks (CPUID {leaf:#x}.{index}, {register} {bits:#x}); restore it on a host like its own"
    )]
    Features {
        leaf: u32,
        index: u32,
        register: &'static str,
        bits: u32,
    },
    #[error(
        "the snapshot's guest may use physical addresses of {saved} bits, and this host's have {here}; restore it on a host like its own"
    )]
    AddressBits { saved: u8, here: u8 },
    #[error(
        "the snapshot's guest sends its requests by a transport that does not work on this host; restore it on a host like its own"
    )]
    Transports,
    #[error(
        "the snapshot's guest has {saved} virtio devices, and the command line gives {given}; give the same --disk, --vsock and --rng"
    )]
    DeviceCount { saved: usize, given: usize },
    #[error(
        "virtio device {index} differs from the snapshot's: {what}; give the same --disk, --vsock and --rng"
    )]
    Device { index: usize, what: &'static str },
    #[error(
        "KVM refuses to {what} ({error}); restore the snapshot on a host with the same processor and kernel"
    )]
    Kvm {
        what: &'static str,
        error: kvm_ioctls::Error,
    },
    #[error(
        "KVM refuses the value of MSR {0:#x}; restore the snapshot on a host with the same processor and kernel"
    )]
    Msr(u32),
}

impl SnapshotError {
    /// Returns a function that maps the error of the KVM call described by `what`.
    fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Kvm { what, error }
    }
}

/// A snapshot whose state is checked. Its memory is checked when a guest is created from it.
#[derive(Debug)]
pub struct Snapshot {
    state: MachineState,
    memory: File,
    digest: [u8; 32],
}

/// Opens a regular file, and returns its size in bytes. A FIFO does not block the caller.
fn open_file(path: &Path) -> std::io::Result<(File, u64)> {
    let file = LogPath::new(path)?.open(OFlags::RDONLY | OFlags::NONBLOCK)?;
    match log_file::length(&file)? {
        Some(length) => Ok((file, length)),
        None => Err(std::io::Error::other("it is not a regular file")),
    }
}

impl Snapshot {
    /// Opens a snapshot and checks its state.
    ///
    /// # Errors
    /// [`SnapshotError`] names the file that cannot be read, or what is wrong with it.
    pub fn open(folder: &Path) -> Result<Self, SnapshotError> {
        let path = folder.join(STATE_FILE);
        let read = |path: &Path| {
            let mut bytes = vec![];
            let (file, _) = open_file(path)?;
            file.take(STATE_MAX + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read(&path).map_err(|error| SnapshotError::Open { path, error })?;
        let (digest, body) = file::unseal(&bytes)?;
        let state = decode::decode(body)?;
        let memory = state.memory_bytes;
        if !crate::memory::is_possible(memory) {
            return Err(SnapshotError::Invalid("its size of memory is impossible"));
        }
        if !(1..=usize::from(VCPUS_MAX)).contains(&state.vcpus.len()) {
            return Err(SnapshotError::Invalid("its number of vCPUs is not 1 to 16"));
        }
        let path = folder.join(MEMORY_FILE);
        let opened = open_file(&path);
        let (file, found) = opened.map_err(|error| SnapshotError::Open { path, error })?;
        if found != memory {
            return Err(SnapshotError::MemoryLength {
                expected: memory,
                found,
            });
        }
        Ok(Self {
            state,
            memory: file,
            digest,
        })
    }

    /// Returns the size of the guest's memory in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.state.memory_bytes
    }

    /// Returns the number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> u8 {
        // Checked by `open`.
        u8::try_from(self.state.vcpus.len()).unwrap_or(VCPUS_MAX)
    }

    /// Returns whether the guest was offered Patchbay.
    pub(crate) fn offers_patchbay(&self) -> bool {
        self.state.transports != 0
    }

    /// Returns the service's part of the snapshot.
    #[must_use]
    pub fn control(&self) -> ControlState {
        let control = self.state.control.clone().unwrap_or_default();
        let requests = control.requests.into_iter();
        ControlState {
            guest: control.guest,
            incarnation: control.incarnation,
            requests: requests.map(Request::into).collect(),
            ledger: control.ledger,
        }
    }

    /// Returns the SHA-256 digest of the state, which includes the digest of the memory. It
    /// identifies the state. The digest of the memory only detects damage.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    pub(crate) fn state(&self) -> &MachineState {
        &self.state
    }

    pub(crate) fn memory(&self) -> &File {
        &self.memory
    }
}

/// Checks that the host can run the snapshot's guest.
pub(crate) fn check(
    state: &MachineState,
    supported: &[kvm_cpuid_entry2],
    transports: Transports,
) -> Result<(), SnapshotError> {
    for vcpu in &state.vcpus {
        cpu_features::check(&vcpu::cpuid(vcpu)?, supported)?;
    }
    match transports.bits() == state.transports {
        true => Ok(()),
        false => Err(SnapshotError::Transports),
    }
}

/// Sets the state of a new vCPU, and returns its CPUID table.
pub(crate) fn restore_vcpu(
    fd: &VcpuFd,
    state: &MachineState,
    id: u8,
) -> Result<CpuId, SnapshotError> {
    let vcpu = state.vcpus.get(usize::from(id));
    vcpu::restore(fd, vcpu.ok_or(SnapshotError::Invalid("it lacks a vCPU"))?)
}

/// Sets the state of the devices. Their interrupts must be connected.
pub(crate) fn restore_devices(
    state: &MachineState,
    console: &Console,
    power: &PowerManagement,
    virtio: &Virtio,
) -> Result<(), SnapshotError> {
    let (Some(serial), Some(saved)) = (&state.serial, &state.power) else {
        return Err(SnapshotError::Invalid("it lacks devices"));
    };
    if !console.restore(serial) {
        return Err(SnapshotError::Invalid("the serial port"));
    }
    match [saved.status, saved.enable].map(u16::try_from) {
        [Ok(status), Ok(enable)] => power.set_registers(status, enable),
        _ => return Err(SnapshotError::Invalid("the power button")),
    }
    virtio.restore(&state.devices)
}

pub(crate) fn save_power(power: &PowerManagement) -> PowerState {
    let (status, enable) = power.registers();
    PowerState {
        status: status.into(),
        enable: enable.into(),
    }
}

impl From<Request> for KeptRequest {
    fn from(Request { op, page, arrays }: Request) -> Self {
        let arrays = arrays.into_iter();
        let arrays = arrays.map(|Array { address, bytes }| KeptArray { address, bytes });
        Self {
            op,
            page,
            arrays: arrays.collect(),
        }
    }
}

impl From<KeptRequest> for Request {
    fn from(KeptRequest { op, page, arrays }: KeptRequest) -> Self {
        let arrays = arrays.into_iter();
        let arrays = arrays.map(|KeptArray { address, bytes }| Array { address, bytes });
        Self {
            op,
            page,
            arrays: arrays.collect(),
        }
    }
}

pub(crate) fn save_control(control: ControlState) -> Control {
    let requests = control.requests.into_iter();
    Control {
        guest: control.guest,
        incarnation: control.incarnation,
        requests: requests.map(KeptRequest::into).collect(),
        ledger: control.ledger,
    }
}

/// Returns the content of the file `state`.
///
/// # Errors
/// It is larger than [`Snapshot::open`] accepts.
pub(crate) fn seal(state: &MachineState) -> Result<Vec<u8>, SaveError> {
    let length = (file::HEADER + state.encoded_len()) as u64;
    if length > STATE_MAX {
        return Err(SaveError::Unable(format!(
            "the guest's state without its memory has {length} bytes, and no copy could be started from more than {STATE_MAX}; release holds and claims, or unload modules of the guest's kernel"
        )));
    }
    Ok(file::seal(&state.encode_to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a snapshot whose ledger has this many bytes.
    fn written(folder: &Path, ledger: usize) -> Result<u64, SaveError> {
        let state = MachineState {
            memory_bytes: crate::memory::MEMORY_MIN,
            vcpus: vec![VcpuState::default()],
            control: Some(Control {
                ledger: vec![7; ledger],
                ..Control::default()
            }),
            ..MachineState::default()
        };
        let bytes = seal(&state)?;
        std::fs::write(folder.join(STATE_FILE), &bytes).unwrap();
        let memory = File::create(folder.join(MEMORY_FILE)).unwrap();
        memory.set_len(state.memory_bytes).unwrap();
        Ok(bytes.len() as u64)
    }

    #[test]
    fn a_state_that_no_copy_accepts_is_not_saved() {
        let folder = tempfile::tempdir().unwrap();
        // The lengths of the ledger and of its message take as many bytes in the largest state.
        let sample = 60 << 20;
        let rest = written(folder.path(), sample).unwrap() - sample as u64;
        let largest = usize::try_from(STATE_MAX - rest).unwrap();
        assert_eq!(written(folder.path(), largest), Ok(STATE_MAX));
        let opened = Snapshot::open(folder.path()).unwrap();
        assert_eq!(opened.control().ledger.len(), largest);
        let refused = written(folder.path(), largest + 1).unwrap_err();
        assert!(
            refused.to_string().contains("release holds and claims"),
            "{refused}"
        );
    }

    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(STATE_FILE);
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        assert!(open_file(&path).is_err(), "a FIFO");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/proc/version", &path).unwrap();
        assert!(open_file(&path).is_err(), "a symbolic link");
    }
}
