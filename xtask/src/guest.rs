// SPDX-License-Identifier: Apache-2.0
//! Prepares everything that a Linux guest needs: kernels, initramfs, programs.

use std::path::PathBuf;
use std::thread::{self, JoinHandle};

use anyhow::Result;

use crate::kernel::{self, Recipe};
use crate::{cargo, debug_file, host, initramfs, lab_image};

/// Environment variables with paths, for tests, demos and benchmarks.
pub type Variables = Vec<(&'static str, PathBuf)>;

/// The controller's program.
pub const CONTROLLER: &str = "patchbay-fleet";

/// Builds what is missing, with the programs that a guest needs and with `others`, and returns the
/// paths.
pub fn prepare(others: &[&str]) -> Result<Variables> {
    let mut variables = kernel_and_agent()?;
    variables.extend(programs(others)?);
    Ok(variables)
}

/// Prepares everything for tests, except the programs, which are built together with the tests.
/// This includes a kernel that has neither the series nor symbols of data, and a debug file.
pub fn prepare_tests() -> Result<Variables> {
    let mut variables = kernel_and_agent()?;
    variables.extend(paths_of_programs());
    let unpatched = kernel::get(&Recipe::without_data_symbols())?;
    let debug_file = debug_file::get(&kernel::get(&Recipe::standard())?)?;
    variables.extend([
        ("PATCHBAY_TEST_UNPATCHED_KERNEL", unpatched.bzimage()),
        ("PATCHBAY_TEST_UNPATCHED_VMLINUX", unpatched.vmlinux()),
        ("PATCHBAY_TEST_UNPATCHED_SYSTEM_MAP", unpatched.system_map()),
        ("PATCHBAY_TEST_DEBUG_FILE", debug_file),
    ]);
    Ok(variables)
}

/// Starts to build the kernels of the tests in the background, because that takes minutes. A caller
/// that needs one of them waits for its entry in the cache.
pub fn start_to_build_kernels(with_oldest: bool) -> Result<JoinHandle<()>> {
    let mut recipes = vec![
        Recipe::standard(),
        Recipe::without_data_symbols(),
        Recipe::small_without_jump_labels(),
    ];
    recipes.extend(with_oldest.then(Recipe::oldest));
    // Packages come first, because only one process at a time can install some.
    let packages: Vec<String> = recipes.iter().flat_map(Recipe::packages).collect();
    host::ensure_packages(&packages.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(thread::spawn(move || {
        // Errors are ignored here, because the caller that needs a kernel reports its error.
        let _: Vec<_> = recipes.iter().map(kernel::get).collect();
    }))
}

fn kernel_and_agent() -> Result<Variables> {
    // Packages come first, because the user may have to install them.
    let mut packages: Vec<String> = Recipe::standard().packages();
    packages.extend(host::INITRAMFS.iter().map(|package| (*package).to_owned()));
    host::ensure_packages(&packages.iter().map(String::as_str).collect::<Vec<_>>())?;
    prepare_lab()?;
    let mut variables = kernel_of_the_guest(&Recipe::standard())?;
    variables.push(("PATCHBAY_AGENT", cargo::build_agent()?));
    Ok(variables)
}

/// Prepares the lab if guests run there.
pub fn prepare_lab() -> Result<()> {
    if !host::Kvm::probe().runs_linux() {
        host::ensure_packages(host::LAB)?;
        lab_image::get()?;
    }
    Ok(())
}

/// Builds the programs that run and control guests, and `others`, in the release profile. Prepares
/// the lab if guests run there.
pub fn programs(others: &[&str]) -> Result<Variables> {
    cargo::build_programs_of_guests(others)?;
    prepare_lab()?;
    Ok(paths_of_guests())
}

fn paths_of_guests() -> Variables {
    vec![
        ("PATCHBAY_VMM", cargo::program("patchbay-vmm")),
        ("PATCHBAY_CLI", cargo::program("patchbay")),
        ("PATCHBAY_ATTACH", cargo::program("patchbay-attach")),
    ]
}

/// Returns variables with the paths of the programs.
pub fn paths_of_programs() -> Variables {
    let mut variables = paths_of_guests();
    variables.push(("PATCHBAYD", cargo::program("patchbayd")));
    variables
}

/// Returns the path of the controller.
pub fn controller() -> (&'static str, PathBuf) {
    ("PATCHBAY_FLEET", cargo::program(CONTROLLER))
}

/// Builds the program that runs a guest with libkrun, and returns a variable with its path. If the
/// build fails, returns another variable with the reason, because tests and demos then leave this
/// guest out.
pub fn libkrun() -> (&'static str, PathBuf) {
    match cargo::build_libkrun_guest() {
        Ok(program) => ("PATCHBAY_TEST_LIBKRUN", program),
        Err(error) => {
            eprintln!("There is no guest of libkrun: {error:#}");
            ("PATCHBAY_TEST_NO_LIBKRUN", format!("{error:#}").into())
        }
    }
}

/// Returns variables with the paths of the guest's kernel.
pub fn kernel_of_the_guest(recipe: &Recipe) -> Result<Variables> {
    let kernel = kernel::get(recipe)?;
    Ok(vec![
        ("PATCHBAY_TEST_KERNEL", kernel.bzimage()),
        ("PATCHBAY_TEST_VMLINUX", kernel.vmlinux()),
        ("PATCHBAY_TEST_INITRAMFS", initramfs::get(&kernel)?),
    ])
}

/// Returns variables with the paths of the kernel without jump labels.
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

/// Returns variables with the paths of the kernels to compare with the guest's.
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

/// Prints where Linux guests run, and why.
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
