// SPDX-License-Identifier: Apache-2.0
//! Reads which task each CPU runs.
//!
//! A CPU's variables are at the address of their symbol plus the CPU's entry in `__per_cpu_offset`
//! (arch/x86/kernel/setup_percpu.c). Until 6.14 the symbols of such variables are offsets from 0,
//! and since 6.15 they are addresses; the sum is right for both.
//!
//! | kernel | pointer to the current task |
//! |---|---|
//! | until 6.1, and since 6.15 | `current_task` (arch/x86/kernel/cpu/common.c) |
//! | 6.2 to 6.14 | `current_task` in `pcpu_hot` (arch/x86/include/asm/current.h) |
//! | if neither is known | `curr` in `runqueues` (kernel/sched/sched.h) |
//!
//! A CPU may switch to another task while the first one is copied, and the first one may then end.
//! A copy therefore counts only if the CPU still has the same task afterwards. The name can be half
//! of an old one, because the kernel changes it byte by byte.

use std::sync::atomic::{Ordering, fence};

use crate::fields::{Field, Name, Structure};
use crate::{Bounded, KernelView, Types, copy, word};

/// The symbol of the number of CPUs, including those that may be added: an `unsigned int`.
pub use crate::trace::CPUS;
/// The symbol of the bits of the CPUs that are online (kernel/cpu.c).
pub const ONLINE: &str = "__cpu_online_mask";
/// The symbol of the array of the CPUs' offsets.
pub const OFFSETS: &str = "__per_cpu_offset";
/// The symbols of the variables that have a pointer to the current task, most preferred first.
pub const CURRENT: [&str; 3] = ["pcpu_hot", "current_task", "runqueues"];

/// Every type that [`Layout::read`] looks up.
pub const TYPES: &[&str] = &["pcpu_hot", "rq", "task_struct"];

/// The maximum number of CPUs, `NR_CPUS` of distributions.
const MAX_CPUS: u64 = 8192;
/// The number of copies of a task after which a CPU that switches tasks all the time is left out.
const MAX_COPIES: usize = 4;

/// The maximum number of reads, and of bytes in them, as in a poll of the rings. If [`MAX_CPUS`]
/// are online, they take 6 reads each, which leaves 4 reads for each of about 4,000 switches of
/// tasks during a copy.
const MAX_READS: usize = 1 << 16;
const MAX_BYTES: usize = 4 << 20;

/// The layout of the structures, from a kernel's own types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Offset of the pointer in each of the variables [`CURRENT`]; `None` if the kernel does not
    /// have the variable's type.
    pointers: [Option<u64>; CURRENT.len()],
    pid: Field,
    process: Field,
    name: Name,
}

impl Layout {
    /// Reads the layout from a kernel's types.
    ///
    /// # Errors
    /// A sentence that names the structure or member that is missing or implausible.
    pub fn read(types: &(impl Types + ?Sized)) -> Result<Self, String> {
        let pointer = |structure: &'static str, member: &str| {
            let member = types.member(structure, &[member])?;
            Some(member.offset.into())
        };
        let task = Structure::new(types, "task_struct")?;
        Ok(Self {
            pointers: [
                pointer("pcpu_hot", "current_task"),
                Some(0),
                pointer("rq", "curr"),
            ],
            pid: task.field(&["pid"], 4)?,
            process: task.field(&["tgid"], 4)?,
            name: task.name(&["comm"])?,
        })
    }

    /// Returns the per-CPU address of the pointer to the current task, given the addresses of the
    /// variables [`CURRENT`] that the kernel has.
    #[must_use]
    pub fn current(&self, variables: [Option<u64>; CURRENT.len()]) -> Option<u64> {
        let known = variables.into_iter().zip(self.pointers);
        let mut known = known.filter_map(|(variable, pointer)| variable?.checked_add(pointer?));
        known.next()
    }
}

/// The addresses of a kernel's per-CPU variables, and the layout of its tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Address of [`CPUS`].
    pub cpus: u64,
    /// Address of [`ONLINE`].
    pub online: u64,
    /// Address of [`OFFSETS`].
    pub offsets: u64,
    /// The per-CPU address of the pointer, from [`Layout::current`].
    pub current: u64,
    /// The layout.
    pub layout: Layout,
}

/// The task that a CPU runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The number of the CPU.
    pub cpu: u32,
    /// The id of the thread; 0 for the idle task.
    pub pid: u32,
    /// The id of its process.
    pub process: u32,
    /// The name, in any bytes.
    pub name: Vec<u8>,
}

impl Source {
    /// Reads the tasks of the CPUs that are online. Leaves out a CPU whose task cannot be read, or
    /// that switches tasks too often. Returns `None` if the CPUs are not known, or if the tasks
    /// take too many reads. Part of the tasks is not returned, because a guest could hide the
    /// others that way.
    pub fn read(&self, view: &(impl KernelView + ?Sized)) -> Option<Vec<Task>> {
        let view = &Bounded::new(view, MAX_READS, MAX_BYTES);
        let mut cpus = [0; 4];
        if !view.read(self.cpus, &mut cpus) {
            return None;
        }
        let cpus = u64::from(u32::from_le_bytes(cpus));
        let cpus = (1..=MAX_CPUS).contains(&cpus).then_some(cpus)?;
        // The bits are an array of words.
        let bits = copy(
            view,
            self.online,
            usize::try_from(cpus.div_ceil(64)).ok()? * 8,
        )?;
        let is_online = |cpu: &u64| {
            let byte = usize::try_from(cpu / 8).ok().and_then(|at| bits.get(at));
            byte.is_some_and(|byte| byte >> (cpu % 8) & 1 == 1)
        };
        let online = (0..cpus).filter(is_online);
        let online = online.take_while(|_| !view.is_exhausted());
        let tasks = online.filter_map(|cpu| self.task(view, cpu)).collect();
        (!view.is_exhausted()).then_some(tasks)
    }

    fn task(&self, view: &(impl KernelView + ?Sized), cpu: u64) -> Option<Task> {
        let offset = word(view, self.offsets.checked_add(8 * cpu)?)?;
        let at = self.current.wrapping_add(offset);
        let current = || word(view, at);
        let mut task = current()?;
        for _ in 0..MAX_COPIES {
            let copied = self.copy(view, u32::try_from(cpu).ok()?, task);
            // The pointer is loaded again after the task.
            fence(Ordering::Acquire);
            match current()? {
                same if same == task => return copied,
                other => task = other,
            }
        }
        None
    }

    fn copy(&self, view: &(impl KernelView + ?Sized), cpu: u32, task: u64) -> Option<Task> {
        fence(Ordering::Acquire);
        // A task has thousands of bytes, so only its members are copied.
        let number = |field: Field| {
            let mut bytes = [0; 4];
            let read = view.read(task.checked_add(field.offset())?, &mut bytes);
            read.then(|| u32::from_le_bytes(bytes))
        };
        Some(Task {
            cpu,
            pid: number(self.layout.pid)?,
            process: number(self.layout.process)?,
            name: self.layout.name.read(view, task)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::*;
    use crate::Member;

    const BASE: u64 = 0xffff_ffff_8260_0000;
    const TASKS: u64 = BASE + 0x1000;

    /// The types of a kernel with or without `struct pcpu_hot`.
    struct Kernel {
        is_hot: bool,
        task: u32,
    }

    impl Types for Kernel {
        fn member(&self, structure: &str, path: &[&str]) -> Option<Member> {
            let (offset, size) = match (structure, path) {
                ("pcpu_hot", ["current_task"]) if self.is_hot => (8, 8),
                ("rq", ["curr"]) => (24, 8),
                ("task_struct", ["pid"]) => (16, 4),
                ("task_struct", ["tgid"]) => (20, 4),
                ("task_struct", ["comm"]) => (32, 16),
                _ => return None,
            };
            Some(Member {
                offset,
                shift: 0,
                width: 0,
                size: Some(size),
            })
        }

        fn size(&self, structure: &str) -> Option<u32> {
            (structure == "task_struct").then_some(self.task)
        }
    }

    /// Called before each read with its address.
    type Hook = Box<dyn FnMut(u64, &mut Vec<u8>)>;

    struct Memory {
        bytes: RefCell<Vec<u8>>,
        hook: RefCell<Option<Hook>>,
    }

    impl KernelView for Memory {
        fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
            let mut memory = self.bytes.borrow_mut();
            if let Some(hook) = &mut *self.hook.borrow_mut() {
                hook(address, &mut memory);
            }
            let at = address.checked_sub(BASE).map(|at| at as usize);
            let found = at.and_then(|at| memory.get(at..)?.get(..bytes.len()));
            found.map(|found| bytes.copy_from_slice(found)).is_some()
        }
    }

    fn put(memory: &mut [u8], address: u64, bytes: &[u8]) {
        let at = (address - BASE) as usize;
        memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put_task(memory: &mut [u8], index: u64, pid: u32, name: &[u8]) {
        let task = TASKS + 64 * index;
        put(memory, task + 16, &pid.to_le_bytes());
        put(memory, task + 20, &(pid / 10 * 10).to_le_bytes());
        put(memory, task + 32, name);
    }

    /// Three CPUs, of which the second is not online. Each runs the task of its number.
    fn kernel(variables: [Option<u64>; 3], is_hot: bool) -> (Source, Memory) {
        let layout = Layout::read(&Kernel { is_hot, task: 64 }).expect("whole");
        let current = layout.current(variables).expect("known");
        let source = Source {
            cpus: BASE,
            online: BASE + 8,
            offsets: BASE + 16,
            current,
            layout,
        };
        let mut memory = vec![0; 0x2000];
        put(&mut memory, BASE, &3_u32.to_le_bytes());
        put(&mut memory, BASE + 8, &0b101_u64.to_le_bytes());
        for cpu in 0..3 {
            let area = BASE + 0x100 * (cpu + 1);
            // The sum is the address of the pointer, whatever the symbol's base is.
            let offset = area.wrapping_sub(current);
            put(&mut memory, BASE + 16 + 8 * cpu, &offset.to_le_bytes());
            put(&mut memory, area, &(TASKS + 64 * cpu).to_le_bytes());
            put_task(&mut memory, cpu, 11 + cpu as u32, b"init\0rubbish");
        }
        let memory = Memory {
            bytes: memory.into(),
            hook: RefCell::default(),
        };
        (source, memory)
    }

    fn task(cpu: u32, name: &[u8]) -> Task {
        Task {
            cpu,
            pid: 11 + cpu,
            process: 10,
            name: name.to_vec(),
        }
    }

    #[test]
    fn the_tasks_of_the_online_cpus_are_read_in_every_version() {
        for (variables, is_hot) in [
            ([None, Some(0x1f_bc0), Some(0x3_0000)], false),
            ([Some(0x3_2000), None, Some(0x3_0000)], true),
            ([None, None, Some(0x3_0000)], false),
            ([None, Some(0xffff_ffff_8300_0000), None], false),
        ] {
            let (source, memory) = kernel(variables, is_hot);
            let tasks = source.read(&memory).expect("readable");
            assert_eq!(tasks, [task(0, b"init"), task(2, b"init")]);
        }
    }

    #[test]
    fn the_pointer_is_the_one_of_the_version() {
        let current = |is_hot, variables| {
            let layout = Layout::read(&Kernel { is_hot, task: 64 }).expect("whole");
            layout.current(variables)
        };
        assert_eq!(current(true, [Some(16), Some(1), Some(2)]), Some(24));
        // A variable of this name whose type the kernel does not have is none of its tasks.
        assert_eq!(current(false, [Some(16), Some(1), Some(2)]), Some(1));
        assert_eq!(current(false, [None, None, Some(2)]), Some(26));
        assert_eq!(current(false, [None; 3]), None);
        let huge = Layout::read(&Kernel {
            is_hot: true,
            task: 1 << 20,
        });
        assert!(huge.is_err_and(|why| why.contains("task_struct")));
    }

    /// The CPU switches to another task while the first one is copied, and the first one ends.
    #[test]
    fn a_task_that_ends_while_it_is_copied_is_not_shown() {
        let (source, memory) = kernel([None, Some(8), None], false);
        *memory.hook.borrow_mut() = Some(Box::new(|address, memory| {
            if address == TASKS + 16 {
                put_task(memory, 0, 77, b"reused\0");
                put(memory, BASE + 0x100, &(TASKS + 128).to_le_bytes());
            }
        }));
        let tasks = source.read(&memory).expect("readable");
        let expected = Task {
            cpu: 0,
            ..task(2, b"init")
        };
        assert_eq!(tasks[0], expected);
        // A CPU that never rests is left out.
        let mut turn = 0;
        *memory.hook.borrow_mut() = Some(Box::new(move |address, memory| {
            // The id of a task is read once in each copy.
            if address >= TASKS && address % 64 == 16 {
                turn += 1;
                let next = TASKS + 64 * (turn % 3);
                put(memory, BASE + 0x100, &next.to_le_bytes());
            }
        }));
        let tasks = source.read(&memory).expect("readable");
        assert_eq!(tasks.len(), 1, "{tasks:?}");
    }

    /// All CPUs that a kernel may have are online. If they rest, all tasks are read. If a hostile
    /// guest makes each of them switch tasks all the time, the call ends without tasks.
    #[test]
    fn a_call_has_a_maximum_number_of_reads() {
        const AREA: u64 = BASE + 0x10_000;
        let (mut source, memory) = kernel([None, Some(8), None], false);
        source.online = AREA;
        source.offsets = AREA + MAX_CPUS / 8;
        source.current = 0;
        {
            let mut memory = memory.bytes.borrow_mut();
            memory.resize(0x30_000, 0);
            put(&mut memory, BASE, &(MAX_CPUS as u32).to_le_bytes());
            put(&mut memory, AREA, &[0xff; MAX_CPUS as usize / 8]);
            // The CPUs share a pointer.
            for cpu in 0..MAX_CPUS {
                let offset = (BASE + 0x100).to_le_bytes();
                put(&mut memory, source.offsets + 8 * cpu, &offset);
            }
        }
        let reads = |hostile: bool| {
            let reads = Rc::new(Cell::new(0));
            let count = Rc::clone(&reads);
            let mut turn = 0;
            *memory.hook.borrow_mut() = Some(Box::new(move |address, memory| {
                count.set(count.get() + 1);
                // The id of a task is read once in each copy.
                if hostile && (TASKS..AREA).contains(&address) && address % 64 == 16 {
                    turn += 1;
                    let next = TASKS + 64 * (turn % 3);
                    put(memory, BASE + 0x100, &next.to_le_bytes());
                }
            }));
            let tasks = source.read(&memory);
            (tasks.map(|tasks| tasks.len()), reads.get())
        };
        let all = MAX_CPUS as usize;
        assert_eq!(reads(false), (Some(all), 2 + 6 * all));
        assert_eq!(reads(true), (None, MAX_READS));
    }

    #[test]
    fn a_hostile_guest_has_no_tasks() {
        let (source, memory) = kernel([None, Some(8), None], false);
        let put = |address, bytes: &[u8]| put(&mut memory.bytes.borrow_mut(), address, bytes);
        // A pointer into user space, and one beyond the memory.
        put(BASE + 0x100, &0x40_0000_u64.to_le_bytes());
        put(BASE + 0x300, &(u64::MAX - 7).to_le_bytes());
        assert_eq!(source.read(&memory), Some(vec![]));
        put(BASE, &u32::MAX.to_le_bytes());
        assert_eq!(source.read(&memory), None);
        put(BASE, &[0; 4]);
        assert_eq!(source.read(&memory), None);
    }
}
