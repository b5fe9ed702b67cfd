// SPDX-License-Identifier: Apache-2.0

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use patchbay_proto::v1::SnapshotGuestResponse as Part;
use tonic::Status;

use super::lab::{Commands, Host, end};

/// Returns a host whose guest is saved in these parts.
fn host(parts: Vec<Result<Part, Status>>) -> Host {
    let host = Host::with(&["db"]);
    host.fake.guest("db", |guest| guest.snapshot = parts);
    host
}

fn parts() -> Vec<Result<Part, Status>> {
    let size = Part {
        memory_bytes: 64 << 20,
        ..Part::default()
    };
    let memory = |memory_offset, byte| Part {
        memory_offset,
        memory: vec![byte; 4096],
        ..Part::default()
    };
    let state = |state: &[u8]| Part {
        state: state.to_vec(),
        ..Part::default()
    };
    [
        size,
        memory(0x3000, 1),
        memory((64 << 20) - 4096, 2),
        state(b"one "),
        state(b"two"),
    ]
    .map(Ok)
    .to_vec()
}

/// Returns the names in the folder of the tests, without the sockets'.
fn names(host: &Host) -> Vec<String> {
    let entries = std::fs::read_dir(host.folder()).expect("readable");
    let names = entries.map(|entry| entry.expect("readable").file_name());
    let names = names.map(|name| name.into_string().expect("text"));
    names.filter(|name| name.contains("snap")).collect()
}

#[test]
fn a_snapshot_is_written_whole_and_for_its_owner_alone() {
    let host = host(parts());
    let folder = host.folder().join("snap");
    let text = host.ok(&["guest", "snapshot", folder.to_str().expect("text")]);
    assert!(text.contains("64 MiB of memory"), "{text}");
    assert_eq!(names(&host), ["snap"]);
    let mode = |name: &str| {
        let metadata = folder.join(name).metadata().expect("there");
        metadata.permissions().mode() & 0o777
    };
    assert_eq!(
        (mode(""), mode("memory"), mode("state")),
        (0o700, 0o400, 0o400)
    );
    assert_eq!(
        std::fs::read(folder.join("state")).expect("readable"),
        b"one two"
    );
    let memory = std::fs::read(folder.join("memory")).expect("readable");
    assert_eq!(memory.len(), 64 << 20);
    assert_eq!((memory[0x2fff], memory[0x3000], memory[0x4000]), (0, 1, 0));
    assert_eq!(memory.last(), Some(&2));
    let allocated = folder.join("memory").metadata().expect("there").blocks() * 512;
    assert!(
        allocated < 1 << 20,
        "{allocated} bytes: pages of zeros are holes"
    );
    // A second snapshot does not replace the first.
    let again = host.run(&["guest", "snapshot", folder.to_str().expect("text")]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("exists"));
}

#[test]
fn nothing_is_left_of_a_snapshot_that_fails() {
    let mut cut = parts();
    cut.truncate(3);
    cut.push(Err(Status::unavailable("the monitor has ended")));
    let mut too_large = parts();
    too_large.insert(
        1,
        Ok(Part {
            memory_offset: u64::MAX,
            memory: vec![1],
            ..Part::default()
        }),
    );
    let mut without_state = parts();
    without_state.truncate(3);
    let refused = vec![Err(Status::internal("no"))];
    for parts in [cut, too_large, without_state, vec![], refused] {
        let host = host(parts);
        let folder = host.folder().join("snap");
        let output = host.run(&["guest", "snapshot", folder.to_str().expect("text")]);
        assert!(!output.status.success());
        assert_eq!(names(&host), [""; 0]);
    }
    let host = host(parts());
    for wrong in ["..", "/", "/tmp/.."] {
        let output = host.run(&["guest", "snapshot", wrong]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            text.contains("does not name a new folder"),
            "{wrong:?}: {text}"
        );
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
    let nowhere = host.run(&["guest", "snapshot", "/nonexistent/snap"]);
    let text = String::from_utf8_lossy(&nowhere.stderr);
    assert!(text.contains("/nonexistent/snap"), "{text}");
}

/// A limit on the size of files stands in for a full disk.
#[test]
fn a_full_disk_is_reported() {
    let host = host(parts());
    let folder = host.folder().join("snap");
    let script = "trap '' XFSZ; ulimit -f 1000; exec \"$@\"";
    let words = ["guest", "snapshot", folder.to_str().expect("text")];
    let mut limited = host.under(&["sh", "-c", script, "sh"], &words);
    let output = limited.output().expect("sh runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("cannot be written") && text.contains("nothing is left"),
        "{text}"
    );
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(names(&host), [""; 0]);
}

#[test]
fn nothing_is_left_of_a_snapshot_that_is_interrupted() {
    let host = host(parts());
    host.fake.guest("db", |guest| guest.stays = true);
    let folder = host.folder().join("snap");
    for signal in ["INT", "TERM"] {
        // The tests may have been started with these signals ignored.
        let words = ["guest", "snapshot", folder.to_str().expect("text")];
        let mut run = host.under(&["env", "--default-signal=INT,TERM"], &words);
        let run = run.spawn().expect("it starts");
        // The signal is sent while the command waits for more of the guest. A file that grows is no
        // event for a test, so this polls.
        while names(&host).is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(end(run, signal), Some(1), "{signal}");
        assert_eq!(names(&host), [""; 0], "{signal}");
    }
}
