// SPDX-License-Identifier: Apache-2.0

//! Loads kernel images: bzImage and ELF.

use std::io::Cursor;
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{self, KernelLoader};
use vm_memory::{ByteValued, GuestAddress};

use super::layout::HIGH_MEMORY;
use super::{BootError, BootProtocol, read, too_little};
use crate::memory::GuestRam;

/// Offset of the setup header in a bzImage (`Documentation/arch/x86/boot.rst`).
const SETUP_HEADER: usize = 0x1f1;
/// "HdrS" at 0x202 marks a Linux kernel of boot protocol 2.00 or later.
const HEADER_MAGIC: u32 = 0x5372_6448;
/// First protocol whose header describes the 64-bit entry (Linux 3.8).
const PROTOCOL_2_12: u16 = 0x020c;
/// Flag in loadflags: the protected-mode kernel is loaded at 1 MiB.
const LOADED_HIGH: u8 = 1;
/// Flag in xloadflags: the kernel has a 64-bit entry.
const XLF_KERNEL_64: u16 = 1;
/// Offset of the 64-bit entry in the protected-mode kernel.
const ENTRY_64: u64 = 0x200;

/// Limit on the command line of an ELF kernel: `COMMAND_LINE_SIZE` without its NUL.
const ELF_COMMAND_LINE: usize = 2047;
/// Highest end of an initrd if the kernel does not name one: the usual value of a bzImage.
const ELF_INITRD_END: u64 = 0x8000_0000;

/// Machine number of x86-64 in an ELF header, and its offset.
const ELF_X86_64: [u8; 2] = [62, 0];
const ELF_MACHINE: usize = 18;
/// Class (64-bit) and byte order (little endian) in an ELF header.
const ELF_IDENT: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KernelEntry {
    Linux(u64),
    Pvh(u64),
}

/// A kernel in guest memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    pub entry: KernelEntry,
    /// End of the memory that the kernel uses before it reads the memory map.
    pub end: u64,
    /// Setup header; `None` for an ELF kernel.
    pub setup: Option<setup_header>,
}

impl Kernel {
    /// Returns the maximum length of the command line in bytes, without the NUL.
    pub fn command_line_max(&self) -> usize {
        self.setup
            .map_or(ELF_COMMAND_LINE, |setup| setup.cmdline_size as usize)
    }

    /// Returns the address at or below which an initrd must end.
    pub fn initrd_end_max(&self) -> u64 {
        self.setup
            .map_or(ELF_INITRD_END, |setup| u64::from(setup.initrd_addr_max) + 1)
    }
}

pub(super) fn load(
    ram: &GuestRam,
    path: &Path,
    protocol: BootProtocol,
) -> Result<Kernel, BootError> {
    let image = read("kernel", path)?;
    if image.starts_with(&ELF_IDENT) {
        load_elf(ram, path, &image, protocol)
    } else if protocol == BootProtocol::Pvh && setup_header(&image).is_some() {
        Err(BootError::NoPvhEntry(path.into()))
    } else {
        load_bzimage(ram, path, &image)
    }
}

fn setup_header(image: &[u8]) -> Option<setup_header> {
    let mut header = setup_header::default();
    let size = header.as_slice().len();
    let bytes = image.get(SETUP_HEADER..SETUP_HEADER + size)?;
    header.as_mut_slice().copy_from_slice(bytes);
    (header.header == HEADER_MAGIC).then_some(header)
}

fn load_bzimage(ram: &GuestRam, path: &Path, image: &[u8]) -> Result<Kernel, BootError> {
    let setup = setup_header(image).ok_or_else(|| BootError::NotAKernel(path.into()))?;
    let unsupported = |problem| BootError::Unsupported {
        path: path.into(),
        problem,
    };
    if setup.version < PROTOCOL_2_12 {
        return Err(unsupported("uses a boot protocol before 2.12"));
    }
    if setup.loadflags & LOADED_HIGH == 0 {
        return Err(unsupported("is a zImage"));
    }
    if setup.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(unsupported("has no 64-bit entry"));
    }
    // The value 0 means 4. The boot sector is not counted.
    let sectors = match setup.setup_sects {
        0 => 4,
        count => usize::from(count),
    };
    let start = (sectors + 1) * 512;
    // The size is in units of 16 bytes. A bzImage may have a signature after its last unit.
    let size = setup.syssize as usize * 16;
    let end = start + size;
    // The last unit may be short, because the image's size need not be a multiple of 16.
    if image.len() + 15 < end || image.len() <= start {
        return Err(BootError::Truncated {
            path: path.into(),
            actual: image.len() as u64,
            expected: end as u64,
        });
    }
    // A relocatable kernel unpacks itself at `pref_address`.
    let load_address = u64::from(setup.code32_start).max(HIGH_MEMORY);
    let run_address = setup.pref_address.max(load_address);
    let needed = run_address + u64::from(setup.init_size).max(size as u64);
    if needed > ram.low_bytes() {
        return Err(too_little("the kernel", needed, ram));
    }
    ram.write(load_address, &image[start..end.min(image.len())])?;
    Ok(Kernel {
        entry: KernelEntry::Linux(load_address + ENTRY_64),
        end: needed,
        setup: Some(setup),
    })
}

fn load_elf(
    ram: &GuestRam,
    path: &Path,
    image: &[u8],
    protocol: BootProtocol,
) -> Result<Kernel, BootError> {
    if image.get(ELF_MACHINE..ELF_MACHINE + 2) != Some(&ELF_X86_64) {
        return Err(BootError::NotAKernel(path.into()));
    }
    let damaged = |problem: String| BootError::Damaged {
        path: path.into(),
        problem,
    };
    let segments =
        elf_segments(image).ok_or_else(|| damaged("its headers are truncated".into()))?;
    let mut end = 0;
    for segment in &segments {
        let file_end = segment.offset.saturating_add(segment.file_size);
        if file_end > image.len() as u64 {
            return Err(BootError::Truncated {
                path: path.into(),
                actual: image.len() as u64,
                expected: file_end,
            });
        }
        if segment.address < HIGH_MEMORY {
            return Err(damaged(format!(
                "a segment is loaded at {:#x}, below 1 MiB",
                segment.address
            )));
        }
        end = segment.address.saturating_add(segment.memory_size).max(end);
    }
    if segments.is_empty() {
        return Err(damaged("it has no loadable segment".into()));
    }
    if end > ram.low_bytes() {
        return Err(too_little("the kernel", end, ram));
    }
    let loaded = Elf::load(
        ram.mmap(),
        None,
        &mut Cursor::new(image),
        Some(GuestAddress(HIGH_MEMORY)),
    )
    .map_err(|error: loader::Error| damaged(error.to_string()))?;
    let entry = match (protocol, loaded.pvh_boot_cap) {
        (BootProtocol::Auto | BootProtocol::Pvh, PvhBootCapability::PvhEntryPresent(at)) => {
            KernelEntry::Pvh(at.0)
        }
        (BootProtocol::Pvh, _) => return Err(BootError::NoPvhEntry(path.into())),
        _ => KernelEntry::Linux(loaded.kernel_load.0),
    };
    Ok(Kernel {
        entry,
        end,
        setup: None,
    })
}

/// A loadable segment of an ELF file.
struct Segment {
    offset: u64,
    address: u64,
    file_size: u64,
    memory_size: u64,
}

/// Returns the loadable segments of a 64-bit little-endian ELF file; `None` if its headers are
/// truncated.
fn elf_segments(image: &[u8]) -> Option<Vec<Segment>> {
    const PT_LOAD: u32 = 1;
    let word = |at: usize| -> Option<u64> {
        let bytes = image.get(at..at.checked_add(8)?)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    let half = |at: usize| -> Option<u16> {
        let bytes = image.get(at..at.checked_add(2)?)?;
        Some(u16::from_le_bytes(bytes.try_into().ok()?))
    };
    let table = usize::try_from(word(32)?).ok()?;
    let size = usize::from(half(54)?);
    let count = usize::from(half(56)?);
    let mut segments = vec![];
    for index in 0..count {
        let at = table.checked_add(index * size)?;
        let [a, b, c, d, ..] = word(at)?.to_le_bytes();
        if u32::from_le_bytes([a, b, c, d]) != PT_LOAD {
            continue;
        }
        segments.push(Segment {
            offset: word(at.checked_add(8)?)?,
            address: word(at.checked_add(24)?)?,
            file_size: word(at.checked_add(32)?)?,
            memory_size: word(at.checked_add(40)?)?,
        });
    }
    Some(segments)
}
