// SPDX-License-Identifier: Apache-2.0
//! Tests `in_place` as `cargo test` runs it. On a machine whose KVM cannot run Linux, `in_place`
//! starts a lab.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use patchbay_ci::place;
use patchbay_lab::kvm::Kvm;
use patchbay_testing::in_place;

/// The environment variable that makes `the_inner_test` run. The outer test sets it.
const INNER: &str = "PATCHBAY_TESTING_INNER";

#[test]
fn the_inner_test() -> Result<()> {
    if std::env::var_os(INNER).is_none() {
        return Ok(());
    }
    in_place(async || {
        let kvm = Kvm::probe();
        ensure!(kvm.runs_linux(), "{}", kvm.describe());
        Ok(())
    })
}

#[test]
fn a_test_runs_where_guests_can_and_says_where() {
    let why = place::needs_lab();
    // `cargo xtask test` sets this variable if it has fetched the lab.
    if why.is_some() && std::env::var_os("PATCHBAY_TEST_DISTRO_KERNELS").is_none() {
        println!("SKIPPED: the lab is not fetched; run `cargo xtask test`");
        return;
    }
    let program = std::env::current_exe().expect("this program");
    let output = Command::new(program)
        // There is no --nocapture, because users who run tests in a lab do not give it.
        .args(["the_inner_test", "--exact"])
        .env(INNER, "")
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && out.contains("test result: ok. 1 passed"),
        "{out}\n{err}"
    );
    let says = err.contains("the_inner_test runs in the lab");
    assert_eq!(says, why.is_some(), "{err}");
}
