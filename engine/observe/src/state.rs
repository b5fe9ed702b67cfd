// SPDX-License-Identifier: Apache-2.0
//! Reads a kernel's taints, its load, its uptime, the number of its warnings, its pressure, and
//! whether it has panicked.
//!
//! Each value except the uptime is one aligned word that the kernel writes whole, so no copy of it
//! can be torn. The words are copied one after another: the load averages may be 5 s apart, as
//! those of /proc/loadavg may, and the pressures 2 s. The two words of the uptime are changed
//! together only when the guest resumes from suspend.
//!
//! The kernel computes pressures only while tasks run. Those of a guest that has been idle since
//! are the last ones, whereas /proc/pressure also counts the idle time.

use crate::fields::Structure;
use crate::{KernelView, Types, word};

/// The symbol of the taints, an `unsigned long` (kernel/panic.c).
pub const TAINTS: &str = "tainted_mask";
/// The symbol of the load averages, three `unsigned long` (kernel/sched/loadavg.c).
pub const LOAD: &str = "avenrun";
/// The symbol of the number of warnings since boot, an `atomic_t` (kernel/panic.c). The kernel
/// counts them since 6.2, and in later updates of 5.10, 5.15 and 6.1.
pub const WARNINGS: &str = "warn_count";
/// The symbol of the number of oopses since boot, an `atomic_t` (kernel/exit.c), which is as old as
/// [`WARNINGS`].
pub const OOPSES: &str = "oops_count";
/// The symbol of the `struct psi_group` of all tasks (kernel/sched/psi.c).
pub const PRESSURE: &str = "psi_system";
/// The symbol of the static key that is on if the kernel does not measure pressure
/// (kernel/sched/psi.c). A static key begins with its count.
pub const NO_PRESSURE: &str = "psi_disabled";

/// The symbol of the CPU that panics, an `atomic_t` (kernel/panic.c), which is -1 before a panic.
pub const PANIC: &str = "panic_cpu";
/// The symbols of the kernel's timekeepers (kernel/time/timekeeping.c). From 6.17 on,
/// `timekeeper_data` is an array whose first element keeps the system's time. Until 6.16, `tk_core`
/// is the only timekeeper.
pub const TIMEKEEPERS: [&str; 2] = ["timekeeper_data", "tk_core"];

/// Every type that [`averages`] and [`Timekeeper::find`] look up.
pub const TYPES: &[&str] = &[
    "psi_group",
    "seqcount_raw_spinlock",
    "timekeeper",
    "tk_data",
];

/// Number of fractional bits of a load average and of a pressure, `FSHIFT` in
/// include/linux/sched/loadavg.h.
const FRACTION_BITS: u32 = 11;
/// The number that `loadavg_proc_show()` in fs/proc/loadavg.c adds before it cuts to two decimals.
const ROUNDING: u64 = (1 << FRACTION_BITS) / 200;

/// The kinds of pressure, in the order of `enum psi_states` in include/linux/psi_types.h. The
/// kernel has added others only after them.
pub const PRESSURES: [&str; 5] = [
    "io some",
    "io full",
    "memory some",
    "memory full",
    "cpu some",
];
/// The size of the averages of one kind: 10, 60 and 300 s, an `unsigned long` each.
const AVERAGES: u32 = 3 * 8;

/// The addresses of the words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Address of [`TAINTS`], if it is known.
    pub taints: Option<u64>,
    /// Address of [`LOAD`], if it is known.
    pub load: Option<u64>,
    /// Addresses of [`WARNINGS`] and [`OOPSES`], if they are known.
    pub reports: Option<[u64; 2]>,
    /// Addresses of [`NO_PRESSURE`] and of the first average of [`PRESSURE`], if they are known.
    pub pressure: Option<[u64; 2]>,
    /// Address of [`PANIC`], if it is known.
    pub panic: Option<u64>,
    /// Addresses of the seconds since boot without the time in suspend, and of the nanoseconds in
    /// suspend, if they are known.
    pub uptime: Option<[u64; 2]>,
}

/// The words of a kernel. A word that cannot be read is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// A bit for each taint, as in /proc/sys/kernel/tainted.
    pub taints: Option<u64>,
    /// The averages of 1, 5 and 15 minutes in hundredths, as /proc/loadavg shows them.
    pub load: Option<[u64; 3]>,
    /// The number of warnings since boot, as in /sys/kernel/warn_count, and that of oopses, as in
    /// /sys/kernel/oops_count.
    pub reports: Option<[u64; 2]>,
    /// For each of [`PRESSURES`], the averages of 10 and 60 s in hundredths of a percent. `None` if
    /// the kernel measures none.
    pub pressure: Option<[[u64; 2]; PRESSURES.len()]>,
    /// A CPU has begun a panic.
    pub panicked: Option<bool>,
    /// The time since boot in whole seconds, with the time in suspend, as in /proc/uptime. The
    /// kernel advances it with the timer tick, so it stands still in a guest that is paused, and
    /// may stand still in one that hangs or has panicked.
    pub uptime: Option<u64>,
}

/// The offsets of the time in a [timekeeper](TIMEKEEPERS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timekeeper {
    /// Offset of the seconds since boot without the time in suspend.
    seconds: u64,
    /// Offset of the nanoseconds in suspend.
    suspended: u64,
}

impl Timekeeper {
    /// Finds the offsets in a kernel's own types. A `struct timekeeper` follows its sequence count.
    /// Since 6.13 a `struct tk_data` contains both. Before, the structure has no name.
    pub fn find(types: &(impl Types + ?Sized)) -> Option<Self> {
        let timekeeper = Structure::new(types, "timekeeper").ok()?;
        let start = match Structure::new(types, "tk_data") {
            Ok(data) => data.member(&["timekeeper"], timekeeper.size).ok()?.offset,
            // The timekeeper has 64-bit members, and is aligned like them.
            Err(_) => Structure::new(types, "seqcount_raw_spinlock")
                .ok()?
                .size
                .next_multiple_of(8),
        };
        let offset = |member: &str| {
            let offset = timekeeper.member(&[member], 8).ok()?.offset;
            start.checked_add(offset).map(u64::from)
        };
        Some(Self {
            seconds: offset("ktime_sec")?,
            suspended: offset("offs_boot")?,
        })
    }

    /// Returns the addresses of the two words in a timekeeper, for [`Source::uptime`].
    #[must_use]
    pub fn words(self, timekeeper: u64) -> Option<[u64; 2]> {
        Some([
            timekeeper.checked_add(self.seconds)?,
            timekeeper.checked_add(self.suspended)?,
        ])
    }
}

/// Returns the offset of the averages in a `struct psi_group`, from a kernel's own types; `None` if
/// it is built without CONFIG_PSI.
pub fn averages(types: &(impl Types + ?Sized)) -> Option<u64> {
    let group = Structure::new(types, "psi_group").ok()?;
    let size = AVERAGES * PRESSURES.len() as u32;
    Some(group.member(&["avg"], size).ok()?.offset.into())
}

impl Source {
    /// Reads the words.
    pub fn read(&self, view: &(impl KernelView + ?Sized)) -> State {
        State {
            taints: self.taints.and_then(|address| word(view, address)),
            load: self.load.and_then(|address| {
                let average = |index| hundredths(word(view, at(address, index)?)?, ROUNDING);
                Some([average(0)?, average(1)?, average(2)?])
            }),
            reports: self.reports.and_then(|[warnings, oopses]| {
                Some([count(view, warnings)?, count(view, oopses)?])
            }),
            pressure: self.pressure.and_then(|[is_off, averages]| {
                if count(view, is_off)? != 0 {
                    return None;
                }
                let mut pressure = [[0; 2]; PRESSURES.len()];
                for (kind, pair) in (0..).zip(&mut pressure) {
                    for (index, average) in (3 * kind..).zip(pair) {
                        *average = hundredths(word(view, at(averages, index)?)?, 0)?;
                    }
                }
                Some(pressure)
            }),
            panicked: self.panic.and_then(|cpu| {
                // A CPU's number is not negative.
                Some(count(view, cpu)? <= MAX_CPU)
            }),
            uptime: self.uptime.and_then(|[seconds, suspended]| {
                let suspended = i64::try_from(word(view, suspended)?).ok()?;
                let suspended = u64::try_from(suspended).ok()? / 1_000_000_000;
                // The kernel copies its timekeeper as a whole, perhaps byte by byte. Two copies
                // with the same time, or one second apart, were not taken in the middle.
                let [earlier, later] = [word(view, seconds)?, word(view, seconds)?];
                if later.wrapping_sub(earlier) > 1 {
                    return None;
                }
                let uptime = later.checked_add(suspended)?;
                (uptime <= MAX_UPTIME).then_some(uptime)
            }),
        }
    }
}

/// The largest number of a CPU in an `int`.
const MAX_CPU: u64 = i32::MAX as u64;
/// The largest plausible uptime in seconds, a thousand years. A larger one is no time of a kernel.
const MAX_UPTIME: u64 = 1000 * 366 * 86_400;

/// Returns the address of a word of an array.
fn at(first: u64, index: u64) -> Option<u64> {
    first.checked_add(8 * index)
}

/// Returns the hundredths of a number with [`FRACTION_BITS`].
fn hundredths(scaled: u64, rounding: u64) -> Option<u64> {
    // With 64 bits, the multiplication would overflow for the largest words.
    let scaled = u128::from(scaled.saturating_add(rounding));
    u64::try_from((scaled * 100) >> FRACTION_BITS).ok()
}

/// Reads an `atomic_t`.
fn count(view: &(impl KernelView + ?Sized), address: u64) -> Option<u64> {
    let mut bytes = [0; 4];
    view.read(address, &mut bytes)
        .then(|| u32::from_le_bytes(bytes).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0xffff_ffff_8260_0000;

    /// Words at consecutive addresses from [`BASE`] on.
    struct Words(Vec<u64>);

    impl KernelView for Words {
        fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
            let offset = address.checked_sub(BASE).map(|offset| offset as usize);
            let word = offset.and_then(|offset| self.0.get(offset / 8));
            let Some((word, offset)) = word.zip(offset) else {
                return false;
            };
            let word = word.to_le_bytes();
            let part = word[offset % 8..].get(..bytes.len());
            part.map(|part| bytes.copy_from_slice(part)).is_some()
        }
    }

    fn at(taints: u64, load: u64) -> Source {
        Source {
            taints: Some(BASE + taints),
            load: Some(BASE + load),
            ..Source::default()
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
        let load = ((u128::from(u64::MAX) * 100) >> 11) as u64;
        assert_eq!(at(0, 8).read(&words).load, Some([load; 3]));
        // The third average lies after the last word.
        assert_eq!(at(0, 16).read(&words).load, None);
        let wild = Source {
            taints: Some(u64::MAX),
            load: Some(u64::MAX - 8),
            reports: Some([u64::MAX; 2]),
            pressure: Some([BASE, u64::MAX - 8]),
            panic: Some(u64::MAX),
            uptime: Some([u64::MAX, u64::MAX - 8]),
        };
        let words = Words(vec![0]);
        assert_eq!(wild.read(&words), State::default());
        assert_eq!(Source::default().read(&words), State::default());
    }

    #[test]
    fn warnings_are_counts_of_32_bits() {
        let words = Words(vec![7 << 32 | 3]);
        let source = Source {
            reports: Some([BASE, BASE + 4]),
            ..Source::default()
        };
        assert_eq!(source.read(&words).reports, Some([3, 7]));
    }

    #[test]
    fn pressure_is_none_if_the_kernel_does_not_measure_it() {
        let source = Source {
            pressure: Some([BASE, BASE + 8]),
            ..Source::default()
        };
        let mut words = vec![0];
        words.extend((0..15).map(|index| index << FRACTION_BITS));
        let whole = |percent: u64| 100 * percent;
        let expected = [[0, 1], [3, 4], [6, 7], [9, 10], [12, 13]].map(|pair| pair.map(whole));
        assert_eq!(source.read(&Words(words.clone())).pressure, Some(expected));
        words[0] = 1;
        assert_eq!(source.read(&Words(words.clone())).pressure, None);
        // The last average lies after the last word.
        words[0] = 0;
        words.truncate(14);
        assert_eq!(source.read(&Words(words)).pressure, None);
    }

    #[test]
    fn a_panic_is_the_number_of_its_cpu() {
        let source = Source {
            panic: Some(BASE),
            ..Source::default()
        };
        for (cpu, panicked) in [(-1_i32, false), (0, true), (7, true), (i32::MIN, false)] {
            let words = Words(vec![u64::from(cpu.cast_unsigned())]);
            assert_eq!(source.read(&words).panicked, Some(panicked), "{cpu}");
        }
    }

    #[test]
    fn the_uptime_counts_the_time_in_suspend_and_is_plausible() {
        let source = Source {
            uptime: Some([BASE, BASE + 8]),
            ..Source::default()
        };
        let uptime = |seconds, suspended| source.read(&Words(vec![seconds, suspended])).uptime;
        assert_eq!(uptime(60, 0), Some(60));
        assert_eq!(uptime(60, 3_999_999_999), Some(63));
        assert_eq!(uptime(MAX_UPTIME, 0), Some(MAX_UPTIME));
        assert_eq!(uptime(MAX_UPTIME, 1_000_000_000), None);
        assert_eq!(uptime(u64::MAX, 1_000_000_000), None);
        // The offset is a signed number, and never negative.
        assert_eq!(uptime(60, u64::MAX), None);
        // The second word cannot be read.
        assert_eq!(source.read(&Words(vec![60])).uptime, None);
    }

    /// Each read at [`BASE`] returns the next of these words. All other words are zero.
    struct Copies(std::cell::RefCell<Vec<u64>>);

    impl KernelView for Copies {
        fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
            let word = match address {
                BASE => self.0.borrow_mut().remove(0),
                _ => 0,
            };
            bytes.copy_from_slice(&word.to_le_bytes());
            true
        }
    }

    /// The kernel copies the lowest byte of 0x1ff seconds before the others, or after them.
    #[test]
    fn a_time_that_is_copied_in_the_middle_is_not_shown() {
        let source = Source {
            uptime: Some([BASE, BASE + 8]),
            ..Source::default()
        };
        let uptime = |copies: [u64; 2]| source.read(&Copies(copies.to_vec().into())).uptime;
        assert_eq!(uptime([0x1ff, 0x200]), Some(0x200));
        assert_eq!(uptime([0x100, 0x200]), None);
        assert_eq!(uptime([0x2ff, 0x200]), None);
    }

    /// Types with these sizes. The members lie where the kernels 6.1 to 6.12 have them.
    struct Time(&'static [(&'static str, u32)]);

    impl Types for Time {
        fn member(&self, structure: &str, path: &[&str]) -> Option<crate::Member> {
            let offset = match (structure, path) {
                ("timekeeper", ["ktime_sec"]) => 120,
                ("timekeeper", ["offs_boot"]) => 152,
                ("tk_data", ["timekeeper"]) => 16,
                _ => return None,
            };
            Some(crate::Member {
                offset,
                shift: 0,
                width: 0,
                size: None,
            })
        }

        fn size(&self, structure: &str) -> Option<u32> {
            let found = self.0.iter().find(|(name, _)| *name == structure);
            found.map(|(_, size)| *size)
        }
    }

    #[test]
    fn the_time_is_found_with_and_without_a_named_structure() {
        const LOCK: (&str, u32) = ("seqcount_raw_spinlock", 4);
        let words = |sizes| Timekeeper::find(&Time(sizes))?.words(BASE);
        let before_6_13 = words(&[LOCK, ("timekeeper", 280)]);
        assert_eq!(before_6_13, Some([BASE + 128, BASE + 160]));
        let since = words(&[LOCK, ("timekeeper", 280), ("tk_data", 640)]);
        assert_eq!(since, Some([BASE + 136, BASE + 168]));
        // Each member must lie within its structure.
        assert_eq!(words(&[LOCK, ("timekeeper", 159)]), None);
        assert_eq!(words(&[LOCK, ("timekeeper", 280), ("tk_data", 295)]), None);
        assert_eq!(words(&[("timekeeper", 280)]), None);
        let found = Timekeeper::find(&Time(&[LOCK, ("timekeeper", 280)])).expect("found");
        assert_eq!(found.words(u64::MAX - 8), None);
    }

    #[test]
    fn the_averages_must_lie_within_the_group() {
        struct Group(u32);
        impl Types for Group {
            fn member(&self, structure: &str, path: &[&str]) -> Option<crate::Member> {
                let is_average = structure == "psi_group" && path == ["avg"];
                is_average.then_some(crate::Member {
                    offset: 64,
                    shift: 0,
                    width: 0,
                    size: None,
                })
            }

            fn size(&self, _: &str) -> Option<u32> {
                Some(self.0)
            }
        }
        assert_eq!(averages(&Group(64 + 120)), Some(64));
        assert_eq!(averages(&Group(64 + 119)), None);
    }
}
