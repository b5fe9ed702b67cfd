// SPDX-License-Identifier: Apache-2.0

use proptest::prelude::*;

use super::craft::{Kernel, branches};
use crate::inspect::entry::Format;
use crate::inspect::inspect;
use crate::inspect::report::SymbolSource;

/// The orders of the arrays, see the module's documentation.
#[derive(Clone, Copy, Debug)]
enum Order {
    Absolute,
    Before,
    After,
    /// As `After`, aligned to four bytes, with offsets relative to themselves.
    AfterWithoutBase,
}

const ORDERS: [Order; 4] = [
    Order::Absolute,
    Order::Before,
    Order::After,
    Order::AfterWithoutBase,
];

/// A kernel with kallsyms in its data. The tokens are the printable characters; one of two is worth two characters.
fn kernel(format: Format, order: Order, percpu: bool, seqs_between: bool) -> Kernel {
    let mut kernel = Kernel::new(format, &branches(true));
    let mut symbols: Vec<(u64, String)> = kernel
        .system_map()
        .lines()
        .map(|line| {
            let mut words = line.split(' ');
            let address = u64::from_str_radix(words.next().unwrap(), 16).unwrap();
            (address, words.collect::<String>())
        })
        .collect();
    for index in 0..1100 {
        symbols.push((
            kernel.text_address() + 0x800 + index,
            format!("tfiller_{index}{}", "x".repeat(index as usize % 150)),
        ));
    }
    symbols.sort();

    let pointer = if kernel.wide() { 8 } else { 4 };
    let base = kernel.data_address() + kernel.data.len() as u64;
    let mut out = Vec::new();
    let alignment = match order {
        Order::AfterWithoutBase => {
            // So that the arrays are not aligned to more than four bytes.
            out.extend_from_slice(&[0xff; 4]);
            4
        }
        _ => pointer,
    };
    let align = |out: &mut Vec<u8>| out.resize(out.len().next_multiple_of(alignment), 0);
    let word =
        |out: &mut Vec<u8>, value: u64| out.extend_from_slice(&value.to_le_bytes()[..pointer]);
    let relative_base = kernel.text_address();
    let offsets = |out: &mut Vec<u8>| {
        for (address, _) in &symbols {
            let offset = match order {
                Order::AfterWithoutBase => address.wrapping_sub(base + out.len() as u64) as u32,
                // CONFIG_KALLSYMS_ABSOLUTE_PERCPU.
                _ if percpu => relative_base.wrapping_sub(*address).wrapping_sub(1) as u32,
                _ => address.wrapping_sub(relative_base) as u32,
            };
            out.extend_from_slice(&offset.to_le_bytes());
        }
        if !matches!(order, Order::AfterWithoutBase) {
            align(out);
            word(out, relative_base);
        }
    };
    match order {
        Order::Absolute => symbols
            .iter()
            .for_each(|(address, _)| word(&mut out, *address)),
        Order::Before => offsets(&mut out),
        Order::After | Order::AfterWithoutBase => {}
    }
    out.extend_from_slice(&(symbols.len() as u32).to_le_bytes());
    align(&mut out);
    let names_at = out.len();
    let mut markers = Vec::new();
    for (index, (_, name)) in symbols.iter().enumerate() {
        if index % 256 == 0 {
            markers.push((out.len() - names_at) as u32);
        }
        let tokens = name.replace("__", "\x01").into_bytes();
        if tokens.len() < 0x80 {
            out.push(tokens.len() as u8);
        } else {
            out.extend_from_slice(&[tokens.len() as u8 | 0x80, (tokens.len() >> 7) as u8]);
        }
        out.extend_from_slice(&tokens);
    }
    align(&mut out);
    for marker in markers {
        out.extend_from_slice(&marker.to_le_bytes());
    }
    align(&mut out);
    if seqs_between {
        for index in 0..symbols.len() as u32 {
            out.extend_from_slice(&index.to_be_bytes()[1..]);
        }
        align(&mut out);
    }
    let mut index = Vec::new();
    let tokens_at = out.len();
    for token in 0..=255u8 {
        index.extend_from_slice(&((out.len() - tokens_at) as u16).to_le_bytes());
        match token {
            1 => out.extend_from_slice(b"__"),
            b'!'..=b'~' => out.push(token),
            _ => {}
        }
        out.push(0);
    }
    align(&mut out);
    out.extend_from_slice(&index);
    if matches!(order, Order::After | Order::AfterWithoutBase) {
        align(&mut out);
        offsets(&mut out);
    }
    assert_eq!(base % pointer as u64, 0);
    kernel.data.extend_from_slice(&out);
    kernel
}

#[test]
fn every_order_and_form_is_read() {
    for format in [Format::Relative64, Format::Relative32] {
        for order in ORDERS {
            for (percpu, seqs_between) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let kernel = kernel(format, order, percpu, seqs_between);
                let report = inspect(&kernel.elf(), None).unwrap();
                assert_eq!(
                    report.image.symbols,
                    SymbolSource::Kallsyms,
                    "{format:?} {order:?} {percpu} {seqs_between}"
                );
                assert_eq!(report.image.symbol_count, 1100 + 35);
                assert_eq!(report.table.start, kernel.table());
                for index in 0..16 {
                    let key = report
                        .keys
                        .iter()
                        .find(|key| key.name == format!("key_{index}"))
                        .unwrap();
                    assert_eq!(key.address, kernel.key(index));
                    assert_eq!(key.sites[0].location, Some(format!("function_{index}+0x4")));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_tables_do_not_panic(
        order in prop::sample::select(ORDERS.to_vec()),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        keep in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut kernel = kernel(Format::Relative64, order, true, false);
        for (at, value) in flips {
            let at = 0x1000 + at.index(kernel.data.len() - 0x1000);
            kernel.data[at] = value;
        }
        if let Some(keep) = keep {
            let keep = 0x1000 + keep.index(kernel.data.len() - 0x1000);
            kernel.data.truncate(keep);
        }
        // The table itself is whole, so that it is found in any case.
        prop_assert_eq!(inspect(&kernel.elf(), None).unwrap().table.start, kernel.table());
    }
}
