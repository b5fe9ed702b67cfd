// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets: guests and files of the host that differ in a few bytes from valid ones, and
//! type information.

use std::path::Path;

use patchbay_kernel_image::Btf;
use patchbay_kernel_image::live::{DebugFile, Finder, Kernel, Way, discover};

use crate::craft_btf;
use crate::craft_dwarf::dwarf;
use crate::craft_file::{symbols, system_map, vmlinux};
use crate::craft_guest::{
    DATA, MODULE_DATA, MODULE_TEXT, NOTE, RAM, RODATA, TEXT, guest, guest_without_data_symbols,
    physical,
};

/// A target and its name.
pub type Named = (&'static str, fn(&[u8]));

/// The targets by name.
pub const TARGETS: &[Named] = &[
    ("live_guests", live_guests),
    ("debug_files", debug_files),
    ("type_information", type_information),
];

/// Changes bytes of a valid guest and discovers its kernel. The first byte of the input chooses the
/// [`Way`], and whether the kernel was also discovered before the changes. Each further group of
/// four bytes changes a byte of the guest: it chooses the area, the offset in the area, and the new
/// value.
pub fn live_guests(data: &[u8]) {
    let Some((choice, changes)) = data.split_first() else {
        return;
    };
    let guest = guest();
    let mut finder = Finder::default();
    if choice & 4 != 0 {
        let found = finder.find(&guest, &guest.cpus, Way::Image);
        assert!(found.is_ok(), "the guest is good");
    }
    for change in changes.chunks_exact(4) {
        let places = [
            (physical(TEXT), 0x400),
            (physical(RODATA), 31 * 4096),
            (physical(DATA), 8 * 4096),
            (physical(MODULE_TEXT), 0x100),
            (physical(MODULE_DATA), 0x800),
            (NOTE, 0x200),
            (0x1b_0000, 0xc000),
            (0, RAM),
        ];
        let (start, length) = places[usize::from(change[0]) % places.len()];
        let at = start + u64::from(u16::from_le_bytes([change[1], change[2]])) % length;
        guest.put_physical(at, &[change[3]]);
    }
    if choice & 4 != 0 {
        if let Ok(kernel) = finder.find(&guest, &guest.cpus, Way::Image) {
            check(&kernel);
        }
        return;
    }
    let (way, cpus) = match choice % 3 {
        0 => (Way::Image, guest.cpus.as_slice()),
        1 => (Way::Note, guest.cpus.as_slice()),
        _ => (Way::Note, &[][..]),
    };
    if let Ok(kernel) = discover(&guest, cpus, way) {
        check(&kernel);
    }
}

/// Changes bytes of a debug file, and uses the file to discover a kernel whose kallsyms lack the
/// symbols of data. The first byte of the input chooses the kind of file. Each further group of
/// four bytes changes a byte of the file.
pub fn debug_files(data: &[u8]) {
    let Some((choice, changes)) = data.split_first() else {
        return;
    };
    let guest = guest_without_data_symbols();
    let mut symbols = symbols(&guest);
    let build_id = Some(&[0, 0xff][..]);
    let types = craft_btf::kernel().finish();
    let mut file = match choice % 3 {
        0 => system_map(&symbols),
        kind => {
            // The types come from the file and not from the kernel.
            symbols.retain(|(_, name)| !name.ends_with("_BTF"));
            let (info, abbreviations) = dwarf(&types);
            match kind {
                1 => vmlinux(&symbols, build_id, &[(".BTF", &types)]),
                _ => {
                    let sections = [(".debug_info", &*info), (".debug_abbrev", &abbreviations)];
                    vmlinux(&symbols, build_id, &sections)
                }
            }
        }
    };
    for change in changes.chunks_exact(4) {
        let at = u32::from_le_bytes([change[0], change[1], change[2], 0]) as usize % file.len();
        file[at] = change[3];
    }
    if let Ok(file) = DebugFile::parse(Path::new("vmlinux"), &file)
        && let Ok(kernel) = Finder::new(Some(file.into())).find(&guest, &guest.cpus, Way::Image)
    {
        let used = kernel.evidence.file.as_ref();
        assert!(used.is_some_and(|used| used.data_symbols));
        check(&kernel);
    } else {
        assert!(!changes.is_empty(), "the file is good");
    }
}

/// Checks the guarantees of every discovery.
fn check(kernel: &Kernel) {
    for image in &kernel.images {
        let length = image.jump_table.end - image.jump_table.start;
        assert_eq!(image.sites.len() as u64 * 16, length);
        for site in &image.sites {
            let nothing = site.entry.init || site.is_mixture;
            assert_ne!(site.holds.is_some(), nothing);
            assert!(!(site.entry.init && site.is_mixture));
            assert!(site.entry.init || image.text.contains(&site.entry.code));
        }
    }
    let mut sites = 0;
    for key in &kernel.keys {
        assert!(!key.sites.is_empty());
        for (image, range) in &key.sites {
            let run = &kernel.images[*image].sites[range.clone()];
            assert!(run.iter().all(|site| site.entry.key == key.address));
            let is_mixed = run.iter().any(|site| site.is_mixture);
            assert!(!is_mixed || key.sealed || key.torn.is_some());
            sites += run.len();
        }
        let texts = kernel.images.iter().map(|image| &image.text);
        assert!(texts.into_iter().all(|text| !text.contains(&key.address)));
    }
    let entries: usize = kernel.images.iter().map(|image| image.sites.len()).sum();
    assert_eq!(sites, entries);
}

/// Parses the input as type information, and again with a valid header before it.
pub fn type_information(data: &[u8]) {
    let names = ["module", "static_key", "module_state"];
    let ask = |bytes: &[u8]| {
        if let Ok(types) = Btf::parse(bytes, &names) {
            for path in [&["mem"][..], &["list", "next"], &["type"]] {
                let member = types.member("module", path);
                let _ = member.and_then(|member| types.size_of_member(member));
                let _ = types.offset("static_key", path);
            }
            let _ = types.size("module");
            let _ = types.enumerator("module_state", "MODULE_STATE_LIVE");
        }
    };
    ask(data);
    let strings = b"\0module\0static_key\0module_state\0mem\0list\0next\0type\0MODULE_STATE_LIVE\0";
    let (types, length) = (data.len() as u32, strings.len() as u32);
    let mut whole = Vec::new();
    for word in [0x0001_eb9f, 24, 0, types, types, length] {
        whole.extend_from_slice(&word.to_le_bytes());
    }
    whole.extend_from_slice(data);
    whole.extend_from_slice(strings);
    ask(&whole);
}
