// SPDX-License-Identifier: Apache-2.0
//! A guest that has the monitor's memory, but no vCPUs to stop.

use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::console::Console;
use patchbay_guest::guest::{Guest, GuestDescription, Machine, PausedGuest};
use patchbay_guest::memory;
use patchbay_guest::pause::PauseError;
use patchbay_guest::testing::TestConsole;
use patchbay_vmm::memory::GuestRam;

use super::callgrind;
use super::kernel::MEMORY_BYTES;

/// Name of the part of the executor's count that ends when the guest resumes.
pub const WINDOW: &str = "window";

pub struct MemoryGuest {
    pub ram: GuestRam,
    shared: memory::GuestRam,
    console: TestConsole,
}

impl MemoryGuest {
    pub fn new() -> Self {
        let ram = GuestRam::new(MEMORY_BYTES).expect("memory");
        Self {
            shared: Arc::new(ram.clone()),
            ram,
            console: TestConsole::default(),
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
        &self.shared
    }

    fn pause(&self, _: Duration) -> Result<Stopped, PauseError> {
        callgrind::end_part(c"before the window");
        Ok(Stopped)
    }
}

pub struct Stopped;

impl Drop for Stopped {
    fn drop(&mut self) {
        callgrind::end_part(c"window");
    }
}

impl PausedGuest for Stopped {
    fn rips(&self) -> Option<&[u64]> {
        // A guest with one vCPU has one RIP. This one is in user space.
        Some(&[0x1000])
    }

    fn breakpoint_pending(&self) -> Option<bool> {
        Some(false)
    }

    fn stop_time(&self) -> Duration {
        Duration::ZERO
    }
}
