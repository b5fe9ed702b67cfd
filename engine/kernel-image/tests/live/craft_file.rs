// SPDX-License-Identifier: Apache-2.0
//! The files that a build of the crafted guest's kernel leaves behind.

use crate::craft_guest::{CraftedGuest, TEXT, note_section};

/// The distance by which KASLR has moved the guest from its addresses in the files.
pub const SLIDE: u64 = 0x20_0000;

/// Returns the symbols at their addresses in the files: address, letter and name.
pub fn symbols(guest: &CraftedGuest) -> Vec<(u64, String)> {
    let mut symbols = guest.listed.clone();
    // KASLR does not move symbols that are not part of the image.
    for (address, _) in symbols.iter_mut().filter(|(address, _)| *address >= TEXT) {
        *address -= SLIDE;
    }
    symbols
}

pub fn system_map(symbols: &[(u64, String)]) -> Vec<u8> {
    let lines = symbols.iter().map(|(address, name)| {
        let (letter, name) = name.split_at(1);
        format!("{address:016x} {letter} {name}\n")
    });
    lines.collect::<String>().into_bytes()
}

/// A section: name, type, bytes, link, entry size.
type Section<'a> = (&'a str, u32, Vec<u8>, u32, u64);

/// A vmlinux with these symbols, this build id and further sections.
pub fn vmlinux(
    symbols: &[(u64, String)],
    build_id: Option<&[u8]>,
    extra: &[(&str, &[u8])],
) -> Vec<u8> {
    let (mut table, mut strings) = (vec![0; 24], vec![0]);
    for (address, name) in symbols {
        table.extend_from_slice(&(strings.len() as u32).to_le_bytes());
        let global = name.starts_with(char::is_uppercase);
        // The type is STT_OBJECT and the section is SHN_ABS.
        table.extend_from_slice(&[u8::from(global) << 4 | 1, 0, 0xf1, 0xff]);
        table.extend_from_slice(&address.to_le_bytes());
        table.extend_from_slice(&[0; 8]);
        strings.extend_from_slice(&name.as_bytes()[1..]);
        strings.push(0);
    }
    let mut sections: Vec<Section<'_>> =
        vec![(".symtab", 2, table, 2, 24), (".strtab", 3, strings, 0, 0)];
    if let Some(build_id) = build_id {
        sections.push((".notes", 7, note_section(build_id), 0, 0));
    }
    for (name, bytes) in extra {
        sections.push((name, 1, bytes.to_vec(), 0, 0));
    }
    elf(sections)
}

/// An ELF file without segments, because a file with only debug information has no bytes in them.
fn elf(mut sections: Vec<Section<'_>>) -> Vec<u8> {
    let mut names = vec![0];
    let mut headers = vec![0; 64];
    sections.push((".shstrtab", 3, Vec::new(), 0, 0));
    let mut elf = vec![0; 64];
    for (name, kind, bytes, link, entry) in &mut sections {
        let name_at = names.len() as u32;
        names.extend_from_slice(name.as_bytes());
        names.push(0);
        if *name == ".shstrtab" {
            *bytes = names.clone();
        }
        elf.resize(elf.len().next_multiple_of(8), 0);
        for half in [name_at, *kind] {
            headers.extend_from_slice(&half.to_le_bytes());
        }
        let (at, length) = (elf.len() as u64, bytes.len() as u64);
        // Flags, address, offset, size; link and info; alignment, entry size.
        for word in [0, 0, at, length, u64::from(*link), 8, *entry] {
            headers.extend_from_slice(&word.to_le_bytes());
        }
        elf.extend_from_slice(bytes);
    }
    elf.resize(elf.len().next_multiple_of(8), 0);
    let table = elf.len() as u64;
    let count = sections.len() as u16 + 1;
    elf[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    // ET_EXEC, EM_X86_64.
    elf[16..24].copy_from_slice(&[2, 0, 62, 0, 1, 0, 0, 0]);
    elf[40..48].copy_from_slice(&table.to_le_bytes());
    for (at, half) in [(52, 64), (54, 56), (58, 64), (60, count), (62, count - 1)] {
        elf[at..at + 2].copy_from_slice(&half.to_le_bytes());
    }
    elf.extend(headers);
    elf
}
