// SPDX-License-Identifier: Apache-2.0
//! The traits through which the service controls a guest. A monitor implements them.

use std::time::Duration;

use static_keys::{GateWord, Write};

use crate::console::Console;
use crate::kernel_memory::Place;
use crate::memory::GuestRam;
use crate::pause::PauseError;
use crate::snapshot::{ControlState, MemorySink, SaveError};

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
    /// Transports that worked when they were probed at the start, most preferred first.
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

    /// Cuts the guest's power; the monitor ends afterwards. This method does not wait for the end
    /// and may be called more than once.
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
    /// Full names of the keys. [`Write::key`] is an index into them.
    pub keys: &'a mut dyn Iterator<Item = &'a str>,
    /// The writes, in their order: sites before counts. A write of 2 or 5 bytes replaces an
    /// instruction, a write of 4 bytes a count.
    pub writes: &'a mut dyn Iterator<Item = Write<Place>>,
    /// The gates that concern the change. No write may be rolled back while one of them is closed.
    pub gates: &'a mut dyn Iterator<Item = GateWord<Place>>,
    /// Digest of the ledger that has the change as pending ([`Guest::will_keep`]). `None` if no
    /// ledger has it.
    pub ledger: Option<[u8; 32]>,
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
    /// When this returns `Ok`, and until the returned value is dropped:
    ///
    /// - No vCPU executes guest code. A vCPU that has not started, is halted or has ended counts as
    ///   stopped, and cannot enter the guest. All writes that a vCPU made before it stopped are
    ///   visible to this thread. All writes of this thread are visible to every vCPU once it runs
    ///   again, including to its instruction fetch.
    /// - No request of the guest is interrupted halfway. A vCPU does not count as stopped while
    ///   [`crate::requests::GuestRequests::request`] runs for it, or while the result is not yet in
    ///   its registers; such a vCPU is late.
    /// - If RIPs are known, accesses to ports and device memory are completed: an instruction that
    ///   left the guest for such an access has finished, so the published RIP is that of the next
    ///   instruction.
    ///
    /// Only one thread calls this at a time. If vCPUs are threads of this process, the
    /// implementation neither allocates memory nor takes a lock that another thread may hold, from
    /// the time when it requests the first vCPU to stop. The same holds for dropping the returned
    /// value.
    ///
    /// The stop ends when this process ends, regardless of how the process ends.
    ///
    /// # Errors
    /// [`PauseError`]. This call then leaves no vCPU stopped: the guest continues to run or has
    /// ended. [`PauseError::AlreadyPaused`] while an earlier returned value exists; the guest then
    /// stays paused.
    fn pause(&self, timeout: Duration) -> Result<Self::Paused<'_>, PauseError>;

    /// Announces a change before the pause in which it is made, or during a lasting pause. If the
    /// guest can outlive this process, the implementation stores the change outside this process,
    /// so that a partial change can be rolled back. Such a partial change may include an
    /// instruction in the middle of [`static_keys::instruction::replace`]. Other implementations do
    /// nothing.
    ///
    /// # Errors
    /// [`PauseError::Unable`]: the change cannot be stored, so it must not be made.
    fn will_write(&self, change: Intended<'_>) -> Result<(), PauseError> {
        let _ = change;
        Ok(())
    }

    /// Announces that the ledger with this digest is about to be written, which has a change as
    /// pending. [`Guest::will_write`] names the digest if the change is then made. `replaced` is
    /// the digest of the ledger before it, if that one has a change as pending too: it stays if
    /// the write fails. If the guest can outlive this process, the implementation keeps outside
    /// this process which of the two changes were made, and tells the next service.
    fn will_keep(&self, digest: &[u8; 32], replaced: Option<&[u8; 32]>) {
        let _ = (digest, replaced);
    }

    /// Announces that the change that the ledger with this digest has as pending is made without a
    /// pause. Nothing tells at which write this process ends, so the implementation forgets the
    /// change, and the next service asks the guest's counts.
    fn will_write_running(&self, ledger: &[u8; 32]) {
        let _ = ledger;
    }

    /// Passes the stopped guest's memory to `sink` and returns the rest of its state, in the
    /// monitor's own format. `control` is stored with it.
    ///
    /// # Errors
    /// [`SaveError`]. The guest is unchanged.
    fn save(
        &self,
        paused: &Self::Paused<'_>,
        control: ControlState,
        sink: &mut dyn MemorySink,
    ) -> Result<Vec<u8>, SaveError> {
        let _ = (paused, control, sink);
        Err(SaveError::Unable(
            "the guest's monitor saves no snapshots for Patchbay; use the monitor's own command"
                .to_owned(),
        ))
    }
}

/// A stopped guest. The results of its methods do not change while the guest is stopped. If vCPUs
/// are threads of this process, the methods do not allocate.
///
/// A monitor that cannot inspect a vCPU reports that its position is unknown, and never guesses.
/// The service then patches text only if words in the kernel's memory rule out that a vCPU is
/// inside a site.
pub trait PausedGuest {
    /// Returns the guest-virtual address of the next instruction of each vCPU, in the order of the
    /// vCPUs. vCPUs that have not started or have ended are left out. `None`: unknown.
    fn rips(&self) -> Option<&[u64]>;
    /// Returns whether a breakpoint exception (#BP) waits to be delivered on any vCPU; `None` if
    /// this is unknown.
    fn breakpoint_pending(&self) -> Option<bool>;
    /// Returns the time from the request to stop until the last vCPU stopped.
    fn stop_time(&self) -> Duration;
    /// Prepares for the writes that [`Guest::will_write`] announced. The service calls this after
    /// all checks and before the first write.
    ///
    /// # Errors
    /// A sentence that gives the reason why nothing may be written.
    fn begin_writes(&self) -> Result<(), String> {
        Ok(())
    }
    /// Checks that the writes will not be lost. The service calls this after the writes and before
    /// the resume. If this succeeds, and no event has reset the guest meanwhile, the service calls
    /// [`PausedGuest::made`]. If this fails, the service reverts the writes and calls
    /// [`PausedGuest::undone`].
    ///
    /// # Errors
    /// A sentence that gives the reason why the writes may be lost, for example because the guest's
    /// memory is being copied to another host.
    fn check_writes(&self) -> Result<(), String> {
        Ok(())
    }
    /// Reports that the change was made: the writes are complete and stay. The service calls this
    /// before the resume.
    fn made(&self) {}
    /// Reports that the writes were reverted. The service calls this before the resume. Another
    /// process may have copied the memory between a write and its revert, so the monitor
    /// invalidates that copy.
    fn undone(&self) {}
}
