// SPDX-License-Identifier: Apache-2.0
//! Implements the service's traits on the monitor's types.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use patchbay_guest::console::{self, ConsoleChunk, Listener};
use patchbay_guest::guest::{Guest, GuestDescription, Machine, PausedGuest, Transport};
use patchbay_guest::kernel_memory::Place;
use patchbay_guest::memory::{self, Exchanged, Leading, Piece, Ram, Word};
use patchbay_guest::snapshot::{ControlState, MemorySink, SaveError};
use patchbay_guest::threads::{Body, ThreadKind, Threads};

use crate::devices::Console;
use crate::memory::{GuestRam, OutsideMemory};
use crate::pause::{PauseError, Paused};
use crate::seccomp;
use crate::thread;
use crate::vm::Vm;

/// A [`Vm`] with its name in the API.
pub struct VmGuest {
    name: String,
    vm: Arc<Vm>,
    ram: memory::GuestRam,
}

impl VmGuest {
    /// Creates a guest with its name in the API.
    pub fn new(name: String, vm: Arc<Vm>) -> Self {
        let ram = Arc::new(vm.ram().clone());
        Self { name, vm, ram }
    }

    pub(crate) fn vm(&self) -> &Vm {
        &self.vm
    }
}

impl std::fmt::Debug for VmGuest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmGuest")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Machine for VmGuest {
    fn description(&self) -> GuestDescription {
        let offered = self.vm.transports();
        let transports = [
            (offered.hypercall, Transport::Hypercall),
            (offered.msr, Transport::Msr),
        ];
        GuestDescription {
            name: self.name.clone(),
            vcpus: self.vm.vcpus().into(),
            memory_bytes: self.vm.ram().bytes(),
            transports: transports
                .into_iter()
                .filter(|(works, _)| *works)
                .map(|(_, transport)| transport)
                .collect(),
        }
    }

    fn has_ended(&self) -> bool {
        self.vm.exit_reason().is_some()
    }

    fn shut_down(&self) {
        self.vm.shutdown();
    }

    fn press_power_button(&self) {
        self.vm.press_power_button();
    }

    fn take_back_press(&self) -> bool {
        self.vm.take_back_press()
    }

    fn console(&self) -> &dyn console::Console {
        &**self.vm.console()
    }
}

impl Guest for VmGuest {
    type Paused<'a> = Paused<'a>;

    fn ram(&self) -> &memory::GuestRam {
        &self.ram
    }

    fn pause(&self, timeout: Duration) -> Result<Paused<'_>, PauseError> {
        self.vm.pause(timeout)
    }

    fn save(
        &self,
        paused: &Paused<'_>,
        control: ControlState,
        sink: &mut dyn MemorySink,
    ) -> Result<Vec<u8>, SaveError> {
        self.vm.save(paused, control, sink)
    }
}

impl PausedGuest for Paused<'_> {
    fn rips(&self) -> Option<&[u64]> {
        Some(self.rips())
    }

    fn breakpoint_pending(&self) -> Option<bool> {
        Some(self.breakpoint_pending())
    }

    fn stop_time(&self) -> Duration {
        self.stop_time()
    }
}

impl Ram for GuestRam {
    fn piece(&self, address: u64, length: usize) -> Result<Piece, OutsideMemory> {
        self.piece(address, length)
    }

    fn read_piece(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        self.read_piece(piece, bytes)
    }

    fn load(&self, piece: Piece) -> Option<u64> {
        self.load(piece)
    }

    fn write_piece(&self, piece: Piece, bytes: &[u8]) -> bool {
        self.write_piece(piece, bytes)
    }

    fn writes_whole(&self, _piece: Piece) -> bool {
        // The guest ends with this process.
        true
    }

    fn compare_exchange_u32(&self, piece: Piece, current: u32, new: u32) -> Option<Exchanged> {
        self.compare_exchange_u32(piece, current, new)
    }

    fn leading_unchanged(&self, words: &[Word<Place>]) -> usize {
        self.leading_unchanged(words)
    }

    fn write_leading(&self, words: &[Word<Place>]) -> Leading {
        self.write_leading(words)
    }

    fn is_dirty(&self, address: u64) -> bool {
        self.is_dirty(address)
    }
}

impl console::Console for Console {
    fn read(&self, offset: u64) -> ConsoleChunk {
        self.read(offset)
    }

    fn input(&self, bytes: &[u8]) -> usize {
        self.input(bytes)
    }

    fn is_closed(&self) -> bool {
        self.is_closed()
    }

    fn on_output(&self, listener: Listener) {
        self.on_output(listener);
    }
}

/// Starts the service's threads under the monitor's system call filters.
#[derive(Clone, Copy, Debug, Default)]
pub struct FilteredThreads;

impl Threads for FilteredThreads {
    fn spawn(&self, kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>> {
        let filter = match kind {
            ThreadKind::Keys => seccomp::ThreadKind::Keys,
            ThreadKind::Trace => seccomp::ThreadKind::Trace,
        };
        thread::spawn(kind.name(), filter, body)
    }
}
