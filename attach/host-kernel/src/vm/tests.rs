// SPDX-License-Identifier: Apache-2.0
//! Kernel memory in which everything is at a known place.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::*;
use crate::layout::Layout;
use crate::memory::KernelMemory;

const AREA: u64 = 0xffff_8880_0000_0000;
const OWN_TASK: u64 = AREA;
const OWN_PID: u64 = AREA + 0x1000;
const NAMESPACE: u64 = AREA + 0x2000;
const TASK: u64 = AREA + 0x4000;
const PID: u64 = AREA + 0x5000;
const FILES: u64 = AREA + 0x6000;
const TABLE: u64 = AREA + 0x7000;
const DESCRIPTORS: u64 = AREA + 0x8000;
const FILE: u64 = AREA + 0x9000;
const KVM: u64 = AREA + 0xa000;
const MM: u64 = AREA + 0xb000;
const SETS: [u64; 2] = [AREA + 0xc000, AREA + 0xd000];
const VCPUS: [u64; 2] = [AREA + 0xe000, AREA + 0xf000];
const THREADS: u64 = AREA + 0x1_0000;
const NODES: u64 = AREA + 0x2_0000;
const SLOTS: u64 = AREA + 0x3_0000;
/// The second set of slots, for changes.
const OTHER_SET: u64 = AREA + 0x4_0000;

const DENTRY: u64 = AREA + 0x5_0000;
const SUPER: u64 = AREA + 0x5_1000;
/// A name need not be aligned.
const NAME: u64 = AREA + 0x5_2004;
/// The file of another process's VM.
const OTHER_FILE: u64 = AREA + 0x5_3000;
const OTHER_KVM: u64 = AREA + 0x5_4000;

pub(crate) const NUMBER: u32 = 1000;
pub(crate) const DESCRIPTOR: u32 = 7;
const SLOT_SIZE: u64 = 88;

fn layout(is_new: bool) -> Layout {
    Layout {
        task_thread_pid: 0,
        task_pid_links: 8,
        task_files: 72,
        task_mm: 80,
        pid_level: 0,
        pid_tasks: 8,
        pid_numbers: 40,
        upid_nr: 0,
        upid_ns: 8,
        upid_size: 16,
        process_type: 1,
        ns_head: 8,
        ns_base: 0,
        node_shift: 0,
        node_slots: 8,
        node_fanout: 64,
        files_fdt: 0,
        fdt_max: 0,
        fdt_fd: 8,
        file_private: 32,
        file_dentry: 40,
        dentry_super: 8,
        dentry_name: 0,
        super_magic: 0,
        kvm_mm: 0,
        kvm_memslots: 8,
        kvm_spaces: 2,
        kvm_online_vcpus: 24,
        kvm_vcpus: match is_new {
            true => VcpusLayout::Xarray(32),
            false => VcpusLayout::Array(32, 4),
        },
        kvm_dirty_ring: Some(64),
        kvm_vm_type: Some((72, 8)),
        kvm_protected: Some(80),
        vcpu_pid: 0,
        vcpu_protected: Some(8),
        sev: Sev::At(88),
        slots_generation: 0,
        slots: match is_new {
            true => SlotsLayout::Tree {
                root: 8,
                node_index: 16,
                nodes: 0,
                node_size: 24,
                left: 16,
                right: 8,
            },
            false => SlotsLayout::Array { used: 8, first: 16 },
        },
        slot_size: SLOT_SIZE as u32,
        slot_base: 48,
        slot_pages: 56,
        slot_bitmap: 64,
        slot_address: 72,
        slot_flags: 80,
    }
}

/// Words at addresses, and changes that follow a read of an address.
#[derive(Clone, Debug, Default)]
struct State {
    words: BTreeMap<u64, u64>,
    changes: Vec<(u64, Vec<(u64, u64)>)>,
    reads: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct World(Arc<Mutex<State>>, Layout);

impl KernelMemory for World {
    fn name(&self) -> &'static str {
        "a test"
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
        let mut state = self.0.lock().expect("no panic");
        state.reads += 1;
        for (at, byte) in (address..).zip(bytes.iter_mut()) {
            let word = state.words.get(&(at & !7));
            let word = word.ok_or(ReadError::Unmapped(address))?;
            *byte = word.to_le_bytes()[(at % 8) as usize];
        }
        // A read of several words is whole here: changes follow it.
        let range = address..address + bytes.len() as u64;
        if let Some(index) = state
            .changes
            .iter()
            .position(|(trigger, _)| range.contains(trigger))
        {
            let (_, changes) = state.changes.remove(index);
            state.words.extend(changes);
        }
        Ok(())
    }

    fn own_task(&mut self, offset: u32) -> Result<u64, ReadError> {
        let mut word = [0; 8];
        self.read(OWN_TASK + u64::from(offset), &mut word)?;
        Ok(u64::from_le_bytes(word))
    }
}

/// A slot: base, pages, process address, flags, dirty bitmap.
pub(crate) type Given = (u64, u64, u64, u32, u64);

pub(crate) const LOW: Given = (0, 0x8_0000, 0x7f00_0000_0000, 0, 0);
const ROM: Given = (0xf_0000, 0x10, 0x7f90_0000_0000, READONLY, 0);
const HIGH: Given = (0x10_0000, 0x100, 0x7f00_8000_0000, 0, 0);

impl World {
    pub(crate) fn new(is_new: bool, slots: &[Given]) -> Self {
        let world = Self(Arc::default(), layout(is_new));
        world.put(OWN_TASK, &[OWN_PID]);
        world.put(OWN_PID, &[1, 0, 0, 0, 0, 5, AREA + 0x3000, 10, NAMESPACE]);
        // 1000 = 15 * 64 + 40
        world.put(NAMESPACE, &[0, NODES | NODE]);
        world.node(NODES, 6, &[(15, (NODES + 0x1000) | NODE)]);
        world.node(NODES + 0x1000, 0, &[(40, PID), (41, THREADS)]);
        world.pid(PID, NUMBER, TASK + 8 + 16);
        world.pid(THREADS, NUMBER + 1, 0);
        world.put(TASK, &[PID, 0, 0, 0, 0, 0, 0, 0, 0, FILES, MM]);
        world.put(FILES, &[TABLE]);
        world.put(TABLE, &[64, DESCRIPTORS]);
        world.put(DESCRIPTORS, &[0; 64]);
        world.put(DESCRIPTORS + 8 * u64::from(DESCRIPTOR), &[FILE]);
        world.put(FILE, &[0, 0, 0, 0, KVM, DENTRY]);
        world.put(DENTRY, &[NAME, SUPER]);
        world.put(SUPER, &[0x0904_1934]);
        world.name(b"kvm-vm\0\0");
        world.put(KVM, &[MM, SETS[0], SETS[1], 2, 0, 0, 0, 0, 0, 0, 0, 0]);
        match is_new {
            true => {
                world.put(KVM + 32, &[(NODES + 0x2000) | NODE]);
                world.node(NODES + 0x2000, 0, &[(0, VCPUS[0]), (1, VCPUS[1])]);
            }
            false => world.put(KVM + 32, &VCPUS),
        }
        world.put(VCPUS[0], &[THREADS, 0]);
        world.put(VCPUS[1], &[0, 0]);
        world.set(SETS[0], SLOTS, 4, slots);
        world.set(SETS[1], SLOTS + 0x8000, 5, &[]);
        world
    }

    fn put(&self, at: u64, words: &[u64]) {
        let mut state = self.0.lock().expect("no panic");
        let places = (at..).step_by(8);
        state.words.extend(places.zip(words.iter().copied()));
    }

    fn name(&self, name: &[u8; 8]) {
        let name = u64::from_le_bytes(*name);
        self.put(NAME - 4, &[name << 32, name >> 32]);
    }

    /// Duplicates the descriptor as the next one, and puts the VM of another process behind both.
    pub(crate) fn more_descriptors(&self) {
        self.put(
            DESCRIPTORS + 8 * u64::from(DESCRIPTOR + 1),
            &[FILE, OTHER_FILE],
        );
        self.put(OTHER_FILE, &[0, 0, 0, 0, OTHER_KVM, DENTRY]);
        self.put(OTHER_KVM, &[MM + 8]);
    }

    fn node(&self, at: u64, shift: u64, entries: &[(u64, u64)]) {
        self.put(at, &[shift]);
        self.put(at + 8, &[0; 64]);
        for (index, entry) in entries {
            self.put(at + 8 + 8 * index, &[*entry]);
        }
    }

    /// A struct pid of two namespaces. `first` is the first task of which it is the process's.
    fn pid(&self, at: u64, number: u32, first: u64) {
        let inner = u64::from(number);
        self.put(at, &[1, 0, first, 0, 0, 5, AREA + 0x3000, inner, NAMESPACE]);
    }

    /// Puts a set of slots. The tree has the middle slot at its root.
    fn set(&self, at: u64, memory: u64, generation: u64, slots: &[Given]) {
        match self.1.slots {
            SlotsLayout::Tree { .. } => {
                // The second node of each slot is in use.
                let node = |index: usize| memory + 256 * index as u64 + 24;
                let middle = slots.len() / 2;
                let root = if slots.is_empty() { 0 } else { node(middle) };
                self.put(at, &[generation, root, 1]);
                for (index, slot) in slots.iter().enumerate() {
                    let at = memory + 256 * index as u64;
                    self.slot(at, slot);
                    let left = (index == middle && index > 0).then(|| node(index - 1));
                    let right =
                        (index == middle && index + 1 < slots.len()).then(|| node(index + 1));
                    let links = [0, right.unwrap_or_default(), left.unwrap_or_default()];
                    self.put(at + 24, &links);
                }
            }
            SlotsLayout::Array { .. } => {
                self.put(at, &[generation, slots.len() as u64]);
                for (slot, place) in slots.iter().rev().zip((at + 16..).step_by(88)) {
                    self.slot(place, slot);
                }
            }
        }
    }

    fn slot(&self, at: u64, (base, pages, address, flags, bitmap): &Given) {
        self.put(at, &[0; 6]);
        let flags = u64::from(*flags);
        self.put(at + 48, &[*base, *pages, *bitmap, *address, flags]);
    }

    /// Changes words after an address has been read.
    fn after(&self, read: u64, changes: &[(u64, u64)]) {
        let mut state = self.0.lock().expect("no panic");
        state.changes.push((read, changes.to_vec()));
    }

    pub(crate) fn kernel(&self) -> HostKernel {
        HostKernel::with(Box::new(self.clone()), self.1.clone()).expect("a kernel")
    }

    fn vm(&self) -> Result<Vm, WalkError> {
        self.kernel().vm(NUMBER, DESCRIPTOR)
    }

    fn reads(&self) -> usize {
        self.0.lock().expect("no panic").reads
    }
}

const NODE: u64 = 2;

fn both(slots: &[Given]) -> [World; 2] {
    [true, false].map(|is_new| World::new(is_new, slots))
}

#[test]
fn slots_and_vcpus_are_read() {
    for world in both(&[LOW, ROM, HIGH]) {
        let vm = world.vm().expect("a VM");
        let slot = |(base, pages, process_address, flags, _): Given| Slot {
            space: 0,
            guest_address: base * PAGE,
            bytes: pages * PAGE,
            process_address,
            readonly: flags & READONLY != 0,
            guest_memfd: false,
            logs_dirty_pages: false,
        };
        assert_eq!(vm.slots, [LOW, ROM, HIGH].map(slot));
        assert_eq!(vm.generations, [4, 5]);
        let threads = [Some(NUMBER + 1), None].map(|thread| Vcpu { thread });
        assert_eq!(vm.vcpus, threads);
        assert_eq!(vm.protection, Protection::None);
        assert_eq!(vm.ram_bytes(), (LOW.1 + HIGH.1) * PAGE);
        assert_eq!(vm.dirty_logging(), DirtyLogging::Off);
        assert_eq!(vm.refusals(), []);
    }
}

#[test]
fn memory_at_several_addresses_counts_once() {
    let again = (0x20_0000, 0x180, LOW.2 + LOW.1 * PAGE - 0x80 * PAGE, 0, 0);
    for world in both(&[LOW, again]) {
        let vm = world.vm().expect("a VM");
        assert_eq!(vm.ram_bytes(), (LOW.1 + 0x100) * PAGE);
    }
}

#[test]
fn what_forbids_a_write_is_seen() {
    let with = |flags, bitmap| (LOW.0, LOW.1, LOW.2, flags, bitmap);
    for (slot, logs, memfd) in [
        (with(LOG_DIRTY_PAGES, 0), true, false),
        (with(0, AREA), true, false),
        (with(GUEST_MEMFD, 0), false, true),
    ] {
        for world in both(&[slot, HIGH]) {
            let vm = world.vm().expect("a VM");
            assert_eq!(vm.slots[0].logs_dirty_pages, logs);
            assert_eq!(vm.slots[0].guest_memfd, memfd);
            let part = if logs {
                DirtyLogging::Part
            } else {
                DirtyLogging::Off
            };
            assert_eq!(vm.dirty_logging(), part);
            let refusal: &[Refusal] = if memfd { &[Refusal::GuestMemfd] } else { &[] };
            assert_eq!(vm.refusals(), refusal);
        }
    }
    for slots in [&[with(LOG_DIRTY_PAGES, 0), ROM][..], &[LOW]] {
        let [world, _] = both(slots);
        if slots.len() == 1 {
            world.put(KVM + 64, &[1 << 16]);
        }
        let vm = world.vm().expect("a VM");
        assert_eq!(vm.refusals(), [Refusal::DirtyLogging]);
    }
    let [world, _] = both(&[]);
    assert_eq!(world.vm().expect("a VM").refusals(), [Refusal::NoMemory]);
}

#[test]
fn protected_guests_are_seen() {
    for (place, word) in [
        (KVM + 72, 4),
        (KVM + 80, 1),
        (VCPUS[0] + 8, 1),
        (KVM + 88, 1),
    ] {
        for world in both(&[LOW]) {
            world.put(place, &[word]);
            let vm = world.vm().expect("a VM");
            assert!(
                matches!(vm.refusals()[..], [Refusal::Protected(_)]),
                "{place:#x}"
            );
        }
    }
    let [mut world, _] = both(&[LOW]);
    world.1.sev = Sev::Unknown;
    let vm = world.vm().expect("a VM");
    assert!(matches!(vm.refusals()[..], [Refusal::Unknown(_)]));
    world.1.sev = Sev::Impossible;
    world.put(KVM + 88, &[1]);
    assert_eq!(world.vm().expect("a VM").protection, Protection::None);
}

#[test]
fn an_update_in_progress_is_awaited() {
    for world in both(&[LOW]) {
        world.put(SETS[0], &[IN_PROGRESS | 4]);
        assert_eq!(world.vm(), Err(WalkError::Busy("the memory slots")));
        world.after(SETS[0], &[(SETS[0], 6)]);
        let vm = world.vm().expect("the update ends");
        assert_eq!(vm.generations, [6, 5]);
    }
}

/// Replaces the set of slots, or a slot in it, just after the first part of it has been read.
#[test]
fn a_set_that_is_replaced_meanwhile_is_read_again() {
    for is_new in [true, false] {
        let world = World::new(is_new, &[LOW, HIGH]);
        world.set(OTHER_SET, SLOTS + 0x4000, 6, &[LOW, ROM]);
        world.after(SETS[0] + 8, &[(KVM + 8, OTHER_SET)]);
        let vm = world.vm().expect("a VM");
        assert!(vm.slots[1].readonly, "{:?}", vm.slots);
        assert_eq!(vm.generations, [6, 5]);

        let world = World::new(is_new, &[LOW, HIGH]);
        world.after(SETS[0] + 8, &[(SETS[0], 6)]);
        assert_eq!(world.vm().expect("a VM").generations, [6, 5]);
    }
    // A slot that is being deleted.
    for (world, flags) in both(&[LOW])
        .into_iter()
        .zip([SLOTS + 80, SETS[0] + 16 + 80])
    {
        world.put(flags, &[INVALID.into()]);
        assert_eq!(world.vm(), Err(WalkError::Busy("a memory slot")));
        world.after(flags, &[(flags, 0)]);
        world.vm().expect("it has been replaced");
    }
}

#[test]
fn slots_that_no_kernel_has_are_refused() {
    let slot = |base, pages, address| (base, pages, address, 0, 0);
    for (what, wrong) in [
        ("overlaps", slot(LOW.1 - 1, 1, HIGH.2)),
        ("empty", slot(HIGH.0, 0, HIGH.2)),
        ("too high", slot(1 << 52, 1, HIGH.2)),
        ("too long", slot(HIGH.0, 1 << 52, HIGH.2)),
        ("no page", slot(HIGH.0, 1, HIGH.2 + 8)),
        ("the kernel's", slot(HIGH.0, 1, AREA)),
        ("reaches the kernel", slot(HIGH.0, 2, (1 << 63) - PAGE)),
    ] {
        for world in both(&[LOW, wrong]) {
            let error = world.vm().expect_err(what);
            assert_eq!(error, WalkError::Inconsistent("a memory slot"), "{what}");
        }
    }
}

#[test]
fn loops_and_loose_ends_are_refused() {
    const TREE: &str = "the tree of memory slots";
    let [new, old] = both(&[LOW, ROM, HIGH]);
    let (left, middle) = (SLOTS + 24, SLOTS + 256 + 24);
    for (at, link, what) in [
        (middle + 16, middle, TREE),
        (left + 16, middle, TREE),
        (left + 8, middle, "a memory slot"),
        (left + 8, left, "a memory slot"),
        (left + 16, 0x7f00_0000_0000, TREE),
        (SETS[0] + 16, 2, TREE),
    ] {
        let world = World::new(true, &[LOW, ROM, HIGH]);
        world.put(at, &[link]);
        let error = world.vm().expect_err("a loop");
        assert_eq!(error, WalkError::Inconsistent(what), "{at:#x} {link:#x}");
        assert!(world.reads() < 20_000, "{}", world.reads());
    }
    new.put(left + 16, &[AREA - 8]);
    assert!(matches!(new.vm(), Err(WalkError::Read(_))));
    old.put(SETS[0] + 8, &[1 << 15 | 1]);
    let array = WalkError::Inconsistent("the array of memory slots");
    assert_eq!(old.vm(), Err(array));
    for world in both(&[LOW]) {
        world.put(KVM + 24, &[MAX_VCPUS as u64 + 1]);
        let many = WalkError::Inconsistent("kvm.online_vcpus");
        assert_eq!(world.vm(), Err(many));
        world.put(KVM + 24, &[3]);
        assert!(world.vm().is_err(), "there are only two");
    }
}

#[test]
fn the_walk_from_the_process_is_checked() {
    let world = World::new(true, &[LOW]);
    let mut kernel = world.kernel();
    let vm = |kernel: &mut HostKernel, pid| kernel.vm(pid, DESCRIPTOR).expect_err("no VM");
    for absent in [0, 7, 1002, 4096, 4096 + NUMBER, u32::MAX] {
        assert_eq!(vm(&mut kernel, absent), WalkError::NoProcess(absent));
    }
    let thread = NUMBER + 1;
    assert_eq!(vm(&mut kernel, thread), WalkError::NotAProcess(thread));
    for closed in [8, 64, u32::MAX] {
        let error = WalkError::NoDescriptor {
            pid: NUMBER,
            descriptor: closed,
        };
        assert_eq!(kernel.vm(NUMBER, closed), Err(error));
    }
    for (at, word, error) in [
        // The VM of another process, and one whose process has ended.
        (KVM, MM + 8, "belongs to another process"),
        (TASK + 80, 0, "belongs to another process"),
        (TASK + 72, 0, "not a running process"),
        // A pid that has been freed and is another's.
        (PID + 56, 7, "a struct pid"),
        (PID, 33, "a struct pid"),
        (TASK, PID + 8, "a task_struct"),
        // A node that leads back to its parent, and one whose entry moves.
        (NODES + 0x1000 + 8 + 8 * 40, NODES | NODE, "an xarray"),
        (NODES + 0x1000 + 8 + 8 * 40, 256 << 2 | NODE, "an xarray"),
    ] {
        let world = World::new(true, &[LOW]);
        world.put(at, &[word]);
        let found = world.vm().expect_err(error).to_string();
        assert!(found.contains(error), "{found}");
    }
}

#[test]
fn a_change_of_a_slot_is_seen() {
    for world in both(&[LOW, HIGH]) {
        let mut kernel = world.kernel();
        let vm = kernel.vm(NUMBER, DESCRIPTOR).expect("a VM");
        let mut unchanged = || kernel.is_unchanged(NUMBER, DESCRIPTOR, &vm);
        assert_eq!(unchanged(), Ok(true));
        for (at, word, then) in [
            (SETS[0], 6, 4),
            (SETS[1], IN_PROGRESS | 5, 5),
            (FILE + 32, KVM + 8, KVM),
        ] {
            world.put(at, &[word]);
            assert!(matches!(unchanged(), Ok(false) | Err(_)), "{at:#x}");
            world.put(at, &[then]);
            assert_eq!(unchanged(), Ok(true));
        }
    }
}

/// A descriptor may lead to another file by the time it is read.
#[test]
fn only_files_of_vms_are_read() {
    for (name, magic) in [
        (b"kvm-vcpu", 0x0904_1934),
        (b"kvm-vmx\0", 0x0904_1934),
        (b"kvm-vm\0\0", 0xef53),
    ] {
        let world = World::new(true, &[LOW]);
        world.name(name);
        world.put(SUPER, &[magic]);
        let error = WalkError::NotAVm {
            pid: NUMBER,
            descriptor: DESCRIPTOR,
        };
        assert_eq!(world.vm(), Err(error), "{name:?} {magic:#x}");
    }
}

#[test]
fn duplicates_of_a_descriptor_are_read_once() {
    let world = World::new(true, &[LOW]);
    world.more_descriptors();
    let mut kernel = world.kernel();
    let vm = kernel.vm(NUMBER, DESCRIPTOR).expect("a VM");
    let descriptors = [0, 1, 2, 3].map(|more| DESCRIPTOR + more);
    let mut reads = |descriptors: &[u32]| {
        let before = world.reads();
        kernel.vms(NUMBER, descriptors);
        world.reads() - before
    };
    let (once, twice) = (reads(&descriptors[..1]), reads(&descriptors[..2]));
    assert!(twice < once + once / 4, "{twice} reads, {once} for one");
    let vms = kernel.vms(NUMBER, &descriptors);
    let [pid, other, closed] = [NUMBER, descriptors[2], descriptors[3]];
    let others = WalkError::OtherProcess {
        pid,
        descriptor: other,
    };
    let none = WalkError::NoDescriptor {
        pid,
        descriptor: closed,
    };
    let expected = [
        (DESCRIPTOR, Ok(vm)),
        (other, Err(others)),
        (closed, Err(none)),
    ];
    assert_eq!(vms, expected);
}

/// A node that has been freed and used again may have the shift of its parent.
#[test]
fn each_node_divides_the_index_further() {
    let world = World::new(true, &[LOW]);
    world.node(NODES + 0x1000, 6, &[(15, PID)]);
    let error = world.vm().expect_err("no leaf");
    assert_eq!(error, WalkError::Inconsistent("an xarray"));
}

/// The descriptor is closed and opened again while the VM is read.
#[test]
fn a_vm_that_is_closed_meanwhile_is_not_returned() {
    let world = World::new(true, &[LOW]);
    let descriptor = DESCRIPTORS + 8 * u64::from(DESCRIPTOR);
    world.after(SETS[1], &[(descriptor, 0)]);
    let error = world.vm().expect_err("closed");
    assert!(matches!(error, WalkError::NoDescriptor { .. }), "{error}");
}

#[test]
fn a_vcpus_thread_is_that_of_the_readers_namespace() {
    for (changes, thread) in [
        // Only in an outer namespace, and in another inner one.
        ([(THREADS, 0), (THREADS + 56, 9)], None),
        ([(THREADS + 64, AREA + 0x3000), (THREADS + 56, 9)], None),
        ([(THREADS + 64, NAMESPACE), (THREADS + 56, 9)], Some(9)),
    ] {
        let world = World::new(true, &[LOW]);
        for (at, word) in changes {
            world.put(at, &[word]);
        }
        assert_eq!(world.vm().expect("a VM").vcpus[0].thread, thread);
    }
}
