// SPDX-License-Identifier: Apache-2.0

//! Letting a thread that answers people run before the vCPUs where they share a core.
//!
//! A guest that was stopped has work to catch up with once it is resumed. Where its vCPU and the
//! thread that writes the answer share a core, the scheduler may well let the vCPU have its whole time
//! slice first: some milliseconds for an answer that takes some microseconds.

use std::mem::size_of;

/// The time slice asked for, which in Linux 6.12 and later anybody may ask for: a shorter one means an
/// earlier turn, not more turns. Earlier kernels take no notice.
const SLICE_NANOSECONDS: u64 = 100_000;

/// Asked for as well; granted to root and those whom `RLIMIT_NICE` allows it.
const NICE: i32 = -10;

/// `struct sched_attr`, as of its first version (`include/uapi/linux/sched/types.h`).
#[repr(C)]
#[derive(Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Asks for early turns for the calling thread, and for threads that it starts from now on. Whatever
/// of it the host does not grant is done without.
pub fn prefer_this_thread() {
    if !(set(NICE) || set(0)) {
        tracing::debug!("the scheduler grants no early turns");
    }
}

fn set(nice: i32) -> bool {
    let attributes = Attributes {
        size: u32::try_from(size_of::<Attributes>()).unwrap_or(0),
        policy: libc::SCHED_OTHER.unsigned_abs(),
        nice,
        runtime: SLICE_NANOSECONDS,
        ..Attributes::default()
    };
    // SAFETY: the kernel reads as many bytes of the structure as its first field says, its size.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structure_is_the_kernels_first() {
        assert_eq!(size_of::<Attributes>(), 48);
    }

    /// Without privileges too, and once the thread has what it asks for.
    #[test]
    fn a_thread_is_let_have_its_slice() {
        let asked = || {
            prefer_this_thread();
            set(0)
        };
        assert!(std::thread::spawn(asked).join().unwrap());
    }
}
