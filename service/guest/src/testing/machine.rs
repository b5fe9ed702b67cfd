// SPDX-License-Identifier: Apache-2.0
//! Implements the seams of the service for the in-memory guest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::console::Console;
use crate::guest::{Guest, GuestDescription, Intended, Machine, PausedGuest, Transport};
use crate::memory::GuestRam;
use crate::pause::{Activity, LateVcpu, PauseError};
use crate::snapshot::{ControlState, MemorySink, SaveError};

use super::image::MEMORY_BYTES;
use super::{Hook, InMemoryGuest, lock};

impl Machine for InMemoryGuest {
    fn description(&self) -> GuestDescription {
        GuestDescription {
            name: self.name.clone(),
            vcpus: 1,
            memory_bytes: MEMORY_BYTES,
            transports: vec![Transport::Hypercall, Transport::Msr],
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    fn shut_down(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.console.close();
    }

    fn press_power_button(&self) {
        self.pressed.store(true, Ordering::SeqCst);
        if let Some(hook) = &mut *lock(&self.on_power_button) {
            self.pressed.store(false, Ordering::SeqCst);
            hook();
        }
    }

    fn has_power_button(&self) -> bool {
        !self.buttonless.load(Ordering::SeqCst)
    }

    fn take_back_press(&self) -> bool {
        self.pressed.swap(false, Ordering::SeqCst)
    }

    fn console(&self) -> &dyn Console {
        &self.console
    }
}

/// A call by which the service tells the guest what becomes of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// [`Guest::will_keep`].
    WillKeep {
        /// Digest of the ledger that is about to be written.
        ledger: [u8; 32],
        /// Digest of the one that it replaces.
        replaced: Option<[u8; 32]>,
    },
    /// [`Guest::will_write`], with [`Intended::ledger`].
    WillWrite(Option<[u8; 32]>),
    /// [`Guest::will_write_running`].
    WillWriteRunning([u8; 32]),
    /// [`PausedGuest::begin_writes`].
    Begins,
    /// [`PausedGuest::made`].
    Made,
    /// [`PausedGuest::undone`].
    Undone,
}

/// A stopped guest.
pub struct PausedInMemory {
    rips: Vec<u64>,
    hidden: bool,
    loses_writes: bool,
    held: Arc<AtomicBool>,
    told: Arc<Mutex<Vec<Told>>>,
    on_check: Arc<Mutex<Option<Hook>>>,
    on_resume: Arc<Mutex<Option<Hook>>>,
}

impl Drop for PausedInMemory {
    fn drop(&mut self) {
        self.held.store(false, Ordering::SeqCst);
        if let Some(hook) = &mut *lock(&self.on_resume) {
            hook();
        }
    }
}

impl PausedGuest for PausedInMemory {
    fn rips(&self) -> Option<&[u64]> {
        (!self.hidden).then_some(&self.rips)
    }

    fn breakpoint_pending(&self) -> Option<bool> {
        (!self.hidden).then_some(false)
    }

    fn stop_time(&self) -> Duration {
        Duration::from_micros(20)
    }

    fn begin_writes(&self) -> Result<(), String> {
        lock(&self.told).push(Told::Begins);
        Ok(())
    }

    fn made(&self) {
        lock(&self.told).push(Told::Made);
    }

    fn undone(&self) {
        lock(&self.told).push(Told::Undone);
    }

    fn check_writes(&self) -> Result<(), String> {
        if let Some(hook) = &mut *lock(&self.on_check) {
            hook();
        }
        match self.loses_writes {
            true => Err("the guest is on its way to another host".to_owned()),
            false => Ok(()),
        }
    }
}

impl Guest for InMemoryGuest {
    type Paused<'a> = PausedInMemory;

    fn ram(&self) -> &GuestRam {
        &self.ram
    }

    fn will_keep(&self, digest: &[u8; 32], replaced: Option<&[u8; 32]>) {
        lock(&self.told).push(Told::WillKeep {
            ledger: *digest,
            replaced: replaced.copied(),
        });
    }

    fn will_write_running(&self, ledger: &[u8; 32]) {
        lock(&self.told).push(Told::WillWriteRunning(*ledger));
    }

    /// Keeps what the service would have stored. Without a function that saves the guest, refuses
    /// as a monitor without snapshots does.
    fn save(
        &self,
        _: &PausedInMemory,
        control: ControlState,
        sink: &mut dyn MemorySink,
    ) -> Result<Vec<u8>, SaveError> {
        lock(&self.saved).push(control);
        if let Some(hook) = &mut *lock(&self.on_save) {
            return hook(sink);
        }
        let why = "the guest's monitor saves no snapshots";
        Err(SaveError::Unable(why.to_owned()))
    }

    fn will_write(&self, change: Intended<'_>) -> Result<(), PauseError> {
        lock(&self.told).push(Told::WillWrite(change.ledger));
        Ok(())
    }

    fn pause(&self, timeout: Duration) -> Result<PausedInMemory, PauseError> {
        if self.has_ended() {
            return Err(PauseError::Ended);
        }
        if self.late.load(Ordering::SeqCst) {
            let late = vec![LateVcpu {
                vcpu: 0,
                activity: Activity::Guest,
                last_rip: None,
            }];
            return Err(PauseError::Late {
                deadline: timeout,
                late,
            });
        }
        if self.held.swap(true, Ordering::SeqCst) {
            return Err(PauseError::AlreadyPaused);
        }
        self.pauses.fetch_add(1, Ordering::SeqCst);
        if let Some(hook) = &mut *lock(&self.on_pause) {
            hook();
        }
        Ok(PausedInMemory {
            rips: lock(&self.rips).clone(),
            hidden: self.hidden.load(Ordering::SeqCst),
            loses_writes: self.loses_writes.load(Ordering::SeqCst),
            held: Arc::clone(&self.held),
            told: Arc::clone(&self.told),
            on_check: Arc::clone(&self.on_check),
            on_resume: Arc::clone(&self.on_resume),
        })
    }
}
