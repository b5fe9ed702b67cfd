// SPDX-License-Identifier: Apache-2.0
//! Kernels that lack an IDT, read-only data, or names as in the source.

use static_keys::Class;

use crate::craft_guest::{
    CraftedGuest, PAGE, TEXT, guest, guest_renamed, guest_with_fred, guest_without_protection,
};
use crate::found::{image, note};

/// Returns the keys and the gates that are found, in a form that can be compared.
fn keys(guest: &CraftedGuest) -> String {
    let kernel = image(guest).unwrap();
    format!("{:?} {:?}", kernel.keys, kernel.gates)
}

#[test]
fn a_kernel_with_fred_needs_no_idt() {
    for msrs in [true, false] {
        let guest = guest_with_fred(msrs);
        assert_eq!(keys(&guest), keys(&crate::craft_guest::guest()), "{msrs}");
        assert_eq!(image(&guest).unwrap().evidence.cpus, 2);
    }
    note(&guest_with_fred(false)).unwrap();
}

#[test]
fn the_entry_point_of_fred_is_this_kernels() {
    let mut guest = guest_with_fred(true);
    guest.cpus[1].fred_config = Some((TEXT + PAGE) | 0x41);
    let error = image(&guest).unwrap_err();
    assert!(
        error.contains("vCPU 1") && error.contains("not in the code"),
        "{error}"
    );
    guest.cpus[1].fred_config = None;
    image(&guest).unwrap();
    // A kernel without FRED must have an IDT.
    let without = |name: &str| {
        let guest = guest_renamed(&|own| {
            if own[1..] == *name {
                "Tother".into()
            } else {
                own
            }
        });
        guest.put_physical(crate::craft_guest::IDT_PAGE, &[0; 16]);
        guest
    };
    for name in ["asm_fred_entrypoint_user", "asm_fred_entrypoint_kernel"] {
        let mut guest = without(name);
        for cpu in &mut guest.cpus {
            cpu.idt_base = 0;
        }
        for found in [image(&guest), note(&guest)] {
            let error = found.unwrap_err();
            assert!(error.contains("no asm_fred_entrypoint_user"), "{error}");
        }
    }
}

#[test]
fn a_kernel_without_read_only_data_is_found() {
    let guest = guest_without_protection();
    assert_eq!(keys(&guest), keys(&crate::craft_guest::guest()));
    note(&guest).unwrap();
    // Words that the kernel writes are read again, so they have their current values.
    let kernel = crate::again::counted(&guest);
    assert_eq!(kernel, (0, 1));
}

#[test]
fn why_a_kernel_without_read_only_data_is_refused_is_said() {
    let guest = guest_renamed(&|own| {
        if own == "D__end_rodata" {
            "Dother".into()
        } else {
            own
        }
    });
    let open = guest_without_protection();
    let image_of = |guest: &CraftedGuest| guest.ram.borrow()[0x10_0000..0x18_0000].to_vec();
    open.ram.borrow_mut()[0x10_0000..0x18_0000].copy_from_slice(&image_of(&guest));
    let error = image(&open).unwrap_err();
    assert!(error.contains("rodata=off on its command line"), "{error}");
}

#[test]
fn why_no_vcpu_leads_to_a_kernel_is_said() {
    for (change, expected) in [
        (
            (|guest: &mut CraftedGuest| guest.cpus[0].cr3 = 0x5000) as fn(&mut CraftedGuest),
            "vCPU 0: its page table maps nothing at 0xffffffff80000000",
        ),
        (
            |guest| guest.cpus[0].idt_base = 0x1000,
            "vCPU 0: it has no IDT",
        ),
        (
            |guest| guest.put_physical(crate::craft_guest::IDT_PAGE + 2, &[0x10, 0]),
            "",
        ),
        (
            |guest| guest.cpus[0].cr0 = 0x10,
            "none has turned on paging",
        ),
    ] {
        let mut guest = guest();
        change(&mut guest);
        guest.cpus[1] = guest.cpus[0];
        match image(&guest) {
            Ok(_) => assert_eq!(expected, ""),
            Err(error) => assert!(!expected.is_empty() && error.contains(expected), "{error}"),
        }
    }
}

/// The suffix that ThinLTO adds: the hash of the file's path, in decimal.
const SUFFIX: &str = ".llvm.1234567890123456789";

#[test]
fn static_symbols_that_thin_lto_renames_are_found() {
    let statics = [
        "jump_label_mutex",
        "text_mutex",
        "tracepoints_mutex",
        "ddebug_lock",
        "ddebug_tables",
        "tp_vec_nr",
        "bp_desc",
        "mod_tree",
        "alpha",
        "function_a",
    ];
    let renamed = |own: String| match statics.contains(&&own[1..]) {
        true => own + SUFFIX,
        false => own,
    };
    assert_eq!(keys(&guest_renamed(&renamed)), keys(&guest()));
    let kernel = image(&guest_renamed(&renamed)).unwrap();
    assert!(kernel.evidence.missing_gates.is_empty());
    let alpha = kernel.keys.iter().find(|key| key.name == "alpha").unwrap();
    assert_eq!(alpha.class, Class::Guarded);
}

#[test]
fn a_plain_name_comes_before_a_renamed_one() {
    // A driver has static symbols with the same names as the kernel's own.
    let rename = |own: String| match own.strip_prefix("tfiller_") {
        Some("1") => format!("dmodules{SUFFIX}"),
        Some("2") => format!("tmodule_mutex{SUFFIX}"),
        Some("3") => format!("Ttext_mutex{SUFFIX}"),
        _ => own,
    };
    assert_eq!(keys(&guest_renamed(&rename)), keys(&guest()));
    // Two symbols have this name in the source and none has it in kallsyms, so the name is
    // ambiguous.
    let twice = |own: String| match own.as_str() {
        "tfiller_1" | "Dtext_mutex" => format!("dtext_mutex{SUFFIX}{}", own.len()),
        _ => own,
    };
    let error = image(&guest_renamed(&twice)).unwrap_err();
    assert!(
        error.contains("no single symbol text_mutex") || error.contains("text_mutex"),
        "{error}"
    );
}
