// SPDX-License-Identifier: Apache-2.0
//! Shared by the demos.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use patchbay_tests::Environment;

/// The environment of a Linux guest. `demo` is the argument of `cargo xtask demo`.
pub fn environment(demo: &str) -> Result<Environment> {
    Environment::linux_guest().with_context(|| {
        format!("no Linux guest can run here; start this with `cargo xtask demo {demo}`, or run `cargo xtask doctor`")
    })
}

/// Prints the heading of a step.
pub fn step(text: &str) {
    println!("\n── {text}");
}
