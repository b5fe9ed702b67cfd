// SPDX-License-Identifier: Apache-2.0

//! Loads a kernel, its initrd and its command line into guest memory, with the structures that its
//! boot protocol requires.
//!
//! | file | protocol | entry |
//! |---|---|---|
//! | bzImage | Linux, 64-bit | 0x200 after the start of the protected-mode kernel |
//! | ELF with a PVH note | PVH, 32-bit | the note's address |
//! | ELF | Linux, 64-bit | the ELF entry |
//!
//! References: `Documentation/arch/x86/boot.rst` and Xen's `docs/misc/pvh.pandoc`.

mod kernel;
pub(crate) mod layout;
mod linux;
mod memory_map;
mod pvh;

use std::io;
use std::path::{Path, PathBuf};

use crate::memory::{GuestRam, OutsideMemory, PAGE_SIZE};
use crate::x86::acpi::{self, MmioDevice};
use crate::x86::registers::Mode;

/// Boot protocol.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BootProtocol {
    /// The protocol given by the table in this module's documentation.
    #[default]
    Auto,
    /// The 64-bit Linux boot protocol, even for an ELF kernel with a PVH note.
    Linux,
    /// PVH. The kernel must be an ELF file with a PVH note.
    Pvh,
}

/// A Linux kernel to boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinuxBoot {
    /// A bzImage or an ELF file (vmlinux).
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Kernel command line.
    pub command_line: String,
    /// Boot protocol.
    pub protocol: BootProtocol,
    /// The way in which the kernel finds its virtio devices.
    pub virtio_devices: DeviceDiscovery,
}

/// The way in which a kernel finds its virtio devices. Only one way is used, because a kernel that
/// finds a device in both ways reports that the device's registers are already in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceDiscovery {
    /// The command line names them with `virtio_mmio.device=`. The kernel needs
    /// `CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES`.
    CommandLine,
    /// ACPI tables name them. Kernels of distributions support this.
    Acpi,
}

impl LinuxBoot {
    /// Adds words, each with a leading space, to the part of the command line that the kernel
    /// itself reads: before ` -- `, if there is one.
    pub fn add_words(&mut self, words: &str) {
        let end = self.command_line.find(" -- ");
        let end = end.unwrap_or(self.command_line.len());
        self.command_line.insert_str(end, words);
    }
}

/// The guest cannot be booted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum BootError {
    #[error("the {what} {path} cannot be read ({error}); check the path and its permissions")]
    Read {
        what: &'static str,
        path: PathBuf,
        error: io::Error,
    },
    #[error(
        "{0} is not a bootable kernel; give an x86-64 bzImage (arch/x86/boot/bzImage) or vmlinux"
    )]
    NotAKernel(PathBuf),
    #[error("the kernel {path} {problem}; give an x86-64 kernel of Linux 3.8 or later")]
    Unsupported {
        path: PathBuf,
        problem: &'static str,
    },
    #[error("the kernel {path} is truncated: {actual} bytes of {expected}; copy or build it again")]
    Truncated {
        path: PathBuf,
        actual: u64,
        expected: u64,
    },
    #[error("the kernel {path} is damaged ({problem}); copy or build it again")]
    Damaged { path: PathBuf, problem: String },
    #[error(
        "the kernel {0} has no PVH entry; give a vmlinux built with CONFIG_PVH=y, or choose another boot protocol"
    )]
    NoPvhEntry(PathBuf),
    #[error(
        "the initrd {0} is neither a newc cpio archive nor a compressed one; make it with cpio -H newc, or leave it out"
    )]
    NotAnInitrd(PathBuf),
    #[error(
        "the command line has {actual} bytes, but the kernel takes at most {limit}; shorten it"
    )]
    CommandLineTooLong { actual: usize, limit: usize },
    #[error("the command line contains a NUL byte; remove it")]
    CommandLineNul,
    #[error(
        "{what} needs memory up to {needed} MiB, but the guest has {available} MiB below 3 GiB; increase --memory"
    )]
    TooLittleMemory {
        what: &'static str,
        needed: u64,
        available: u64,
    },
    /// Cannot happen at the minimum memory size, which has room for all boot structures.
    #[error("a boot structure does not fit into the guest's memory: {0}; increase --memory")]
    Structure(OutsideMemory),
}

impl From<OutsideMemory> for BootError {
    fn from(error: OutsideMemory) -> Self {
        Self::Structure(error)
    }
}

/// Registers and mode of the boot vCPU at its first instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EntryPoint {
    pub rip: u64,
    pub mode: Mode,
    /// RSI: the address of the zero page (Linux boot protocol).
    pub rsi: u64,
    /// RBX: the address of the start info (PVH).
    pub rbx: u64,
}

/// An initrd in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Initrd {
    address: u64,
    size: u64,
}

/// Loads the kernel, its initrd, its command line and the boot structures, and returns the entry
/// point. The ACPI tables name `devices`.
pub(crate) fn load(
    ram: &GuestRam,
    boot: &LinuxBoot,
    vcpus: u8,
    devices: &[MmioDevice],
) -> Result<EntryPoint, BootError> {
    let kernel = kernel::load(ram, &boot.kernel, boot.protocol)?;
    let limit = kernel.command_line_max().min(layout::COMMAND_LINE_MAX - 1);
    let command_line = boot.command_line.as_bytes();
    if command_line.len() > limit {
        return Err(BootError::CommandLineTooLong {
            actual: command_line.len(),
            limit,
        });
    }
    if command_line.contains(&0) {
        return Err(BootError::CommandLineNul);
    }
    ram.write(layout::COMMAND_LINE, command_line)?;
    ram.write(layout::COMMAND_LINE + command_line.len() as u64, &[0])?;
    let initrd = match &boot.initrd {
        Some(path) => Some(load_initrd(ram, path, &kernel)?),
        None => None,
    };
    ram.write(layout::MP_TABLE, &crate::x86::mp_table::build(vcpus))?;
    ram.write(layout::ACPI_TABLES, &acpi::build(vcpus, devices))?;
    Ok(match kernel.entry {
        kernel::KernelEntry::Linux(rip) => {
            linux::write_zero_page(ram, &kernel, command_line.len(), initrd)?;
            EntryPoint {
                rip,
                mode: Mode::Long,
                rsi: layout::ZERO_PAGE,
                rbx: 0,
            }
        }
        kernel::KernelEntry::Pvh(rip) => {
            pvh::write_start_info(ram, initrd)?;
            EntryPoint {
                rip,
                mode: Mode::Protected,
                rsi: 0,
                rbx: layout::PVH_START_INFO,
            }
        }
    })
}

/// First bytes of the archives that Linux unpacks (`init/initramfs.c`, `lib/decompress.c`).
const INITRD_MAGICS: [&[u8]; 9] = [
    b"070701",
    b"070702",
    &[0x1f, 0x8b],
    &[0x1f, 0x9e],
    b"BZh",
    &[0x5d, 0x00, 0x00],
    &[0xfd, b'7', b'z', b'X', b'Z', 0],
    &[0x89, b'L', b'Z', b'O', 0],
    &[0x28, 0xb5, 0x2f, 0xfd],
];
const INITRD_MAGIC_LZ4: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, BootError> {
    std::fs::read(path).map_err(|error| BootError::Read {
        what,
        path: path.into(),
        error,
    })
}

fn too_little(what: &'static str, needed: u64, ram: &GuestRam) -> BootError {
    BootError::TooLittleMemory {
        what,
        needed: needed.div_ceil(1 << 20),
        available: ram.low_bytes() >> 20,
    }
}

/// Loads the initrd as high as the kernel allows, clear of the kernel.
fn load_initrd(ram: &GuestRam, path: &Path, kernel: &kernel::Kernel) -> Result<Initrd, BootError> {
    let bytes = read("initrd", path)?;
    let known = INITRD_MAGICS.iter().any(|magic| bytes.starts_with(magic));
    if !known && !bytes.starts_with(&INITRD_MAGIC_LZ4) {
        return Err(BootError::NotAnInitrd(path.into()));
    }
    let size = bytes.len() as u64;
    let top = ram.low_bytes().min(kernel.initrd_end_max());
    let address = top.checked_sub(size).map(|at| at - at % PAGE_SIZE);
    match address {
        Some(address) if address >= kernel.end => {
            ram.write(address, &bytes)?;
            Ok(Initrd { address, size })
        }
        _ => Err(too_little(
            "the kernel with its initrd",
            kernel.end + size.next_multiple_of(PAGE_SIZE),
            ram,
        )),
    }
}

#[cfg(test)]
mod tests;
