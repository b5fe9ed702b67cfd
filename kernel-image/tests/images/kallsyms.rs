// SPDX-License-Identifier: Apache-2.0

use proptest::prelude::*;

use crate::craft_kallsyms::{ORDERS, kernel};
use patchbay_kernel_image::{Format, Image, SymbolSource, Table, inspect, read_kallsyms};

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

#[test]
fn memory_in_pieces_is_read_as_a_file_is() {
    for order in ORDERS {
        let kernel = kernel(Format::Relative64, order, true, false);
        let piece = |address: u64, bytes: &[u8]| address..address + bytes.len() as u64;
        let text = piece(kernel.text_address(), &kernel.text);
        let data = piece(kernel.data_address(), &kernel.data);
        let image = Image::from_pieces(
            [
                (data.clone(), kernel.data.as_slice()),
                (text.clone(), &kernel.text),
            ],
            vec![text.clone()],
        )
        .unwrap();
        let symbols = read_kallsyms(&image).unwrap();
        assert_eq!(symbols.address("key_3"), Some(kernel.key(3)));
        let table = Table::find(&image, &symbols).unwrap();
        assert_eq!((table.start, table.entries.len()), (kernel.table(), 16));
        let overlapping = [
            (text.clone(), kernel.text.as_slice()),
            (text.start + 1..text.end, &[]),
        ];
        assert!(Image::from_pieces(overlapping, Vec::new()).is_err());
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
