// SPDX-License-Identifier: Apache-2.0
//! A debug file for a kernel that is built without debug information: its vmlinux with types as
//! DWARF.
//!
//! The compiler describes the types from the kernel's own headers and configuration. A kernel with
//! CONFIG_DEBUG_INFO has them in the same form, but takes minutes to build.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::kernel::{self, Kernel};
use crate::step::Steps;
use crate::{cache, host};

/// The sections that describe types, and the line table, to which each unit refers.
const SECTIONS: [&str; 5] = [
    ".debug_abbrev",
    ".debug_info",
    ".debug_line",
    ".debug_line_str",
    ".debug_str",
];

/// Returns the file, and builds it if it is not in the cache. The kernel must have the series.
pub fn get(kernel: &Kernel) -> Result<PathBuf> {
    let mut inputs = cache::Inputs::new("debug file 2");
    inputs.add("kernel", kernel.key());
    inputs.add_folder("sources", &sources())?;
    let folder = cache::entry("debug-file", &inputs.key(), |folder| build(kernel, folder))?;
    Ok(folder.join("vmlinux"))
}

fn sources() -> PathBuf {
    host::repository().join("guest-kernel-patches/types")
}

fn build(kernel: &Kernel, folder: &Path) -> Result<()> {
    let steps = Steps::new("building a debug file", &folder.join("build.log"))?;
    // Uses a copy, because Kbuild writes next to the sources.
    let work = folder.join("types");
    steps.run(
        "copying",
        Command::new("cp").arg("-r").args([sources(), work.clone()]),
    )?;
    let mut command = kernel::make_module(kernel, &work);
    steps.run("compiling", command.arg("types.o"))?;
    // Linking applies the relocations that an object's DWARF has.
    let linked = work.join("types");
    let mut command = Command::new("ld");
    command.args(["--unresolved-symbols=ignore-all", "--entry=0", "-o"]);
    steps.run("linking", command.arg(&linked).arg(work.join("types.o")))?;
    let mut dump = Command::new("objcopy");
    let mut add = Command::new("objcopy");
    for section in SECTIONS {
        let content = section_file(section, &work);
        dump.arg("--dump-section").arg(&content);
        add.arg("--add-section").arg(&content);
    }
    // Without an output file the input would be rewritten.
    steps.run("taking the types", dump.arg(&linked).arg("/dev/null"))?;
    let result = folder.join("vmlinux");
    steps.run("adding the types", add.arg(kernel.vmlinux()).arg(&result))?;
    fs::remove_dir_all(&work)?;
    Ok(())
}

/// Formats `SECTION=FILE`.
fn section_file(section: &str, folder: &Path) -> OsString {
    let mut argument = OsString::from(section);
    argument.push("=");
    argument.push(folder.join(&section[1..]));
    argument
}
