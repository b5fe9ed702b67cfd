// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::testing::*;

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
            let refusal: &[Refusal] = match (logs, memfd) {
                (true, _) => &[Refusal::DirtyLogging],
                (_, true) => &[Refusal::GuestMemfd],
                _ => &[],
            };
            assert_eq!(vm.refusals(), refusal);
        }
    }
    // The memory of a display is smaller than the guest's.
    for world in both(&[LOW, (HIGH.0, HIGH.1, HIGH.2, LOG_DIRTY_PAGES, 0)]) {
        let vm = world.vm().expect("a VM");
        assert_eq!(vm.dirty_logging(), DirtyLogging::Part);
        assert_eq!(vm.refusals(), []);
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

/// Replaces the set of slots, or a slot in the set, just after the first part has been read.
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
        // A pid that has been freed and reused for another process.
        (PID + 56, 7, "a struct pid"),
        (PID, 33, "a struct pid"),
        (TASK, PID + 8, "a task_struct"),
        // A node that leads back to its parent, and an entry that requires a retry
        // (`XA_RETRY_ENTRY`).
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
            // Another process image, without open files, with another table, with a descriptor
            // that is closed or that has another file.
            (TASK + 80, MM + 8, MM),
            (TASK + 72, 0, FILES),
            (FILES, TABLE + 0x80, TABLE),
            (DESCRIPTORS + 8 * u64::from(DESCRIPTOR), 0, FILE),
            (DESCRIPTORS + 8 * u64::from(DESCRIPTOR), FILE + 8, FILE),
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
    for (descriptor, is_same) in [(descriptors[1], true), (other, false)] {
        let same = kernel.is_same_file((NUMBER, DESCRIPTOR), (NUMBER, descriptor));
        assert_eq!(same, Ok(is_same), "{descriptor}");
    }
}

/// A node that has been freed and used again may have the shift of its parent.
#[test]
fn each_node_divides_the_index_further() {
    let world = World::new(true, &[LOW]);
    world.node(NODES + 0x1000, 6, &[(15, PID)]);
    let error = world.vm().expect_err("no leaf");
    assert_eq!(error, WalkError::Inconsistent("an xarray"));
}

/// The process closes the descriptor and opens it again while the VM is read.
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
        // A thread that is only in an outer namespace, and one that is in another inner namespace.
        ([(THREADS, 0), (THREADS + 56, 9)], None),
        ([(THREADS + 64, AREA + 0x3000), (THREADS + 56, 9)], None),
        ([(THREADS + 64, NAMESPACE), (THREADS + 56, 9)], Some(9)),
        // The thread has ended.
        ([(THREADS + 8, 0), (THREADS + 56, 9)], None),
    ] {
        let world = World::new(true, &[LOW]);
        for (at, word) in changes {
            world.put(at, &[word]);
        }
        assert_eq!(world.vm().expect("a VM").vcpus[0].thread, thread);
    }
}
