// SPDX-License-Identifier: Apache-2.0

use std::io::Write;

use crate::craft::{Branch, Kernel, branches, bzimage};
use crate::given;
use patchbay_kernel_image::{Format, FoundBy, Instruction, Report, SymbolSource, inspect};

const FORMATS: [Format; 4] = [
    Format::Relative64,
    Format::Relative32,
    Format::Absolute64,
    Format::Absolute32,
];

fn with_map(kernel: &Kernel) -> Report {
    let symbols = given(&kernel.system_map()).unwrap();
    inspect(&kernel.elf(), Some(symbols)).unwrap()
}

fn check(kernel: &Kernel, written: &[Branch], report: &Report) {
    assert_eq!(report.table.format, kernel.format.name());
    assert_eq!(report.table.start, kernel.table());
    assert_eq!(report.table.entries, written.len());
    assert_eq!(report.summary.unexplained, 0);
    assert_eq!(report.summary.differ_from_initial, 0);
    assert_eq!(report.keys.len(), written.len());
    for (index, branch) in written.iter().enumerate() {
        let key = report
            .keys
            .iter()
            .find(|key| key.address == kernel.key(index))
            .unwrap();
        assert_eq!(key.initial, Some(branch.initial));
        let [site] = &key.sites[..] else {
            panic!("{key:?}")
        };
        assert_eq!(site.address, kernel.site(index));
        assert_eq!(site.target, kernel.site(index) + 0x20);
        assert_eq!(site.size, Some(branch.size));
        assert_eq!(site.likely, branch.flags & 1 != 0);
        assert_eq!(site.objtool_nop, branch.flags & 2 != 0);
        let jmp = branch.bytes[0] == 0xe9 || branch.bytes[0] == 0xeb;
        assert_eq!(
            site.instruction,
            Some(if jmp {
                Instruction::Jmp
            } else {
                Instruction::Nop
            })
        );
    }
}

#[test]
fn every_format_by_symbols_and_by_search() {
    for format in FORMATS {
        for objtool in [false, true] {
            let written = branches(objtool);
            let kernel = Kernel::new(format, &written);

            let report = with_map(&kernel);
            check(&kernel, &written, &report);
            assert_eq!(
                (report.table.found_by, report.image.symbols),
                (FoundBy::Symbols, SymbolSource::File)
            );
            let key = report.keys.iter().find(|key| key.name == "key_3").unwrap();
            assert_eq!(key.address, kernel.key(3));
            assert_eq!(key.sites[0].location.as_deref(), Some("function_3+0x4"));

            let report = inspect(&kernel.elf(), None).unwrap();
            check(&kernel, &written, &report);
            assert_eq!(
                (report.table.found_by, report.image.symbols),
                (FoundBy::Search, SymbolSource::None)
            );
            assert_eq!(report.table.objtool_bit, objtool);
            assert_eq!(report.table.proof, Some(kernel.bounds_code()));
        }
    }
}

#[test]
fn a_part_of_a_table_is_not_taken_for_the_whole() {
    for format in FORMATS {
        let mut written = branches(true);
        // A site that cannot be explained splits the run into eight and seven entries.
        written[8].bytes = [0xf4; 5];
        let kernel = Kernel::new(format, &written);
        let error = inspect(&kernel.elf(), None).unwrap_err().to_string();
        assert!(
            error.contains("8 entries at") && error.contains("--debug-file"),
            "{error}"
        );
        // With symbols, the whole table is found, and its problem is reported.
        let report = with_map(&kernel);
        assert_eq!(
            (report.table.entries, report.summary.unexplained),
            (16, 1),
            "{format:?}"
        );
    }
}

#[test]
fn a_search_needs_code_that_refers_to_both_ends() {
    for format in FORMATS {
        let mut kernel = Kernel::new(format, &branches(true));
        let (start, stop) = (kernel.table(), kernel.table() + kernel.table_bytes as u64);
        for (start, stop) in [(start, stop - 4), (start + 4, stop), (start, start)] {
            kernel.refer_to_bounds(start, stop);
            assert!(inspect(&kernel.elf(), None).is_err(), "{format:?}");
        }
        // The two references are too far apart.
        kernel.refer_to_bounds(start, 0);
        let low = (stop as u32).to_le_bytes();
        kernel.text[0x800..0x804].copy_from_slice(&low);
        assert!(inspect(&kernel.elf(), None).is_err(), "{format:?}");
        kernel.refer_to_bounds_by_distance();
        let report = inspect(&kernel.elf(), None).unwrap();
        assert_eq!(report.table.proof, Some(kernel.text_address() + 0x83));
    }
}

#[test]
fn sections_say_what_is_code_and_what_is_freed() {
    let kernel = Kernel::new(Format::Relative64, &branches(true));
    let text = kernel.text_address();
    let sections = [
        (".text", 6, text, 0x400),
        (".init.text", 6, text + 0x400, 0x80),
        (".exit.text", 6, text + 0x480, 0x80),
        // In kernels of 6.16 and later, `.data` is marked executable.
        (".data", 7, kernel.data_address(), kernel.data.len() as u64),
    ];
    let symbols = given(&kernel.system_map()).unwrap();
    let report = inspect(&kernel.elf_with_sections(&sections), Some(symbols)).unwrap();
    assert_eq!((report.summary.sites, report.summary.unexplained), (16, 0));
    // The offsets 0x400..0x500 hold sites 12 and 13 in `.init.text`, and 14 and 15 in `.exit.text`.
    assert_eq!(report.summary.init, 4);
    for index in 0..16 {
        let key = report
            .keys
            .iter()
            .find(|key| key.name == format!("key_{index}"))
            .unwrap();
        assert_eq!(key.sites[0].init, index >= 12, "{key:?}");
    }
    // The boundary symbols, which the kernel uses, give the same result.
    let map = format!(
        "{}{:x} T __init_begin\n{:x} T _sinittext\n{:x} T _einittext\n{:x} T __init_end\n",
        kernel.system_map(),
        text + 0x400,
        text + 0x400,
        text + 0x480,
        text + 0x500
    );
    let symbols = given(&map).unwrap();
    assert_eq!(
        inspect(&kernel.elf(), Some(symbols)).unwrap().summary.init,
        4
    );
}

#[test]
fn boot_time_and_historic_nops() {
    let placeholder = [0xe9, 0, 0, 0, 0];
    for (bytes, size, instruction) in [
        (placeholder, 5, Instruction::BootNop),
        ([0x66, 0x66, 0x66, 0x66, 0x90], 5, Instruction::Nop),
        ([0x66, 0x66, 0x90, 0x66, 0x90], 5, Instruction::Nop),
        ([0x3e, 0x8d, 0x74, 0x26, 0], 5, Instruction::Nop),
        ([0x90, 0x8d, 0x74, 0x26, 0], 5, Instruction::Nop),
        ([0x8d, 0x44, 0x20, 0, 0x90], 5, Instruction::Nop),
        ([0x89, 0xf6, 0xcc, 0xcc, 0xcc], 2, Instruction::Nop),
    ] {
        for format in FORMATS {
            let branch = Branch {
                bytes,
                size,
                flags: 0,
                initial: 0,
            };
            let report = with_map(&Kernel::new(format, &[branch; 16]));
            assert_eq!(report.summary.unexplained, 0, "{bytes:x?}");
            for site in report.keys.iter().flat_map(|key| &key.sites) {
                assert_eq!(
                    (site.size, site.instruction),
                    (Some(size), Some(instruction))
                );
            }
        }
    }
}

#[test]
fn what_does_not_agree_is_named() {
    let objtool_nop = "objtool wrote a NOP";
    for (bytes, flags, problem) in [
        ([0xe9, 0x1c, 0, 0, 0], 0, "the site holds `jmp"),
        ([0xeb, 0x1d, 0, 0, 0], 0, "the site holds `jmp"),
        ([0x0f, 0x1f, 0x44, 0, 1], 2, "neither NOP nor JMP"),
        ([0xcc, 0x1f, 0x44, 0, 0], 2, "neither NOP nor JMP"),
        ([0xe9, 0x1b, 0, 0, 0], 2, objtool_nop),
        ([0x66, 0x90, 0, 0, 0], 0, "objtool left a JMP"),
    ] {
        let mut written = branches(true);
        written[7] = Branch {
            bytes,
            size: 5,
            flags,
            initial: 0,
        };
        let report = with_map(&Kernel::new(Format::Relative64, &written));
        assert_eq!(report.summary.unexplained, 1, "{bytes:x?}");
        let key = report.keys.iter().find(|key| key.name == "key_7").unwrap();
        let found = key.sites[0].problem.as_deref().unwrap();
        assert!(found.contains(problem), "{found}");
    }
}

#[test]
fn a_key_that_the_image_contradicts_is_counted() {
    let mut written = branches(true);
    written[0].initial = 1;
    let report = with_map(&Kernel::new(Format::Relative64, &written));
    assert_eq!(
        (
            report.summary.unexplained,
            report.summary.differ_from_initial
        ),
        (0, 1)
    );
}

/// A zstd frame with raw blocks (RFC 8878, 3.1.1).
fn zstd(data: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
    frame.extend_from_slice(&(data.len() as u32).to_le_bytes());
    frame.extend_from_slice(&((data.len() as u32) << 3 | 1).to_le_bytes()[..3]);
    frame.extend_from_slice(data);
    frame
}

/// A legacy LZ4 frame with one block of literals only.
fn lz4(data: &[u8]) -> Vec<u8> {
    let mut block = vec![0xf0];
    let mut rest = data.len() - 15;
    while rest >= 255 {
        block.push(255);
        rest -= 255;
    }
    block.push(rest as u8);
    block.extend_from_slice(data);
    [
        &[0x02, 0x21, 0x4c, 0x18],
        (block.len() as u32).to_le_bytes().as_slice(),
        &block,
    ]
    .concat()
}

#[test]
fn packed_images() {
    let written = branches(true);
    let kernel = Kernel::new(Format::Relative64, &written);
    let elf = kernel.elf();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&elf).unwrap();
    let gzip = gzip.finish().unwrap();
    let mut bzip2 = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    bzip2.write_all(&elf).unwrap();
    let bzip2 = bzip2.finish().unwrap();
    for (stream, trailer) in [
        (elf.clone(), false),
        (gzip, false),
        (bzip2, true),
        (zstd(&elf), true),
        (lz4(&elf), true),
    ] {
        // The payload is tested as a compressed file and in a bzImage.
        check(&kernel, &written, &inspect(&stream, None).unwrap());
        let mut payload = stream.clone();
        if trailer {
            payload.extend_from_slice(&(elf.len() as u32).to_le_bytes());
        }
        let report = inspect(&bzimage(&payload), None).unwrap();
        assert_eq!(report.image.kind, "bzimage");
        check(&kernel, &written, &report);
        // The header is complete, but the payload is truncated.
        let error = inspect(&bzimage(&payload)[..1100], None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("truncated bzImage") && error.contains("copy it again"),
            "{error}"
        );
    }
}
