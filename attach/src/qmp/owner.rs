// SPDX-License-Identifier: Apache-2.0
//! The process that listens on a unix socket, found without a connection to it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Flag of a socket that listens (`__SO_ACCEPTCON` in `include/linux/net.h`).
const LISTENS: &str = "00010000";

/// `None`: it is in another namespace, its socket has a relative name, or this user may not look into it.
pub fn owner(path: &Path) -> Option<u32> {
    let file = |path: &Path| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let wanted = file(path)?;
    let sockets = fs::read("/proc/net/unix").ok()?;
    let inode = String::from_utf8_lossy(&sockets)
        .lines()
        .filter_map(listening)
        .find(|(_, name)| name.is_absolute() && file(name) == Some(wanted))
        .map(|(inode, _)| inode.to_owned())?;
    let link = format!("socket:[{inode}]");
    let has_it = |pid: &u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok();
        let mut descriptors = descriptors.into_iter().flatten().flatten();
        descriptors.any(|entry| fs::read_link(entry.path()).is_ok_and(|to| to == Path::new(&link)))
    };
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .find(has_it)
}

/// Inode and name of a line of /proc/net/unix, if its socket listens.
fn listening(line: &str) -> Option<(&str, &Path)> {
    let mut fields = line.split_ascii_whitespace();
    if fields.nth(3)? != LISTENS {
        return None;
    }
    let inode = fields.nth(2)?;
    let (_, name) = line.split_once(&format!(" {inode} "))?;
    Some((inode, Path::new(name)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn the_listener_is_found_and_not_its_clients() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("a socket");
        assert_eq!(owner(&path), None);
        let listener = UnixListener::bind(&path).expect("free");
        let _client = UnixStream::connect(&path).expect("it listens");
        let (_accepted, _) = listener.accept().expect("a client");
        assert_eq!(owner(&path), Some(std::process::id()));
        drop(listener);
        assert_eq!(owner(&path), None, "the accepted socket has its name");
    }

    #[test]
    fn lines_without_a_name_or_of_other_sockets_are_passed_over() {
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01 24161 /run/a b";
        assert_eq!(listening(line), Some(("24161", Path::new("/run/a b"))));
        for line in [
            "",
            "Num       RefCount Protocol Flags    Type St Inode Path",
            "0000000000000000: 00000002 00000000 00010000 0001 01 24161",
            "0000000000000000: 00000003 00000000 00000000 0001 03 24162 /run/a b",
        ] {
            assert_eq!(listening(line), None, "{line}");
        }
    }
}
