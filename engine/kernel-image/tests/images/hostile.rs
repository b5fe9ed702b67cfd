// SPDX-License-Identifier: Apache-2.0

use std::io::Write;

use proptest::prelude::*;

use crate::craft::{Kernel, branches, bzimage};
use crate::given;
use patchbay_kernel_image::{Format, Symbols, inspect};

fn error(file: &[u8]) -> String {
    inspect(file, None).unwrap_err().to_string()
}

#[test]
fn errors_say_what_to_do_next() {
    let elf = Kernel::new(Format::Relative64, &branches(true)).elf();
    let mut arm = elf.clone();
    arm[18] = 183;
    let mut core = elf.clone();
    core[16] = 4;
    let mut old = bzimage(&elf);
    old[0x206] = 0x06;
    let without_table = Kernel::new(Format::Relative64, &[]).elf();
    for (file, expected) in [
        (Vec::new(), "it is empty"),
        (b"#!/bin/sh\n".to_vec(), "not a kernel image"),
        (b"MZ\x90\x00 something".to_vec(), "objcopy"),
        (b"\x89LZO\x00\r\n".to_vec(), "LZO, which is not supported"),
        (bzimage(b"\x89LZO\x00\r\n"), "extract-vmlinux"),
        (bzimage(b"unknown!"), "extract-vmlinux"),
        (old, "older than 2.08"),
        (arm, "machine 183"),
        (core, "neither a kernel nor a module"),
        (elf[..0x1100].to_vec(), "copy it again"),
        (elf[..40].to_vec(), "copy it again"),
        (without_table, "CONFIG_JUMP_LABEL"),
    ] {
        let error = error(&file);
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
}

#[test]
fn symbol_files_of_other_kernels_are_refused() {
    let kernel = Kernel::new(Format::Relative64, &branches(true));
    let with = |map: &str| {
        let symbols = given(map).map_err(|error| error.to_string())?;
        inspect(&kernel.elf(), Some(symbols))
            .map(drop)
            .map_err(|error| error.to_string())
    };
    let table = |start: u64, stop: u64| {
        format!("{start:x} D __start___jump_table\n{stop:x} D __stop___jump_table\n")
    };
    for (map, expected) in [
        (
            "ffffffffffffffff B The real System.map is in the package\n".to_owned(),
            "stub",
        ),
        (
            "0000000000000000 T _text\n".to_owned(),
            "zeros to unprivileged",
        ),
        ("no symbols\n".to_owned(), "line 1"),
        (table(0x1000, 0x2000), "not in this image"),
        (
            table(kernel.table() + 16, kernel.table()),
            "not in this image",
        ),
        (
            table(kernel.table(), kernel.table()),
            "without CONFIG_JUMP_LABEL",
        ),
        (
            table(kernel.table() + 8, kernel.table() + 56),
            "no jump table in a known format",
        ),
        (
            table(kernel.table(), kernel.table() + 17),
            "no jump table in a known format",
        ),
    ] {
        let error = with(&map).unwrap_err();
        assert!(error.contains(expected), "{error:?} lacks {expected:?}");
    }
    assert_eq!(with(&kernel.system_map()), Ok(()));
}

#[test]
fn a_bomb_is_refused() {
    let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let zeros = vec![0; 16 << 20];
    for _ in 0..65 {
        bomb.write_all(&zeros).unwrap();
    }
    let error = error(&bzimage(&bomb.finish().unwrap()));
    assert!(error.contains("more than 1024 MiB"), "{error}");
}

#[test]
fn segments_that_wrap_or_overlap_are_refused() {
    let kernel = Kernel::new(Format::Relative64, &branches(true));
    // The values replace p_vaddr and p_memsz of the first program header, which is at offset 64.
    for (at, value) in [
        (64 + 16, kernel.data_address()),
        (64 + 40, u64::MAX),
        (64 + 40, 0x20_0000),
    ] {
        let mut elf = kernel.elf();
        elf[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let error = error(&elf);
        assert!(
            error.contains("overlap") || error.contains("wraps"),
            "{error}"
        );
    }
}

/// Reads the file and ignores the result. Only a panic is a failure.
fn survive(file: &[u8], map: &str) {
    let _ = inspect(file, None);
    if let Ok(symbols) = given(map) {
        let _ = inspect(file, Some(symbols));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn damaged_images_do_not_panic(
        format in prop::sample::select(vec![Format::Relative64, Format::Relative32, Format::Absolute64, Format::Absolute32]),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..24),
        header_flips in prop::collection::vec((0usize..0x200, any::<u8>()), 0..4),
        relocatable in any::<bool>(),
        keep in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let kernel = Kernel::new(format, &branches(true));
        let mut elf = kernel.elf();
        if relocatable {
            elf[16] = 1;
        }
        for (at, value) in flips {
            let at = at.index(elf.len());
            elf[at] = value;
        }
        for (at, value) in header_flips {
            elf[at] = value;
        }
        if let Some(keep) = keep {
            elf.truncate(keep.index(elf.len()));
        }
        survive(&elf, &kernel.system_map());
        survive(&bzimage(&elf), &kernel.system_map());
    }

    #[test]
    fn noise_behind_every_magic_does_not_panic(
        magic in prop::sample::select(vec![
            &b"\x7fELF\x02\x01\x01"[..], b"\x7fELF\x01\x01\x01", b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd",
            b"\x02\x21\x4c\x18", b"BZh9", b"\x5d\0\0", b"",
        ]),
        noise in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let file = [magic, &noise].concat();
        survive(&file, "");
        survive(&bzimage(&file), "");
    }

    #[test]
    fn symbol_files_do_not_panic(text in prop::collection::vec(any::<u8>(), 0..200), line in "[0-9a-f]{0,20} [A-Za-z]{0,2} .{0,20}\n") {
        let _ = Symbols::from_text(&text);
        let _ = Symbols::from_text(line.as_bytes());
    }
}
