// SPDX-License-Identifier: Apache-2.0
//! Simulated kernel memory whose structures are at known addresses.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::kernel::{HostKernel, WalkError};
use crate::layout::{Layout, Sev, SlotsLayout, VcpusLayout};
use crate::memory::{KernelMemory, ReadError};
use crate::vm::Vm;

/// The tag of a pointer to a node of an xarray.
pub(crate) const NODE: u64 = 2;

pub(crate) const AREA: u64 = 0xffff_8880_0000_0000;
pub(crate) const OWN_TASK: u64 = AREA;
pub(crate) const OWN_PID: u64 = AREA + 0x1000;
pub(crate) const NAMESPACE: u64 = AREA + 0x2000;
pub(crate) const TASK: u64 = AREA + 0x4000;
pub(crate) const PID: u64 = AREA + 0x5000;
pub(crate) const FILES: u64 = AREA + 0x6000;
pub(crate) const TABLE: u64 = AREA + 0x7000;
pub(crate) const DESCRIPTORS: u64 = AREA + 0x8000;
pub(crate) const FILE: u64 = AREA + 0x9000;
pub(crate) const KVM: u64 = AREA + 0xa000;
pub(crate) const MM: u64 = AREA + 0xb000;
pub(crate) const SETS: [u64; 2] = [AREA + 0xc000, AREA + 0xd000];
pub(crate) const VCPUS: [u64; 2] = [AREA + 0xe000, AREA + 0xf000];
pub(crate) const THREADS: u64 = AREA + 0x1_0000;
pub(crate) const NODES: u64 = AREA + 0x2_0000;
pub(crate) const SLOTS: u64 = AREA + 0x3_0000;
/// The second set of slots, for changes.
pub(crate) const OTHER_SET: u64 = AREA + 0x4_0000;

pub(crate) const DENTRY: u64 = AREA + 0x5_0000;
pub(crate) const SUPER: u64 = AREA + 0x5_1000;
/// The name is not aligned, because names need not be.
pub(crate) const NAME: u64 = AREA + 0x5_2004;
/// The file of another process's VM.
pub(crate) const OTHER_FILE: u64 = AREA + 0x5_3000;
pub(crate) const OTHER_KVM: u64 = AREA + 0x5_4000;

pub(crate) const NUMBER: u32 = 1000;
pub(crate) const DESCRIPTOR: u32 = 7;
pub(crate) const SLOT_SIZE: u64 = 88;

pub(crate) fn layout(is_new: bool) -> Layout {
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

/// Words at addresses, and changes that take effect after the read of an address.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    words: BTreeMap<u64, u64>,
    changes: Vec<(u64, Vec<(u64, u64)>)>,
    reads: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct World(Arc<Mutex<State>>, pub(crate) Layout);

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
        // Changes take effect only after the whole read, even if it is of several words.
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
pub(crate) const ROM: Given = (0xf_0000, 0x10, 0x7f90_0000_0000, 1 << 1, 0);
pub(crate) const HIGH: Given = (0x10_0000, 0x100, 0x7f00_8000_0000, 0, 0);

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

    pub(crate) fn put(&self, at: u64, words: &[u64]) {
        let mut state = self.0.lock().expect("no panic");
        let places = (at..).step_by(8);
        state.words.extend(places.zip(words.iter().copied()));
    }

    /// Lets both vCPUs run.
    pub(crate) fn both_run(&self) {
        self.put(VCPUS[1], &[THREADS, 0]);
    }

    pub(crate) fn name(&self, name: &[u8; 8]) {
        let name = u64::from_le_bytes(*name);
        self.put(NAME - 4, &[name << 32, name >> 32]);
    }

    /// Duplicates the descriptor as the next one. Adds the VM of another process behind both.
    pub(crate) fn more_descriptors(&self) {
        self.put(
            DESCRIPTORS + 8 * u64::from(DESCRIPTOR + 1),
            &[FILE, OTHER_FILE],
        );
        self.put(OTHER_FILE, &[0, 0, 0, 0, OTHER_KVM, DENTRY]);
        self.put(OTHER_KVM, &[MM + 8]);
    }

    pub(crate) fn node(&self, at: u64, shift: u64, entries: &[(u64, u64)]) {
        self.put(at, &[shift]);
        self.put(at + 8, &[0; 64]);
        for (index, entry) in entries {
            self.put(at + 8 + 8 * index, &[*entry]);
        }
    }

    /// Writes a `struct pid` that is in two namespaces. `first` is the first list node of type
    /// `PIDTYPE_TGID`; 0 for the pid of a thread.
    pub(crate) fn pid(&self, at: u64, number: u32, first: u64) {
        let inner = u64::from(number);
        let task = AREA + 0x3100;
        self.put(
            at,
            &[1, task, first, 0, 0, 5, AREA + 0x3000, inner, NAMESPACE],
        );
    }

    /// Writes a set of slots. The tree has the middle slot at its root.
    pub(crate) fn set(&self, at: u64, memory: u64, generation: u64, slots: &[Given]) {
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

    pub(crate) fn slot(&self, at: u64, (base, pages, address, flags, bitmap): &Given) {
        self.put(at, &[0; 6]);
        let flags = u64::from(*flags);
        self.put(at + 48, &[*base, *pages, *bitmap, *address, flags]);
    }

    /// Changes words after an address has been read.
    pub(crate) fn after(&self, read: u64, changes: &[(u64, u64)]) {
        let mut state = self.0.lock().expect("no panic");
        state.changes.push((read, changes.to_vec()));
    }

    pub(crate) fn kernel(&self) -> HostKernel {
        HostKernel::with(Box::new(self.clone()), self.1.clone()).expect("a kernel")
    }

    pub(crate) fn vm(&self) -> Result<Vm, WalkError> {
        self.kernel().vm(NUMBER, DESCRIPTOR)
    }

    pub(crate) fn reads(&self) -> usize {
        self.0.lock().expect("no panic").reads
    }
}
