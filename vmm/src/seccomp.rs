// SPDX-License-Identifier: Apache-2.0

//! System call filters, one per kind of thread.
//!
//! A filter is put on at a thread's start and cannot be taken off; threads that a
//! filtered thread makes inherit it. A guest that breaks out of a device's code
//! finds itself on a vCPU or device thread, which can open nothing, connect to
//! nothing and start nothing.
//!
//! | kind | beside memory, futexes and open files |
//! |---|---|
//! | vCPU | `ioctl` with the four requests that a running vCPU needs |
//! | device | the calls of virtio's back ends: vectored file I/O, unix sockets, epoll |
//! | keys | `tgkill`, to stop vCPUs; syncing the audit log |
//! | console | nothing |
//! | trace | epoll and the agent's connections |
//! | API | epoll, sockets, threads, removing its socket |
//!
//! Any other call ends the monitor, but for opening and looking up files: that fails with
//! `EACCES`. Libraries try it unasked and do without, at moments that no list can foresee:
//! glibc's `free` reads `/proc/sys/vm/overcommit_memory` when it first gives memory of a
//! thread's own heap back (`malloc/arena.c`, `shrink_heap`), and a panic's backtrace looks
//! for debug information.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// What happens on a system call that a thread should not need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SeccompLevel {
    /// Nothing: no filter.
    Off,
    /// It is carried out, with a line in the kernel's audit log.
    Log,
    /// It ends the monitor, with a message.
    On,
}

/// The kinds of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// Runs guest code.
    Vcpu,
    /// Carries out what virtio devices are asked for.
    Device,
    /// Owns the keys.
    Keys,
    /// Copies the console's output, or types into it.
    Console,
    /// Reads and decodes what the agent sends.
    Trace,
    /// Serves the API.
    Api,
}

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// The filter cannot be made.
    #[error("the system call filter cannot be made ({0}); run with --seccomp off and report it")]
    Build(#[from] seccompiler::BackendError),
    /// The kernel refuses the filter.
    #[error(
        "the kernel refuses the system call filter ({0}); it needs CONFIG_SECCOMP_FILTER, or run with --seccomp off"
    )]
    Apply(#[from] seccompiler::Error),
}

static LEVEL: OnceLock<SeccompLevel> = OnceLock::new();

/// Sets, once for the process, how [`enter`] filters. Without it nothing is
/// filtered: a library must not take system calls from a program unasked.
pub fn enforce(level: SeccompLevel) {
    if level == SeccompLevel::On {
        install_handler();
    }
    // The first call counts.
    let _ = LEVEL.set(level);
}

/// Puts the calling thread under the filter of its kind, if filters are wanted.
///
/// # Errors
/// [`SeccompError`]: the thread has no filter then.
pub fn enter(kind: ThreadKind) -> Result<(), SeccompError> {
    let action = match LEVEL.get() {
        None | Some(SeccompLevel::Off) => return Ok(()),
        Some(SeccompLevel::Log) => SeccompAction::Log,
        Some(SeccompLevel::On) => SeccompAction::Trap,
    };
    filter(kind, action)
}

/// Of two filters the stricter verdict counts (seccomp(2)): `SECCOMP_RET_ERRNO` for files is heard
/// only because the second filter lets those calls through.
fn filter(kind: ThreadKind, action: SeccompAction) -> Result<(), SeccompError> {
    seccompiler::apply_filter(&file_filter()?)?;
    seccompiler::apply_filter(&program(kind, action)?)?;
    Ok(())
}

fn file_filter() -> Result<BpfProgram, SeccompError> {
    let filter = SeccompFilter::new(
        FILES.iter().map(|call| (*call, vec![])).collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EACCES.unsigned_abs()),
        TargetArch::x86_64,
    )?;
    Ok(filter.try_into()?)
}

/// What every thread needs: memory, time, locks, files that are open, its own
/// signals and its end.
const COMMON: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Refused by a filter of its own, with an error.
const FILES: &[i64] = &[
    libc::SYS_access,
    libc::SYS_getcwd,
    libc::SYS_lstat,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_stat,
    libc::SYS_statx,
];

const DEVICE: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_getsockopt,
    libc::SYS_ioctl,
    libc::SYS_poll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socket,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
];

const KEYS: &[i64] = &[libc::SYS_fdatasync, libc::SYS_fsync, libc::SYS_ftruncate];

const TRACE: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
];

const API: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_connect,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_flock,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_geteuid,
    libc::SYS_getuid,
    libc::SYS_ioctl,
    libc::SYS_listen,
    libc::SYS_poll,
    libc::SYS_prctl,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
];

/// The requests of a running vCPU (`include/uapi/linux/kvm.h`): `KVM_RUN`,
/// `KVM_GET_REGS`, `KVM_GET_VCPU_EVENTS`, `KVM_KVMCLOCK_CTRL`.
const VCPU_IOCTLS: [u64; 4] = [0xae80, 0x8090_ae81, 0x8040_ae9f, 0xaead];

fn program(kind: ThreadKind, action: SeccompAction) -> Result<BpfProgram, SeccompError> {
    let more = match kind {
        ThreadKind::Vcpu | ThreadKind::Console => &[],
        ThreadKind::Device => DEVICE,
        ThreadKind::Keys => KEYS,
        ThreadKind::Trace => TRACE,
        ThreadKind::Api => API,
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = COMMON
        .iter()
        .chain(FILES)
        .chain(more)
        .map(|call| (*call, vec![]))
        .collect();
    // Signals reach this process alone, and no new memory becomes code.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![only(0, SeccompCmpOp::Eq, own)?]);
    let executable = SeccompCmpOp::MaskedEq(u64::from(libc::PROT_EXEC.unsigned_abs()));
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![only(2, executable.clone(), 0)?]);
    }
    if kind == ThreadKind::Vcpu {
        let requests = VCPU_IOCTLS
            .into_iter()
            .map(|request| only(1, SeccompCmpOp::Eq, request));
        rules.insert(libc::SYS_ioctl, requests.collect::<Result<_, _>>()?);
    }
    let filter = SeccompFilter::new(rules, action, SeccompAction::Allow, TargetArch::x86_64)?;
    Ok(filter.try_into()?)
}

/// The call is let through if this argument compares so with this value.
fn only(argument: u8, compare: SeccompCmpOp, value: u64) -> Result<SeccompRule, SeccompError> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// Says which system call was refused, and ends the process. Runs as a signal
/// handler: only calls that are safe there, and no allocation.
extern "C" fn refused(_signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // `si_syscall` of a SIGSYS: behind signo, errno, code and padding (16 bytes) and
    // the calling address (8 bytes); `include/uapi/asm-generic/siginfo.h`.
    const SYSCALL: usize = 24;
    // SAFETY: the kernel hands over a whole siginfo, 128 bytes, to a handler
    // installed with SA_SIGINFO.
    let call = unsafe { info.cast::<u8>().add(SYSCALL) };
    // SAFETY: four bytes at that offset are the system call's number, an int.
    let call = unsafe { call.cast::<i32>().read_unaligned() };
    let mut message = *b"patchbay-vmm: ended: a thread made system call 0000, which its filter forbids; run with --seccomp log and report it\n";
    let digits = 47;
    let mut rest = call.unsigned_abs();
    for place in (0..4).rev() {
        message[digits + place] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    // Fails if nobody listens.
    let _ = rustix::io::write(rustix::stdio::stderr(), &message);
    // SAFETY: ends the process at once, which is allowed anywhere.
    unsafe { libc::_exit(1) };
}

fn install_handler() {
    let handler = refused as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    // SAFETY: all-zero is a valid sigaction: no flags, an empty mask, SIG_DFL.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: `action` is initialised, the old action is not asked for, and the
    // handler makes only calls that are safe in one.
    let result = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
    debug_assert_eq!(result, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_filter() {
        for kind in [
            ThreadKind::Vcpu,
            ThreadKind::Device,
            ThreadKind::Keys,
            ThreadKind::Console,
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

    /// On a thread of its own: a filter stays.
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

    fn socket() -> i32 {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        socket.err().map_or(0, rustix::io::Errno::raw_os_error)
    }

    #[test]
    fn filters_refuse_what_is_not_listed_and_only_that() {
        assert_eq!(filtered(ThreadKind::Vcpu, open), libc::EACCES);
        assert_eq!(filtered(ThreadKind::Keys, open), libc::EACCES);
        assert_eq!(filtered(ThreadKind::Api, open), libc::EACCES);
        assert_eq!(filtered(ThreadKind::Vcpu, socket), libc::EXFULL);
        assert_eq!(filtered(ThreadKind::Console, socket), libc::EXFULL);
        assert_eq!(filtered(ThreadKind::Trace, open), libc::EACCES);
        assert_eq!(filtered(ThreadKind::Trace, socket), libc::EXFULL);
        assert_eq!(filtered(ThreadKind::Api, socket), 0);
    }

    #[test]
    fn files_that_libraries_want_unasked_do_not_end_the_monitor() {
        let unasked = || {
            enforce(SeccompLevel::On);
            enter(ThreadKind::Keys).unwrap();
            // More than `M_TRIM_THRESHOLD` (mallopt(3)), in blocks smaller than `M_MMAP_THRESHOLD`.
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
            // Signal 0 asks whether there is such a process: init is one.
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
}
