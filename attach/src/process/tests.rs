// SPDX-License-Identifier: Apache-2.0

use std::fs::OpenOptions;
use std::os::unix::fs::MetadataExt;

use super::*;

fn own() -> Process {
    Process::open(std::process::id()).expect("this process")
}

/// Returns this process's mapping of an address.
fn mapping(address: u64) -> Result<Mapping, AttachError> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mappings = own().mappings(vec![address], deadline)?;
    mappings.at(address, 1).cloned()
}

#[test]
fn a_process_is_identified_by_its_number_and_its_start() {
    let (number, started) = (std::process::id(), own().started().expect("it runs"));
    let found = Process::open_started(number, started).expect("the same");
    assert_eq!(found.pid(), number);
    Process::open_started(number, started + 1).expect_err("another process");
}

#[test]
fn mappings_are_parsed() {
    let line = "7f1b83fff000-7f1c83fff000 rw-s 00001000 fe:01 1234                       /dev/shm/a b (deleted)";
    let mapping = Mapping::parse(line).expect("a mapping");
    assert_eq!(
        (mapping.start, mapping.end, mapping.offset),
        (0x7f1b_83ff_f000, 0x7f1c_83ff_f000, 0x1000)
    );
    assert!(mapping.shared && mapping.path == "/dev/shm/a b (deleted)" && mapping.inode == 1234);
    assert_eq!(mapping.device, rustix::fs::makedev(0xfe, 1));
    let private = Mapping::parse("1000-2000 rw-p 00000000 00:00 0").expect("a mapping");
    assert!(!private.shared && private.path.is_empty() && private.writable);
    let read_only = Mapping::parse("1000-2000 r--s 00000000 00:00 0").expect("a mapping");
    assert!(read_only.shared && !read_only.writable);
    for line in [
        "",
        "1000",
        "1000-2000",
        "x-y rw-p 0 0:0 0",
        "1000-2000 rw-p 0 00 0",
    ] {
        assert_eq!(Mapping::parse(line), None, "{line}");
    }
}

#[test]
fn run_pages_are_known_by_their_names() {
    let page = |line: &str| Mapping::parse(line).expect(line).run_page();
    let line = "7f00-9f00 rw-s 00000000 00:0f 1054                 anon_inode:kvm-vcpu:11";
    assert_eq!(page(line), Some((11, 0x7f00)));
    for (from, to) in [
        ("rw-s", "rw-p"),
        ("rw-s", "r--s"),
        ("00000000", "00040000"),
        ("vcpu:11", "vcpu:x"),
        ("kvm-vcpu:11", "kvm-vm"),
        ("anon_inode", "/anon_inode"),
    ] {
        assert_eq!(page(&line.replace(from, to)), None, "{to}");
    }
}

/// A slot of KVM may name memory that its process may only read, such as another user's file. A
/// write through /proc/PID/mem ignores the rights of a mapping, so the mapping must be refused.
#[test]
fn memory_that_the_process_may_only_read_is_refused() {
    // A literal is in this program's file, which is mapped without the right to write.
    let literal = "memory that may only be read";
    let address = literal.as_ptr() as u64;
    let error = mapping(address).expect_err("it may only be read");
    let program = std::env::current_exe().expect("a program");
    let error = error.to_string();
    assert!(error.contains("may not write"), "{error}");
    assert!(error.contains(&*program.to_string_lossy()), "{error}");
}

#[test]
fn neighbours_continue_a_mapping() {
    let parse = |line: &str| Mapping::parse(line).expect(line);
    let first = parse("1000-2000 rw-s 00003000 fe:01 7");
    let anonymous = parse("1000-2000 rw-p 00000000 00:00 0");
    assert!(first.continues_in(&parse("2000-5000 rw-s 00004000 fe:01 7")));
    assert!(anonymous.continues_in(&parse("2000-3000 rwxp 00000000 00:00 0 [heap]")));
    for other in [
        "2000-5000 r--s 00004000 fe:01 7",
        "2000-5000 rw-p 00004000 fe:01 7",
        "2000-5000 rw-s 00005000 fe:01 7",
        "2000-5000 rw-s 00004000 fe:02 7",
        "2000-5000 rw-s 00004000 fe:01 8",
        "3000-5000 rw-s 00004000 fe:01 7",
    ] {
        assert!(!first.continues_in(&parse(other)), "{other}");
    }
}

/// Returns a file, and the mapping that a process would have of it.
fn ram(folder: &Path) -> (PathBuf, Mapping) {
    let path = folder.join("ram");
    fs::write(&path, b"here").expect("room");
    let metadata = fs::metadata(&path).expect("there");
    let mapping = Mapping {
        start: 0,
        end: 4096,
        writable: true,
        shared: true,
        offset: 0,
        device: metadata.dev(),
        inode: metadata.ino(),
        path: path.display().to_string(),
    };
    (path, mapping)
}

#[test]
fn a_mapped_file_is_found_by_a_descriptor_that_may_write() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (path, mapping) = ram(folder.path());
    let process = own();
    assert!(process.file_of(&mapping).is_none(), "not by its path");
    let open = |options: &mut OpenOptions| options.open(&path).expect("there");
    let useless = [
        open(File::options().read(true)),
        open(File::options().write(true)),
        open(File::options().read(true).append(true)),
    ];
    assert!(process.file_of(&mapping).is_none(), "no right to write");
    let file = open(File::options().read(true).write(true));
    let found = process.file_of(&mapping).expect("found");
    assert_eq!(found.metadata().expect("open").ino(), mapping.inode);
    let other = Mapping {
        inode: u64::MAX,
        ..mapping.clone()
    };
    assert!(process.file_of(&other).is_none(), "another file");
    // Yama may deny taking the descriptor.
    assert!(process.reopen(file.as_raw_fd(), &other).is_none());
    let found = process.reopen(file.as_raw_fd(), &mapping).expect("found");
    assert_eq!(found.metadata().expect("open").ino(), mapping.inode);
    for useless in &useless[..2] {
        assert!(process.reopen(useless.as_raw_fd(), &mapping).is_none());
    }
}

#[test]
fn a_process_has_one_attacher() {
    let lock = own().lock().expect("nobody has it");
    let error = own().lock().expect_err("taken").to_string();
    let named = format!("another process {} is attached", std::process::id());
    assert!(error.contains(&named), "{error}");
    drop(lock);
    own().lock().expect("free again");
}

#[test]
fn threads_and_the_end_are_seen() {
    let process = own();
    let id = rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .cast_unsigned();
    assert_eq!(process.threads(&[id]), Some(vec![id]));
    assert_eq!(process.threads(&[id, 1]), None);
    assert!(process.has_thread(id) && !process.has_thread(1));
    let again = Process::of(rustix::io::dup(&process.pidfd).expect("free"));
    assert_eq!(again.expect("it runs").pid(), std::process::id());
    let user = rustix::process::getuid().as_raw();
    assert_eq!(process.users().expect("readable")[0], user);
    assert!(!process.has_ended_within(Duration::ZERO));
    let mut child = std::process::Command::new("true")
        .spawn()
        .expect("a process");
    let process = Process::open(child.id()).expect("not reaped");
    assert!(process.has_ended_within(Duration::from_secs(30)));
    child.wait().expect("it has ended");
    assert!(Process::open(u32::MAX).is_err());
    let pidfd = rustix::io::dup(&own().pidfd).expect("free");
    Process::with(1, pidfd).expect_err("another one");
    let reaped = process.pidfd;
    Process::of(reaped).expect_err("it has been reaped");
    let mapping = mapping(0).expect_err("nothing is mapped there");
    assert!(
        mapping.to_string().contains("not the guest's monitor"),
        "{mapping}"
    );
}
