// SPDX-License-Identifier: Apache-2.0

use patchbay_kernel_image::live::{Kernel, NoteFound, Way, discover};
use static_keys::{Class, Concerns, GateKind};

use static_keys::Nops;

use crate::craft_guest::{
    CraftedGuest, MODULE_TEXT, NOP5, RELEASE, TEXT, guest, guest_with_ideal_nop, physical,
};

pub fn image(guest: &CraftedGuest) -> Result<Kernel, String> {
    discover(guest, &guest.cpus, Way::Image).map_err(|error| error.to_string())
}

/// Discovers the kernel without registers.
pub fn note(guest: &CraftedGuest) -> Result<Kernel, String> {
    discover(guest, &[], Way::Note).map_err(|error| error.to_string())
}

#[test]
fn every_key_is_found_with_its_class_and_name() {
    let kernel = image(&guest()).unwrap();
    let mut keys: Vec<_> = kernel
        .keys
        .iter()
        .map(|key| {
            let sites: usize = key.sites.iter().map(|(_, range)| range.len()).sum();
            let image = kernel.images[key.image].name.as_str();
            (
                image,
                key.name.as_str(),
                key.class,
                key.sealed,
                key.count,
                sites,
            )
        })
        .collect();
    keys.sort_unstable_by_key(|key| (key.0, key.1));
    assert_eq!(
        keys,
        [
            ("", "alpha", Class::Guarded, false, 0, 4),
            ("", "event", Class::Tracepoint, false, 0, 1),
            ("", "net/core/dev.c/123", Class::DynamicDebug, false, 0, 1),
            ("", "sealed", Class::Guarded, true, 1, 1),
            (
                "",
                "security_hook_active_capable_0",
                Class::Never,
                false,
                0,
                1
            ),
            ("", "shared@function_a", Class::Guarded, false, 0, 1),
            ("", "shared@function_b", Class::Guarded, false, 0, 1),
            ("mod", "own", Class::Guarded, false, 1, 1),
        ]
    );
    let line = kernel
        .keys
        .iter()
        .find_map(|key| key.debug.as_ref())
        .unwrap();
    assert_eq!(
        (line.function.as_str(), line.format.as_str()),
        ("function_b", "line %d\n")
    );
    assert!(!line.classed);
    let dead = kernel.images[0]
        .sites
        .iter()
        .filter(|site| site.holds.is_none());
    assert_eq!(dead.count(), 2);
}

#[test]
fn a_line_of_a_class_is_told_from_others() {
    let guest = guest();
    guest.put_u32(guest.symbol("__start___dyndbg") + 32, 123 | 3 << 18);
    let kernel = image(&guest).unwrap();
    let mut lines = kernel.keys.iter().filter_map(|key| key.debug.as_ref());
    let line = lines.next().unwrap();
    assert_eq!((line.line, line.classed), (123, true));
}

#[test]
fn the_kernel_is_described() {
    let kernel = image(&guest()).unwrap();
    assert_eq!(kernel.release, RELEASE);
    assert_eq!(kernel.build_id, "00ff");
    assert_eq!(kernel.kaslr_offset, Some(0));
    assert_eq!(kernel.evidence.cpus, 2);
    assert_eq!(kernel.evidence.note, NoteFound::Agrees);
    assert_eq!(kernel.evidence.missing_gates, []);
    let gates = |kind| kernel.gates.iter().filter(move |gate| gate.kind == kind);
    assert_eq!(gates(GateKind::ModuleList).count(), 2);
    let table = gates(GateKind::ModuleTable).next().unwrap();
    assert_eq!(table.concerns, Concerns::MODULES);
    assert_eq!(
        kernel.images[1]
            .function(kernel.images[1].sites[0].entry.code)
            .unwrap(),
        "module_function+0x10"
    );
}

#[test]
fn the_note_leads_to_the_same_kernel() {
    let guest = guest();
    let (image, note) = (image(&guest).unwrap(), note(&guest).unwrap());
    assert_eq!(note.evidence.note, NoteFound::Searched);
    assert_eq!(
        format!("{:?} {:?} {:?}", image.keys, image.gates, image.boot),
        format!("{:?} {:?} {:?}", note.keys, note.gates, note.boot)
    );
}

#[test]
fn a_cpu_that_has_not_started_says_nothing() {
    let mut guest = guest();
    guest.cpus[0].cr0 = 0x10;
    assert_eq!(image(&guest).unwrap().evidence.cpus, 1);
    guest.cpus[1].cr0 = 0x10;
    assert!(image(&guest).unwrap_err().contains("no vCPU's page table"));
}

/// Since 6.11 the kernel clears the `entries` pointer of a key that it seals.
#[test]
fn a_key_without_entries_is_sealed() {
    let guest = guest();
    guest.put_u64(guest.symbol("shared") + 8, 2);
    let kernel = image(&guest).unwrap();
    let sealed = kernel.keys.iter().filter(|key| key.sealed);
    let mut names: Vec<_> = sealed.map(|key| key.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["sealed", "shared@function_a"]);
}

const K8_NOP5: [u8; 5] = [0x66, 0x66, 0x66, 0x66, 0x90];

#[test]
fn a_kernel_before_5_13_has_the_nop_that_it_chose() {
    for (nop, nops) in [(K8_NOP5, Nops::K8), (NOP5, Nops::P6)] {
        let kernel = image(&guest_with_ideal_nop(nop)).unwrap();
        assert_eq!((kernel.nops, kernel.keys.len()), (nops, 8));
    }
    assert_eq!(image(&guest()).unwrap().nops, Nops::Fixed);
}

#[test]
fn a_kernel_has_one_nop() {
    for (own, other) in [
        (K8_NOP5, &NOP5[..]),
        (NOP5, &K8_NOP5),
        // No kernel before 5.13 has 2-byte sites.
        (NOP5, &[0x66, 0x90]),
        (K8_NOP5, &[0xeb, 0x1e]),
    ] {
        for site in [TEXT + 0x280, MODULE_TEXT + 0x80] {
            let guest = guest_with_ideal_nop(own);
            guest.put(site, other);
            let error = image(&guest).unwrap_err();
            assert!(error.contains("neither its NOP"), "{error}");
        }
    }
}

#[test]
fn a_nop_that_no_kernel_chooses_is_refused() {
    let error = image(&guest_with_ideal_nop([0x90; 5])).unwrap_err();
    assert!(
        error.contains("ideal_nops leads to 90 90 90 90 90"),
        "{error}"
    );
    let guest = guest_with_ideal_nop(K8_NOP5);
    let array = guest.u64_at(physical(guest.symbol("ideal_nops")));
    for pointer in [guest.symbol("ideal_nops"), array + 9 * 8] {
        let guest = guest_with_ideal_nop(K8_NOP5);
        guest.put_u64(pointer, 0xdead_0000);
        let error = image(&guest).unwrap_err();
        assert!(error.contains("is not mapped"), "{error}");
    }
}

/// Returns the error for a guest that was changed.
pub fn after(change: impl FnOnce(&CraftedGuest)) -> String {
    let guest = guest();
    change(&guest);
    image(&guest).map(drop).unwrap_err()
}
