// SPDX-License-Identifier: Apache-2.0

//! The real monitor with a guest that attacks it: vCPUs on KVM, the registry, the executor of
//! changes. What a test writes to guest memory stands for the writes of another vCPU.

use std::fmt::Debug;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_guest::abi;
use patchbay_service::keys::KeyDetails;
use patchbay_service::keys::registry::Registry;
use patchbay_service::keys::{
    KeyUpdate, Keys, KeysConfig, KeysError, UpdateOutcome, UpdateRequest,
};
use patchbay_service::trace::TracepointKeys;
use patchbay_vmm::config::{Payload, RawCode, RawEntry, VmConfig};
use patchbay_vmm::devices::virtio::VirtioConfig;
use patchbay_vmm::guest::VmGuest;
use patchbay_vmm::vm::{ExitReason, Vm};
use static_keys::Op;
use vm_memory::{Bytes, GuestAddress};
use zerocopy::{Immutable, IntoBytes};

use super::kernel::{self, CODE, MEMORY, Memory, REQUEST, SCRATCH, TEXT, physical};
use super::program::{MAILBOX, NOT_TAKEN, Program, ROUNDS, TAKEN};
use crate::bare_metal::{Watchdog, created, load, wait_until, watchdog};

/// Timeout that no correct run reaches.
pub const DEADLINE: Duration = Duration::from_secs(30);
/// Deadline of changes that the guest never allows.
pub const BRIEF: Duration = Duration::from_millis(40);

/// Limit on the growth of the monitor's memory during an attack, guest memory included, in KiB.
const GROWTH_MAX: u64 = 256 << 10;

/// The vCPUs' initial page tables, in which the processor sets accessed bits.
const ACCESSED: Range<u64> = 0x9000..0xf000;

/// Attacks run one at a time: each uses several CPUs and checks the process's memory.
static TURN: Mutex<()> = Mutex::new(());

/// A guest that attacks the monitor.
pub struct Rig {
    pub vm: Arc<Vm>,
    pub keys: Keys,
    runtime: tokio::runtime::Runtime,
    memory_kib: u64,
    _watchdog: Watchdog,
    _turn: MutexGuard<'static, ()>,
}

/// Parameters of a [`Rig`].
#[derive(Default)]
pub struct Setup {
    /// Programs of the vCPUs after the first.
    pub programs: Vec<Program>,
    /// Guest memory in bytes; 6 MiB by default.
    pub memory: Option<u64>,
    pub virtio: VirtioConfig,
}

impl Rig {
    /// Starts one vCPU that serves requests, and one per program. Nothing is registered. Returns
    /// `None`, with the reason printed, if the test cannot run on this host.
    pub fn new(programs: Vec<Program>) -> Option<Self> {
        Self::with(Setup {
            programs,
            ..Setup::default()
        })
    }

    /// Starts the vCPUs as `new` does, and registers the well-behaved kernel.
    pub fn registered(programs: Vec<Program>) -> Option<Self> {
        let rig = Self::new(programs)?;
        rig.register();
        Some(rig)
    }

    pub fn with(setup: Setup) -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let watchdog = watchdog(120);
        // Resets the process's peak memory (`VmHWM`).
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        let memory_kib = process_kib("VmRSS:");
        let registry = Arc::new(Registry::default());
        let vm = Arc::new(created(config(setup), registry.clone())?);
        if !vm.transports().msr {
            println!("SKIPPED: the MSR transport does not reach user space on this host's KVM");
            return None;
        }
        let guest = Arc::new(VmGuest::new("hostile".to_owned(), vm.clone()));
        let config = KeysConfig {
            allow_guarded: true,
            ..KeysConfig::default()
        };
        let (keys, _) = Keys::start(guest, registry, config).unwrap();
        let rig = Self {
            vm,
            keys,
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap(),
            memory_kib,
            _watchdog: watchdog,
            _turn: turn,
        };
        rig.memory().write_kernel();
        rig.vm.start().unwrap();
        rig.wait_until("the first vCPU runs", || rig.scratch(0, NOT_TAKEN) > 0);
        Some(rig)
    }

    pub fn memory(&self) -> Memory<'_> {
        Memory(self.vm.ram())
    }

    /// Reads a word of a vCPU's scratch page.
    pub fn scratch(&self, vcpu: u64, at: u64) -> u64 {
        load(self.vm.ram(), SCRATCH + vcpu * 0x1000 + at)
    }

    /// Writes to a vCPU's mailbox atomically, so that the guest never sees half of a request.
    fn put_in_mailbox(&self, vcpu: u64, value: u64) {
        let address = GuestAddress(SCRATCH + vcpu * 0x1000 + MAILBOX);
        let memory = self.vm.ram().mmap();
        memory.store(value, address, Ordering::Release).unwrap();
    }

    /// Waits until a vCPU has made this many more rounds of its program.
    pub fn wait_for_rounds(&self, vcpu: u64, rounds: u64) {
        let before = self.scratch(vcpu, ROUNDS);
        self.wait_until("the program runs", || {
            self.scratch(vcpu, ROUNDS) >= before + rounds
        });
    }

    /// Waits for a condition. The guest must not end meanwhile.
    pub fn wait_until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        wait_until(what, || {
            assert_eq!(self.vm.exit_reason(), None, "waiting until {what}");
            condition()
        });
    }

    /// Releases a program that waits for its mailbox.
    pub fn let_go(&self, vcpu: u64) {
        self.put_in_mailbox(vcpu, 1);
    }

    /// Makes vCPU 0 write `value` to the MSR and waits until it continues.
    pub fn write_msr(&self, value: u64) {
        self.put_in_mailbox(0, value);
        self.wait_until("the guest goes on after its request", || {
            self.scratch(0, MAILBOX) == 0
        });
    }

    /// Makes vCPU 0 request `op` with the page as it is. Returns the page's status.
    pub fn ask_with_page(&self, op: u32, page: u64) -> i32 {
        self.write_msr(page | u64::from(op));
        let mut status = [0; 4];
        self.vm
            .ram()
            .read(page + abi::STATUS_OFFSET, &mut status)
            .unwrap();
        i32::from_le_bytes(status)
    }

    /// Makes vCPU 0 send a request with these bytes. Returns the page's status.
    pub fn ask(&self, op: u32, request: &(impl IntoBytes + Immutable)) -> i32 {
        self.memory().write_physical(REQUEST, request.as_bytes());
        self.ask_with_page(op, REQUEST)
    }

    /// Registers the well-behaved kernel.
    pub fn register(&self) {
        let status = self.ask(abi::OP_REGISTER, &kernel::descriptor());
        assert_eq!(status, 0, "{:?}", self.keys.describe().error);
    }

    /// Registers a descriptor. The monitor must refuse it with an error that contains `words`.
    pub fn refuses(&self, descriptor: &abi::Descriptor, words: &str) {
        self.refuses_request(abi::OP_REGISTER, descriptor, words);
    }

    /// Sends a request. The monitor must refuse it with an error that contains `words`, and change
    /// nothing in memory but the status.
    pub fn refuses_request(&self, op: u32, request: &(impl IntoBytes + Immutable), words: &str) {
        self.memory().write_physical(REQUEST, request.as_bytes());
        let before = self.picture();
        let status = self.ask_with_page(op, REQUEST);
        let error = self.keys.describe().error.unwrap_or_default();
        assert_eq!(status, -22, "{error}");
        assert!(error.contains(words), "{error:?} does not say {words:?}");
        assert!(
            error.bytes().all(|byte| (b' '..0x7f).contains(&byte)),
            "{error:?}"
        );
        self.only_changed(&before, &[]);
    }

    /// Changes keys as an operator.
    pub fn change(&self, names: &[&str], op: Op) -> Result<Arc<UpdateOutcome>, KeysError> {
        self.change_within(names, op, DEADLINE)
    }

    pub fn change_within(
        &self,
        names: &[&str],
        op: Op,
        within: Duration,
    ) -> Result<Arc<UpdateOutcome>, KeysError> {
        let updates = names.iter().map(|name| KeyUpdate::new(*name, op)).collect();
        let deadline = Instant::now() + within;
        let request = UpdateRequest {
            allow_guarded: true,
            force: true,
            ..UpdateRequest::new(updates, "uid:0".to_owned(), DEADLINE, deadline)
        };
        self.runtime.block_on(self.keys.update(request))
    }

    /// Changes keys. The change must fail for this reason, with an error that contains `words`, and
    /// change nothing.
    pub fn fails(&self, names: &[&str], op: Op, reason: &str, words: &str) {
        let before = self.picture();
        let error = loop {
            let error = self.change_within(names, op, BRIEF).expect_err(reason);
            if !out_of_time(&error) {
                break error;
            }
        };
        assert_eq!(error.reason(), reason, "{error}");
        let error = error.to_string();
        assert!(error.contains(words), "{error:?} does not say {words:?}");
        self.only_changed(&before, &[]);
    }

    /// Turns keys on and off, which must change only these sites and counts.
    pub fn flips(&self, names: &[&str], legal: &[Range<u64>]) {
        for op in [Op::Enable, Op::Disable] {
            let before = self.picture();
            self.change(names, op).unwrap();
            self.only_changed(&before, legal);
        }
    }

    /// Returns a copy of the memory below the device gap, taken while the guest is stopped.
    pub fn picture(&self) -> Vec<u8> {
        let paused = self.vm.pause(DEADLINE).unwrap();
        let mut bytes = vec![0; usize::try_from(self.vm.ram().low_bytes()).unwrap()];
        self.vm.ram().read(0, &mut bytes).unwrap();
        drop(paused);
        bytes
    }

    /// Asserts that nothing has changed since `before` except the given guest-physical ranges, the
    /// status and the boot number in the request page, and what the vCPUs write: scratch pages and
    /// accessed bits.
    pub fn only_changed(&self, before: &[u8], legal: &[Range<u64>]) {
        let after = self.picture();
        let status = REQUEST + abi::STATUS_OFFSET;
        let boot = REQUEST + offset_of!(abi::Descriptor, boot) as u64;
        let own = [
            SCRATCH..REQUEST,
            status..status + 4,
            boot..boot + 8,
            ACCESSED,
        ];
        let pages = (0..).zip(before.chunks(4096).zip(after.chunks(4096)));
        let changed: Vec<u64> = pages
            .filter(|(_, (old, new))| old != new)
            .flat_map(|(page, (old, new))| {
                let bytes = (page * 4096..).zip(old.iter().zip(new));
                bytes.filter(|(_, (old, new))| old != new)
            })
            .map(|(address, _)| address)
            .filter(|address| !own.iter().chain(legal).any(|range| range.contains(address)))
            .collect();
        assert!(changed.is_empty(), "written: {changed:x?}");
    }

    /// Ends the attack. The monitor must then serve a well-behaved guest: it must stop the vCPUs
    /// and read the keys, and its memory must not have grown too much.
    pub fn survives(self) {
        let grown = process_kib("VmHWM:").saturating_sub(self.memory_kib);
        assert!(grown < GROWTH_MAX, "grown by {grown} KiB");
        self.look_at_everything();
        self.memory().write_kernel();
        self.register();
        self.change(&["beta", "event"], Op::Enable).unwrap();
        assert_eq!(self.memory().count(kernel::BETA), 1);
        // Flips the branch that vCPU 0 executes, and waits until vCPU 0 takes the new direction.
        for (op, counter) in [(Op::Enable, TAKEN), (Op::Disable, NOT_TAKEN)] {
            self.change(&["alpha"], op).unwrap();
            let before = self.scratch(0, counter);
            self.wait_until("the flipped branch is taken", || {
                self.scratch(0, counter) > before
            });
        }
        self.look_at_everything();
        self.vm.shutdown();
        assert_eq!(self.vm.wait(), ExitReason::Shutdown);
    }

    /// Lists and reads all keys as a client does, and asserts that no text contains control
    /// characters.
    pub fn look_at_everything(&self) {
        let query = patchbay_service::keys::ListQuery {
            page_size: 1000,
            ..Default::default()
        };
        let Ok(list) = self.keys.list(&query) else {
            return;
        };
        for tracepoint in self.keys.tracepoints().into_iter().flatten() {
            assert!(tracepoint.probes.is_none_or(|probes| probes <= 256));
        }
        for key in list.keys.iter().take(50) {
            assert_printable(&key.name);
            if let Ok(details) = self.keys.get(&key.name, 1 << 14, "") {
                for site in details.sites {
                    assert_printable(&site.disassembly);
                    if let Err(obstacle) = &site.state.patchable {
                        assert_printable(&obstacle.to_string());
                    }
                    assert_printable(&site.state.module);
                }
            }
        }
    }

    /// Returns the details of a key with at most 10,000 of its sites.
    pub fn details(&self, name: &str) -> KeyDetails {
        self.keys.get(name, 10_000, "").unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.vm.shutdown();
    }
}

/// Returns whether a change failed only because the host is busy. The change may reach its deadline
/// before it is tried, or before the vCPUs are scheduled to stop.
pub fn out_of_time(error: &KeysError) -> bool {
    match error {
        KeysError::Busy { attempts, .. } => *attempts == 0,
        error => error.reason() == "VCPU_NOT_STOPPED",
    }
}

/// Asserts that the text contains no control characters.
pub fn assert_printable(text: &(impl AsRef<str> + Debug)) {
    assert!(
        text.as_ref().chars().all(|letter| !letter.is_control()),
        "{text:?}"
    );
}

/// Returns the guest-physical range of a five-byte site.
pub fn site(address: u64) -> Range<u64> {
    physical(address)..physical(address) + 5
}

/// Returns the guest-physical range of a key's count.
pub fn count(key: u64) -> Range<u64> {
    physical(key)..physical(key) + 4
}

fn config(setup: Setup) -> VmConfig {
    let mut image = vec![0; usize::try_from(physical(TEXT) - CODE).unwrap()];
    let mut entries = vec![Some(RawEntry {
        rip: physical(TEXT),
        rsp: 0,
        argument: SCRATCH,
        user_mode: false,
    })];
    for (index, program) in (1..).zip(&setup.programs) {
        let at = index * 0x8000;
        image[at..at + program.code.len()].copy_from_slice(&program.code);
        entries.push(Some(RawEntry {
            rip: CODE + at as u64,
            rsp: 0,
            argument: SCRATCH + index as u64 * 0x1000,
            user_mode: program.user_mode,
        }));
    }
    image.extend(Program::serve());
    VmConfig {
        memory_bytes: setup.memory.unwrap_or(MEMORY),
        vcpus: u8::try_from(entries.len()).unwrap(),
        virtio: setup.virtio,
        ..VmConfig::new(Payload::Raw(RawCode {
            image,
            address: CODE,
            entries,
        }))
    }
}

/// Returns a field of the process's status in KiB.
fn process_kib(line: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let found = status.lines().find_map(|text| text.strip_prefix(line));
    let words = found.unwrap_or("0 kB").split_whitespace();
    words.into_iter().next().unwrap().parse().unwrap()
}
