// SPDX-License-Identifier: Apache-2.0
//! Guests that run while their kernel is discovered. A race must not be mistaken for a kernel that
//! cannot be read.

use patchbay_kernel_image::live::{DiscoveryError, Way, discover};

use crate::craft_guest::{CraftedGuest, JMP5, NOP5, guest, physical};

/// Guest-physical address of the first of several pages that the guest does not use otherwise.
const FREE: u64 = 0x1a_8000;
const PAGE: u64 = 4096;

/// Copies the top page table, because each process has its own.
fn fork(guest: &CraftedGuest, to: u64) {
    let root = guest.symbol("init_top_pgt");
    let root = physical(root) as usize;
    let table = guest.ram.borrow()[root..root + PAGE as usize].to_vec();
    guest.put_physical(to, &table);
}

/// A guest whose vCPUs run a process with this CR3.
fn in_process(cr3: u64) -> CraftedGuest {
    let mut guest = guest();
    fork(&guest, cr3 & !0xfff);
    for cpu in &mut guest.cpus {
        cpu.cr3 = cr3;
    }
    guest
}

fn find(guest: &CraftedGuest) -> Result<(), DiscoveryError> {
    *guest.reads.borrow_mut() = 0;
    let kernel = discover(guest, &guest.cpus, Way::Image)?;
    assert!(kernel.keys.iter().all(|key| key.torn.is_none()));
    Ok(())
}

/// A process ends, and its page table is used for something else.
#[test]
fn a_page_table_that_is_freed_meanwhile_is_no_reason_to_refuse() {
    let guest = in_process(FREE);
    find(&guest).unwrap();
    let (reads, whole) = (*guest.reads.borrow(), guest.ram.borrow().clone());
    let mut last_busy = 0;
    for first in 0..reads {
        for fill in [0, 0x27, 0xff] {
            guest.ram.borrow_mut().clone_from(&whole);
            *guest.before_read.borrow_mut() = Some(Box::new(move |number, ram| {
                if number == first {
                    ram[FREE as usize..(FREE + PAGE) as usize].fill(fill);
                }
            }));
            match find(&guest) {
                Ok(()) => {}
                Err(DiscoveryError::Busy(_) | DiscoveryError::Absent(_)) => {
                    last_busy = last_busy.max(first);
                }
                Err(error) => panic!("freed before read {first}: {error}"),
            }
        }
    }
    // After the first reads, only the kernel's own page table is used.
    assert!(last_busy < 40, "{last_busy} of {reads}");
}

/// Without page table isolation bit 12 of CR3 is a bit of the address. The preceding page may be
/// another process's table.
#[test]
fn a_page_beside_the_page_table_says_nothing() {
    let guest = in_process(FREE + PAGE);
    fork(&guest, FREE);
    find(&guest).unwrap();
    let (reads, whole) = (*guest.reads.borrow(), guest.ram.borrow().clone());
    for first in 0..reads {
        guest.ram.borrow_mut().clone_from(&whole);
        *guest.before_read.borrow_mut() = Some(Box::new(move |number, ram| {
            if number == first {
                ram[FREE as usize..(FREE + PAGE) as usize].fill(0);
            }
        }));
        find(&guest).unwrap();
    }
}

/// With page table isolation a vCPU in user mode uses the user half of the pair of page tables,
/// which maps only the entry code.
#[test]
fn the_users_half_of_isolated_tables_leads_to_the_kernels() {
    let guest = in_process(FREE + PAGE);
    fork(&guest, FREE);
    // The user's half maps only the text of the image.
    let (tables, text) = (FREE + 2 * PAGE, crate::craft_guest::TEXT);
    let mut table = FREE + PAGE;
    for (next, shift) in [(tables, 39), (tables + PAGE, 30), (tables + 2 * PAGE, 21)] {
        let at = table + 8 * (text >> shift & 0x1ff);
        guest.put_physical(at, &(next | 3).to_le_bytes());
        table = next;
    }
    let (_, entry) = guest.entry(text);
    guest.put_physical(table + 8 * (text >> 12 & 0x1ff), &entry.to_le_bytes());
    let kernel = discover(&guest, &guest.cpus, Way::Image).unwrap();
    let root = physical(guest.symbol("init_top_pgt"));
    assert_eq!((kernel.page_table.root, kernel.evidence.cpus), (root, 2));
}

/// The page table of a process that has ended must not cause a refusal, but a kernel that stays
/// unreadable must.
#[test]
fn a_kernel_that_cannot_be_read_is_refused_once_its_page_table_stays() {
    let guest = in_process(FREE);
    let kallsyms = crate::craft_guest::guest_without("_stext");
    guest.ram.borrow_mut()[0x10_0000..0x18_0000]
        .copy_from_slice(&kallsyms.ram.borrow()[0x10_0000..0x18_0000]);
    let error = find(&guest).unwrap_err();
    assert!(matches!(error, DiscoveryError::Refused(_)), "{error}");
}

/// The guest switches a key on and off all the time, and its sites and its count are copied one
/// after another.
#[test]
fn a_key_that_is_switched_while_it_is_read_is_read_again() {
    let guest = guest();
    find(&guest).unwrap();
    let reads = *guest.reads.borrow();
    let line = physical(guest.symbol("__start___dyndbg") + 40) as usize;
    let site = physical(crate::craft_guest::TEXT + 0x280) as usize;
    // The guest changes the key in four steps, one before each of four reads: a breakpoint, the
    // other bytes of the site, the first byte, and the count.
    for period in [7, 11, 29] {
        for first in 0..reads {
            *guest.before_read.borrow_mut() = Some(Box::new(move |number, ram| {
                let since = number.wrapping_sub(first);
                if number < first {
                    return;
                }
                let on = since / period % 2 == 0;
                let bytes = if on { JMP5 } else { NOP5 };
                match since % period {
                    0 => ram[site] = 0xcc,
                    1 => ram[site + 1..site + 5].copy_from_slice(&bytes[1..]),
                    2 => ram[site] = bytes[0],
                    3 => ram[line] = u8::from(on),
                    _ => {}
                }
            }));
            find(&guest).unwrap();
        }
    }
}
