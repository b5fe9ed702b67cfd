// SPDX-License-Identifier: Apache-2.0

use patchbay_kernel_image::live::{self, DiscoveryError, Finder, Way, discover};
use patchbay_memory::Cpu;
use static_keys::{GateKind, ListedGate};

use crate::craft_guest::{
    CraftedGuest, DIRECT, JMP5, MODULE_DATA, MODULE_TEXT, RAM, RODATA, TEXT, guest, guest_without,
    physical,
};
use crate::found::{after, image, note};

fn is_busy(change: impl FnOnce(&CraftedGuest)) -> bool {
    let guest = guest();
    change(&guest);
    let error = discover(&guest, &guest.cpus, Way::Image)
        .map(drop)
        .unwrap_err();
    matches!(error, DiscoveryError::Busy(_))
}

#[test]
fn one_site_that_is_not_explained_refuses_the_whole() {
    for (bytes, expected) in [
        (
            &[0xe9, 0x1c, 0, 0, 0][..],
            "e9 1c 00 00 00, neither its NOP nor the JMP",
        ),
        // The NOP that kernels before 5.13 choose for some processors.
        (
            &[0x66, 0x66, 0x66, 0x66, 0x90],
            "66 66 66 66 90, neither its NOP",
        ),
    ] {
        for site in [TEXT + 0x280, MODULE_TEXT + 0x80] {
            let error = after(|guest| guest.put(site, bytes));
            assert!(error.contains(expected), "{error}");
        }
    }
    // The guest is changing the site.
    let change = |guest: &CraftedGuest| guest.put(TEXT + 0x280, &[0xcc, 0x1f, 0x44, 0, 0]);
    let error = after(change);
    assert!(error.contains("holds a breakpoint"), "{error}");
    assert!(is_busy(change));
}

/// A writer that was killed leaves a key torn. All other keys remain usable.
#[test]
fn a_torn_key_is_named_and_refuses_nothing() {
    let kernel = image(&guest()).expect("whole");
    assert!(kernel.keys.iter().all(|key| key.torn.is_none()));
    // The three contents are a JMP although the key is off, a mixture of NOP and JMP, and the TEST
    // that a replacement stores first.
    let mixed = [JMP5[0], JMP5[1], 0x44, 0, 0];
    let test = [0xa9, 0x1f, 0x44, 0, 0];
    for (bytes, expected) in [
        (JMP5, "does not do what the count 0"),
        (mixed, "a mixture of its NOP and its JMP"),
        (test, "a mixture of its NOP and its JMP"),
    ] {
        let guest = guest();
        guest.put(TEXT + 0x280, &bytes);
        let torn = image(&guest).expect("the others are whole");
        let named: Vec<_> = torn
            .keys
            .iter()
            .filter_map(|key| key.torn.clone())
            .collect();
        assert_eq!(named.len(), 1, "{named:?}");
        assert!(named[0].contains(expected), "{named:?}");
        assert_eq!(torn.keys.len(), kernel.keys.len());
        let entries = |kernel: &live::Kernel| -> Vec<_> {
            let images = kernel.images.iter();
            images
                .flat_map(|image| &image.sites)
                .map(|site| site.entry)
                .collect()
        };
        assert_eq!(entries(&torn), entries(&kernel));
    }
}

/// The guest is changing the key, or hangs in the change with its mutexes held. The other keys can
/// be listed.
#[test]
fn a_key_that_is_torn_while_a_mutex_is_held_says_so() {
    for (symbol, offset, value) in HELD {
        let guest = guest();
        guest.put_u32(guest.symbol(symbol) + offset, value);
        guest.put(TEXT + 0x280, &JMP5);
        let kernel = image(&guest).expect("the others are whole");
        let torn: Vec<_> = kernel
            .keys
            .iter()
            .filter_map(|key| key.torn.as_deref())
            .collect();
        assert_eq!(torn.len(), 1, "{torn:?}");
        assert!(torn[0].contains(", while the gate "), "{torn:?}");
    }
}

#[test]
fn a_closed_gate_is_busy_and_said() {
    for (symbol, value, expected) in [
        ("system_state", 1, "gate system_state is"),
        ("panic_cpu", 2, "its kernel panics on CPU 2, and its keys"),
    ] {
        let close = |guest: &CraftedGuest| guest.put_u32(guest.symbol(symbol), value);
        let error = after(close);
        assert!(error.contains(expected), "{error}");
        // A panic ends only with a reset, so it is not reported as busy.
        assert_eq!(is_busy(close), symbol != "panic_cpu", "{symbol}");
        assert_eq!(
            error.contains("look again"),
            symbol != "panic_cpu",
            "{error}"
        );
    }
}

#[test]
fn the_keys_of_a_kernel_that_has_panicked_can_be_read() {
    let guest = guest();
    let mut finder = Finder::default();
    let before = finder.find(&guest, &guest.cpus, Way::Image).expect("found");
    guest.put_u32(guest.symbol("panic_cpu"), 2);
    for finder in [&mut finder, &mut Finder::default()] {
        let error = finder.find(&guest, &guest.cpus, Way::Image);
        assert!(matches!(error, Err(DiscoveryError::Panics(2))), "{error:?}");
        let kernel = finder.find_panicked(&guest, &guest.cpus, Way::Image);
        let kernel = kernel.expect("it can be read");
        let addresses = |kernel: &live::Kernel| -> Vec<u64> {
            kernel.keys.iter().map(|key| key.address).collect()
        };
        assert_eq!(kernel.boot, before.boot);
        assert_eq!(addresses(&kernel), addresses(&before));
    }
    // The other gates still count.
    guest.put_u32(guest.symbol("system_state"), 1);
    let error = finder.find_panicked(&guest, &guest.cpus, Way::Image);
    assert!(matches!(error, Err(DiscoveryError::Busy(_))), "{error:?}");
}

/// Mutexes and words of text changes, each with the value that it keeps while its holder hangs.
const HELD: [(&str, u64, u32); 7] = [
    ("jump_label_mutex", 0, 0x1000),
    ("text_mutex", 0, 0x1008),
    ("tracepoints_mutex", 0, 0x1000),
    ("ddebug_lock", 0, 0x1000),
    ("module_mutex", 0, 0x1000),
    ("tp_vec_nr", 0, 1),
    ("bp_desc", 12, 1),
];

/// The gates of [`HELD`] stop only changes of the keys that they protect.
#[test]
fn a_mutex_that_stays_held_stops_no_discovery() {
    let whole = image(&guest()).unwrap();
    for (symbol, offset, value) in HELD {
        let guest = guest();
        guest.put_u32(guest.symbol(symbol) + offset, value);
        let kernel = image(&guest).unwrap();
        assert_eq!(
            format!("{:?} {:?}", kernel.keys, kernel.gates),
            format!("{:?} {:?}", whole.keys, whole.gates),
            "{symbol}"
        );
    }
}

/// A site that is not explained may be one that the kernel is changing.
#[test]
fn what_is_not_explained_while_a_mutex_is_held_is_busy() {
    for (symbol, offset, value) in HELD {
        let change = |guest: &CraftedGuest| {
            guest.put_u32(guest.symbol(symbol) + offset, value);
            guest.put(TEXT + 0x280, &[0xe9, 0x1c, 0, 0, 0]);
        };
        let error = after(change);
        assert!(is_busy(change), "{error}");
        assert!(error.contains("while the gate"), "{error}");
    }
}

/// The kernel shuts down while the tables are read.
#[test]
fn gates_are_looked_at_again_at_the_end() {
    let guest = guest();
    image(&guest).unwrap();
    let reads = *guest.reads.borrow();
    let at = physical(guest.symbol("system_state"));
    *guest.reads.borrow_mut() = 0;
    *guest.before_read.borrow_mut() = Some(Box::new(move |number, ram| {
        if number + 12 > reads {
            ram[at as usize] = 4;
        }
    }));
    let error = image(&guest).map(drop).unwrap_err();
    assert!(error.contains("system_state"), "{error}");
}

/// The kernel boots when the first tables are read, and has booted at the end.
#[test]
fn gates_are_looked_at_before_the_tables() {
    let guest = guest();
    image(&guest).unwrap();
    let reads = *guest.reads.borrow();
    let at = physical(guest.symbol("system_state"));
    *guest.reads.borrow_mut() = 0;
    guest.put_u32(guest.symbol("system_state"), 1);
    *guest.before_read.borrow_mut() = Some(Box::new(move |number, ram| {
        if number + 12 > reads {
            ram[at as usize] = 3;
        }
    }));
    let error = image(&guest).map(drop).unwrap_err();
    assert!(error.contains("system_state"), "{error}");
}

#[test]
fn keys_must_name_their_entries() {
    for (change, expected) in [
        (
            (|guest: &CraftedGuest| guest.put_u64(guest.symbol("shared") + 8, 0))
                as fn(&CraftedGuest),
            "names other entries",
        ),
        (
            |guest| guest.put_u64(guest.symbol("alpha") + 8, 0x4000_0002),
            "not mapped",
        ),
        // The list of alpha leads back to its first element.
        (
            |guest| guest.put_u64(MODULE_DATA + 0x518, MODULE_DATA + 0x500),
            "longer than the 2 images that use it",
        ),
        (
            |guest| guest.put_u64(MODULE_DATA + 0x510, MODULE_DATA + 0x40),
            "not in the list of modules",
        ),
        (
            |guest| guest.put_u32(guest.symbol("shared"), u32::MAX),
            "the first reference",
        ),
    ] {
        let error = after(change);
        assert!(error.contains(expected), "{error}");
        assert!(is_busy(change), "{error}");
    }
}

#[test]
fn keys_lie_in_data_of_an_image() {
    for (key, expected) in [
        (TEXT + 0x700, "lies in text"),
        (TEXT - 0x1000, "lies in no image"),
    ] {
        let error = after(|guest| {
            // The first entry is changed, so that the table stays sorted.
            let word = guest.symbol("__start___jump_table") + 8;
            guest.put_u64(word, key.wrapping_sub(word));
        });
        assert!(error.contains(expected), "{error}");
    }
    // This key lies after the last area of the last image.
    let error = after(|guest| {
        let word = MODULE_DATA + 0x400 + 16 + 8;
        guest.put_u64(word, (MODULE_DATA + 0x900).wrapping_sub(word));
    });
    assert!(error.contains("lies in no image"), "{error}");
}

#[test]
fn modules_are_bounded_and_live() {
    let head = |guest: &CraftedGuest| guest.symbol("modules");
    let error = after(|guest| guest.put_u64(MODULE_DATA + 8, MODULE_DATA + 8));
    assert!(error.contains("loops"), "{error}");
    // Modules that are not live are limited to 64, because the `static_key_mod` list of each key
    // may contain all of them.
    let error = after(|guest| {
        guest.put_u32(MODULE_DATA, 1);
        guest.put_u64(MODULE_DATA + 8, MODULE_DATA + 8);
    });
    assert!(
        error.contains("more than 64 modules are loading"),
        "{error}"
    );
    let error = after(|guest| guest.put_u64(head(guest), 0x1000));
    assert!(error.contains("not mapped"), "{error}");
    let error = after(|guest| guest.put_u32(MODULE_DATA + 152, 1 << 21));
    assert!(error.contains("are left for it"), "{error}");
    let error = after(|guest| guest.put_u32(MODULE_DATA + 88, u32::MAX));
    assert!(error.contains("cannot be read"), "{error}");
    // Two modules share one jump table.
    let error = after(|guest| {
        let second = MODULE_DATA + 0x680;
        let mut copy = [0; 0x80];
        copy.copy_from_slice(&guest.ram.borrow()[physical(MODULE_DATA) as usize..][..0x80]);
        guest.put(second, &copy);
        guest.put_u64(MODULE_DATA + 8, second + 8);
    });
    assert!(
        error.contains("cannot be read") || error.contains("names other"),
        "{error}"
    );
}

/// After an oops in its init function a module stays COMING.
#[test]
fn a_module_that_is_not_live_is_left_out_and_named() {
    for (state, name) in [(1, "COMING"), (3, "UNFORMED"), (9, "of an unknown state")] {
        let guest = guest();
        guest.put_u32(MODULE_DATA, state);
        let kernel = image(&guest).unwrap();
        assert_eq!(kernel.images.len(), 1);
        let left_out: Vec<_> = kernel
            .left_out
            .iter()
            .map(|module| (&*module.name, module.state))
            .collect();
        assert_eq!(left_out, [("mod", name)]);
        // The key that the module uses has only the kernel's own sites.
        let alpha = kernel.keys.iter().find(|key| key.name == "alpha").unwrap();
        assert_eq!(alpha.sites, [(0, 0..3)]);
        assert!(!kernel.keys.iter().any(|key| key.name == "own"));
        // The gate closes when the state changes, and the modules are then read again.
        let gate = |gate: &&ListedGate| gate.kind == GateKind::ModuleLeftOut;
        let gate = kernel.gates.iter().find(gate).unwrap();
        assert_eq!((gate.address, gate.wanted), (MODULE_DATA, u64::from(state)));
    }
    assert!(image(&guest()).unwrap().left_out.is_empty());
    // The text of a module that is not live may hold anything, and its memory may be unmapped.
    let guest = guest();
    guest.put_u32(MODULE_DATA, 1);
    guest.put(MODULE_TEXT, &[0xcc; 0x100]);
    guest.put_u64(MODULE_DATA + 144, 0xdead_0000);
    guest.put_u64(MODULE_DATA + 80, 0xdead_0000);
    image(&guest).unwrap();
}

#[test]
fn a_kernel_that_is_not_there_is_not_found() {
    let error = after(|guest| guest.ram.borrow_mut().fill(0));
    assert!(error.contains("no vCPU's page table"), "{error}");
    // Gate 0 leads elsewhere in the text.
    let error = after(|guest| guest.put_physical(0x1a_0000, &[0x20]));
    assert!(error.contains("not asm_exc_divide_error"), "{error}");
    let guest = guest();
    guest.put_physical(0x1a_0000, &[0x20]);
    let error = note(&guest).map(drop).unwrap_err();
    assert!(error.contains("not asm_exc_divide_error"), "{error}");
    // One vCPU has a different IDT.
    let mut guest = crate::craft_guest::guest();
    let gate = guest.u64_at(0x1a_0000) + 0x10;
    guest.put_physical(0x1a_8000, &gate.to_le_bytes());
    guest.put_physical(0x1a_8008, &guest.u64_at(0x1a_0008).to_le_bytes());
    guest.cpus[1].idt_base = DIRECT + 0x1a_8000;
    let error = image(&guest).map(drop).unwrap_err();
    assert!(error.contains("gate 0 of vCPU 1"), "{error}");
    guest.cpus[1].idt_base = DIRECT + 0x1a_9000;
    let error = image(&guest).map(drop).unwrap_err();
    assert!(
        error.contains("vCPU 1 does not run this kernel") && error.contains("it has no IDT"),
        "{error}"
    );
    let error = after(|guest| guest.put(guest.symbol("linux_banner"), b"Windows"));
    assert!(error.contains("linux_banner"), "{error}");
    // One vCPU runs a nested guest.
    let mut guest = crate::craft_guest::guest();
    guest.cpus[1].cr3 = 0x5000;
    let error = image(&guest).map(drop).unwrap_err();
    assert!(error.contains("vCPU 1 does not run this kernel"), "{error}");
}

/// A nested guest chooses its page table and its IDT itself, so registers that may belong to one
/// are not used to find the kernel.
#[test]
fn registers_of_a_nested_guest_are_not_the_guests() {
    let mut guest = guest();
    guest.cpus[0].may_be_nested = true;
    image(&guest).expect("the other vCPU leads to the kernel");
    guest.cpus[1].may_be_nested = true;
    let error = image(&guest).map(drop).unwrap_err();
    assert!(error.contains("VMX or SVM is on"), "{error}");
    // The registers of a vCPU that has not started do not lead to the kernel.
    guest.cpus[1].may_be_nested = false;
    guest.cpus[1].cr0 = 0x10;
    let error = image(&guest).map(drop).unwrap_err();
    assert!(error.contains("VMX or SVM is on"), "{error}");
    for (cr4, efer, can) in [(0, 0xd01, false), (1 << 13, 0, true), (0, 0x1d01, true)] {
        assert_eq!(Cpu::can_run_guests(cr4, efer), can, "{cr4:x} {efer:x}");
    }
}

/// Tables that map themselves, at each level.
#[test]
fn page_tables_that_loop_end() {
    let guest = guest();
    let root = guest.cpus[0].cr3;
    let index = TEXT >> 39 & 0x1ff;
    let level_3 = guest.u64_at(root + 8 * index) & !0xfff;
    let level_2 = guest.u64_at(level_3 + 8 * (TEXT >> 30 & 0x1ff)) & !0xfff;
    for (table, shift) in [(root, 39), (level_3, 30), (level_2, 21)] {
        for target in [root, level_3, level_2, RAM, !0xfff] {
            let change = |guest: &CraftedGuest| {
                for index in (0..512).filter(|index| shift != 39 || *index == TEXT >> 39 & 0x1ff) {
                    guest.put_physical(table + 8 * index, &(target | 3).to_le_bytes());
                }
            };
            let guest = crate::craft_guest::guest();
            change(&guest);
            // One of the targets is the entry's original value.
            for found in [image(&guest), note(&guest)] {
                assert!(found.is_err() || target == level_3 && table == root);
            }
        }
    }
}

#[test]
fn kallsyms_that_lie_are_refused() {
    // Returns the guest-physical address of the digits in the token table.
    let kallsyms = |guest: &CraftedGuest| {
        let ram = guest.ram.borrow();
        let start = physical(RODATA) as usize;
        let digits = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0";
        let data = &ram[start..start + 31 * 4096];
        let at = data
            .windows(digits.len())
            .position(|window| window == digits);
        start + at.unwrap()
    };
    let error = after(|guest| {
        let at = kallsyms(guest);
        guest.put_physical(at as u64, &[1]);
    });
    assert!(error.contains("no kallsyms"), "{error}");
    // The tables must be valid at the addresses that the symbols give.
    let error = after(|guest| guest.put_u32(guest.symbol("__start_BTF"), 0));
    assert!(error.contains("BTF cannot be read"), "{error}");
    // The read-only data is mapped writable, so the image has no read-only part.
    let error = after(|guest| {
        for page in 0..31 {
            let mut table = guest.cpus[0].cr3;
            for shift in [39, 30, 21] {
                table = guest.u64_at(table + 8 * (RODATA >> shift & 0x1ff)) & !0xfff;
            }
            let at = table + 8 * ((RODATA + page * 4096) >> 12 & 0x1ff);
            let entry = guest.u64_at(at) | 2;
            guest.put_physical(at, &entry.to_le_bytes());
        }
    });
    assert!(error.contains("no vCPU's page table"), "{error}");
}

/// With CONFIG_RANDSTRUCT, only type information gives the offsets of a structure's members.
#[test]
fn a_kernel_without_type_information_or_data_symbols_is_refused() {
    for (symbol, why) in [
        ("__start_BTF", "CONFIG_DEBUG_INFO_BTF"),
        ("__stop_BTF", "CONFIG_DEBUG_INFO_BTF"),
        ("init_top_pgt", "CONFIG_KALLSYMS_ALL"),
        ("system_state", "CONFIG_KALLSYMS_ALL"),
    ] {
        let guest = guest_without(symbol);
        for found in [image(&guest), note(&guest)] {
            let error = found.map(drop).unwrap_err();
            assert!(error.contains(why), "{symbol}: {error}");
        }
    }
}

#[test]
fn truncated_type_information_is_refused() {
    let whole = guest();
    let (start, stop) = (whole.symbol("__start_BTF"), whole.symbol("__stop_BTF"));
    // The words are the lengths of the types and of the strings, the kind of a type, and the magic.
    for (at, value) in [
        (12, u32::MAX),
        (12, 0x100),
        (20, u32::MAX),
        (28, 0xff << 24),
        (0, 7),
    ] {
        let error = after(|guest| guest.put_u32(start + at, value));
        assert!(error.contains("the kernel's BTF"), "{error}");
    }
    let types = whole.u64_at(physical(start) + 8) >> 32;
    for cut in (24..24 + types).step_by(31) {
        let error = after(|guest| {
            let zeros = vec![0; (stop - start - cut) as usize];
            guest.put(start + cut, &zeros);
        });
        assert!(error.contains("BTF"), "{error}");
    }
}

/// The guest's memory is replaced before one of the reads, for each read in turn.
#[test]
fn memory_that_changes_while_it_is_read_ends_well() {
    let guest = guest();
    image(&guest).unwrap();
    let whole = guest.ram.borrow().clone();
    let reads = *guest.reads.borrow();
    assert!(reads < 1000, "{reads}");
    for first in 0..reads {
        for fill in [None, Some(0), Some(0xff)] {
            *guest.ram.borrow_mut() = whole.clone();
            *guest.reads.borrow_mut() = 0;
            *guest.before_read.borrow_mut() = Some(Box::new(move |number, ram| {
                if number == first {
                    match fill {
                        Some(byte) => ram.fill(byte),
                        None => ram.rotate_left(4096),
                    }
                }
            }));
            if let Ok(kernel) = image(&guest) {
                // A kernel that is found is complete, even if the memory was replaced during the
                // discovery.
                assert!(
                    kernel
                        .gates
                        .iter()
                        .any(|gate| gate.kind == GateKind::TextMutex)
                );
                assert_eq!(kernel.keys.len(), 8);
            }
        }
    }
}
