// SPDX-License-Identifier: Apache-2.0
//! Determines which guest connects from a CID.
//!
//! The kernel does not reveal which CID a vhost-vsock device has: the device's descriptor has no
//! fdinfo of its own, and the device's ioctls set the CID and do not return it
//! (`vhost_vsock_dev_ioctl()`, `drivers/vhost/vsock.c`). So a QEMU could claim the CID of another
//! guest, and would receive the events of that guest's agent. But if no other process of the host
//! has such a device, a guest that connects is this QEMU's guest.

use std::fs;
use std::io;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use rustix::io::Errno;

use crate::kvm;
use crate::process::Process;

/// The device number of /dev/vhost-vsock: MISC_MAJOR and VHOST_VSOCK_MINOR
/// (`include/linux/miscdevice.h`).
const DEVICE: (u32, u32) = (10, 241);

/// Refuses a process unless it is known to be the only one on the host with a vhost-vsock device.
///
/// # Errors
/// Another process has such a device, or this cannot be checked; the error names the process or the
/// reason.
pub fn is_only_device_of(process: &Process) -> Result<(), String> {
    if !kvm::is_initial(kvm::pid_namespace()) {
        return Err("this PID namespace does not show all processes of the host".to_owned());
    }
    only(process.pid(), |pid| has(pid, DEVICE))
}

/// Returns whether a process has a vhost-vsock device.
///
/// # Errors
/// This user may not inspect the process.
pub fn has_device(process: &Process) -> io::Result<bool> {
    has(process.pid(), DEVICE)
}

fn only(process: u32, mut has: impl FnMut(u32) -> io::Result<bool>) -> Result<(), String> {
    let unknown = |what: &str, error: io::Error| {
        format!("whether {what} has a vhost-vsock device cannot be seen ({error})")
    };
    if !has(process).map_err(|error| unknown(&format!("process {process}"), error))? {
        return Err(format!("process {process} has no vhost-vsock device"));
    }
    let processes = fs::read_dir("/proc").map_err(|error| unknown("another process", error))?;
    for entry in processes {
        let entry = entry.map_err(|error| unknown("another process", error))?;
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        if pid != process && has(pid).map_err(|error| unknown(&format!("process {pid}"), error))? {
            return Err(format!("process {pid} has a vhost-vsock device as well"));
        }
    }
    Ok(())
}

/// Returns whether a process has a descriptor of this character device. Returns false for a process
/// that has ended.
fn has(pid: u32, device: (u32, u32)) -> io::Result<bool> {
    let unless_gone = |error: io::Error| match Errno::from_io_error(&error) {
        Some(Errno::NOENT | Errno::SRCH) => Ok(false),
        _ => Err(error),
    };
    let entries = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(entries) => entries,
        Err(error) => return unless_gone(error),
    };
    for entry in entries {
        let path = match entry {
            Ok(entry) => entry.path(),
            Err(error) => return unless_gone(error),
        };
        // STATX_DONT_SYNC does not wait for file systems that do not answer.
        let found = match statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE) {
            Ok(found) => found,
            // The descriptor has been closed.
            Err(Errno::NOENT | Errno::SRCH) => continue,
            Err(error) => return Err(error.into()),
        };
        let kind = FileType::from_raw_mode(found.stx_mode.into());
        if kind == FileType::CharacterDevice
            && (found.stx_rdev_major, found.stx_rdev_minor) == device
        {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_device_is_found_among_the_descriptors_of_a_process() {
        let own = std::process::id();
        let random = (1, 8);
        let descriptor = File::open("/dev/random").expect("a device");
        assert!(has(own, random).expect("readable"));
        drop(descriptor);
        assert!(!has(own, DEVICE).expect("readable"));
        assert!(!has(u32::MAX, DEVICE).expect("no such process"));
    }

    #[test]
    fn a_cid_is_proven_only_while_one_process_has_a_device() {
        let own = std::process::id();
        let parent = std::os::unix::process::parent_id();
        assert_eq!(only(own, |pid| Ok(pid == own)), Ok(()));
        let refusals = [
            (only(own, |_| Ok(false)), format!("process {own} has no")),
            (
                only(own, |pid| Ok([own, parent].contains(&pid))),
                format!("process {parent} has a vhost-vsock device as well"),
            ),
            (
                only(own, |pid| match pid == own {
                    true => Ok(true),
                    false => Err(io::ErrorKind::PermissionDenied.into()),
                }),
                "cannot be seen (permission denied)".to_owned(),
            ),
        ];
        for (refusal, expected) in refusals {
            let error = refusal.expect_err(&expected);
            assert!(error.contains(&expected), "{error}");
        }
    }
}
