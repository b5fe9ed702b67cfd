// SPDX-License-Identifier: Apache-2.0

use proptest::prelude::*;

use crate::craft_kallsyms::{ORDERS, kernel};
use crate::given;
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
                assert_eq!(report.image.symbol_count, 1100 + 36);
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
        // The jump table is intact, so it must be found.
        prop_assert_eq!(inspect(&kernel.elf(), None).unwrap().table.start, kernel.table());
    }
}

#[test]
fn a_map_must_have_every_symbol_of_the_image() {
    let kernel = kernel(Format::Relative64, ORDERS[0], true, false);
    let elf = kernel.elf();
    let own = read_kallsyms(&Image::parse(&elf).unwrap()).unwrap();
    // `change` returns the address for a symbol, or `None` to leave it out.
    let with = |change: &dyn Fn(u64, &str) -> Option<u64>| {
        let lines = own.iter().filter_map(|(symbol, name)| {
            let address = change(symbol.address, name)?;
            Some(format!("{address:x} T {name}\n"))
        });
        let map = given(&lines.collect::<String>()).unwrap();
        inspect(&elf, Some(map)).map_err(|error| error.to_string())
    };
    let report = with(&|address, _| Some(address)).unwrap();
    assert_eq!(report.image.symbols, SymbolSource::File);
    assert_eq!(report.summary.unexplained, 0);
    let other = |change: &dyn Fn(u64, &str) -> Option<u64>, expected: &str| {
        let error = with(change).unwrap_err();
        let all = format!("the debug file System.map is of another build: {expected}");
        assert!(error.contains(&all), "{error}");
    };
    other(
        &|address, name| Some(address + u64::from(name == "key_3")),
        "the kernel has key_3 at",
    );
    other(
        &|address, name| (name != "function_3").then_some(address),
        "the kernel has function_3 at",
    );
    let text = kernel.text_address();
    let moved = |address| {
        if address < text {
            address
        } else {
            address + 0x1000
        }
    };
    other(&|address, _| Some(moved(address)), "its _stext is not");
}
