// SPDX-License-Identifier: Apache-2.0
//! Decodes the three entry formats from bytes.

use static_keys::{EntryFormat, Image, JumpEntry};

const ENTRY: JumpEntry = JumpEntry {
    code: 0xffff_ffff_8100_0010,
    target: 0xffff_ffff_8100_0400,
    key: 0xffff_ffff_8200_0020,
    likely: true,
    init: false,
    objtool_nop: false,
};

fn bytes<const N: usize>(members: [&[u8]; N]) -> Vec<u8> {
    members.concat()
}

#[test]
fn relative() {
    let table: u64 = 0xffff_ffff_8300_0000;
    let entry = bytes([
        &(-0x0200_0000_i32 + 0x10).to_le_bytes(),
        &(-0x0200_0000_i32 + 0x400 - 4).to_le_bytes(),
        &(-0x0100_0000_i64 + 0x20 - 8 + 1).to_le_bytes(),
    ]);
    assert_eq!(
        EntryFormat::Relative.decode(table, &entry, Image::Live),
        Some(ENTRY)
    );
    // A distant key, like a module's under KASLR.
    let far = bytes([&[0; 8], &(0x7000_0000_0000_0000_i64).to_le_bytes()]);
    let key = EntryFormat::Relative
        .decode(table, &far, Image::Live)
        .expect("whole")
        .key;
    assert_eq!(key, table.wrapping_add(8 + 0x7000_0000_0000_0000));
}

#[test]
fn absolute_64() {
    let entry = bytes([
        &ENTRY.code.to_le_bytes(),
        &ENTRY.target.to_le_bytes(),
        &(ENTRY.key | 1).to_le_bytes(),
    ]);
    assert_eq!(
        EntryFormat::Absolute64.decode(0x1000, &entry, Image::Live),
        Some(ENTRY)
    );
}

#[test]
fn absolute_32_is_not_sign_extended() {
    let entry = bytes([
        &0xc100_0010_u32.to_le_bytes(),
        &0xc100_0400_u32.to_le_bytes(),
        &0xc200_0021_u32.to_le_bytes(),
    ]);
    let expected = JumpEntry {
        code: 0xc100_0010,
        target: 0xc100_0400,
        key: 0xc200_0020,
        ..ENTRY
    };
    assert_eq!(
        EntryFormat::Absolute32.decode(0x1000, &entry, Image::Live),
        Some(expected)
    );
}

#[test]
fn the_flags_of_the_key() {
    for flags in 0..4_u64 {
        let entry = bytes([
            &ENTRY.code.to_le_bytes(),
            &ENTRY.target.to_le_bytes(),
            &(ENTRY.key | flags).to_le_bytes(),
        ]);
        let (likely, bit1) = (flags & 1 != 0, flags & 2 != 0);
        for (image, init, objtool_nop) in [(Image::Live, bit1, false), (Image::File, false, bit1)] {
            let expected = JumpEntry {
                likely,
                init,
                objtool_nop,
                ..ENTRY
            };
            assert_eq!(
                EntryFormat::Absolute64.decode(0, &entry, image),
                Some(expected),
                "{flags} {image:?}"
            );
        }
    }
}

#[test]
fn addresses_wrap_as_the_kernels_do() {
    let entry = bytes([
        &i32::MAX.to_le_bytes(),
        &i32::MIN.to_le_bytes(),
        &i64::MIN.to_le_bytes(),
    ]);
    let decoded = EntryFormat::Relative
        .decode(u64::MAX - 3, &entry, Image::Live)
        .expect("whole");
    assert_eq!(decoded.code, 0x7fff_fffb);
    assert_eq!(decoded.target, 0xffff_ffff_8000_0000);
    assert_eq!(decoded.key, 0x8000_0000_0000_0004);
}

#[test]
fn tables_decode_entry_by_entry() {
    for (format, size) in [
        (EntryFormat::Relative, 16),
        (EntryFormat::Absolute64, 24),
        (EntryFormat::Absolute32, 12),
    ] {
        let table: Vec<u8> = (0..=255).collect();
        let entries: Vec<JumpEntry> = format.entries(0x4000, &table, Image::File).collect();
        assert_eq!(format.entry_size(), size);
        assert_eq!(entries.len(), 256 / size, "a rest is no entry");
        for (index, entry) in entries.into_iter().enumerate() {
            let at = index * size;
            assert_eq!(
                format.decode(0x4000 + at as u64, &table[at..], Image::File),
                Some(entry)
            );
        }
        assert_eq!(
            format.decode(0, &table[..size - 1], Image::Live),
            None,
            "too short"
        );
    }
    assert_eq!(
        EntryFormat::None.entries(0, &[0; 64], Image::Live).count(),
        0
    );
    assert_eq!(EntryFormat::None.decode(0, &[0; 64], Image::Live), None);
}
