// SPDX-License-Identifier: Apache-2.0
//! Kernels that do not reveal everything, with a debug file of the host.

use std::path::Path;

use patchbay_kernel_image::live::{DebugFile, DebugFileError, FileUse, Finder, Kernel, Log, Way};

use crate::craft_btf;
use crate::craft_dwarf::dwarf;
use crate::craft_file::{SLIDE, symbols, system_map, vmlinux};
use crate::craft_guest::{CraftedGuest, DIRECT, guest, guest_without, guest_without_data_symbols};
use crate::found::image;

/// The kernel's own build id.
const BUILD: Option<&[u8]> = Some(&[0, 0xff]);

fn parse(file: &[u8]) -> Result<DebugFile, DebugFileError> {
    DebugFile::parse(Path::new("vmlinux"), file)
}

fn find(guest: &CraftedGuest, file: &[u8]) -> Result<Kernel, String> {
    let file = parse(file).map_err(|error| error.to_string())?;
    let mut finder = Finder::new(Some(file.into()));
    finder
        .find(guest, &guest.cpus, Way::Image)
        .map_err(|error| error.to_string())
}

fn said(kernel: &Kernel) -> String {
    let images = kernel
        .images
        .iter()
        .map(|image| (&image.text, &image.sites));
    format!(
        "{:x?} {:?} {:?} {:?} {:?} {}",
        images.collect::<Vec<_>>(),
        kernel.keys,
        kernel.gates,
        kernel.layout,
        kernel.page_table,
        kernel.build_id,
    )
}

fn btf() -> Vec<u8> {
    craft_btf::kernel().finish()
}

#[test]
fn data_symbols_come_from_a_file() {
    let (whole, guest) = (guest(), guest_without_data_symbols());
    let expected = said(&image(&whole).unwrap());
    let symbols = symbols(&guest);
    for (file, build_id) in [
        (system_map(&symbols), false),
        (vmlinux(&symbols, BUILD, &[]), true),
        (vmlinux(&symbols, None, &[]), false),
    ] {
        let kernel = find(&guest, &file).unwrap();
        assert_eq!(said(&kernel), expected);
        let used = kernel.evidence.file.unwrap();
        // The guest's kallsyms have 9 named symbols of text, without _etext, and 1100 fillers.
        let compared = 9 + 1100;
        let only = FileUse {
            path: "vmlinux".into(),
            data_symbols: true,
            types: false,
            compared,
            build_id,
        };
        assert_eq!(used, only);
        assert!(kernel.evidence.missing_gates.is_empty());
    }
}

/// The log, the words of the state and the tasks are the same with the symbols or types of a file
/// as with those of the kernel. The crafted kernel has no tracing.
#[test]
fn the_log_is_found_by_a_file() {
    let whole = guest();
    let log = |finder: &mut Finder, guest: &CraftedGuest| {
        let log = finder.find_log(guest, &guest.cpus, Way::Image);
        log.map_err(|error| error.to_string())
    };
    let expected = log(&mut Finder::default(), &whole).unwrap();
    assert!(expected.tasks.is_ok() && expected.state.panic.is_some());

    let without_symbols = guest_without_data_symbols();
    let map = system_map(&symbols(&without_symbols));
    let without_types = guest_without("__start_BTF");
    let mut named = symbols(&without_types);
    named.retain(|(_, name)| !name.ends_with("_BTF"));
    let stop = without_types.symbol("__stop_BTF") - SLIDE;
    named.push((stop, "D__stop_BTF".to_owned()));
    let types = vmlinux(&named, BUILD, &[(".BTF", &btf())]);
    for (guest, file, describes) in [
        (without_symbols, map, "kernel's BTF"),
        (without_types, types, "debug file"),
    ] {
        log(&mut Finder::default(), &guest).unwrap_err();
        let mut finder = Finder::new(Some(parse(&file).unwrap().into()));
        let found = log(&mut finder, &guest).unwrap();
        assert_eq!(log(&mut finder, &guest).unwrap(), found, "again");
        let why = found.trace.clone().unwrap_err();
        assert!(
            why.contains(describes) && why.contains("struct trace_array"),
            "{why}"
        );
        let trace = expected.trace.clone();
        assert_eq!(Log { trace, ..found }, expected);
    }
}

#[test]
fn the_search_for_the_note_uses_the_file_too() {
    let guest = guest_without_data_symbols();
    let file = parse(&system_map(&symbols(&guest))).unwrap();
    let mut finder = Finder::new(Some(file.into()));
    let kernel = finder.find(&guest, &[], Way::Note).unwrap();
    assert!(kernel.evidence.file.unwrap().data_symbols);
    // The information from the file is kept for the next discovery.
    finder.find(&guest, &guest.cpus, Way::Image).unwrap();
    let again = finder.find(&guest, &guest.cpus, Way::Image).unwrap();
    assert!(again.evidence.again);
    assert!(again.evidence.file.unwrap().data_symbols);
}

#[test]
fn types_come_from_a_file_with_the_same_build_id() {
    let guest = guest_without("__start_BTF");
    let mut symbols = symbols(&guest);
    symbols.retain(|(_, name)| !name.ends_with("_BTF"));
    let (types, expected) = (btf(), said(&image(&crate::craft_guest::guest()).unwrap()));
    let file = vmlinux(&symbols, BUILD, &[(".BTF", &types)]);
    let error = find(&guest, &file).unwrap_err();
    assert!(error.contains("has __stop_BTF at"), "{error}");
    symbols.push((guest.symbol("__stop_BTF") - SLIDE, "D__stop_BTF".to_owned()));
    let kernel = find(&guest, &vmlinux(&symbols, BUILD, &[(".BTF", &types)])).unwrap();
    assert_eq!(said(&kernel), expected);
    let used = kernel.evidence.file.unwrap();
    assert_eq!(
        (used.data_symbols, used.types, used.build_id),
        (false, true, true)
    );
    // A build with the same symbols may have laid out its structures with another seed.
    let error = find(&guest, &vmlinux(&symbols, None, &[(".BTF", &types)])).unwrap_err();
    assert!(error.contains("nothing proves the types"), "{error}");
    for file in [system_map(&symbols), vmlinux(&symbols, BUILD, &[])] {
        let error = find(&guest, &file).unwrap_err();
        assert!(
            error.contains("the debug file vmlinux has no types"),
            "{error}"
        );
        assert!(error.contains("--debug-file"), "{error}");
    }
}

#[test]
fn types_come_from_dwarf_where_the_file_has_no_btf() {
    let guest = guest_without_data_symbols();
    let mut symbols = symbols(&guest);
    symbols.retain(|(_, name)| !name.ends_with("_BTF"));
    let (info, abbreviations) = dwarf(&btf());
    let file = |info: &[u8]| {
        let sections = [(".debug_info", info), (".debug_abbrev", &abbreviations)];
        vmlinux(&symbols, BUILD, &sections)
    };
    let kernel = find(&guest, &file(&info)).unwrap();
    let whole = image(&crate::craft_guest::guest()).unwrap();
    assert_eq!(said(&kernel), said(&whole));
    assert!(kernel.evidence.file.unwrap().types);
    let error = find(&guest, &file(&info[..info.len() / 2])).unwrap_err();
    assert!(error.contains("DWARF is damaged"), "{error}");
    let packed = vmlinux(&symbols, BUILD, &[(".zdebug_info", &info)]);
    let error = find(&guest, &packed).unwrap_err();
    assert!(
        error.contains("objcopy --decompress-debug-sections"),
        "{error}"
    );
    // Changes every third byte in turn. Types may then contain themselves, and names may lack a
    // NUL.
    for at in (0..info.len()).step_by(3) {
        for value in [0, info[at] ^ 1, 0xff] {
            let mut other = info.clone();
            other[at] = value;
            let _ = parse(&file(&other));
        }
    }
}

#[test]
fn a_kernel_that_reveals_nothing_needs_symbols_and_types() {
    let guest = guest_without_data_symbols();
    let mut symbols = symbols(&guest);
    symbols.retain(|(_, name)| !name.ends_with("_BTF"));
    let types = btf();
    let kernel = find(&guest, &vmlinux(&symbols, BUILD, &[(".BTF", &types)])).unwrap();
    let used = kernel.evidence.file.unwrap();
    assert!(used.data_symbols && used.types);
    let error = find(&guest, &system_map(&symbols)).unwrap_err();
    assert!(
        error.contains("the debug file vmlinux has no types"),
        "{error}"
    );
    let error = image(&guest).unwrap_err();
    assert!(error.contains("--debug-file FILE"), "{error}");
}

#[test]
fn one_symbol_that_was_moved_is_another_build() {
    let guest = guest_without_data_symbols();
    let good = symbols(&guest);
    for (name, by) in [("function_b", 8), ("filler_1099", u64::MAX), ("_stext", 16)] {
        let mut moved = good.clone();
        let found = moved.iter_mut().find(|(_, other)| &other[1..] == name);
        let (address, _) = found.unwrap();
        *address = address.wrapping_add(by);
        for file in [system_map(&moved), vmlinux(&moved, BUILD, &[])] {
            let error = find(&guest, &file).unwrap_err();
            assert!(
                error.contains("of another build: the kernel has"),
                "{error}"
            );
            // With another _stext every symbol differs, and the first is reported.
            let shown = if name == "_stext" { "_text" } else { name };
            assert!(error.contains(&format!("has {shown} at")), "{error}");
        }
    }
    let mut less = good.clone();
    less.retain(|(_, name)| name != "Tfunction_b");
    let error = find(&guest, &system_map(&less)).unwrap_err();
    assert!(
        error.contains("has function_b at 0xffffffff81000200"),
        "{error}"
    );
    assert!(error.contains("does not have it"), "{error}");
    less.retain(|(_, name)| name != "T_stext");
    let error = find(&guest, &system_map(&less)).unwrap_err();
    assert!(error.contains("no single symbol _stext"), "{error}");
}

#[test]
fn another_build_id_is_another_build() {
    let guest = guest_without_data_symbols();
    let file = vmlinux(&symbols(&guest), Some(&[0, 0xfe]), &[]);
    let expected = "its build id is 00fe, the kernel's is 00ff";
    let error = find(&guest, &file).unwrap_err();
    assert!(error.contains(expected), "{error}");
    // Each of the two places where the kernel stores its build id suffices.
    for hide in ["vmcoreinfo_data", "__start_notes"] {
        let guest = guest_without_data_symbols();
        guest.put_u64(guest.symbol(hide), DIRECT + (1 << 40));
        let error = find(&guest, &file).unwrap_err();
        assert!(error.contains(expected), "{hide}: {error}");
    }
}

#[test]
fn a_file_that_is_not_needed_is_not_used() {
    let guest = guest();
    let other = b"ffffffff81000000 T _stext\n";
    let kernel = find(&guest, other).unwrap();
    assert!(kernel.evidence.file.is_none());
}

#[test]
fn a_file_that_lacks_data_symbols_too_is_refused() {
    let guest = guest_without_data_symbols();
    let mut symbols = symbols(&guest);
    symbols.retain(|(_, name)| name != "Dtext_mutex");
    let error = find(&guest, &system_map(&symbols)).unwrap_err();
    assert!(error.contains("the gate text_mutex, so"), "{error}");
    symbols.retain(|(_, name)| name != "Dinit_top_pgt");
    let error = find(&guest, &system_map(&symbols)).unwrap_err();
    assert!(
        error.contains("neither the kernel's kallsyms nor the debug file"),
        "{error}"
    );
}

#[test]
fn files_that_are_none_are_refused() {
    let guest = guest();
    let whole = vmlinux(&symbols(&guest), BUILD, &[]);
    let text = |bytes: &[u8]| parse(bytes).unwrap_err().to_string();
    assert!(text(b"no kernel").contains("line 1 of the symbol file"));
    assert!(text(b"").contains("no addresses"));
    assert!(text(b"0 T _stext\n").contains("no addresses"));
    assert!(text(&vmlinux(&[], BUILD, &[])).contains("stripped"));
    assert!(
        text(&vmlinux(&symbols(&guest), BUILD, &[(".BTF", b"BTF")])).contains("BTF is damaged")
    );
    for (at, value, found) in [
        (4, 1, "class 1, type 2 and machine 62"),
        (16, 1, "class 2, type 1 and machine 62"),
        (18, 3, "class 2, type 2 and machine 3"),
    ] {
        let mut other = whole.clone();
        other[at] = value;
        let error = text(&other);
        assert!(error.contains(found), "{error}");
        assert!(error.contains("x86-64 has class 2"), "{error}");
    }
    // A copy that ends early loses the table of sections, which is at the end.
    for length in (64..whole.len()).step_by(whole.len() / 50) {
        let error = text(&whole[..length]);
        assert!(error.contains("copy it again"), "{error}");
    }
    // A few bytes anywhere are wrong.
    for at in (0..whole.len()).step_by(whole.len() / 200) {
        for value in [0, 0x7f, 0xff] {
            let mut other = whole.clone();
            let end = whole.len().min(at + 8);
            other[at..end].fill(value);
            if let Ok(file) = parse(&other) {
                let guest = guest_without_data_symbols();
                let _ = Finder::new(Some(file.into())).find(&guest, &guest.cpus, Way::Image);
            }
        }
    }
}

#[test]
fn only_a_regular_file_that_is_not_huge_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vmlinux");
    let open = || DebugFile::open(&path);
    let error = open().unwrap_err();
    assert!(matches!(error, DebugFileError::Read(_)));
    // Its text is a part of the message already.
    assert!(std::error::Error::source(&error).is_none());
    std::fs::write(&path, system_map(&symbols(&guest()))).unwrap();
    open().unwrap();
    let file = std::fs::File::create(&path).unwrap();
    file.set_len((2 << 30) + 1).unwrap();
    let error = open().unwrap_err().to_string();
    assert!(
        error.contains("2147483649 bytes, more than 2147483648;"),
        "{error}"
    );
    // Opening a pipe without a writer would block.
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    for (other, kind) in [(folder.path(), "a folder"), (&pipe, "a pipe")] {
        let error = DebugFile::open(other).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{kind}, not a regular file")),
            "{error}"
        );
    }
}
