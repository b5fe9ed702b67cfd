// SPDX-License-Identifier: Apache-2.0
//! Compares the code of kernels without running them.

use anyhow::{Context, Result};

use crate::Kernels;
use crate::images::{Changed, Comparison, Image, functions, sections};

/// A system call that has the demo's branch and does little else.
const GETPPID: &str = "__do_sys_getppid";

/// Prints the differences. Returns whether the claims hold: with the symbol off all code is
/// identical, and with the symbol on no function that contains a branch site differs.
pub fn compare(kernels: &Kernels) -> Result<bool> {
    let [unpatched, not_selected, selected, without_jump_labels] = [
        &kernels.unpatched,
        &kernels.not_selected,
        &kernels.selected,
        &kernels.without_jump_labels,
    ]
    .map(|files| Image::read(&files.vmlinux));
    let (unpatched, not_selected) = (unpatched?, not_selected?);
    let (selected, without_jump_labels) = (selected?, without_jump_labels?);

    println!("Sections with code, beside those of the unpatched kernel:\n");
    println!("| | bytes | symbol off | symbol on |");
    println!("|---|---|---|---|");
    let off = sections(&unpatched, &not_selected);
    let on = sections(&unpatched, &selected);
    let word = |identical| if identical { "identical" } else { "differs" };
    for (off, on) in off.iter().zip(&on) {
        println!(
            "| `{}` | {} | {} | {} |",
            off.name,
            off.size,
            word(off.identical),
            word(on.identical)
        );
    }
    let identical = off.iter().all(|section| section.identical);

    let off = functions(&unpatched, &not_selected)?;
    let on = functions(&unpatched, &selected)?;
    println!(
        "\nFunctions, beside those of the unpatched kernel, with addresses set aside that mean the same:\n"
    );
    println!("| | symbol off | symbol on |");
    println!("|---|---|---|");
    let row = |what: &str, number: fn(&Comparison) -> usize| {
        println!("| {what} | {} | {} |", number(&off), number(&on));
    };
    row("branch sites, unpatched", |found| found.sites[0]);
    row("branch sites", |found| found.sites[1]);
    row("of those in no function", |found| found.elsewhere[1]);
    row("functions with sites, unpatched", |found| found.with_sites);
    row("of those the same", |found| {
        found.with_sites - found.changed_with_sites.len()
    });
    row("other functions, unpatched", |found| {
        found.functions - found.with_sites
    });
    row("new, gone or different", |found| found.changed.len());
    for (state, found) in [("off", &off), ("on", &on)] {
        list(
            &format!("Symbol {state}, with sites"),
            &found.changed_with_sites,
        );
        list(&format!("Symbol {state}, others"), &found.changed);
    }

    let on_has_no_site_changed = on.changed_with_sites.is_empty();

    println!("\n| bytes of code | unpatched | series on | series on, no jump labels |");
    println!("|---|---|---|---|");
    let images = [&unpatched, &selected, &without_jump_labels];
    let sizes = images.map(|image| {
        let functions = image.functions();
        let getppid = functions.iter().find(|f| f.identity.0 == GETPPID);
        getppid.map(|f| f.bytes.len())
    });
    let [plain, on, without] = sizes.map(|size| size.with_context(|| format!("no {GETPPID}")));
    println!("| `{GETPPID}` | {} | {} | {} |", plain?, on?, without?);
    let code = images.map(|image| {
        let code = image.sections().iter().filter(|section| section.code);
        code.map(|section| section.size).sum::<u64>()
    });
    println!(
        "| all sections with code | {} | {} | {} |",
        code[0], code[1], code[2]
    );
    let nothing = off.changed.is_empty() && off.changed_with_sites.is_empty();
    Ok(identical && nothing && on_has_no_site_changed)
}

fn list(what: &str, changed: &[Changed]) {
    if changed.is_empty() {
        return;
    }
    println!("\n{what}:\n");
    for (name, difference) in changed {
        println!("- `{name}`: {difference}");
    }
}
