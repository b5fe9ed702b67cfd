// SPDX-License-Identifier: Apache-2.0
//! Small kernel images with a symbol table of their own.

use patchbay_kernel_image::Format;

use crate::craft::{Kernel, branches};

/// The orders of the arrays, see kallsyms.rs of the crate.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    Absolute,
    Before,
    After,
    /// Like `After`, aligned to four bytes, with offsets relative to themselves.
    AfterWithoutBase,
}

pub const ORDERS: [Order; 4] = [
    Order::Absolute,
    Order::Before,
    Order::After,
    Order::AfterWithoutBase,
];

/// A kernel with kallsyms in its data. The tokens are the printable characters, and token 1 for
/// `__`.
pub fn kernel(format: Format, order: Order, percpu: bool, seqs_between: bool) -> Kernel {
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
    let layout = Layout {
        pointer: if kernel.wide() { 8 } else { 4 },
        base: kernel.data_address() + kernel.data.len() as u64,
        relative_base: kernel.text_address(),
        order,
        percpu,
        seqs_between,
    };
    let out = layout.arrays(&symbols);
    kernel.data.extend_from_slice(&out);
    kernel
}

/// The layout of the arrays.
pub struct Layout {
    pub pointer: usize,
    /// Address of the arrays.
    pub base: u64,
    pub relative_base: u64,
    pub order: Order,
    pub percpu: bool,
    pub seqs_between: bool,
}

impl Layout {
    /// The arrays for symbols {address, letter and name} that are sorted.
    pub fn arrays(&self, symbols: &[(u64, String)]) -> Vec<u8> {
        let Self {
            pointer,
            base,
            relative_base,
            order,
            percpu,
            seqs_between,
        } = *self;
        let mut out = Vec::new();
        let alignment = match order {
            Order::AfterWithoutBase => {
                // This keeps the arrays from being aligned to more than four bytes.
                out.extend_from_slice(&[0xff; 4]);
                4
            }
            _ => pointer,
        };
        let align = |out: &mut Vec<u8>| out.resize(out.len().next_multiple_of(alignment), 0);
        let word =
            |out: &mut Vec<u8>, value: u64| out.extend_from_slice(&value.to_le_bytes()[..pointer]);
        let offsets = |out: &mut Vec<u8>| {
            for (address, _) in symbols {
                let offset = match order {
                    Order::AfterWithoutBase => address.wrapping_sub(base + out.len() as u64) as u32,
                    // With CONFIG_KALLSYMS_ABSOLUTE_PERCPU, values below the image are stored as
                    // they are.
                    _ if percpu && *address < 1 << 31 => *address as u32,
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
        out
    }
}
