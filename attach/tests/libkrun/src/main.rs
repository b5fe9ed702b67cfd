// SPDX-License-Identifier: Apache-2.0
//! Runs a guest with libkrun, a monitor in the form of a library. The guest's serial console is
//! standard input and output. The process ends with the guest.
//!
//! Tests and demos attach to this process as to any other monitor. Neither it nor libkrun
//! cooperates with Patchbay.

use std::error::Error;
use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;
use std::ptr;

const USAGE: &str = "usage: libkrun-guest VCPUS MEMORY_MIB KERNEL COMMAND_LINE [INITRAMFS]";
/// The number by which libkrun names kernels that are ELF files.
const ELF: u32 = 1;
const STANDARD_INPUT: i32 = 0;
const STANDARD_OUTPUT: i32 = 1;

/// Returns the value of a call of libkrun, or its error, which is a negative errno.
fn check(call: &str, value: i32) -> Result<u32, String> {
    u32::try_from(value).map_err(|_| {
        let error = std::io::Error::from_raw_os_error(value.saturating_neg());
        format!("{call} failed: {error}")
    })
}

/// Runs a guest. Returns only if it cannot be started, because libkrun ends the process at the end
/// of the guest.
fn run() -> Result<u32, Box<dyn Error>> {
    let mut words = std::env::args_os().skip(1);
    let mut word = || words.next().ok_or(USAGE);
    let number = |word: std::ffi::OsString| word.into_string().map_err(|_| USAGE);
    let vcpus = number(word()?)?.parse()?;
    let memory_mib = number(word()?)?.parse()?;
    let kernel = CString::new(word()?.into_vec())?;
    let command_line = CString::new(word()?.into_vec())?;
    let initramfs = word().ok().map(|path| CString::new(path.into_vec()));
    let initramfs = initramfs.transpose()?;

    let guest = check("krun_create_ctx", krun::krun_create_ctx())?;
    let configured = krun::krun_set_vm_config(guest, vcpus, memory_mib);
    check("krun_set_vm_config", configured)?;
    let disabled = krun::krun_disable_implicit_console(guest);
    check("krun_disable_implicit_console", disabled)?;
    let disabled = krun::krun_disable_implicit_vsock(guest);
    check("krun_disable_implicit_vsock", disabled)?;
    // SAFETY: libkrun takes over both descriptors. They are open for as long as the process runs,
    // and no other code of this program uses them afterwards.
    let added =
        unsafe { krun::krun_add_serial_console_default(guest, STANDARD_INPUT, STANDARD_OUTPUT) };
    check("krun_add_serial_console_default", added)?;
    let initramfs = initramfs
        .as_deref()
        .map_or(ptr::null(), |path| path.as_ptr());
    // SAFETY: Each pointer is null or points to a string that ends with a NUL and outlives the
    // call. libkrun copies the strings.
    let set = unsafe {
        krun::krun_set_kernel(
            guest,
            kernel.as_ptr(),
            ELF,
            initramfs,
            command_line.as_ptr(),
        )
    };
    check("krun_set_kernel", set)?;
    Ok(check("krun_start_enter", krun::krun_start_enter(guest))?)
}

fn main() -> ExitCode {
    match run() {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("libkrun-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
