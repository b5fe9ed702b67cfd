// SPDX-License-Identifier: Apache-2.0
//! Reads the taints and the load of a kernel. The kernel keeps them in single words.
//!
//! Each value is one aligned word that the kernel writes whole, so no copy of it can be torn. The
//! three load averages are copied one after another and may be 5 s apart, as those of
//! /proc/loadavg may.

use crate::{KernelView, word};

/// The symbol of the taints, an `unsigned long` (kernel/panic.c).
pub const TAINTS: &str = "tainted_mask";
/// The symbol of the load averages, three `unsigned long` (kernel/sched/loadavg.c).
pub const LOAD: &str = "avenrun";

/// Number of fractional bits of a load average, `FSHIFT` in include/linux/sched/loadavg.h.
const FRACTION_BITS: u32 = 11;
/// The number that `loadavg_proc_show()` in fs/proc/loadavg.c adds before it cuts to two decimals.
const ROUNDING: u64 = (1 << FRACTION_BITS) / 200;

/// The addresses of the words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Address of [`TAINTS`], if it is known.
    pub taints: Option<u64>,
    /// Address of [`LOAD`], if it is known.
    pub load: Option<u64>,
}

/// The words of a kernel. A word that cannot be read is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// A bit for each taint, as in /proc/sys/kernel/tainted.
    pub taints: Option<u64>,
    /// The averages of 1, 5 and 15 minutes in hundredths, as /proc/loadavg shows them.
    pub load: Option<[u64; 3]>,
}

impl Source {
    /// Reads the words.
    pub fn read(&self, view: &(impl KernelView + ?Sized)) -> State {
        let average = |address: u64| {
            let scaled = word(view, address)?.saturating_add(ROUNDING);
            // With 64 bits, the multiplication would overflow for the largest words.
            Some(((u128::from(scaled) * 100) >> FRACTION_BITS) as u64)
        };
        let load = |first: u64| {
            let [second, third] = [8, 16].map(|offset| first.checked_add(offset));
            Some([average(first)?, average(second?)?, average(third?)?])
        };
        State {
            taints: self.taints.and_then(|address| word(view, address)),
            load: self.load.and_then(load),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0xffff_ffff_8260_0000;

    /// Words at consecutive addresses from [`BASE`] on.
    struct Words(Vec<u64>);

    impl KernelView for Words {
        fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
            let index = address.checked_sub(BASE).map(|offset| offset as usize / 8);
            let Some(word) = index.and_then(|index| self.0.get(index)) else {
                return false;
            };
            bytes.copy_from_slice(&word.to_le_bytes());
            true
        }
    }

    fn at(taints: u64, load: u64) -> Source {
        Source {
            taints: Some(BASE + taints),
            load: Some(BASE + load),
        }
    }

    #[test]
    fn taints_and_load_are_read_as_proc_shows_them() {
        // `ROUNDING` is 10: (2028 + 10) / 2048 is cut to 0.99, and (2038 + 10) / 2048 is 1.00.
        let words = Words(vec![1 << 9 | 1, 2028, 2038, 3 << 11]);
        let state = at(0, 8).read(&words);
        assert_eq!(state.taints, Some(0x201));
        assert_eq!(state.load, Some([99, 100, 300]));
    }

    #[test]
    fn words_that_cannot_be_read_are_left_out_and_the_largest_do_no_harm() {
        let words = Words(vec![u64::MAX; 4]);
        let load = (u128::from(u64::MAX) * 100 >> 11) as u64;
        assert_eq!(at(0, 8).read(&words).load, Some([load; 3]));
        // The third average lies after the last word.
        assert_eq!(at(0, 16).read(&words).load, None);
        let wild = Source {
            taints: Some(u64::MAX),
            load: Some(u64::MAX - 8),
        };
        assert_eq!(wild.read(&words), State::default());
        assert_eq!(Source::default().read(&words), State::default());
    }
}
