// SPDX-License-Identifier: Apache-2.0

//! Runs the conformance suite of the service's traits on the monitor, with guests of a few
//! instructions.

mod bare_metal;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use bare_metal::{
    CODE, branch_code, branch_guest, counters, raw, spinning, started, wait_until, watchdog,
};
use patchbay_guest::guest::Guest;
use patchbay_guest::pause::Activity;
use patchbay_guest::requests::GuestRequests;
use patchbay_guest::testing::conformance::{self, Exits};
use patchbay_vmm::config::{RawEntry, VmConfig};
use patchbay_vmm::devices::{MemoryDevice, PortDevice};
use patchbay_vmm::guest::VmGuest;
use patchbay_vmm::request::{MSR_INDEX, NoRequests};
use patchbay_vmm::vm::Vm;

const VCPUS: u8 = 2;
/// End of the branch guest's memory, and the first of four unused pages in it.
const END: u64 = 4 << 20;
const SCRATCH: u64 = 3 << 20;
/// I/O port and guest-physical address of the test devices.
const PORT: u16 = 0x500;
const DEVICE: u64 = 0xc000_0000;

fn named(vm: &Arc<Vm>) -> Arc<VmGuest> {
    Arc::new(VmGuest::new("conformance".to_owned(), Arc::clone(vm)))
}

fn guest() -> Option<(Arc<VmGuest>, impl Fn() -> Vec<u64>)> {
    let vm = Arc::new(branch_guest(VCPUS)?);
    let guest = named(&vm);
    Some((guest, progress(vm)))
}

fn progress(vm: Arc<Vm>) -> impl Fn() -> Vec<u64> {
    let rounds = move |vcpu| counters(vm.ram(), vcpu).not_taken;
    move || (0..VCPUS).map(&rounds).collect()
}

#[test]
fn memory() {
    let Some((guest, _)) = guest() else { return };
    conformance::memory(guest.ram(), SCRATCH, END);
}

#[test]
fn pause() {
    let _watchdog = watchdog(120);
    let Some((guest, progress)) = guest() else {
        return;
    };
    conformance::pause(&*guest, progress);
}

#[test]
fn lifecycle() {
    let _watchdog = watchdog(120);
    let Some((guest, _)) = guest() else { return };
    conformance::lifecycle(&guest);
}

/// An instruction that leaves the guest.
struct Leaving {
    /// Instructions that load the operands.
    before: Vec<u8>,
    instruction: Vec<u8>,
    activity: Activity,
}

impl Leaving {
    /// in al, dx
    fn port() -> Self {
        Self {
            // mov dx, PORT
            before: [&[0x66, 0xba][..], &PORT.to_le_bytes()].concat(),
            instruction: vec![0xec],
            activity: Activity::PortIo(PORT),
        }
    }

    /// mov eax, [rbx]
    fn memory() -> Self {
        let device = u32::try_from(DEVICE).unwrap();
        Self {
            // mov ebx, DEVICE
            before: [&[0xbb][..], &device.to_le_bytes()].concat(),
            instruction: vec![0x8b, 0x03],
            activity: Activity::Mmio(DEVICE),
        }
    }

    /// wrmsr
    fn request() -> Self {
        Self {
            // mov ecx, MSR_INDEX; mov eax, page | 3; xor edx, edx
            before: [
                &[0xb9][..],
                &MSR_INDEX.to_le_bytes(),
                &[0xb8, 0x03, 0x00, 0x17, 0x00, 0x31, 0xd2],
            ]
            .concat(),
            instruction: vec![0x0f, 0x30],
            activity: Activity::Request(3),
        }
    }

    /// Returns the address of the instruction after `instruction`.
    fn next(&self) -> u64 {
        CODE + (self.before.len() + self.instruction.len()) as u64
    }

    /// Returns ring-0 code: a loop that executes the instruction and increments a counter.
    fn code(&self) -> Vec<u8> {
        // inc qword [rdi]; jmp back to the instruction.
        let back = 0_u8.wrapping_sub(u8::try_from(self.instruction.len() + 5).unwrap());
        let counting = [0x48, 0xff, 0x07, 0xeb, back];
        let mut image = branch_code();
        let code = [&self.before[..], &self.instruction, &counting].concat();
        image[..code.len()].copy_from_slice(&code);
        image
    }

    fn entry(vcpu: u8) -> RawEntry {
        RawEntry {
            rip: CODE,
            user_mode: false,
            ..spinning(vcpu)
        }
    }

    /// Starts the guest with these handlers, or prints why it cannot run on this host.
    fn start<H>(&self, entries: Vec<Option<RawEntry>>, handler: &Arc<H>) -> Option<Arc<Vm>>
    where
        H: PortDevice + MemoryDevice + GuestRequests + 'static,
    {
        let mut config: VmConfig = raw(self.code(), entries);
        config.ports.push((PORT..=PORT, handler.clone()));
        let device = DEVICE..=DEVICE + 7;
        config.memory_devices.push((device, handler.clone()));
        if !matches!(self.activity, Activity::Request(_)) {
            return started(config, Arc::new(NoRequests)).map(Arc::new);
        }
        config.offer_patchbay = true;
        let vm = started(config, handler.clone())?;
        if !vm.transports().msr {
            println!("SKIPPED: an unknown MSR does not reach user space on this host's KVM");
            return None;
        }
        Some(Arc::new(vm))
    }
}

/// Counts the exits that it handles.
#[derive(Default)]
struct Counting {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Counting {
    fn handle(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        // A pause that did not wait for the handler would see `begun` without `ended`.
        std::thread::yield_now();
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// Blocks a vCPU until it is released.
struct Blocking {
    entered: Mutex<Sender<()>>,
    release: Mutex<Receiver<()>>,
}

impl Blocking {
    fn handle(&self) {
        // This fails only if the test has ended.
        let _ = self.entered.lock().unwrap().send(());
        // This also returns when the sender is dropped.
        let _ = self.release.lock().unwrap().recv();
    }
}

macro_rules! handlers {
    ($($type:ty),*) => {$(
        impl PortDevice for $type {
            fn read(&self, _port: u16, data: &mut [u8]) {
                self.handle();
                data.fill(0);
            }

            fn write(&self, _port: u16, _data: &[u8]) {}
        }

        impl MemoryDevice for $type {
            fn read(&self, _address: u64, data: &mut [u8]) {
                self.handle();
                data.fill(0);
            }

            fn write(&self, _address: u64, _data: &[u8]) {}
        }

        impl GuestRequests for $type {
            fn attach(&self, _: patchbay_guest::memory::GuestRam) {}

            fn request(&self, _op: u32, _page: u64) -> i32 {
                self.handle();
                0
            }
        }
    )*};
}

handlers!(Counting, Blocking);

fn exits(leaving: &Leaving) {
    let _watchdog = watchdog(120);
    let handler = Arc::new(Counting::default());
    let Some(vm) = leaving.start(vec![Some(Leaving::entry(0))], &handler) else {
        return;
    };
    conformance::exits(
        &*named(&vm),
        &Exits {
            begun: || handler.begun.load(Ordering::SeqCst),
            ended: || handler.ended.load(Ordering::SeqCst),
            counted: || counters(vm.ram(), 0).not_taken,
            counting: leaving.next(),
        },
    );
}

#[test]
fn accesses_to_ports_are_settled() {
    exits(&Leaving::port());
}

#[test]
fn accesses_to_device_memory_are_settled() {
    exits(&Leaving::memory());
}

#[test]
fn requests_are_not_cut_in_half() {
    exits(&Leaving::request());
}

/// Tests a guest whose vCPU 1 is blocked while vCPU 0 runs.
fn late(leaving: &Leaving) {
    let _watchdog = watchdog(120);
    let (entered, has_entered) = channel();
    let (release, released) = channel();
    let handler = Arc::new(Blocking {
        entered: Mutex::new(entered),
        release: Mutex::new(released),
    });
    let entries = vec![Some(spinning(0)), Some(Leaving::entry(1))];
    let Some(vm) = leaving.start(entries, &handler) else {
        return;
    };
    // Declared again after the guest, so that it is dropped first: the guest's end waits for the
    // blocked vCPU.
    let release = release;
    has_entered.recv().unwrap();
    wait_until("vCPU 0 runs", || counters(vm.ram(), 0).not_taken > 0);
    let guest = named(&vm);
    let blocked = (1, leaving.activity);
    conformance::late(&*guest, blocked, progress(vm), || drop(release));
}

#[test]
fn a_vcpu_in_a_port_access_is_late() {
    late(&Leaving::port());
}

#[test]
fn a_vcpu_in_a_memory_access_is_late() {
    late(&Leaving::memory());
}

#[test]
fn a_vcpu_in_a_request_is_late() {
    late(&Leaving::request());
}
