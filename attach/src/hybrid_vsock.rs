// SPDX-License-Identifier: Apache-2.0
//! Finds the vsock device that a monitor implements itself, and binds the socket on which the
//! connections of the guest's agent arrive.
//!
//! Firecracker and Cloud Hypervisor listen on a Unix socket for connections to the guest. They pass
//! on a connection of the guest to port P of the host by connecting to the path of that socket with
//! `_P` appended. The attacher creates this socket in the monitor's folder.
//!
//! | fact | evidence |
//! |---|---|
//! | the device's path | the monitor listens there, as the kernel's record of its socket says; the command line only chooses between several such paths |
//! | the folder | resolved from the root or the working folder of the process, without symbolic links |
//! | the right to create a file there | the monitor's own rights ([`Rights`]) |
//! | a connection is this guest's | the kernel's credentials of the connection name the monitor |

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use patchbay_host_kernel::{Kind, option_value};
use patchbay_service::trace::socket_path;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, fchmod, openat2, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use crate::host::monitor_of;
use crate::process::Process;
use crate::rights::Rights;

/// The maximum length of a Unix socket's path in bytes, without the NUL (`sun_path` in unix(7)).
const MAX_PATH: usize = 107;
/// The maximum length of the socket's name in bytes, so that it fits behind the number of any
/// descriptor.
const MAX_NAME: usize = MAX_PATH - "/proc/self/fd/2147483647/".len();
/// Firecracker's API socket without `--api-sock`.
const FIRECRACKERS_API: &str = "/run/firecracker.socket";
/// The number of connections that wait until they are accepted.
const BACKLOG: i32 = 16;

/// Returns the path of the socket of a monitor's vsock device, as the monitor names it. Returns
/// `None` if the monitor has no such device.
///
/// # Errors
/// Several sockets may be the device's, or the process cannot be inspected.
pub fn find(process: &Process) -> Result<Option<PathBuf>, String> {
    let kind = monitor_of(process).kind;
    if !matches!(kind, Kind::Firecracker | Kind::CloudHypervisor) {
        return Ok(None);
    }
    let line = process.command_line().map_err(|error| error.to_string())?;
    let line = String::from_utf8_lossy(&line);
    let words: Vec<&str> = line.split('\0').collect();
    let listeners = process.listeners().map_err(|error| error.to_string())?;
    choose(kind, &words, listeners)
}

/// Chooses the vsock device's socket among those on which the monitor listens.
fn choose(
    kind: Kind,
    words: &[&str],
    mut listeners: BTreeSet<PathBuf>,
) -> Result<Option<PathBuf>, String> {
    let property = |option, name: &str| {
        let value = option_value(words, option)?;
        value.split(',').find_map(|part| part.strip_prefix(name))
    };
    if let (Kind::CloudHypervisor, Some(path)) = (kind, property("vsock", "socket="))
        && let Some(path) = listeners.take(Path::new(path))
    {
        return Ok(Some(path));
    }
    let others = match kind {
        Kind::Firecracker => {
            let api = option_value(words, "api-sock");
            vec![Some(api.unwrap_or(FIRECRACKERS_API))]
        }
        _ => vec![
            property("api-socket", "path=").or_else(|| option_value(words, "api-socket")),
            property("serial", "socket="),
            property("console", "socket="),
        ],
    };
    for other in others.into_iter().flatten() {
        listeners.remove(Path::new(other));
    }
    let Some(path) = listeners.pop_first() else {
        return Ok(None);
    };
    match listeners.first() {
        None => Ok(Some(path)),
        Some(other) => Err(format!(
            "the monitor listens on {}, on {} and perhaps on more sockets, and which one is its vsock device is not known",
            path.display(),
            other.display()
        )),
    }
}

/// The file of a bound socket. Dropping it removes the file.
#[derive(Debug)]
pub struct SocketFile {
    folder: OwnedFd,
    name: OsString,
    /// Device and inode. No other file gets the inode before `_socket` is closed.
    identity: (u64, u64),
    _socket: OwnedFd,
    rights: Rights,
}

/// Binds the socket to which the monitor passes on the connections of the guest's agent. Replaces
/// one that a killed attacher has left there. `vsock` is the path that [`find`] returned.
///
/// # Errors
/// The reason why the socket is not created.
pub fn bind_beside(process: &Process, vsock: &Path) -> Result<(UnixListener, SocketFile), String> {
    let path = socket_path(vsock);
    if path.as_os_str().len() > MAX_PATH {
        return Err(too_long(&path));
    }
    let (Some(device), Some(name)) = (vsock.file_name(), path.file_name()) else {
        return Err(format!("{} is not the path of a socket", vsock.display()));
    };
    if name.len() > MAX_NAME {
        return Err(too_long(&path));
    }
    let absolute = vsock.is_absolute();
    let base = process.folder_of_paths(absolute);
    let base = base.map_err(|error| error.to_string())?;
    let rights = process.rights().map_err(|error| error.to_string())?;
    let (listener, folder, identity) = rights.call(|| {
        let folder = open_folder(base.as_fd(), &path, absolute)?;
        let device = Path::new(device);
        if !is_socket(folder.as_fd(), device).map_err(|error| not_inspected(device, error))? {
            return Err(format!(
                "{} is no longer the socket of the monitor's vsock device",
                vsock.display()
            ));
        }
        let (listener, identity) = create(folder.as_fd(), &path, name.as_ref())?;
        Ok((listener, folder, identity))
    })?;
    let cannot = |error: io::Error| format!("{} cannot be served: {error}", path.display());
    let duplicate = listener.try_clone().map_err(cannot)?;
    // From here on the file is removed, also after an error.
    let file = SocketFile {
        folder,
        name: name.to_owned(),
        identity,
        _socket: duplicate,
        rights,
    };
    listen(&listener, BACKLOG).map_err(|error| cannot(error.into()))?;
    Ok((UnixListener::from(listener), file))
}

/// Opens the folder of a path as the monitor sees it.
fn open_folder(base: BorrowedFd<'_>, path: &Path, absolute: bool) -> Result<OwnedFd, String> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let within = match absolute {
        true => ResolveFlags::IN_ROOT,
        false => ResolveFlags::BENEATH,
    };
    let resolve = within | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let place = match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    };
    openat2(base, place, flags, Mode::empty(), resolve).map_err(|error| match error {
        Errno::LOOP => format!(
            "the path {} of the monitor contains a symbolic link, and none is followed; start the monitor with a path without them",
            folder.display()
        ),
        Errno::XDEV => format!(
            "the path {} leads out of the monitor's working folder; start the monitor with an absolute path",
            folder.display()
        ),
        error => format!(
            "the monitor's folder {} cannot be opened with the monitor's rights: {error}",
            folder.display()
        ),
    })
}

/// Binds a socket in a folder, and returns it with the device and the inode of its file.
fn create(
    folder: BorrowedFd<'_>,
    path: &Path,
    name: &Path,
) -> Result<(OwnedFd, (u64, u64)), String> {
    let cannot = |error: Errno| {
        format!(
            "{} cannot be created with the monitor's rights: {error}",
            path.display()
        )
    };
    // There is no bindat().
    let place = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    let address = SocketAddrUnix::new(&place).map_err(cannot)?;
    remove_stale(folder, path, name, &address)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(cannot)?;
    // On Linux the file inherits the socket's mode.
    fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(cannot)?;
    // bind() does not follow a symbolic link at the path's end, and replaces nothing.
    bind(&socket, &address).map_err(cannot)?;
    let file = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).map_err(cannot)?;
    Ok((socket, (file.st_dev, file.st_ino)))
}

/// Removes a socket on which no process listens.
fn remove_stale(
    folder: BorrowedFd<'_>,
    path: &Path,
    name: &Path,
    address: &SocketAddrUnix,
) -> Result<(), String> {
    let path = path.display();
    match is_socket(folder, name) {
        Ok(true) => {}
        Ok(false) => return Err(format!("{path} exists and is not a socket; remove it")),
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(not_inspected(name, error)),
    }
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    match client.and_then(|client| connect(&client, address)) {
        Err(Errno::CONNREFUSED) => {}
        // EAGAIN: the queue of the process that listens is full.
        Ok(()) | Err(Errno::AGAIN) => {
            return Err(format!("another process listens on {path}; stop it"));
        }
        Err(error) => {
            return Err(format!(
                "cannot check whether another process listens on {path}: {error}"
            ));
        }
    }
    let removed = unlinkat(folder, name, AtFlags::empty());
    removed.map_err(|error| format!("the unused socket {path} cannot be removed: {error}"))
}

/// Returns whether a file of a folder is a socket, and not a symbolic link to one.
fn is_socket(folder: BorrowedFd<'_>, name: &Path) -> Result<bool, Errno> {
    let file = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(file.st_mode) == FileType::Socket)
}

fn not_inspected(name: &Path, error: Errno) -> String {
    format!(
        "the monitor's file {} cannot be inspected: {error}",
        name.display()
    )
}

fn too_long(path: &Path) -> String {
    let port = socket_path(Path::new("")).as_os_str().len();
    format!(
        "the path {} is too long for a Unix socket beside the monitor's vsock device, whose path may have at most {} bytes and its file \
         name at most {}; start the monitor with a shorter path",
        path.display(),
        MAX_PATH - port,
        MAX_NAME - port
    )
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let removed = self.rights.call(|| {
            let file = statat(&self.folder, &*self.name, AtFlags::SYMLINK_NOFOLLOW);
            // The monitor may have replaced the file.
            if file.is_ok_and(|file| (file.st_dev, file.st_ino) == self.identity) {
                let removed = unlinkat(&self.folder, &*self.name, AtFlags::empty());
                removed.map_err(|error| error.to_string())?;
            }
            Ok(())
        });
        if let Err(error) = removed {
            tracing::warn!("the agent's socket {:?} is not removed: {error}", self.name);
        }
    }
}

#[cfg(test)]
mod tests;
