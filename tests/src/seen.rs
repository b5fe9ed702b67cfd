// SPDX-License-Identifier: Apache-2.0
//! What a guest itself makes of the keys of the kernel module `patchbay_test`.

use anyhow::{Result, bail};

use crate::Guest;

/// The guest's folder with a folder for each of the module's keys.
pub const TEST_KEYS: &str = "/sys/kernel/debug/patchbay_test/keys";

/// One of the keys as the guest sees it.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    /// The counter as it stands in memory.
    pub raw: i32,
    /// `static_key_count()`
    pub count: i32,
    /// Whether its likely branch is taken.
    pub likely: bool,
    /// Whether its unlikely branch is taken.
    pub unlikely: bool,
}

impl Guest {
    /// What the guest makes of one of the keys of `patchbay_test`.
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
            bail!("four numbers expected: {text}");
        };
        Ok(Seen {
            raw,
            count,
            likely: likely != 0,
            unlikely: unlikely != 0,
        })
    }
}
