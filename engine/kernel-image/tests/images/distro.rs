// SPDX-License-Identifier: Apache-2.0
//! Stock kernels: PATCHBAY_TEST_DISTRO_KERNELS lists their files, separated by colons. If a file
//! has a System.map of the same release beside it (vmlinuz-R and System.map-R) that is not a stub,
//! names and table bounds are compared with it.

use std::collections::BTreeSet;
use std::path::Path;

use iced_x86::{Code, Decoder, DecoderOptions};

use patchbay_kernel_image::live::DebugFile;
use patchbay_kernel_image::{
    FoundBy, Image, Instruction, Report, SiteReport, SymbolSource, Symbols, Table, inspect, unpack,
};

#[test]
fn stock_kernels_agree_with_their_own_bytes() {
    let Some(list) =
        std::env::var_os("PATCHBAY_TEST_DISTRO_KERNELS").filter(|list| !list.is_empty())
    else {
        eprintln!(
            "SKIPPED: PATCHBAY_TEST_DISTRO_KERNELS names no kernel files; `cargo xtask test` fetches and names them"
        );
        return;
    };
    for path in std::env::split_paths(&list) {
        let file =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let report =
            inspect(&file, None).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        check(&path, &report);
        if report.image.kind != "module" {
            search_agrees(&path, &file, &report);
            system_map_agrees(&path, &file, &report);
        }
    }
}

fn check(path: &Path, report: &Report) {
    let summary = &report.summary;
    println!("{}: {:?} {:?}", path.display(), report.table, summary);
    assert_eq!(summary.unexplained, 0);
    assert_eq!(summary.sites, report.table.entries);
    assert_eq!(
        summary.sites as u64,
        (report.table.stop - report.table.start) / report.table.entry_size
    );
    // The bytes, bit 1 and the keys' initial values must agree.
    assert_eq!(summary.differ_from_initial, 0);
    let mut addresses = BTreeSet::new();
    for site in report.keys.iter().flat_map(|key| &key.sites) {
        oracle_agrees(site);
        assert!(
            addresses.insert(site.address),
            "two entries for {:#x}",
            site.address
        );
    }
    if report.image.kind == "module" {
        return;
    }
    assert!(summary.sites > 1000 && summary.keys > 500, "{summary:?}");
    assert_ne!(report.image.symbols, SymbolSource::None);
    assert_eq!(report.table.found_by, FoundBy::Symbols);
    for name in ["sched_switch", "sys_enter", "page_alloc_shuffle_key"] {
        assert!(
            report.keys.iter().any(|key| key.name == name),
            "no key {name}"
        );
    }
    assert!(report.keys.iter().all(|key| !key.name.starts_with("0x")));
}

/// Checks that an independent decoder reads the same instruction.
fn oracle_agrees(site: &SiteReport) {
    let bytes: Vec<u8> = (0..site.bytes.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&site.bytes[at..at + 2], 16).unwrap())
        .collect();
    let decoded = Decoder::with_ip(64, &bytes, site.address, DecoderOptions::NONE).decode();
    assert_eq!(Some(decoded.len() as u8), site.size, "{site:?}");
    match site.instruction {
        Some(Instruction::Jmp) => {
            assert!(
                matches!(decoded.code(), Code::Jmp_rel8_64 | Code::Jmp_rel32_64),
                "{site:?}"
            );
            assert_eq!(decoded.near_branch_target(), site.target);
        }
        Some(Instruction::Nop) => assert!(
            matches!(decoded.code(), Code::Nopw | Code::Nop_rm32),
            "{site:?}"
        ),
        other => panic!("{other:?} in {site:?}"),
    }
}

/// Checks that a search without symbols finds the same table.
fn search_agrees(path: &Path, file: &[u8], report: &Report) {
    let unpacked = unpack(file).unwrap();
    let image = Image::parse(&unpacked.elf).unwrap();
    let table = Table::find(&image, &Symbols::default()).unwrap();
    assert_eq!(table.found_by, FoundBy::Search);
    assert_eq!(
        (table.start, table.stop),
        (report.table.start, report.table.stop),
        "{}",
        path.display()
    );
}

fn system_map_agrees(path: &Path, file: &[u8], report: &Report) {
    let Some(map) = path
        .file_name()
        .and_then(|name| name.to_str()?.split_once('-'))
        .map(|(_, release)| path.with_file_name(format!("System.map-{release}")))
    else {
        return;
    };
    let symbols = match DebugFile::open(&map) {
        Ok(symbols) => symbols,
        Err(error) => return println!("{}: not compared, {error}", map.display()),
    };
    let other = inspect(file, Some(symbols)).unwrap();
    assert_eq!(
        (other.table.start, other.table.stop),
        (report.table.start, report.table.stop)
    );
    for (ours, theirs) in report.keys.iter().zip(&other.keys) {
        assert_eq!(ours.name, theirs.name);
        for (ours, theirs) in ours.sites.iter().zip(&theirs.sites) {
            assert_eq!(ours.location, theirs.location);
        }
    }
    println!("{}: agrees with {}", path.display(), map.display());
}
