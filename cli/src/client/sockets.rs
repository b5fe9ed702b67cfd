// SPDX-License-Identifier: Apache-2.0
//! Finds API sockets in their folders.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// The environment variable that names the socket for commands without --socket.
pub const SOCKET_VARIABLE: &str = "PATCHBAY_SOCKET";
/// The controller's default socket; [`CONTROLLER_VARIABLE`] overrides it.
pub const CONTROLLER: &str = "/run/patchbay-fleet/fleet.sock";
pub const CONTROLLER_VARIABLE: &str = "PATCHBAY_FLEET_SOCKET";
/// The environment variable that names replicas of the controller if --fleet is not given.
pub const FLEET_VARIABLE: &str = "PATCHBAY_FLEET";
/// The environment variables that name the files of --fleet.
pub const CERT_VARIABLE: &str = "PATCHBAY_FLEET_CERT";
pub const KEY_VARIABLE: &str = "PATCHBAY_FLEET_KEY";
pub const CA_VARIABLE: &str = "PATCHBAY_FLEET_CA";

const SUFFIX: &str = "sock";
/// The socket's name in the folder of a guest that is a systemd unit: NAME/api.sock.
const UNIT_SOCKET: &str = "api.sock";
/// Folder of the host's guests, unless `PATCHBAY_RUN_DIR` names another folder.
const HOST_FOLDER: &str = "/run/patchbay";
const HOST_FOLDER_VARIABLE: &str = "PATCHBAY_RUN_DIR";

/// A socket, and the guest's name according to its path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Socket {
    pub name: String,
    pub path: PathBuf,
}

/// Returns the value of an environment variable that is set and not empty.
pub fn variable(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}

fn host_folder() -> PathBuf {
    variable(HOST_FOLDER_VARIABLE).unwrap_or_else(|| HOST_FOLDER.into())
}

fn user_folder() -> Option<PathBuf> {
    variable("XDG_RUNTIME_DIR").map(|folder| folder.join("patchbay"))
}

/// Returns the folder in which `guest run` puts sockets: `$XDG_RUNTIME_DIR/patchbay`, or
/// `/run/patchbay` without that variable.
pub fn folder() -> PathBuf {
    user_folder().unwrap_or_else(host_folder)
}

/// Returns every folder that is searched, for error messages.
pub fn searched() -> String {
    let folders = user_folder().into_iter().chain([host_folder()]);
    let folders: Vec<String> = folders.map(|path| path.display().to_string()).collect();
    folders.join(" and ")
}

/// Returns the socket that `guest run` makes for the guest `name`.
///
/// # Errors
/// The name cannot be a file name.
pub fn of(name: &str) -> Result<PathBuf, Failure> {
    let fits = !name.is_empty()
        && !name.starts_with('.')
        && name.len() <= 64
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    if !fits {
        return Err(Failure::usage(format!(
            "{name:?} cannot be a guest's name; use up to 64 letters, digits, '-', '_' and '.', \
             and no '.' first"
        )));
    }
    Ok(folder().join(format!("{name}.{SUFFIX}")))
}

/// Returns all sockets, ordered by name. Among sockets of the same name, the user's own come first.
///
/// # Errors
/// A folder cannot be read.
pub fn all() -> Result<Vec<Socket>, Failure> {
    let mut found = vec![];
    if let Some(folder) = user_folder() {
        found.extend(flat(&folder)?);
    }
    let host = host_folder();
    if user_folder().as_ref() != Some(&host) {
        found.extend(flat(&host)?);
    }
    found.extend(units(&host)?);
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Returns the sockets FOLDER/NAME.sock.
fn flat(folder: &Path) -> Result<Vec<Socket>, Failure> {
    let name = |path: &Path| {
        let suffix = path.extension()?;
        let name = path.file_stem()?.to_str()?.to_owned();
        (suffix == SUFFIX).then_some(name)
    };
    let sockets = entries(folder)?.into_iter().filter_map(|path| {
        let name = name(&path)?;
        Some(Socket { name, path })
    });
    Ok(sockets.collect())
}

/// Returns the sockets FOLDER/NAME/api.sock. Skips folders that only other users can read.
fn units(folder: &Path) -> Result<Vec<Socket>, Failure> {
    let sockets = entries(folder)?.into_iter().filter_map(|path| {
        let name = path.file_name()?.to_str()?.to_owned();
        let path = path.join(UNIT_SOCKET);
        path.exists().then_some(Socket { name, path })
    });
    Ok(sockets.collect())
}

/// Returns the entries of a folder. Returns none if the folder does not exist or this user may not
/// read it.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    match std::fs::read_dir(folder) {
        Ok(entries) => Ok(entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect()),
        // Without permission for the folder, this user could not connect to the sockets in it
        // either.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::PermissionDenied
            ) =>
        {
            Ok(vec![])
        }
        Err(error) => Err(Failure::error(format!(
            "the folder {} of API sockets cannot be read: {error}; give a socket with --socket",
            folder.display()
        ))),
    }
}
