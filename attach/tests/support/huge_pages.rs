// SPDX-License-Identifier: Apache-2.0
//! Reserves huge pages of 2 MiB for a test.

use std::fs;

const COUNT: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// Pages that were added for a test. They are removed on drop.
pub struct Reserved {
    added: u64,
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Reserves this many free pages. If that fails, prints the reason and returns `None`.
pub fn reserve(pages: u64) -> Option<Reserved> {
    let free = || number(FREE).unwrap_or(0);
    let added = pages.saturating_sub(free());
    let reserved = Reserved { added };
    if added != 0 {
        let count = number(COUNT).unwrap_or(0);
        // Without the right to reserve pages, or without memory, too few pages are free.
        let _ = fs::write(COUNT, (count + added).to_string());
    }
    if free() >= pages {
        return Some(reserved);
    }
    eprintln!("SKIPPED: it needs {pages} free huge pages of 2 MiB, see {COUNT}");
    None
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.added != 0 {
            let count = number(COUNT).unwrap_or(0).saturating_sub(self.added);
            let _ = fs::write(COUNT, count.to_string());
        }
    }
}
