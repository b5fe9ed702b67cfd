// SPDX-License-Identifier: Apache-2.0
//! Measures the cost of the kernel series, compared with the same kernel without the series:
//!
//! - `images`: its code, by section and by function;
//! - `boot`: its boot log, with and without the monitor's CPUID leaf;
//! - `work`: the instructions (or ticks) of system calls, also for a kernel without jump labels.
//!
//! Run it as `cargo xtask bench guest-cost [-- PART…]`; by default it measures all parts. It prints
//! Markdown tables.

mod boot;
mod code;
#[path = "../../images/mod.rs"]
mod images;
mod work;

use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use patchbay_tests::{Environment, KernelFiles};

/// The kernels to compare.
struct Kernels {
    /// A kernel with the series applied and selected, and the demo's patch.
    selected: KernelFiles,
    unpatched: KernelFiles,
    not_selected: KernelFiles,
    without_jump_labels: KernelFiles,
}

impl Kernels {
    fn from_variables() -> Result<Self> {
        let named = |name| KernelFiles::named(name).map_err(|reason| anyhow!(reason));
        let standard = |name: &str| {
            std::env::var_os(name)
                .ok_or_else(|| anyhow!("{name} is not set; `cargo xtask bench` sets it"))
        };
        Ok(Self {
            selected: KernelFiles {
                kernel: standard("PATCHBAY_TEST_KERNEL")?.into(),
                vmlinux: standard("PATCHBAY_TEST_VMLINUX")?.into(),
            },
            unpatched: named("UNPATCHED")?,
            not_selected: named("NOT_SELECTED")?,
            without_jump_labels: named("NO_JUMP_LABEL")?,
        })
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    let given: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    let parts: Vec<&str> = match &*given {
        [] => vec!["boot", "work"],
        given => given.iter().map(String::as_str).collect(),
    };
    let kernels = Kernels::from_variables()?;
    let mut as_claimed = true;
    for part in parts {
        as_claimed &= match part {
            "images" => code::compare(&kernels)?,
            "boot" | "work" => {
                let Some(environment) = Environment::linux_guest() else {
                    return Ok(ExitCode::FAILURE);
                };
                match part {
                    "boot" => boot::compare(&environment, &kernels).await?,
                    _ => work::measure(&environment, &kernels).await?,
                }
            }
            other => bail!("there is no part {other}; use images, boot or work"),
        };
    }
    Ok(if as_claimed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
