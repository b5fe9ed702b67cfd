// SPDX-License-Identifier: Apache-2.0
//! The guest's own view of the keys of the kernel module `patchbay_test`.

use anyhow::{Result, bail};

use crate::Guest;

/// The guest's directory with a directory for each of the module's keys.
pub const TEST_KEYS: &str = "/sys/kernel/debug/patchbay_test/keys";

/// A key as seen by the guest.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    /// The count in memory.
    pub raw: i32,
    /// Result of `static_key_count()`.
    pub count: i32,
    /// The likely branch is taken.
    pub likely: bool,
    /// The unlikely branch is taken.
    pub unlikely: bool,
}

impl Guest {
    /// Reads a key of `patchbay_test` through the guest.
    pub async fn seen(&mut self, key: &str) -> Result<Seen> {
        let text = self
            .shell(&format!(
                "cd {TEST_KEYS}/{key} && cat raw count likely unlikely; cd /"
            ))
            .await?;
        let numbers: Vec<i32> = text
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let [raw, count, likely, unlikely] = numbers[..] else {
            bail!("expected four numbers, found: {text}");
        };
        Ok(Seen {
            raw,
            count,
            likely: likely != 0,
            unlikely: unlikely != 0,
        })
    }
}
