// SPDX-License-Identifier: Apache-2.0
//! A guest as the service sees it: what a monitor implements.

use std::time::Duration;

use static_keys::{GateWord, Write};

use crate::console::Console;
use crate::kernel_memory::Place;
use crate::memory::GuestRam;
use crate::pause::PauseError;

/// The mechanism by which the guest's requests reach the monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// `KVM_HC_MAP_GPA_RANGE` with `KVM_CAP_EXIT_HYPERCALL`.
    Hypercall,
    /// WRMSR with `KVM_CAP_X86_USER_SPACE_MSR`.
    Msr,
}

/// Properties of the guest. Only the size of its memory may change.
#[derive(Clone, Debug)]
pub struct GuestDescription {
    /// Name that the operator gave the guest.
    pub name: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
    /// Transports that the probe at start found working, most preferred first.
    pub transports: Vec<Transport>,
}

/// The guest's lifecycle. The methods return at once. They may be called at any time, also while
/// the guest is paused, from any thread except those of vCPUs.
pub trait Machine: Send + Sync {
    /// Returns the guest's properties.
    fn description(&self) -> GuestDescription;

    /// Returns whether the guest has powered off, reset or crashed: no vCPU will run again. Once
    /// true, it stays true.
    fn has_ended(&self) -> bool;

    /// Cuts the guest's power; the monitor ends afterwards. It does not wait for the end and may be
    /// called more than once.
    fn shut_down(&self);

    /// Presses the guest's power button without waiting for a reaction. A press that the guest's
    /// kernel has not seen stays pending until it is seen or cancelled.
    fn press_power_button(&self);

    /// Returns whether the guest has a power button that can be pressed.
    fn has_power_button(&self) -> bool {
        true
    }

    /// Cancels a press that the guest's kernel has not seen. Returns false if there is none.
    fn take_back_press(&self) -> bool;

    /// Returns the guest's serial console. It closes when the guest ends, and not before.
    fn console(&self) -> &dyn Console;
}

/// A change that is about to be made.
pub struct Intended<'a> {
    /// Full names of the keys. [`Write::key`] is an index.
    pub keys: &'a mut dyn Iterator<Item = &'a str>,
    /// The writes, in their order: sites before counts. A length of 2 or 5 is an instruction, 4 a
    /// count.
    pub writes: &'a mut dyn Iterator<Item = Write<Place>>,
    /// The gates that concern the change. No write may be rolled back while one is closed.
    pub gates: &'a mut dyn Iterator<Item = GateWord<Place>>,
}

/// A guest that can be stopped and patched.
pub trait Guest: Machine + 'static {
    /// The stopped guest. Dropping it resumes every vCPU at once.
    type Paused<'a>: PausedGuest
    where
        Self: 'a;

    /// Returns the guest's memory, the same object for as long as the guest exists.
    fn ram(&self) -> &GuestRam;

    /// Stops every vCPU within `timeout`, or changes nothing.
    ///
    /// When this returns `Ok`, and until the answer is dropped:
    ///
    /// - No vCPU executes guest code. Those that have not started, are halted or have ended count
    ///   as stopped, and cannot begin meanwhile. All writes that a vCPU made before it stopped are
    ///   seen by this thread; all writes of this thread are seen by every vCPU once it runs again,
    ///   instruction fetch included.
    /// - No request of the guest is cut in half: a vCPU for which
    ///   [`crate::requests::GuestRequests::request`] runs, or whose answer is not yet in its
    ///   registers, has not stopped. It is late.
    /// - Where RIPs are known, accesses to ports and device memory are settled: an instruction that
    ///   left the guest for one has completed, so that the published RIP is the next one's.
    ///
    /// Called by one thread at a time. Where vCPUs are threads of this process, it neither
    /// allocates nor takes a lock that another thread may hold once the first vCPU was asked to
    /// stop, and the same holds for dropping the answer.
    ///
    /// A stop does not outlive this process, regardless of how the process ends.
    ///
    /// # Errors
    /// [`PauseError`]; the guest then continues to run, or has ended, and no vCPU stays stopped.
    /// [`PauseError::AlreadyPaused`] while an earlier returned value exists.
    fn pause(&self, timeout: Duration) -> Result<Self::Paused<'_>, PauseError>;

    /// Called before the pause in which this change is made, or during a lasting pause. If the
    /// guest outlives this process, the implementation stores the change outside this process, so
    /// that a partial change can be rolled back; an instruction may then be in the middle of
    /// [`static_keys::instruction::replace`]. Other implementations need nothing.
    ///
    /// # Errors
    /// [`PauseError::Unable`]: the change cannot be stored, so it must not be made.
    fn will_write(&self, change: Intended<'_>) -> Result<(), PauseError> {
        let _ = change;
        Ok(())
    }
}

/// A stopped guest. Its answers do not change while the guest is stopped. Where vCPUs are threads
/// of this process they are given without allocating.
///
/// A monitor that cannot inspect a vCPU reports that its position is unknown, and never guesses.
/// The service then patches text only if the kernel's own words rule out that a vCPU is inside a
/// site.
pub trait PausedGuest {
    /// Returns the guest-virtual addresses of the next instruction of each vCPU, in the order of
    /// the vCPUs; those that have not started or have ended have none. `None`: unknown.
    fn rips(&self) -> Option<&[u64]>;
    /// Returns whether a breakpoint exception (#BP) waits to be delivered on any vCPU. `None`:
    /// unknown.
    fn breakpoint_pending(&self) -> Option<bool>;
    /// Returns the time from the request until the last vCPU stopped.
    fn stop_time(&self) -> Duration;
    /// Called after all checks and before the first write, for [`Guest::will_write`].
    ///
    /// # Errors
    /// A sentence that says why nothing may be written.
    fn begin_writes(&self) -> Result<(), String> {
        Ok(())
    }
    /// Checks after the writes and before the resume that the writes will not be lost. If they may
    /// be, the service reverts them and calls [`PausedGuest::undone`].
    ///
    /// # Errors
    /// A sentence that says why they may be lost, for example because the guest's memory is being
    /// copied to another host.
    fn check_writes(&self) -> Result<(), String> {
        Ok(())
    }
    /// Called after writes were reverted and before the resume. Another process may have copied the
    /// memory between a write and its revert; the monitor invalidates that copy.
    fn undone(&self) {}
}
