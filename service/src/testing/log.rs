// SPDX-License-Identifier: Apache-2.0
//! A kernel's log in the memory of the test guest.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use patchbay_guest::guest::Guest;
use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_guest::memory::GuestRam;
use patchbay_guest::testing::InMemoryGuest;
use patchbay_kernel_image::live::Log;
use patchbay_observe::state::Source;
use patchbay_observe::testing::{BASE, Log as Ring, Version, Writer};
use static_keys::GuestMemory;

use super::discovery::found;
use crate::keys::registry::{KernelLog, Registry};

/// The addresses of the words of the kernel's state, between the pointer to the ring and the ring.
const TAINTS: u64 = BASE + 8;
const LOAD: u64 = BASE + 16;
const REPORTS: u64 = BASE + 40;
const NO_PRESSURE: u64 = BASE + 48;
const PRESSURE: u64 = BASE + 56;
const PANIC: u64 = PRESSURE + 15 * 8;
const UPTIME: u64 = PANIC + 8;
/// The number of CPUs, behind the header of the ring; then the bits of those that are online, and
/// the offsets of two CPUs.
const CPUS: u64 = BASE + 0x400;
/// The pointers to the tasks of the two CPUs, and the tasks.
const CURRENT: u64 = CPUS + 0x40;
const TASKS: u64 = CPUS + 0x80;

/// A log in the memory of a guest that has registered.
pub struct GuestLog {
    ring: Mutex<Ring>,
    ram: GuestRam,
    log: Log,
}

impl GuestLog {
    /// Puts an empty log with 64 descriptors and 4 KiB of text into the guest's memory.
    ///
    /// # Panics
    /// If the guest has not registered.
    pub fn new(guest: &Arc<InMemoryGuest>) -> Self {
        let ring = Ring::new(Version::V6_12, 6, 12);
        let log = Log {
            page_table: found(guest).page_table,
            source: ring.source(),
            state: Source {
                taints: Some(TAINTS),
                load: Some(LOAD),
                reports: Some([REPORTS, REPORTS + 4]),
                pressure: Some([NO_PRESSURE, PRESSURE]),
                panic: Some(PANIC),
                uptime: Some([UPTIME, UPTIME + 8]),
            },
            tasks: Ok(patchbay_observe::tasks::Source {
                cpus: CPUS,
                online: CPUS + 8,
                offsets: CPUS + 16,
                current: CPUS,
                layout: patchbay_observe::tasks::Layout::read(&Version::V6_12)
                    .expect("it is whole"),
            }),
            trace: Err("the test has no trace events".to_owned()),
        };
        let log = Self {
            ring: Mutex::new(ring),
            ram: guest.ram().clone(),
            log,
        };
        // Writes the whole ring; no CPU panics.
        log.write(|_| {});
        log.write(|writer| writer.put(PANIC, u32::MAX.into()));
        log
    }

    /// Adds the kernel's trace events.
    #[must_use]
    pub fn with_trace(mut self, source: patchbay_observe::trace::Source) -> Self {
        self.log.trace = Ok(source);
        self
    }

    /// Tells the registry where the log is, as a discovery does.
    pub fn found_by(&self, registry: &Registry) {
        registry.remember_log(KernelLog {
            log: self.log.clone(),
            resets: 0,
        });
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes to the log.
    ///
    /// # Panics
    /// If the guest's memory does not map the log.
    pub fn write<T>(&self, write: impl FnOnce(&mut Writer) -> T) -> T {
        let memory = KernelMemory::new(&self.ram, self.log.page_table);
        self.ring().write(|writer| {
            let before = writer.memory().to_vec();
            let written = write(writer);
            let is_new = before.iter().all(|byte| *byte == 0) || before == writer.memory();
            let (old, new) = (before.chunks(32), writer.memory().chunks(32));
            let chunks: Vec<_> = (BASE..).step_by(32).zip(old.zip(new)).collect();
            // The text is written first and the state of its record last, as by a kernel.
            for (address, (old, new)) in chunks.into_iter().rev() {
                if is_new || old != new {
                    let place = memory.locate(address, new.len()).expect("mapped");
                    memory.write(place, new).expect("writable");
                }
            }
            written
        })
    }

    /// Writes the kernel's taints and its load averages, which have 11 fractional bits.
    pub fn put_state(&self, taints: u64, load: [u64; 3]) {
        self.write(|writer| {
            writer.put(TAINTS, taints);
            for (address, average) in (LOAD..).step_by(8).zip(load) {
                writer.put(address, average);
            }
        });
    }

    /// Writes the numbers of the kernel's warnings and oopses, and for each kind of pressure the
    /// percentage over 60 s.
    pub fn put_health(&self, [warnings, oopses]: [u32; 2], pressure: [u64; 5]) {
        self.write(|writer| {
            writer.put(REPORTS, u64::from(oopses) << 32 | u64::from(warnings));
            for (address, percent) in (PRESSURE + 8..).step_by(24).zip(pressure) {
                writer.put(address, percent << 11);
            }
        });
    }

    /// Writes the seconds since boot, and the nanoseconds in suspend.
    pub fn put_uptime(&self, seconds: u64, suspended: u64) {
        self.write(|writer| {
            writer.put(UPTIME, seconds);
            writer.put(UPTIME + 8, suspended);
        });
    }

    /// Gives each of up to two CPUs a task: its pid, that of its process, and its name.
    ///
    /// # Panics
    /// If there are more, or a name has over 16 bytes.
    pub fn put_tasks(&self, tasks: &[(u32, u32, &str)]) {
        assert!(tasks.len() <= 2, "two CPUs have room");
        self.write(|writer| {
            writer.put(CPUS, tasks.len() as u64);
            writer.put(CPUS + 8, u64::MAX);
            for (cpu, (pid, process, name)) in (0..).zip(tasks) {
                let (current, task) = (CURRENT + 8 * cpu, TASKS + 64 * cpu);
                writer.put(CPUS + 16 + 8 * cpu, current - CPUS);
                writer.put(current, task);
                writer.put(task, u64::from(*process) << 32 | u64::from(*pid));
                writer.put_bytes(task + 16, &[0; 16]);
                writer.put_bytes(task + 16, name.as_bytes());
            }
        });
    }

    /// Lets a CPU begin a panic.
    pub fn panic(&self, cpu: u32) {
        self.write(|writer| writer.put(PANIC, cpu.into()));
    }

    /// Prints a line of a level.
    pub fn print(&self, level: u8, text: &str) {
        self.write(|writer| writer.print(level, text));
    }
}
