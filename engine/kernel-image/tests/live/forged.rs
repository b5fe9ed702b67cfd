// SPDX-License-Identifier: Apache-2.0
//! Forged copies of the kernel's note.

use patchbay_kernel_image::live::{NoteFound, Way, discover};

use crate::craft_guest::{DIRECT, NOTE, guest, note_text};
use crate::found::{after, image, note};

/// Pages with texts that any process in the guest can write.
#[test]
fn forged_notes_do_not_mislead() {
    let free = 0x1a_8000;
    let forged = |change: &dyn Fn(String) -> String| {
        let guest = guest();
        let text = change(note_text(&guest));
        guest.put_physical(free, text.as_bytes());
        note(&guest).map(|kernel| kernel.release)
    };
    // A text that does not agree with the page tables is ignored.
    for (from, to) in [
        ("NUMBER(phys_base)=-", "NUMBER(phys_base)=-1"),
        ("SYMBOL(init_top_pgt)=f", "SYMBOL(init_top_pgt)=e"),
        ("pgtable_l5_enabled)=0", "pgtable_l5_enabled)=1"),
        ("SYMBOL(_stext)", "SYMBOL(nothing)"),
        ("SYMBOL(kallsyms_names)=", "SYMBOL(kallsyms_names)=1"),
        // This address lies in writable data.
        (
            "SYMBOL(kallsyms_names)=ffffffff81001",
            "SYMBOL(kallsyms_names)=ffffffff81021",
        ),
        ("phys_base)=", "phys_base)=x"),
    ] {
        let release = forged(&|text| text.replace("6.12.1", "6.6.6").replace(from, to));
        assert_eq!(
            release.as_deref(),
            Ok(crate::craft_guest::RELEASE),
            "{from}"
        );
    }
    // A text that agrees can only cause a refusal.
    let error = forged(&|text| text.replace("6.12.1", "6.6.6")).unwrap_err();
    assert!(error.contains("two VMCOREINFO texts"), "{error}");
    let error = forged(&|text| text.replace("sme_mask)=0", "sme_mask)=8")).unwrap_err();
    assert!(error.contains("encrypted"), "{error}");
    // The page table that this text names maps `_stext`, but not to the address that follows from
    // the text's `phys_base`.
    let release = forged_with_tables();
    assert_eq!(release.as_deref(), Ok(crate::craft_guest::RELEASE));
    // Every vCPU must map the kernel that a text names.
    let mut guest = guest();
    guest.cpus[1].cr3 = 0x5000;
    let error = discover(&guest, &guest.cpus, Way::Note)
        .map(drop)
        .unwrap_err();
    assert!(error.to_string().contains("VMCOREINFO"), "{error}");
    guest.cpus[1] = guest.cpus[0];
    guest.cpus[1].cr4 |= 1 << 12;
    assert!(discover(&guest, &guest.cpus, Way::Note).is_err());
}

/// A text that names another `phys_base`, and a copy of the top page table at the guest-physical
/// address to which that `phys_base` maps it.
fn forged_with_tables() -> Result<String, String> {
    let guest = guest();
    let (text, root) = (note_text(&guest), guest.cpus[0].cr3 as usize);
    let table = guest.ram.borrow()[root..root + 4096].to_vec();
    // Both pages are free.
    let copy = 0x1a_8000;
    let moved = (0x10_0000_i64 - 0x100_0000) + (copy - root as i64);
    let base = text
        .lines()
        .find(|line| line.starts_with("NUMBER(phys_base)"));
    let text = text.replace(base.unwrap(), &format!("NUMBER(phys_base)={moved}"));
    guest.put_physical(copy as u64, &table);
    guest.put_physical(
        copy as u64 + 4096,
        text.replace("6.12.1", "6.6.6").as_bytes(),
    );
    note(&guest).map(|kernel| kernel.release)
}

#[test]
fn the_kernels_own_note_must_agree() {
    for (from, to, expected) in [
        ("6.12.1", "6.6.6", "the release"),
        ("phys_base)=-", "phys_base)=-1", "phys_base"),
        ("_stext)=ffffffff81", "_stext)=ffffffff82", "_stext"),
    ] {
        let error = after(|guest| {
            let text = note_text(guest).replace(from, to);
            guest.put_physical(NOTE, text.as_bytes());
        });
        assert!(error.contains(expected), "{error}");
    }
    let guest = guest();
    let text = note_text(&guest).replace("BUILD-ID=00ff", "BUILD-ID=\x1bff\u{e9}");
    guest.put_physical(NOTE, text.as_bytes());
    assert_eq!(image(&guest).unwrap().build_id, "?ff??");
    // If the pointer leads to no memory, the kernel counts as one without VMCOREINFO. The build id
    // then comes from its section `.notes`.
    guest.put_u64(guest.symbol("vmcoreinfo_data"), DIRECT + (1 << 40));
    let kernel = image(&guest).unwrap();
    assert_eq!(
        (kernel.evidence.note, &*kernel.build_id),
        (NoteFound::Absent, "00ff")
    );
    guest.put_u32(guest.symbol("__start_notes"), u32::MAX);
    assert_eq!(image(&guest).unwrap().build_id, "");
}
