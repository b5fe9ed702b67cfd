// SPDX-License-Identifier: Apache-2.0
//! Discoveries after the first.

use patchbay_kernel_image::live::{self, DiscoveryError, Finder, Kernel, Way};
use patchbay_memory::Cpu;

use crate::craft_guest::{CraftedGuest, DATA, JMP5, MODULE_DATA, NOP5, TEXT, guest, physical};
use crate::found::image;

fn find(finder: &mut Finder, guest: &CraftedGuest) -> Kernel {
    finder.find(guest, &guest.cpus, Way::Image).unwrap()
}

/// Returns everything that was found, without the times.
fn said(kernel: &Kernel) -> String {
    let images = kernel.images.iter().map(|image| {
        let sites = image.sites.iter().map(|site| site.entry);
        let functions = sites.map(|entry| [entry.code, entry.target].map(|at| image.function(at)));
        (
            image.module,
            &image.name,
            &image.text,
            &image.jump_table,
            &image.sites,
            functions.collect::<Vec<_>>(),
        )
    });
    format!(
        "{:x?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {} {}",
        kernel.boot,
        images.collect::<Vec<_>>(),
        kernel.keys,
        kernel.gates,
        kernel.layout,
        kernel.page_table,
        kernel.build_id,
        kernel.evidence.note,
        kernel.release,
        kernel.evidence.cpus,
    )
}

/// Removes the module from the list of modules and from the `static_key_mod` list of the key that
/// it used, and overwrites the module's memory.
fn unload(guest: &CraftedGuest, kernel: &Kernel) {
    let head = guest.symbol("modules");
    guest.put_u64(head, head);
    guest.put_u64(head + 8, head);
    let alpha = guest.symbol("alpha");
    let site = kernel.keys.iter().find(|key| key.address == alpha).unwrap();
    let (_, range) = &site.sites[0];
    let first = kernel.images[0].jump_table.start + 16 * range.start as u64;
    guest.put_u64(alpha + 8, first);
    guest.put(MODULE_DATA, &[0xff; 0x800]);
}

#[test]
fn a_module_that_goes_is_seen_with_what_is_kept() {
    let guest = guest();
    let mut finder = Finder::default();
    let first = find(&mut finder, &guest);
    assert!(!first.evidence.again);
    assert_eq!(said(&first), said(&image(&guest).unwrap()));
    let whole = *guest.reads.borrow();

    unload(&guest, &first);
    *guest.reads.borrow_mut() = 0;
    let second = find(&mut finder, &guest);
    assert!(*guest.reads.borrow() < whole / 2);
    assert!(second.evidence.again);
    assert_eq!((first.images.len(), second.images.len()), (2, 1));
    assert_eq!(said(&second), said(&image(&guest).unwrap()));
}

/// A reset does not change the memory, so only the vCPUs reveal the reset.
#[test]
fn a_kernel_is_confirmed_by_the_vcpus_that_run_it() {
    let guest = guest();
    let mut finder = Finder::default();
    let confirm = |finder: &Finder, cpus: &[Cpu]| {
        let confirmed = finder.confirm(&guest, cpus);
        confirmed.map_err(|error| {
            assert!(matches!(error, DiscoveryError::Busy(_)), "{error}");
            error.to_string()
        })
    };
    confirm(&finder, &guest.cpus).expect_err("nothing was found");
    find(&mut finder, &guest);
    confirm(&finder, &guest.cpus).expect("it runs");

    let running = guest.cpus[0];
    let reset = Cpu {
        cr0: 0x6000_0010,
        cr3: 0,
        cr4: 0,
        idt_base: 0,
        ..running
    };
    let error = confirm(&finder, &[reset; 2]).expect_err("reset");
    assert!(error.contains("no vCPU runs the kernel"), "{error}");
    confirm(&finder, &[]).expect_err("no vCPU");
    confirm(&finder, &[reset, running]).expect("a vCPU that was not started");
    // The vCPUs run firmware with paging, or a nested guest.
    let other = Cpu {
        cr3: 0x1000,
        ..running
    };
    confirm(&finder, &[running, other]).expect_err("another system");
    let nested = Cpu {
        may_be_nested: true,
        ..other
    };
    confirm(&finder, &[running, nested]).expect("one runs it");
    confirm(&finder, &[nested]).expect_err("none runs it");
}

#[test]
fn a_module_that_comes_is_seen_with_what_is_kept() {
    let (with, without) = (guest(), guest());
    unload(&without, &image(&with).unwrap());
    let mut finder = Finder::default();
    let first = find(&mut finder, &without);
    without.ram.borrow_mut().clone_from(&with.ram.borrow());
    let second = find(&mut finder, &without);
    assert!(second.evidence.again);
    assert_eq!((first.images.len(), second.images.len()), (1, 2));
    assert_eq!(said(&second), said(&image(&with).unwrap()));
}

/// A kernel has some 100,000 symbols, and a host may have a thousand guests.
#[test]
fn only_symbols_of_keys_and_sites_are_kept() {
    let guest = guest();
    let mut finder = Finder::default();
    let kernel = find(&mut finder, &guest);
    assert!(kernel.images[0].symbols.len() > 1100);
    let kept = |shown: String| {
        let (_, rest) = shown.split_once("symbols: ").unwrap();
        let digits = rest.trim_start_matches("Some(");
        let digits = digits.split(|c: char| !c.is_ascii_digit()).next().unwrap();
        digits.parse::<usize>().unwrap()
    };
    let functions = kernel.functions();
    // For each key and each site, the symbols at one address.
    assert!((5..40).contains(&kept(format!("{finder:?}"))), "{finder:?}");
    assert!(
        (3..20).contains(&kept(format!("{functions:?}"))),
        "{functions:?}"
    );
    for image in &kernel.images {
        let text = |at: &u64| image.text.contains(at) || image.init_text.contains(at);
        let sites = image.sites.iter().map(|site| site.entry);
        for address in sites
            .flat_map(|entry| [entry.code, entry.target])
            .filter(text)
        {
            assert_eq!(functions.name(address), image.function(address));
        }
    }
    let again = find(&mut finder, &guest);
    assert_eq!(said(&again), said(&kernel));
    assert_eq!(format!("{functions:?}"), format!("{:?}", again.functions()));
    for functions in [functions, again.functions()] {
        for probe in ["probe_sched_switch", "trace_event_raw_event_test"] {
            let address = guest.symbol(probe);
            assert_eq!(functions.probe(address), Some(probe));
            assert_eq!(functions.probe(address + 1), None);
        }
        assert_eq!(functions.probe(guest.symbol("filler_7")), None);
    }
}

/// The first discovery has not kept the name of such a key.
#[test]
fn a_key_that_only_a_new_module_uses_has_its_name() {
    let (with, without) = (guest(), guest());
    let kernel = image(&with).unwrap();
    unload(&without, &kernel);
    let (alpha, key) = (with.symbol("alpha"), with.symbol("boot_cpu_data"));
    let (structure, table, chain) = (MODULE_DATA, MODULE_DATA + 0x400, MODULE_DATA + 0x500);
    with.put_u64(alpha + 8, without.u64_at(physical(alpha + 8)));
    // The first entry of the module's table is now one of this key.
    with.put_u64(table + 8, key.wrapping_sub(table + 8));
    for (address, value) in [
        (key, 0),
        (key + 8, chain | 2),
        (chain, 0),
        (chain + 8, table),
        (chain + 16, structure),
    ] {
        with.put_u64(address, value);
    }
    let mut finder = Finder::default();
    find(&mut finder, &without);
    without.ram.borrow_mut().clone_from(&with.ram.borrow());
    for is_again in [false, true] {
        let kernel = find(&mut finder, &without);
        assert_eq!(kernel.evidence.again, is_again);
        assert!(kernel.keys.iter().any(|key| key.name == "boot_cpu_data"));
        assert_eq!(said(&kernel), said(&image(&with).unwrap()));
    }
}

#[test]
fn counts_and_sites_are_read_each_time() {
    let guest = guest();
    let mut finder = Finder::default();
    find(&mut finder, &guest);
    guest.put(TEXT + 0x280, &JMP5);
    let torn = |kernel: &live::Kernel| {
        let line = kernel.keys.iter().find(|key| key.debug.is_some()).unwrap();
        (line.count, line.torn.clone())
    };
    let (count, why) = torn(&find(&mut finder, &guest));
    assert_eq!(count, 0);
    assert!(why.unwrap().contains("does not do what the count 0"));
    guest.put_u32(guest.symbol("__start___dyndbg") + 40, 1);
    let kernel = find(&mut finder, &guest);
    assert!(kernel.evidence.again);
    assert_eq!(torn(&kernel), (1, None));
    assert_eq!(said(&kernel), said(&image(&guest).unwrap()));
}

/// Returns the count of a key of dynamic debug, before and after the guest enables the key's line.
pub fn counted(guest: &CraftedGuest) -> (i32, i32) {
    let mut finder = Finder::default();
    let mut count = || {
        let kernel = find(&mut finder, guest);
        let line = kernel.keys.iter().find(|key| key.debug.is_some()).unwrap();
        line.count
    };
    let before = count();
    guest.put(TEXT + 0x280, &JMP5);
    guest.put_u32(guest.symbol("__start___dyndbg") + 40, 1);
    (before, count())
}

#[test]
fn a_refused_kernel_is_looked_at_as_a_whole() {
    let guest = guest();
    let mut finder = Finder::default();
    find(&mut finder, &guest);
    guest.put(TEXT + 0x280, &[0x90; 5]);
    let error = finder.find(&guest, &guest.cpus, Way::Image).unwrap_err();
    assert!(matches!(error, DiscoveryError::Refused(_)), "{error}");
    guest.put(TEXT + 0x280, &NOP5);
    assert!(!find(&mut finder, &guest).evidence.again);
}

#[test]
fn a_closed_gate_is_busy_and_what_is_known_stays() {
    let guest = guest();
    let mut finder = Finder::default();
    // A guest that is busy at the first discovery is not read as a whole again.
    for (word, closed, open) in [
        (guest.symbol("shared"), u32::MAX, 0),
        (guest.symbol("system_state"), 4, 3),
    ] {
        guest.put_u32(word, closed);
        let error = finder.find(&guest, &guest.cpus, Way::Image).unwrap_err();
        assert!(matches!(error, DiscoveryError::Busy(_)), "{error}");
        guest.put_u32(word, open);
        assert!(find(&mut finder, &guest).evidence.again);
    }
}

/// The finder must not reuse its results for a kernel that was started since.
#[test]
fn another_kernel_is_discovered_as_a_whole() {
    type Change = (&'static str, &'static dyn Fn(&CraftedGuest));
    let changes: [Change; 3] = [
        ("canary", &|guest| {
            guest.put_u64(guest.symbol("init_task") + 40, 0x4321);
        }),
        ("banner", &|guest| {
            guest.put(guest.symbol("linux_banner") + 30, b"somebody");
        }),
        ("mapping", &|guest| {
            // The last page of data, which holds nothing.
            let last = DATA + 7 * 4096;
            let mut table = physical(guest.symbol("init_top_pgt"));
            for level in [4, 3, 2] {
                table = guest.u64_at(table + 8 * (last >> (12 + 9 * (level - 1)) & 0x1ff)) & !0xfff;
            }
            guest.put_physical(table + 8 * (last >> 12 & 0x1ff), &[0; 8]);
        }),
    ];
    for (what, change) in changes {
        let guest = guest();
        let mut finder = Finder::default();
        find(&mut finder, &guest);
        change(&guest);
        let kernel = find(&mut finder, &guest);
        assert!(!kernel.evidence.again, "{what}");
        assert_eq!(said(&kernel), said(&image(&guest).unwrap()), "{what}");
        assert!(find(&mut finder, &guest).evidence.again, "{what}");
    }
}

/// After kexec the kernel that was found before is still in memory unchanged, but no vCPU runs it.
#[test]
fn every_vcpu_must_run_the_known_kernel() {
    for stray in [0..1, 1..2, 0..2] {
        let mut guest = guest();
        let mut finder = Finder::default();
        find(&mut finder, &guest);
        let root = guest.cpus[0].cr3;
        for cpu in &mut guest.cpus[stray] {
            cpu.cr3 = 0x1000;
        }
        let error = finder.find(&guest, &guest.cpus, Way::Image).unwrap_err();
        assert_eq!(error.to_string(), image(&guest).unwrap_err());
        for cpu in &mut guest.cpus {
            cpu.cr3 = root;
        }
        assert!(find(&mut finder, &guest).evidence.again);
        for cpu in &mut guest.cpus {
            cpu.cr0 = 0x10;
        }
        let error = finder.find(&guest, &guest.cpus, Way::Image).unwrap_err();
        assert!(error.to_string().contains("no vCPU's page table"));
    }
}

#[test]
fn without_registers_nothing_is_kept_in_use() {
    let guest = guest();
    let mut finder = Finder::default();
    find(&mut finder, &guest);
    let kernel = finder.find(&guest, &[], Way::Note).unwrap();
    assert!(!kernel.evidence.again);
}
