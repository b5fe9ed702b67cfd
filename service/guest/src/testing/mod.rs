// SPDX-License-Identifier: Apache-2.0
//! A guest without vCPUs, for API tests without KVM. It has real guest memory with page tables, a
//! small kernel image with keys, sites and gate words, and sends requests as a kernel would.

pub mod conformance;
mod console;
mod image;
mod machine;
mod memory;
mod modules;
pub mod structures;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use zerocopy::{FromZeros, IntoBytes};

pub use self::console::TestConsole;
pub use self::image::TestKey;
use self::image::*;
pub use self::machine::{PausedInMemory, Told};
pub use self::memory::Memory;
pub use self::structures::Gate;
use crate::abi;
use crate::memory::GuestRam;
use crate::requests::GuestRequests;
use crate::snapshot::{ControlState, MemorySink, SaveError};

struct KeyAddresses {
    key: u64,
    sites: Vec<u64>,
}

type Hook = Box<dyn FnMut() + Send>;
type SaveHook = Box<dyn FnMut(&mut dyn MemorySink) -> Result<Vec<u8>, SaveError> + Send>;

/// A guest in memory.
pub struct InMemoryGuest {
    name: String,
    memory: Arc<Memory>,
    ram: GuestRam,
    requests: Arc<dyn GuestRequests>,
    console: TestConsole,
    places: Mutex<HashMap<String, KeyAddresses>>,
    modules: Mutex<Vec<(String, u64)>>,
    /// The kernel's last registration.
    registered: Mutex<Option<abi::Descriptor>>,
    /// The last registration of each loaded module.
    loaded: Mutex<HashMap<String, abi::Module>>,
    boot: AtomicU64,
    generation: AtomicU64,
    loads: AtomicU64,
    ended: AtomicBool,
    late: AtomicBool,
    hidden: AtomicBool,
    loses_writes: AtomicBool,
    held: Arc<AtomicBool>,
    told: Arc<Mutex<Vec<Told>>>,
    saved: Mutex<Vec<ControlState>>,
    pauses: AtomicU64,
    rips: Mutex<Vec<u64>>,
    pressed: AtomicBool,
    buttonless: AtomicBool,
    on_power_button: Mutex<Option<Hook>>,
    on_pause: Mutex<Option<Hook>>,
    on_check: Arc<Mutex<Option<Hook>>>,
    on_resume: Arc<Mutex<Option<Hook>>>,
    on_save: Mutex<Option<SaveHook>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl InMemoryGuest {
    /// Creates a guest that is named "test" and has not registered.
    pub fn new(requests: Arc<impl GuestRequests + 'static>) -> Arc<Self> {
        Self::named(requests, "test")
    }

    /// Creates a guest with this name that has not registered.
    pub fn named(requests: Arc<impl GuestRequests + 'static>, name: &str) -> Arc<Self> {
        let memory = Memory::new(MEMORY_BYTES);
        let guest = Self {
            name: name.to_owned(),
            ram: memory.clone(),
            memory,
            requests,
            console: TestConsole::default(),
            places: Mutex::default(),
            modules: Mutex::default(),
            registered: Mutex::default(),
            loaded: Mutex::default(),
            boot: AtomicU64::new(0x2000),
            generation: AtomicU64::new(0x1000),
            loads: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            late: AtomicBool::new(false),
            hidden: AtomicBool::new(false),
            loses_writes: AtomicBool::new(false),
            held: Arc::default(),
            told: Arc::default(),
            saved: Mutex::default(),
            pauses: AtomicU64::new(0),
            rips: Mutex::default(),
            pressed: AtomicBool::new(false),
            buttonless: AtomicBool::new(false),
            on_power_button: Mutex::default(),
            on_pause: Mutex::default(),
            on_check: Arc::default(),
            on_resume: Arc::default(),
            on_save: Mutex::default(),
        };
        guest.map_image();
        Arc::new(guest)
    }

    /// Creates a running guest whose kernel has registered these keys.
    ///
    /// # Panics
    /// If the registration is refused.
    pub fn boot(requests: Arc<impl GuestRequests + 'static>, keys: &[TestKey]) -> Arc<Self> {
        let guest = Self::new(requests);
        guest.run(keys);
        guest
    }

    /// Registers these keys and enters the state `SYSTEM_RUNNING`.
    ///
    /// # Panics
    /// If the registration is refused.
    pub fn run(&self, keys: &[TestKey]) {
        self.requests.attach(self.ram.clone());
        let error = self.register(keys);
        assert_eq!(error, 0, "the registration was refused");
        self.set_gate(Gate::SystemState, 2);
    }

    fn map_image(&self) {
        const PRESENT_WRITABLE: u64 = 3;
        const LARGE: u64 = 1 << 7;
        let index = |level: u64| (IMAGE >> (12 + 9 * level)) & 0x1ff;
        let entry = |table: u64, index: u64, value: u64| {
            self.write_physical(table + 8 * index, &value.to_le_bytes())
        };
        entry(
            PAGE_TABLE,
            index(3),
            (PAGE_TABLE + 0x1000) | PRESENT_WRITABLE,
        );
        entry(
            PAGE_TABLE + 0x1000,
            index(2),
            (PAGE_TABLE + 0x2000) | PRESENT_WRITABLE,
        );
        for page in 0..IMAGE_BYTES >> 21 {
            let physical = IMAGE_PHYSICAL + (page << 21);
            entry(
                PAGE_TABLE + 0x2000,
                index(1) + page,
                physical | LARGE | PRESENT_WRITABLE,
            );
        }
    }

    fn write_physical(&self, address: u64, bytes: &[u8]) {
        self.ram.write(address, bytes).expect("in memory");
    }

    /// Writes guest-virtual memory of the image.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.write_physical(address - IMAGE + IMAGE_PHYSICAL, bytes);
    }

    /// Reads guest-virtual memory of the image.
    ///
    /// # Panics
    /// If the address is not in the image.
    pub fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.ram
            .read(address - IMAGE + IMAGE_PHYSICAL, &mut bytes)
            .expect("in memory");
        bytes
    }

    /// Returns the guest-physical address of a key's count.
    ///
    /// # Panics
    /// If there is no such key.
    pub fn count_address(&self, name: &str) -> u64 {
        self.place(name, |place| place.key) - IMAGE + IMAGE_PHYSICAL
    }

    /// Sets a gate word.
    pub fn set_gate(&self, gate: Gate, value: u64) {
        self.write(gate.address(GATE_WORDS), &value.to_le_bytes());
    }

    /// Writes keys, sites, table and directory at these addresses.
    fn lay_out(&self, prefix: &str, keys: &[TestKey], at: &Layout) -> (abi::Range, abi::Directory) {
        let mut entry = at.table;
        let mut site = at.text;
        let mut names = Vec::new();
        let (mut plain, mut sealed) = (at.keys, SEALED_KEYS);
        let mut tracepoint = TRACEPOINTS;
        // The jump table must be sorted by the addresses of the keys, which are assigned in this
        // order.
        let mut sorted: Vec<&TestKey> = keys.iter().collect();
        sorted.sort_by_key(|key| (key.class == abi::KEY_TRACEPOINT, key.sealed));
        for (index, key) in (0_u64..).zip(sorted) {
            let (next, offset, size) = match (key.class, key.sealed) {
                (abi::KEY_TRACEPOINT, _) => (&mut tracepoint, TRACEPOINT_KEY, TRACEPOINT_BYTES),
                (_, true) => (&mut sealed, 0, KEY_BYTES),
                (_, false) => (&mut plain, 0, KEY_BYTES),
            };
            let address = *next + offset;
            *next += size;
            let entries = if key.sites == 0 { 0 } else { entry };
            self.write(address, &key.count.to_le_bytes());
            self.write(
                address + 8,
                &(entries | u64::from(key.initially_true)).to_le_bytes(),
            );
            let mut sites = Vec::new();
            for _ in 0..key.sites {
                self.write_site(site, key.jumps());
                self.write_entry(entry, site, address | u64::from(key.initially_true));
                sites.push(site);
                site += SITE_STRIDE;
                entry += ENTRY_BYTES;
            }
            let tracepoint = if key.class == abi::KEY_TRACEPOINT {
                address - TRACEPOINT_KEY
            } else {
                0
            };
            if tracepoint != 0 {
                self.write_probes(tracepoint, if key.probe { &[1] } else { &[] });
            }
            let named = abi::Key {
                address,
                name: u32::try_from(names.len()).expect("short names"),
                class: key.class,
                flags: 0,
                tracepoint,
                module: at.module,
            };
            self.write(
                at.directory + index * size_of::<abi::Key>() as u64,
                named.as_bytes(),
            );
            names.extend_from_slice(key.name.as_bytes());
            names.push(0);
            lock(&self.places).insert(
                format!("{prefix}{}", key.name),
                KeyAddresses {
                    key: address,
                    sites,
                },
            );
        }
        self.write(at.names, &names);
        let directory = structures::directory(
            at.directory,
            u32::try_from(keys.len()).expect("few keys"),
            at.names,
            u32::try_from(names.len()).expect("short names"),
        );
        (
            abi::Range {
                start: at.table,
                end: entry,
            },
            directory,
        )
    }

    /// Writes the probes of a tracepoint, given by their data. The array of a tracepoint always has
    /// the same address, because a kernel's allocator may also reuse the address of a freed array.
    fn write_probes(&self, tracepoint: u64, probes: &[u64]) {
        let array = PROBES + (tracepoint - TRACEPOINTS) / TRACEPOINT_BYTES * PROBES_BYTES;
        let mut at = array;
        for data in probes {
            for (offset, word) in [(0, TEXT), (8, *data), (16, 10)] {
                self.write(at + offset, &word.to_le_bytes());
            }
            at += PROBE_BYTES;
        }
        self.write(at, &[0; PROBE_BYTES as usize]);
        let funcs = if probes.is_empty() { 0 } else { array };
        self.write(tracepoint + TRACEPOINT_FUNCS, &funcs.to_le_bytes());
    }

    /// Replaces the probes of a tracepoint, as the guest itself would, by up to 4 probes that
    /// differ in their data, and turns its key on or off.
    pub fn set_probes(&self, name: &str, probes: &[u64]) {
        let key = self.place(name, |place| place.key);
        self.write_probes(key - TRACEPOINT_KEY, probes);
        self.set_count(name, i32::from(!probes.is_empty()));
    }

    fn write_site(&self, site: u64, jumps: bool) {
        let distance = u32::try_from(TARGET_DISTANCE - 5).expect("near");
        let mut jump = [0xe9; 5];
        jump[1..].copy_from_slice(&distance.to_le_bytes());
        self.write(site, if jumps { &jump } else { &NOP5 });
    }

    fn write_entry(&self, entry: u64, site: u64, key: u64) {
        let near = |to: u64, from: u64| {
            i32::try_from(to.wrapping_sub(from).cast_signed())
                .expect("near")
                .to_le_bytes()
        };
        self.write(entry, &near(site, entry));
        self.write(entry + 4, &near(site + TARGET_DISTANCE, entry + 4));
        self.write(entry + 8, &key.wrapping_sub(entry + 8).to_le_bytes());
    }

    /// Lays out a kernel with these keys and returns the descriptor that
    /// [`InMemoryGuest::register`] sends.
    pub fn descriptor(&self, keys: &[TestKey]) -> abi::Descriptor {
        let layout = Layout {
            text: TEXT,
            table: JUMP_TABLE,
            keys: KEYS,
            directory: DIRECTORY,
            names: NAMES,
            module: 0,
        };
        let (jump_table, directory) = self.lay_out("", keys, &layout);
        let mut descriptor = abi::Descriptor::new_zeroed();
        descriptor.header = self.header(abi::OP_REGISTER, size_of::<abi::Descriptor>());
        structures::describe(&mut descriptor);
        descriptor.boot = self.boot.load(Ordering::SeqCst);
        descriptor.jump_table = jump_table;
        descriptor.text = abi::Range {
            start: TEXT,
            end: TEXT_END,
        };
        descriptor.ro_after_init = abi::Range {
            start: SEALED_KEYS,
            end: SEALED_KEYS_END,
        };
        descriptor.page_table = PAGE_TABLE;
        descriptor.gates = GATES;
        let gates = structures::gates(GATE_WORDS);
        self.write(GATES, gates.as_bytes());
        descriptor.gate_count = u32::try_from(gates.len()).expect("few");
        // This also ensures that the host's first record allocates no page of the test memory.
        self.write(RECORDS, &[0; 32 * RECORD_COUNT as usize]);
        descriptor.records = RECORDS;
        descriptor.record_count = RECORD_COUNT;
        descriptor.record_size = 32;
        descriptor.module_state = u32::try_from(MODULE_STATE).expect("small");
        descriptor.module_state_live = 0;
        descriptor.directory = directory;
        descriptor.release[..6].copy_from_slice(b"6.12.0");
        descriptor.build_id = [0xab; 20];
        descriptor
    }

    /// Returns the ring of records: {sequence number, key, time, counts} of each slot.
    pub fn records(&self) -> Vec<[u64; 4]> {
        let record = |index| {
            let bytes: [u8; 32] = self.read(RECORDS + 32 * u64::from(index));
            let (words, _) = bytes.as_chunks();
            [0, 1, 2, 3].map(|word| u64::from_le_bytes(words[word]))
        };
        (0..RECORD_COUNT).map(record).collect()
    }

    fn header(&self, op: u32, size: usize) -> abi::Header {
        abi::Header {
            magic: abi::HEADER_MAGIC,
            abi_version: abi::ABI_VERSION,
            op: u16::try_from(op).expect("small"),
            size: u32::try_from(size).expect("small"),
            status: -38,
            generation: self.generation.load(Ordering::SeqCst),
        }
    }

    /// Sets the number that the boots of the guest are counted from.
    pub fn set_boot(&self, boot: u64) {
        self.boot.store(boot, Ordering::SeqCst);
    }

    /// Returns a generation that no registration has had.
    pub fn next_generation(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Sends a request as a vCPU would.
    pub fn request(&self, op: u32, request: &[u8]) -> i32 {
        self.write_physical(REQUEST_PAGE, request);
        self.requests.request(op, REQUEST_PAGE)
    }

    /// Returns the contents of the request page, up to the size of the largest request.
    ///
    /// # Panics
    /// Never: the page is in memory.
    pub fn last_request(&self) -> Vec<u8> {
        let mut bytes = vec![0; size_of::<abi::Descriptor>()];
        self.ram.read(REQUEST_PAGE, &mut bytes).expect("in memory");
        bytes
    }

    /// Registers another kernel with these keys.
    pub fn register(&self, keys: &[TestKey]) -> i32 {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.boot.fetch_add(1, Ordering::SeqCst);
        lock(&self.places).clear();
        let descriptor = self.descriptor(keys);
        *lock(&self.registered) = Some(descriptor);
        self.request(abi::OP_REGISTER, descriptor.as_bytes())
    }

    /// Registers the same kernel again, under a new generation. Its modules are registered again by
    /// [`InMemoryGuest::add_module_again`].
    ///
    /// # Panics
    /// If no kernel has registered.
    pub fn register_again(&self) -> i32 {
        self.generation.fetch_add(1, Ordering::SeqCst);
        let mut descriptor = lock(&self.registered).expect("registered before");
        descriptor.header = self.header(abi::OP_REGISTER, size_of::<abi::Descriptor>());
        self.request(abi::OP_REGISTER, descriptor.as_bytes())
    }

    /// Withdraws the kernel's registration.
    pub fn unregister(&self) -> i32 {
        let header = self.header(abi::OP_UNREGISTER, size_of::<abi::Header>());
        self.request(abi::OP_UNREGISTER, header.as_bytes())
    }

    fn place<T>(&self, name: &str, of: impl FnOnce(&KeyAddresses) -> T) -> T {
        let places = lock(&self.places);
        of(places.get(name).unwrap_or_else(|| panic!("no key {name}")))
    }

    /// Returns the raw count of a key.
    pub fn count(&self, name: &str) -> i32 {
        i32::from_le_bytes(self.read(self.place(name, |place| place.key)))
    }

    /// Sets the raw count, as the guest itself would, and writes the sites to match. The key must
    /// not have likely sites, because these would get the wrong instruction.
    pub fn set_count(&self, name: &str, count: i32) {
        self.write(self.place(name, |place| place.key), &count.to_le_bytes());
        for site in self.place(name, |place| place.sites.clone()) {
            self.write_site(site, count > 0);
        }
    }

    /// Returns the addresses of a key's sites.
    pub fn sites(&self, name: &str) -> Vec<u64> {
        self.place(name, |place| place.sites.clone())
    }

    /// Returns true if every site of the key is a JMP, and false if every site is a NOP.
    ///
    /// # Panics
    /// If the sites differ or are neither.
    pub fn jumps(&self, name: &str) -> bool {
        let jumps: Vec<bool> = self
            .sites(name)
            .into_iter()
            .map(|site| match self.read::<5>(site) {
                NOP5 => false,
                [0xe9, displacement @ ..] => {
                    assert_eq!(
                        u64::from(u32::from_le_bytes(displacement)) + 5,
                        TARGET_DISTANCE
                    );
                    true
                }
                bytes => panic!("foreign bytes {bytes:02x?}"),
            })
            .collect();
        assert!(
            jumps.iter().all(|&jump| jump == jumps[0]),
            "torn: {jumps:?}"
        );
        jumps[0]
    }

    /// Returns the guest's memory, whose writes a test can make fail.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the number of times that the guest was stopped.
    pub fn pauses(&self) -> u64 {
        self.pauses.load(Ordering::SeqCst)
    }

    /// Sets whether vCPU 0 does not stop, so that each pause fails with
    /// [`PauseError::Late`](crate::pause::PauseError::Late).
    pub fn set_late(&self, late: bool) {
        self.late.store(late, Ordering::SeqCst);
    }

    /// Sets whether the positions of the stopped vCPUs are reported as unknown.
    pub fn hide_vcpus(&self, hidden: bool) {
        self.hidden.store(hidden, Ordering::SeqCst);
    }

    /// Sets whether the writes of a pause are reported as lost.
    pub fn lose_writes(&self, lost: bool) {
        self.loses_writes.store(lost, Ordering::SeqCst);
    }

    /// Sets the RIPs of the vCPUs in the next pauses.
    pub fn set_rips(&self, rips: Vec<u64>) {
        *lock(&self.rips) = rips;
    }

    /// Returns whether the power button is pressed and the kernel has not seen it.
    pub fn is_pressed(&self) -> bool {
        self.pressed.load(Ordering::SeqCst)
    }

    /// Removes the power button.
    pub fn remove_power_button(&self) {
        self.buttonless.store(true, Ordering::SeqCst);
    }

    /// Sets a function that the kernel calls at each press of its power button from now on.
    pub fn on_power_button(&self, hook: impl FnMut() + Send + 'static) {
        *lock(&self.on_power_button) = Some(Box::new(hook));
    }

    /// Returns what the service has told about changes since the last call.
    pub fn told(&self) -> Vec<Told> {
        std::mem::take(&mut *lock(&self.told))
    }

    /// Returns the service's part of each snapshot that it has asked for since the last call.
    pub fn saved(&self) -> Vec<ControlState> {
        std::mem::take(&mut *lock(&self.saved))
    }

    /// Sets a function that is called in each pause, before
    /// [`Guest::pause`](crate::guest::Guest::pause) returns.
    pub fn on_pause(&self, hook: impl FnMut() + Send + 'static) {
        *lock(&self.on_pause) = Some(Box::new(hook));
    }

    /// Sets a function that is called in each pause after the writes, before they are checked.
    pub fn on_check(&self, hook: impl FnMut() + Send + 'static) {
        *lock(&self.on_check) = Some(Box::new(hook));
    }

    /// Sets a function that is called at the end of every pause.
    pub fn on_resume(&self, hook: impl FnMut() + Send + 'static) {
        *lock(&self.on_resume) = Some(Box::new(hook));
    }

    /// Sets a function that saves the guest.
    pub fn on_save(
        &self,
        hook: impl FnMut(&mut dyn MemorySink) -> Result<Vec<u8>, SaveError> + Send + 'static,
    ) {
        *lock(&self.on_save) = Some(Box::new(hook));
    }

    /// Prints to the console.
    pub fn print(&self, text: &[u8]) {
        self.console.print(text);
    }
}
