// SPDX-License-Identifier: Apache-2.0

//! Loads valid and invalid kernels, initrds and command lines.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::memory::GuestRam;

const MIB: u64 = 1 << 20;

/// Returns a bzImage with 8 KiB of code that needs 4 MiB of memory from 16 MiB on.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 512 * 2];
    image.extend_from_slice(&[0x90; 8192]);
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1f4, &(8192_u32 / 16).to_le_bytes());
    put(0x1fe, &[0x55, 0xaa]);
    put(0x202, b"HdrS");
    put(0x206, &0x020f_u16.to_le_bytes());
    put(0x211, &[1]);
    put(0x214, &0x10_0000_u32.to_le_bytes());
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(0x236, &1_u16.to_le_bytes());
    put(0x238, &100_u32.to_le_bytes());
    put(0x258, &(16 * MIB).to_le_bytes());
    put(0x260, &u32::try_from(4 * MIB).unwrap().to_le_bytes());
    image
}

/// Returns an ELF kernel with one segment at 1 MiB and an optional PVH note.
fn elf(pvh: bool) -> Vec<u8> {
    let mut image = vec![0; 0x1000];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    put(16, &[2, 0, 62, 0, 1, 0, 0, 0]);
    put(24, &0x10_0000_u64.to_le_bytes());
    put(32, &64_u64.to_le_bytes());
    put(52, &[64, 0, 56, 0, 2, 0]);
    // PT_LOAD of 16 bytes.
    put(64, &1_u32.to_le_bytes());
    for (field, value) in [
        (8, 0x800_u64),
        (24, 0x10_0000),
        (32, 16),
        (40, 2 * MIB),
        (48, 8),
    ] {
        put(64 + field, &value.to_le_bytes());
    }
    // PT_NOTE with a note of type XEN_ELFNOTE_PHYS32_ENTRY, or of another type.
    put(120, &4_u32.to_le_bytes());
    for (field, value) in [(8, 0x900_u64), (32, 20), (40, 20), (48, 4)] {
        put(120 + field, &value.to_le_bytes());
    }
    put(0x900, &4_u32.to_le_bytes());
    put(0x904, &4_u32.to_le_bytes());
    put(0x908, &(if pvh { 18_u32 } else { 17 }).to_le_bytes());
    put(0x90c, b"Xen\0");
    put(0x910, &0x10_0040_u32.to_le_bytes());
    put(0x800, b"sixteen bytes...");
    image
}

struct Case {
    folder: TempDir,
    boot: LinuxBoot,
    memory: u64,
}

impl Case {
    fn new(kernel: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        fs::write(&path, kernel).unwrap();
        Self {
            folder,
            boot: LinuxBoot {
                kernel: path,
                initrd: None,
                command_line: "console=ttyS0".into(),
                protocol: BootProtocol::Auto,
                virtio_devices: DeviceDiscovery::CommandLine,
            },
            memory: 64 * MIB,
        }
    }

    fn initrd(mut self, bytes: &[u8]) -> Self {
        let path = self.folder.path().join("initrd");
        fs::write(&path, bytes).unwrap();
        self.boot.initrd = Some(path);
        self
    }

    fn load(&self) -> Result<(GuestRam, EntryPoint), BootError> {
        let ram = GuestRam::new(self.memory).unwrap();
        let entry = load(&ram, &self.boot, 2, &[])?;
        Ok((ram, entry))
    }

    /// Returns the error, which must be one line with a next step.
    fn error(&self) -> BootError {
        let error = self.load().err().unwrap();
        let text = error.to_string();
        assert!(text.contains(';') || text.contains(": "), "{text}");
        assert!(!text.contains('\n'), "{text}");
        error
    }
}

fn read_u32(ram: &GuestRam, address: u64) -> u32 {
    let mut bytes = [0; 4];
    ram.read(address, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

#[test]
fn a_bzimage_with_initrd_ends_up_in_place() {
    let archive = [b"070701", &[7; 5000][..]].concat();
    let (ram, entry) = Case::new(&bzimage()).initrd(&archive).load().unwrap();
    assert_eq!((entry.rip, entry.mode), (0x10_0200, Mode::Long));
    assert_eq!(entry.rsi, layout::ZERO_PAGE);
    let initrd = u64::from(read_u32(&ram, layout::ZERO_PAGE + 0x218));
    assert_eq!(read_u32(&ram, layout::ZERO_PAGE + 0x21c), 5006);
    assert_eq!(initrd % PAGE_SIZE, 0);
    assert!(
        initrd >= 20 * MIB && initrd + 5006 <= 64 * MIB,
        "{initrd:#x}"
    );
    let mut start = [0; 6];
    ram.read(initrd, &mut start).unwrap();
    assert_eq!(&start, b"070701");
    let mut line = [0; 14];
    ram.read(layout::COMMAND_LINE, &mut line).unwrap();
    assert_eq!(&line, b"console=ttyS0\0");
    let mut entries = [0];
    ram.read(layout::ZERO_PAGE + 0x1e8, &mut entries).unwrap();
    assert_eq!(entries, [4]);
}

#[test]
fn an_elf_kernel_boots_by_pvh_if_it_can_and_may() {
    let (ram, entry) = Case::new(&elf(true)).load().unwrap();
    assert_eq!((entry.rip, entry.mode), (0x10_0040, Mode::Protected));
    assert_eq!(entry.rbx, layout::PVH_START_INFO);
    assert_eq!(read_u32(&ram, layout::PVH_START_INFO), 0x336e_c578);

    let mut case = Case::new(&elf(true));
    case.boot.protocol = BootProtocol::Linux;
    let (_, entry) = case.load().unwrap();
    assert_eq!((entry.rip, entry.mode), (0x10_0000, Mode::Long));

    let (_, entry) = Case::new(&elf(false)).load().unwrap();
    assert_eq!((entry.rip, entry.mode), (0x10_0000, Mode::Long));
}

#[test]
fn pvh_without_an_entry_is_refused() {
    for kernel in [elf(false), bzimage()] {
        let mut case = Case::new(&kernel);
        case.boot.protocol = BootProtocol::Pvh;
        assert!(matches!(case.error(), BootError::NoPvhEntry(_)));
    }
}

#[test]
fn files_that_are_missing_are_named() {
    let mut case = Case::new(&bzimage());
    case.boot.initrd = Some("/nonexistent/initrd".into());
    let error = case.error();
    assert!(
        error.to_string().contains("initrd /nonexistent/initrd"),
        "{error}"
    );
    case.boot.kernel = "/nonexistent/kernel".into();
    let error = case.error();
    assert!(
        error.to_string().contains("kernel /nonexistent/kernel"),
        "{error}"
    );
    case.boot.kernel = "/".into();
    assert!(matches!(case.error(), BootError::Read { .. }));
}

#[test]
fn files_that_are_no_kernels_are_refused() {
    let mut arm = elf(false);
    arm[18] = 183;
    for kernel in [
        vec![],
        b"#!/bin/sh\n".to_vec(),
        vec![0; 100_000],
        vec![0x1f, 0x8b],
        bzimage()[..0x210].to_vec(),
        arm,
    ] {
        assert!(matches!(
            Case::new(&kernel).error(),
            BootError::NotAKernel(_)
        ));
    }
}

#[test]
fn kernels_without_a_64_bit_entry_are_refused() {
    for (at, bytes) in [(0x206, [0x0b, 2]), (0x211, [0, 0]), (0x236, [0, 0])] {
        let mut kernel = bzimage();
        kernel[at..at + 2].copy_from_slice(&bytes);
        assert!(matches!(
            Case::new(&kernel).error(),
            BootError::Unsupported { .. }
        ));
    }
}

#[test]
fn truncated_kernels_are_refused_wherever_they_end() {
    let image = bzimage();
    for length in [0x300, 1024, 1025, image.len() - 16] {
        let error = Case::new(&image[..length]).error();
        assert!(
            matches!(error, BootError::Truncated { .. }),
            "{length}: {error}"
        );
    }
    let image = elf(true);
    for length in 0..0x80f {
        // An image of any length gives an error and no panic.
        Case::new(&image[..length]).error();
    }
    let error = Case::new(&image[..0x80f]).error();
    assert!(matches!(error, BootError::Truncated { .. }), "{error}");
}

#[test]
fn elf_headers_with_absurd_numbers_are_refused() {
    for (at, what) in [
        (64 + 8, "offset"),
        (64 + 24, "address"),
        (64 + 32, "size"),
        (64 + 40, "memory"),
        (32, "table"),
    ] {
        let mut image = elf(true);
        image[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        let error = Case::new(&image).load();
        assert!(error.is_err(), "{what}");
    }
    let mut low = elf(true);
    low[64 + 24..64 + 32].copy_from_slice(&0x7000_u64.to_le_bytes());
    assert!(matches!(Case::new(&low).error(), BootError::Damaged { .. }));
}

#[test]
fn invalid_initrds_are_refused() {
    for bytes in [&b""[..], b"0707", b"PK\x03\x04", &[0; 4096]] {
        let case = Case::new(&bzimage()).initrd(bytes);
        assert!(matches!(case.error(), BootError::NotAnInitrd(_)));
    }
}

#[test]
fn too_little_memory_names_what_is_needed() {
    let mut case = Case::new(&bzimage());
    case.memory = 16 * MIB;
    assert!(matches!(
        case.error(),
        BootError::TooLittleMemory {
            needed: 20,
            available: 16,
            ..
        }
    ));
    let archive = [b"070701", &[0; 3 << 20][..]].concat();
    let mut case = Case::new(&bzimage()).initrd(&archive);
    case.memory = 22 * MIB;
    assert!(matches!(
        case.error(),
        BootError::TooLittleMemory {
            what: "the kernel with its initrd",
            needed: 24,
            ..
        }
    ));
    case.memory = 24 * MIB;
    case.load().unwrap();
}

#[test]
fn command_lines_too_long_or_with_a_nul_are_refused() {
    let mut case = Case::new(&bzimage());
    case.boot.command_line = "x".repeat(100);
    case.load().unwrap();
    case.boot.command_line.push('x');
    assert!(matches!(
        case.error(),
        BootError::CommandLineTooLong {
            actual: 101,
            limit: 100
        }
    ));
    case.boot.command_line = "a\0b".into();
    assert!(matches!(case.error(), BootError::CommandLineNul));
}
