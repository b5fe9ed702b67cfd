// SPDX-License-Identifier: Apache-2.0

//! Malformed key directories: addresses, classes, names.

use patchbay_guest::abi;
use patchbay_guest::testing::structures;
use patchbay_service::keys::ListQuery;
use static_keys::Op;
use zerocopy::IntoBytes;

use super::kernel::*;
use super::rig::{Rig, assert_printable};

/// Registers directories with an invalid record of `beta`. Each must be refused.
fn refused(records: &[(abi::Key, &str)]) {
    let Some(rig) = Rig::new(vec![]) else { return };
    for (record, words) in records {
        rig.memory().write(DIRECTORY + 32, record.as_bytes());
        rig.refuses(&descriptor(), words);
    }
    rig.survives();
}

fn unknown_flags() -> abi::Key {
    abi::Key {
        flags: 0x8000,
        ..record(BETA, 6, abi::KEY_REF, 0)
    }
}

#[test]
fn keys_in_text() {
    let words = "lies in text";
    refused(&[
        (record(TEXT, 6, abi::KEY_REF, 0), words),
        (record(BETA_SITE & !3, 6, abi::KEY_REF, 0), words),
        (record(TEXT_END - 4, 6, abi::KEY_GUARDED, 0), words),
    ]);
}

#[test]
fn keys_at_addresses_that_no_key_has() {
    refused(&[
        (record(BETA + 1, 6, abi::KEY_REF, 0), "misaligned"),
        (
            record(u64::MAX - 3, 6, abi::KEY_REF, 0),
            "end of the address space",
        ),
        (record(!15, 6, abi::KEY_REF, 0), "end of the address space"),
        (record(ALPHA, 6, abi::KEY_REF, 0), "listed twice"),
    ]);
}

#[test]
fn unknown_classes_and_tracepoints_of_others() {
    refused(&[
        (record(BETA, 6, 3, 0), "unknown class 3"),
        (record(BETA, 6, u16::MAX, 0), "unknown class 65535"),
        (unknown_flags(), "unknown flags 0x8000"),
        (
            record(BETA, 6, abi::KEY_TRACEPOINT, TRACEPOINT),
            "not the key of the tracepoint",
        ),
        (
            record(BETA, 6, abi::KEY_TRACEPOINT, u64::MAX),
            "not the key of the tracepoint",
        ),
    ]);
}

#[test]
fn names_outside_their_block_or_without_end() {
    refused(&[
        (record(BETA, 26, abi::KEY_REF, 0), "outside the block"),
        (record(BETA, u32::MAX, abi::KEY_REF, 0), "outside the block"),
        // This name begins at the end of the block, where no NUL follows.
        (record(BETA, 25, abi::KEY_REF, 0), "does not end"),
    ]);
    let Some(rig) = Rig::new(vec![]) else { return };
    let mut descriptor = descriptor();
    rig.memory().write(NAMES, &[b'a'; 0x1_0000]);
    descriptor.directory.names_size = 0x1_0000;
    rig.refuses(&descriptor, "does not end within 540 bytes");
    descriptor.directory.names_size = u32::MAX;
    rig.refuses(&descriptor, "4294967295 bytes of names");
    descriptor.directory.names_size = 0;
    rig.refuses(&descriptor, "does not end");
    rig.survives();
}

#[test]
fn two_to_the_32_keys() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let mut descriptor = descriptor();
    descriptor.directory.key_count = u32::MAX;
    rig.refuses(&descriptor, "4294967295 keys");
    descriptor.directory.key_count = 1 << 17;
    // The maximum number of keys, in memory that is not mapped.
    rig.refuses(&descriptor, "not present");
    descriptor.directory.key_count = 4;
    descriptor.directory.keys = u64::MAX - 10;
    rig.refuses(&descriptor, "end of the address space");
    descriptor.directory.keys = 0x1000;
    rig.refuses(&descriptor, "not present");
    rig.survives();
}

/// Names that could confuse a terminal.
#[test]
fn names_with_control_characters() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let names: [&[u8]; 4] = [
        b"\x1b[2J\x1b]0;pwned\x07",
        b"\xff\xfe\xc3\x28\xf0\x9f",
        "\u{202e}\u{200b}\u{7f}\u{85}\r\n".as_bytes(),
        b"a:b#1 *?[]",
    ];
    let mut block = vec![];
    let keys = [ALPHA, BETA, GUARDED, EVENT];
    let mut records = vec![];
    for (key, name) in keys.into_iter().zip(names) {
        let at = u32::try_from(block.len()).unwrap();
        records.push(record(key, at, abi::KEY_GUARDED, 0));
        block.extend_from_slice(name);
        block.push(0);
    }
    rig.memory().records(&records);
    rig.memory().write(NAMES, &block);
    let mut descriptor = descriptor();
    descriptor.directory.names_size = u32::try_from(block.len()).unwrap();
    descriptor.release = [0x1b; 64];
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
    assert_printable(&rig.keys.describe().release);
    rig.look_at_everything();
    let list = rig
        .keys
        .list(&ListQuery {
            page_size: 10,
            ..ListQuery::default()
        })
        .unwrap();
    for key in list.keys {
        assert!(key.name.bytes().all(|byte| byte.is_ascii_graphic()));
        assert!(!key.name.contains(':'), "{}", key.name);
        // Each key can be addressed by the name that is shown.
        let error = rig.change(&[&key.name], Op::Dec).unwrap_err();
        assert_eq!(error.reason(), "WOULD_WARN", "{error}");
        assert_printable(&error.to_string());
    }
    rig.survives();
}

/// Two keys share one name, and two have an empty name.
#[test]
fn names_of_many() {
    let Some(rig) = Rig::new(vec![]) else { return };
    rig.memory().records(&[
        record(ALPHA, 0, abi::KEY_REF, 0),
        record(BETA, 0, abi::KEY_REF, 0),
        record(GUARDED, 5, abi::KEY_REF, 0),
        record(EVENT, 5, abi::KEY_REF, 0),
    ]);
    rig.register();
    for name in ["alpha#1", "alpha#2"] {
        assert_eq!(&*rig.details(name).key.name, name);
    }
    for key in [GUARDED, EVENT] {
        assert_eq!(rig.details(&format!("{key:#x}")).key.address, key);
    }
    rig.survives();
}

/// The maximum number of keys, all with the longest name. The memory for names is bounded by the
/// size of their block.
#[test]
fn the_longest_names_of_the_most_keys() {
    const KEYS: u32 = 1 << 17;
    let Some(rig) = Rig::with(super::rig::Setup {
        memory: Some(16 << 20),
        ..Default::default()
    }) else {
        return;
    };
    for page in 0..4 {
        rig.memory().map_beyond(page, (4 << 20) + (page << 21));
    }
    let records: Vec<u8> = (0..KEYS)
        .flat_map(|index| {
            let key = record(
                0xffff_9000_0000_0000 + u64::from(index) * 16,
                0,
                abi::KEY_REF,
                0,
            );
            key.as_bytes().to_vec()
        })
        .collect();
    rig.memory().write_physical(4 << 20, &records);
    rig.memory().write(NAMES, &[b'n'; 540]);
    rig.memory().write(NAMES + 540, &[0]);
    let mut descriptor = descriptor();
    descriptor.directory = structures::directory(BEYOND, KEYS, NAMES, 541);
    rig.refuses(&descriptor, "bytes of names");
    rig.memory().write(NAMES, b"n\0");
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
    assert_eq!(rig.keys.describe().keys, KEYS);
    rig.look_at_everything();
    rig.survives();
}
