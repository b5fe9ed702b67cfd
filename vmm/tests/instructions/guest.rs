// SPDX-License-Identifier: Apache-2.0
//! A guest that has memory, but no vCPUs to stop.

use std::sync::Arc;
use std::time::Duration;

use patchbay_attach::memory::Access;
use patchbay_guest::console::Console;
use patchbay_guest::guest::{Guest, GuestDescription, Machine, PausedGuest};
use patchbay_guest::memory;
use patchbay_guest::pause::PauseError;
use patchbay_guest::testing::TestConsole;
use patchbay_vmm::memory::GuestRam;

use super::callgrind;
use super::kernel::MEMORY_BYTES;
use super::monitor::Monitor;

/// Name of the part of the executor's count that ends when the guest resumes.
pub const WINDOW: &str = "window";

/// The access of the service to the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// It is the memory of our monitor, whose vCPUs' RIPs are known.
    Own,
    /// It belongs to another monitor, and is its file.
    File,
    /// It belongs to another monitor, and is read and written by system calls.
    Process,
}

pub struct MemoryGuest {
    ram: memory::GuestRam,
    knows_rips: bool,
    console: TestConsole,
    /// The other monitor.
    _other: Option<Monitor>,
}

impl MemoryGuest {
    pub fn new(memory: Memory) -> Self {
        let other = (memory != Memory::Own).then(Monitor::start);
        let ram: memory::GuestRam = match &other {
            None => Arc::new(GuestRam::new(MEMORY_BYTES).expect("memory")),
            Some(other) if memory == Memory::File => Arc::new(other.memory(Access::File)),
            Some(other) => Arc::new(other.memory(Access::Process)),
        };
        Self {
            ram,
            knows_rips: memory == Memory::Own,
            console: TestConsole::default(),
            _other: other,
        }
    }
}

impl Machine for MemoryGuest {
    fn description(&self) -> GuestDescription {
        GuestDescription {
            name: "instructions".to_owned(),
            vcpus: 1,
            memory_bytes: MEMORY_BYTES,
            transports: Vec::new(),
        }
    }

    fn has_ended(&self) -> bool {
        false
    }

    fn shut_down(&self) {}

    fn press_power_button(&self) {}

    fn take_back_press(&self) -> bool {
        false
    }

    fn console(&self) -> &dyn Console {
        &self.console
    }
}

impl Guest for MemoryGuest {
    type Paused<'a> = Stopped;

    fn ram(&self) -> &memory::GuestRam {
        &self.ram
    }

    fn pause(&self, _: Duration) -> Result<Stopped, PauseError> {
        callgrind::end_part(c"before the window");
        Ok(Stopped {
            knows_rips: self.knows_rips,
        })
    }
}

pub struct Stopped {
    knows_rips: bool,
}

impl Drop for Stopped {
    fn drop(&mut self) {
        callgrind::end_part(c"window");
    }
}

impl PausedGuest for Stopped {
    fn rips(&self) -> Option<&[u64]> {
        // A guest with one vCPU has one RIP. This one is in user space.
        self.knows_rips.then_some(&[0x1000])
    }

    fn breakpoint_pending(&self) -> Option<bool> {
        self.knows_rips.then_some(false)
    }

    fn stop_time(&self) -> Duration {
        Duration::ZERO
    }
}
