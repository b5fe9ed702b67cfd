// SPDX-License-Identifier: Apache-2.0
//! Prepares all that is needed to run a Linux guest: kernels, initramfs, programs.

use std::path::PathBuf;

use anyhow::Result;

use crate::kernel::{self, Recipe};
use crate::{cargo, host, initramfs, lab_image};

/// Files by the variables that tell tests, demo and benchmarks where they are.
pub type Variables = Vec<(&'static str, PathBuf)>;

/// Builds what is missing and returns where everything is. The kernel without the series is
/// only made for those who need it.
pub fn prepare(with_unpatched: bool) -> Result<Variables> {
    // First what a person may have to be asked for.
    let mut packages: Vec<String> = Recipe::standard().packages();
    packages.extend(host::INITRAMFS.iter().map(|package| (*package).to_owned()));
    if !host::Kvm::probe().runs_linux() {
        packages.extend(host::LAB.iter().map(|package| (*package).to_owned()));
    }
    host::ensure_packages(&packages.iter().map(String::as_str).collect::<Vec<_>>())?;

    // Always the same packages, so that cargo selects the same features of their dependencies.
    cargo::build_programs(&["patchbay-vmm", "patchbay-cli", "patchbay-examples"])?;
    if !host::Kvm::probe().runs_linux() {
        lab_image::get()?;
    }
    let mut variables = kernel_of_the_guest(&Recipe::standard())?;
    variables.extend([
        ("PATCHBAY_VMM", cargo::program("patchbay-vmm")),
        ("PATCHBAY_CLI", cargo::program("patchbay")),
    ]);
    if with_unpatched {
        let unpatched = kernel::get(&Recipe::unpatched())?;
        variables.push(("PATCHBAY_TEST_UNPATCHED_KERNEL", unpatched.bzimage()));
    }
    Ok(variables)
}

/// The variables that say which kernel guests boot.
pub fn kernel_of_the_guest(recipe: &Recipe) -> Result<Variables> {
    let kernel = kernel::get(recipe)?;
    Ok(vec![
        ("PATCHBAY_TEST_KERNEL", kernel.bzimage()),
        ("PATCHBAY_TEST_VMLINUX", kernel.vmlinux()),
        ("PATCHBAY_TEST_INITRAMFS", initramfs::get(&kernel)?),
    ])
}

/// Where the kernel without jump labels is, for the tests that ask for it.
pub fn kernel_without_jump_labels() -> Result<Variables> {
    let kernel = kernel::get(&Recipe::small_without_jump_labels())?;
    Ok(vec![
        ("PATCHBAY_TEST_NO_JUMP_LABEL_KERNEL", kernel.bzimage()),
        ("PATCHBAY_TEST_NO_JUMP_LABEL_VMLINUX", kernel.vmlinux()),
        (
            "PATCHBAY_TEST_NO_JUMP_LABEL_INITRAMFS",
            initramfs::get(&kernel)?,
        ),
    ])
}

/// The kernels that are compared with the guest's.
pub fn kernels_to_compare() -> Result<Variables> {
    let kernels = [
        (
            Recipe::unpatched(),
            "PATCHBAY_TEST_UNPATCHED_KERNEL",
            "PATCHBAY_TEST_UNPATCHED_VMLINUX",
        ),
        (
            Recipe::not_selected(),
            "PATCHBAY_TEST_NOT_SELECTED_KERNEL",
            "PATCHBAY_TEST_NOT_SELECTED_VMLINUX",
        ),
        (
            Recipe::without_jump_labels(),
            "PATCHBAY_TEST_NO_JUMP_LABEL_KERNEL",
            "PATCHBAY_TEST_NO_JUMP_LABEL_VMLINUX",
        ),
    ];
    let mut variables = Variables::new();
    for (recipe, bzimage, vmlinux) in kernels {
        let kernel = kernel::get(&recipe)?;
        variables.extend([(bzimage, kernel.bzimage()), (vmlinux, kernel.vmlinux())]);
    }
    Ok(variables)
}

/// Says where Linux guests run, and why.
pub fn announce_place() {
    let kvm = host::Kvm::probe();
    if kvm.runs_linux() {
        eprintln!("The guest runs on this machine's KVM.");
    } else {
        eprintln!(
            "The guest runs in the lab, an emulated computer, and is slow: {}.",
            kvm.describe()
        );
    }
}
