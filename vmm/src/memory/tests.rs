// SPDX-License-Identifier: Apache-2.0
use super::*;

#[test]
fn memory_beyond_three_gibibytes_continues_at_four() {
    let ram = GuestRam::new((3 << 30) + (1 << 20)).unwrap();
    assert_eq!(ram.low_bytes(), 3 << 30);
    assert_eq!(ram.high_bytes(), 1 << 20);
    ram.write(DEVICE_GAP_END + 5, b"high").unwrap();
    let mut bytes = [0; 4];
    ram.read(DEVICE_GAP_END + 5, &mut bytes).unwrap();
    assert_eq!(&bytes, b"high");
    assert!(ram.read(DEVICE_GAP_START - 2, &mut bytes).is_err());
    assert!(ram.read(DEVICE_GAP_END - 2, &mut bytes).is_err());
    assert!(ram.read(u64::MAX - 1, &mut bytes).is_err());
}

#[test]
fn sizes_out_of_range_are_refused() {
    for bytes in [0, PAGE_SIZE, MEMORY_MIN + 1, MEMORY_MAX + PAGE_SIZE] {
        assert!(
            matches!(GuestRam::new(bytes), Err(MemoryError::Size(_))),
            "{bytes}"
        );
    }
}

#[test]
fn writes_mark_the_dirty_bitmap_and_reads_do_not() {
    let ram = GuestRam::new(MEMORY_MIN).unwrap();
    let mut bytes = [0; 8];
    ram.read(0x5000, &mut bytes).unwrap();
    assert!(!ram.is_dirty(0x5000));
    ram.write(0x5ffc, &[1; 8]).unwrap();
    assert!(ram.is_dirty(0x5000) && ram.is_dirty(0x6000));
    assert!(!ram.is_dirty(0x4000) && !ram.is_dirty(0x7000));
}

#[test]
fn compare_exchange_wants_an_aligned_word_and_marks_only_success() {
    let ram = GuestRam::new(MEMORY_MIN).unwrap();
    let piece = ram.piece(0x8004, 4).unwrap();
    assert_eq!(ram.compare_exchange_u32(piece, 1, 2), Some(Err(0)));
    assert!(!ram.is_dirty(0x8000));
    assert_eq!(ram.compare_exchange_u32(piece, 0, 2), Some(Ok(0)));
    assert!(ram.is_dirty(0x8000));
    let odd = ram.piece(0x8002, 4).unwrap();
    assert_eq!(ram.compare_exchange_u32(odd, 0, 2), None);
    let long = ram.piece(0x8000, 8).unwrap();
    assert_eq!(ram.compare_exchange_u32(long, 0, 2), None);
}

/// Returns words at these addresses that change from zero to `after`.
fn words(ram: &GuestRam, addresses: &[u64], length: usize, after: u64) -> Vec<Word<Place>> {
    let word = |address: &u64| Word {
        place: Place::new(ram.piece(*address, length).unwrap(), Piece::NONE),
        length,
        mask: u64::MAX >> (64 - 8 * length),
        before: 0,
        after,
    };
    addresses.iter().map(word).collect()
}

#[test]
fn words_are_written_in_both_regions_and_marked_dirty() {
    let ram = GuestRam::new((3 << 30) + (1 << 20)).unwrap();
    let high = DEVICE_GAP_END + 0x1ffe;
    let words = words(&ram, &[0x5ffe, high, 0x8000], 5, 0x05_0403_0201);
    assert_eq!(ram.leading_unchanged(&words), 3);
    assert!(!ram.is_dirty(0x5000) && !ram.is_dirty(high));
    let all = Leading {
        written: 3,
        differs: None,
        ..Leading::default()
    };
    assert_eq!(ram.write_leading(&words), all);
    assert_eq!(ram.leading_unchanged(&words), 0);
    for address in [0x5ffe, high, 0x8000] {
        let mut bytes = [0; 6];
        ram.read(address, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 0]);
        assert!(ram.is_dirty(address) && ram.is_dirty(address + 4));
    }
    assert!(!ram.is_dirty(0x4000) && !ram.is_dirty(0x7000) && !ram.is_dirty(0x9000));
}

#[test]
fn a_word_that_reads_back_as_another_value_is_reported() {
    let ram = GuestRam::new(MEMORY_MIN).unwrap();
    for (length, found) in [(2, 0x201), (4, 0x403_0201), (5, 0x05_0403_0201)] {
        let mut words = words(&ram, &[0x5000, 0x5010, 0x5020], length, 0x01);
        // `after` is longer than the word. Only a part of it is written, so another value is
        // read back.
        words[1].after = 0x07_0605_0403_0201;
        let leading = ram.write_leading(&words);
        let expected = Leading {
            written: 1,
            differs: Some(found),
            ..Leading::default()
        };
        assert_eq!(leading, expected, "{length}");
    }
}

#[test]
fn a_word_that_differs_ends_the_unchanged_ones() {
    let ram = GuestRam::new(MEMORY_MIN).unwrap();
    for length in [1, 2, 4, 5, 8] {
        let words = words(&ram, &[0x5000, 0x5010, 0x5020], length, 1);
        let last = 0x5010 + length as u64 - 1;
        ram.write(last, &[0x80]).unwrap();
        assert_eq!(ram.leading_unchanged(&words), 1, "{length}");
        ram.write(last, &[0]).unwrap();
        ram.write(last + 1, &[0x80]).unwrap();
        assert_eq!(ram.leading_unchanged(&words), 3, "{length}");
        ram.write(last + 1, &[0]).unwrap();
    }
}
