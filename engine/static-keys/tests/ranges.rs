// SPDX-License-Identifier: Apache-2.0
//! Compares the arithmetic of ranges with arithmetic that cannot overflow.

use proptest::prelude::*;
use static_keys::Range;

/// Addresses near the ends of the address space, near each other, and anywhere.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..16_u64,
        u64::MAX - 16..=u64::MAX,
        1000..1016_u64,
        any::<u64>()
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ranges_do_not_wrap(start in address(), end in address(), at in address(), len in address()) {
        let range = Range { start, end };
        let [wide_start, wide_end, first, length] = [start, end, at, len].map(u128::from);
        let past = first + length;
        prop_assert_eq!(range.len().map(u128::from), wide_end.checked_sub(wide_start));
        prop_assert_eq!(range.is_empty(), wide_end <= wide_start);
        // A range ends at u64::MAX at most, so it never contains the last byte of the address
        // space.
        let fits = past <= u128::from(u64::MAX);
        prop_assert_eq!(
            range.contains(at, len),
            fits && wide_start <= first && past <= wide_end
        );
        let (low, high) = (first.max(wide_start), past.min(wide_end));
        prop_assert_eq!(range.overlaps(at, len), low < high);
    }
}
