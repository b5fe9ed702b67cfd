// SPDX-License-Identifier: Apache-2.0

//! Scheduling hints for threads that answer requests.
//!
//! A resumed guest has work to catch up with. If its vCPU and the thread that writes the answer
//! share a core, the scheduler may run the vCPU for a whole time slice first. This delays an answer
//! that takes microseconds by milliseconds.

use std::mem::size_of;

/// Requested time slice. A shorter slice gives earlier turns, not more CPU time. Linux 6.12 and
/// later grant the request to any process; earlier kernels ignore it.
const SLICE_NANOSECONDS: u64 = 100_000;

/// Requested niceness. Granted to root and within `RLIMIT_NICE`.
const NICE: i32 = -10;

/// `struct sched_attr`, first version (`include/uapi/linux/sched/types.h`).
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

/// Requests early turns for the calling thread and the threads that it starts later. The host may
/// refuse; that is not an error.
pub fn prefer_this_thread() {
    if !(set(NICE) || set(0)) {
        tracing::debug!("the scheduler refuses a shorter time slice");
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
    // SAFETY: the kernel reads only the number of bytes given by the structure's first field, its
    // size.
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

    /// The request also succeeds without privileges and when the values are already set.
    #[test]
    fn a_thread_is_let_have_its_slice() {
        let asked = || {
            prefer_this_thread();
            set(0)
        };
        assert!(std::thread::spawn(asked).join().unwrap());
    }
}
