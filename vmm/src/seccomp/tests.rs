// SPDX-License-Identifier: Apache-2.0

//! Checks what each filter allows and refuses.

use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketType};

use super::*;

#[test]
fn every_kind_has_a_filter() {
    for kind in [
        ThreadKind::Vcpu,
        ThreadKind::Device,
        ThreadKind::Keys,
        ThreadKind::Console,
        ThreadKind::LogFiles,
        ThreadKind::Trace,
        ThreadKind::Api,
    ] {
        assert!(!program(kind, SeccompAction::Trap).unwrap().is_empty());
    }
}

#[test]
fn the_message_has_its_number_in_place() {
    let message = b"patchbay-vmm: ended: a thread made system call 0000, which";
    assert_eq!(&message[47..51], b"0000");
}

/// Runs `call` on a thread of its own, because a filter cannot be removed.
fn filtered(kind: ThreadKind, call: impl FnOnce() -> i32 + Send + 'static) -> i32 {
    std::thread::spawn(move || {
        filter(kind, SeccompAction::Errno(libc::EXFULL.unsigned_abs())).unwrap();
        call()
    })
    .join()
    .unwrap()
}

fn open() -> i32 {
    let opened = rustix::fs::open(
        "/dev/null",
        rustix::fs::OFlags::RDONLY,
        rustix::fs::Mode::empty(),
    );
    opened.err().map_or(0, rustix::io::Errno::raw_os_error)
}

fn error<T>(result: rustix::io::Result<T>) -> i32 {
    result.err().map_or(0, rustix::io::Errno::raw_os_error)
}

fn socket_of(family: AddressFamily) -> i32 {
    error(rustix::net::socket(family, SocketType::STREAM, None))
}

fn socket() -> i32 {
    socket_of(AddressFamily::UNIX)
}

fn other_socket() -> i32 {
    socket_of(AddressFamily::INET)
}

#[test]
fn filters_refuse_what_is_not_listed_and_only_that() {
    assert_eq!(filtered(ThreadKind::Vcpu, open), libc::EACCES);
    assert_eq!(filtered(ThreadKind::Keys, open), libc::EACCES);
    assert_eq!(filtered(ThreadKind::Api, open), libc::EACCES);
    assert_eq!(filtered(ThreadKind::Vcpu, socket), libc::EXFULL);
    assert_eq!(filtered(ThreadKind::Trace, open), libc::EACCES);
    assert_eq!(filtered(ThreadKind::Trace, socket), libc::EXFULL);
    assert_eq!(filtered(ThreadKind::Console, socket), libc::EXFULL);
    for kind in [ThreadKind::Api, ThreadKind::Device] {
        assert_eq!(filtered(kind, socket), 0);
        assert_eq!(filtered(kind, other_socket), libc::EXFULL);
    }
    let open_in_folder = || {
        let null = std::fs::File::options().append(true).open("/dev/null");
        null.err()
            .and_then(|error| error.raw_os_error())
            .unwrap_or(0)
    };
    assert_eq!(filtered(ThreadKind::LogFiles, open_in_folder), 0);
    assert_eq!(filtered(ThreadKind::Keys, open_in_folder), libc::EACCES);
}

#[test]
fn the_device_thread_removes_nothing_and_changes_no_terminal() {
    let unlink = || error(rustix::fs::unlink("/nonexistent"));
    assert_eq!(filtered(ThreadKind::Device, unlink), libc::EXFULL);
    assert_eq!(filtered(ThreadKind::Api, unlink), libc::ENOENT);
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let blocking = stream.try_clone().unwrap();
    let nonblocking = move || {
        let result = blocking.set_nonblocking(true);
        result.err().and_then(|e| e.raw_os_error()).unwrap_or(0)
    };
    assert_eq!(filtered(ThreadKind::Device, nonblocking), 0);
    // TIOCSTI types into a terminal.
    let type_into = move || {
        // SAFETY: the filter refuses the request. Without the filter, the kernel would refuse it on
        // a socket.
        let result = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCSTI, c"x".as_ptr()) };
        assert_eq!(result, -1);
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    };
    assert_eq!(filtered(ThreadKind::Device, type_into), libc::EXFULL);
}

#[test]
fn the_api_starts_threads_and_no_processes() {
    let thread = || std::thread::spawn(|| 0).join().unwrap();
    assert_eq!(filtered(ThreadKind::Api, thread), 0);
    let fork = || {
        let flags = libc::SIGCHLD;
        // SAFETY: refused by the filter; a child would end at once.
        let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
        if child == 0 {
            // SAFETY: ends the child without running any of the parent's code.
            unsafe { libc::_exit(0) };
        }
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    };
    assert_eq!(filtered(ThreadKind::Api, fork), libc::EXFULL);
}

#[test]
fn descriptors_send_no_signals() {
    let owner = || {
        // SAFETY: the call has no pointers.
        let result = unsafe { libc::fcntl(0, libc::F_SETOWN, 1) };
        assert_eq!(result, -1);
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    };
    assert_eq!(filtered(ThreadKind::Device, owner), libc::EXFULL);
}

#[test]
fn files_that_libraries_want_unasked_do_not_end_the_monitor() {
    let unasked = || {
        enforce(SeccompLevel::On);
        enter(ThreadKind::Keys).unwrap();
        // Frees more than `M_TRIM_THRESHOLD` (mallopt(3)), in blocks smaller than
        // `M_MMAP_THRESHOLD`, so that glibc shrinks the thread's heap and opens a file.
        drop(std::hint::black_box(vec![vec![1_u8; 64 << 10]; 64]));
        std::backtrace::Backtrace::force_capture().to_string()
    };
    let backtrace = std::thread::spawn(unasked).join().unwrap();
    assert_ne!(backtrace, "");
}

#[test]
fn signals_go_to_this_process_alone_and_data_is_no_code() {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let foreign = || {
        // Signal 0 only checks whether the process exists. Process 1 always exists.
        // SAFETY: the call reads and writes no memory.
        let result = unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) };
        assert_eq!(result, -1);
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    };
    assert_eq!(filtered(ThreadKind::Keys, foreign), libc::EXFULL);
    for (code, refused) in [(ProtFlags::EXEC, libc::EXFULL), (ProtFlags::WRITE, 0)] {
        let map = move || {
            let flags = ProtFlags::READ | code;
            // SAFETY: a mapping of its own, at an address that the kernel chooses.
            let mapped =
                unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, flags, MapFlags::PRIVATE) };
            mapped.err().map_or(0, rustix::io::Errno::raw_os_error)
        };
        assert_eq!(filtered(ThreadKind::Vcpu, map), refused);
    }
}

#[test]
fn a_vcpu_may_only_make_its_own_ioctls() {
    let foreign = || {
        let size = rustix::termios::tcgetwinsize(rustix::stdio::stdin());
        size.err().map_or(0, rustix::io::Errno::raw_os_error)
    };
    assert_eq!(filtered(ThreadKind::Vcpu, foreign), libc::EXFULL);
}
