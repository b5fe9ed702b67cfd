// SPDX-License-Identifier: Apache-2.0
//! Tests the comparison of kernels' images with small images, whose code is moved and then also
//! changed.

// The benchmark uses more of this module.
#[allow(dead_code, unused_imports)]
#[path = "../images/mod.rs"]
mod images;

use images::compare::Difference;
use images::image::{Section, Symbol};
use images::{Comparison, Image, functions, sections};

const TEXT: u64 = 0xffff_ffff_8100_0000;
const RODATA: u64 = 0xffff_ffff_8200_0000;

/// The contents of a test image.
struct Parts {
    /// The number of INT3s before the first function.
    padding: usize,
    /// The string whose address `caller` puts into a register.
    message: &'static str,
    /// The index of the function that `caller` calls, the first or the second.
    callee: usize,
    /// The number that `caller` puts into a register.
    number: u8,
    /// The offset in `caller` of the second case of its switch.
    case: u64,
    /// The strings before the message in .rodata, where the message has no symbol.
    texts: &'static str,
    /// The image has another function at its end.
    more: bool,
}

const PLAIN: Parts = Parts {
    padding: 0,
    message: "hello",
    callee: 0,
    number: 7,
    case: 2,
    texts: "",
    more: false,
};

/// The same image with moved code.
const MOVED: Parts = Parts {
    padding: 32,
    texts: "a text of another function\0",
    ..PLAIN
};

fn relative(from: usize, to: usize) -> [u8; 4] {
    let distance = i64::try_from(to).unwrap() - i64::try_from(from).unwrap();
    i32::try_from(distance).unwrap().to_le_bytes()
}

fn image(parts: &Parts) -> Image {
    let start = TEXT + parts.padding as u64;
    // There are two functions that only return, and one that calls one of them.
    let mut code = vec![0xcc; parts.padding];
    code.extend([0xc3, 0xc3]);
    let callee = parts.padding + parts.callee;
    // jmp *table(,%rax,8); mov $message,%rdi
    let low = |address: u64| u32::try_from(address & 0xffff_ffff).unwrap().to_le_bytes();
    let message = RODATA + parts.texts.len() as u64;
    let table = message + parts.message.len() as u64 + 1;
    code.extend([0xff, 0x24, 0xc5]);
    code.extend(low(table));
    code.extend([0x48, 0xc7, 0xc7]);
    code.extend(low(message));
    // mov $number,%al; the branch site, a NOP of two bytes
    code.extend([0xb0, parts.number, 0x66, 0x90]);
    let site = TEXT + code.len() as u64 - 2;
    // call callee; jmp to the start of this function; ret
    code.push(0xe8);
    code.extend(relative(code.len() + 4, callee));
    code.push(0xe9);
    code.extend(relative(code.len() + 4, parts.padding + 2));
    code.push(0xc3);
    let caller_size = (code.len() - parts.padding - 2) as u64;
    code.extend(parts.more.then_some(0xc3));
    let end = TEXT + code.len() as u64;

    let mut data = format!("{}{}\0", parts.texts, parts.message).into_bytes();
    for place in [start + 2, start + 2 + parts.case] {
        data.extend(place.to_le_bytes());
    }
    let table = RODATA + data.len() as u64;
    data.extend(low(site.wrapping_sub(table)));
    data.extend([0; 12]);
    let section = |name: &str, address, bytes: Vec<u8>, code| Section {
        name: name.to_owned(),
        address,
        size: bytes.len() as u64,
        bytes,
        code,
    };
    let symbol = |name: &str, address, size| Symbol {
        name: name.to_owned(),
        file: String::new(),
        address,
        size,
    };
    let mut symbols = vec![
        symbol("one", start, 1),
        symbol("two", start + 1, 1),
        symbol("caller", start + 2, caller_size),
        symbol("__start___jump_table", table, 0),
        symbol("__stop___jump_table", table + 16, 0),
    ];
    symbols.extend(parts.more.then(|| symbol("three", end - 1, 1)));
    let sections = vec![
        section(".text", TEXT, code, true),
        section(".rodata", RODATA, data, false),
    ];
    Image::new(sections, symbols)
}

fn compare(first: &Parts, second: &Parts) -> Comparison {
    functions(&image(first), &image(second)).unwrap()
}

#[test]
fn code_that_was_moved_is_the_same() {
    let found = compare(&PLAIN, &MOVED);
    assert_eq!(found.changed_with_sites, []);
    assert_eq!(found.changed, []);
    assert_eq!((found.functions, found.with_sites), (3, 1));
    assert_eq!((found.sites, found.elsewhere), ([1, 1], [0, 0]));
}

#[test]
fn whatever_means_something_else_is_found() {
    let changes = [
        ("another call", Parts { callee: 1, ..MOVED }),
        ("another number", Parts { number: 8, ..MOVED }),
        (
            "another text",
            Parts {
                message: "hullo",
                ..MOVED
            },
        ),
        ("another case", Parts { case: 3, ..MOVED }),
    ];
    for (what, parts) in changes {
        let found = compare(&PLAIN, &parts);
        assert_eq!(found.changed_with_sites.len(), 1, "{what}: {found:?}");
        assert_eq!(found.changed_with_sites[0].0, "caller", "{what}");
        assert_eq!(found.changed, [], "{what}");
    }
}

#[test]
fn functions_come_and_go() {
    let more = Parts {
        more: true,
        ..MOVED
    };
    let difference = |difference| vec![("three".to_owned(), difference)];
    let came = compare(&PLAIN, &more);
    assert_eq!(came.changed, difference(Difference::New));
    let went = compare(&more, &PLAIN);
    assert_eq!(went.changed, difference(Difference::Gone));
}

#[test]
fn sections_are_compared_byte_for_byte() {
    let identical = |first: &Parts, second: &Parts| {
        let (first, second) = (image(first), image(second));
        let pairs = sections(&first, &second);
        assert_eq!(pairs.len(), 1, "only .text has code");
        pairs[0].identical
    };
    assert!(identical(&PLAIN, &PLAIN));
    assert!(!identical(&PLAIN, &Parts { number: 8, ..PLAIN }));
    assert!(!identical(&PLAIN, &MOVED));
}
