// SPDX-License-Identifier: Apache-2.0

//! System call filters, one per kind of thread.
//!
//! A filter is installed at a thread's start and cannot be removed. Threads started by a filtered
//! thread inherit it. A guest that breaks out through a device runs on a vCPU or device thread,
//! which can neither open files nor start processes.
//!
//! | kind | allowed besides memory, time, futexes, open files and signals to this process |
//! |---|---|
//! | vCPU | the six `ioctl` requests of a running vCPU |
//! | device | calls of virtio's back ends: vectored file I/O, epoll, connecting unix sockets |
//! | keys | syncing and truncating the audit log, and the `ioctl` requests that read the state of the guest's stopped hardware |
//! | console | nothing |
//! | log files | opening and renaming files, restricted by Landlock ([`jail`](crate::jail)) |
//! | trace | epoll and the agent's connections |
//! | API | epoll, unix sockets, threads, removing its socket, terminal modes, syncing the audit log |
//!
//! A filter sees the numeric arguments of a call, but no paths. The device thread is restricted to
//! the sockets of its vsock device by Landlock, where the kernel supports it
//! (`LANDLOCK_ACCESS_FS_RESOLVE_UNIX`), and by the permissions of the monitor's user.
//!
//! Any other call ends the monitor, with two exceptions. Opening and looking up files fails with
//! `EACCES`, because libraries do it on their own at unpredictable times and can continue without
//! the files: glibc's `free` reads `/proc/sys/vm/overcommit_memory` when it first returns memory of
//! a thread's own heap (`malloc/arena.c`, `shrink_heap`), and a panic's backtrace looks for debug
//! information. `clone3` fails with `ENOSYS`, so that libraries fall back to `clone`, whose flags a
//! filter can check.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// Level of the monitor's confinement. The comments of the levels are in the help of `--jail`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SeccompLevel {
    /// No confinement.
    Off,
    /// System call filters that allow every call. The kernel's audit log gets a line for each call
    /// that `on` would not allow.
    Log,
    /// System call filters, Landlock rules and resource limits. A call that the filters do not
    /// allow fails or ends the monitor with a message.
    On,
}

/// Kinds of threads, by what they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// Runs guest code.
    Vcpu,
    /// Processes requests to virtio devices.
    Device,
    /// Executes changes of keys.
    Keys,
    /// Types standard input into the console.
    Console,
    /// Writes the console's output, and reopens log files.
    LogFiles,
    /// Reads and decodes the agent's data.
    Trace,
    /// Serves the API.
    Api,
}

/// A filter cannot be installed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum SeccompError {
    #[error("the system call filter cannot be built ({0}); run with --jail off and report it")]
    Build(seccompiler::BackendError),
    #[error(
        "the kernel refuses the system call filter ({0}); it needs CONFIG_SECCOMP_FILTER, or run with --jail off"
    )]
    Apply(seccompiler::Error),
}

impl From<seccompiler::BackendError> for SeccompError {
    fn from(error: seccompiler::BackendError) -> Self {
        Self::Build(error)
    }
}

impl From<seccompiler::Error> for SeccompError {
    fn from(error: seccompiler::Error) -> Self {
        Self::Apply(error)
    }
}

static LEVEL: OnceLock<SeccompLevel> = OnceLock::new();

/// Sets how [`enter`] filters, once per process. Without this call nothing is filtered, because a
/// library must not restrict a program that has not requested it.
pub fn enforce(level: SeccompLevel) {
    if level == SeccompLevel::On {
        install_handler();
    }
    // Only the first call has an effect.
    let _ = LEVEL.set(level);
}

/// Installs the filter of this kind of thread on the calling thread, if filters are enabled.
///
/// # Errors
/// [`SeccompError`]. The thread then has no filter.
pub fn enter(kind: ThreadKind) -> Result<(), SeccompError> {
    let action = match LEVEL.get() {
        None | Some(SeccompLevel::Off) => return Ok(()),
        Some(SeccompLevel::Log) => SeccompAction::Log,
        Some(SeccompLevel::On) => SeccompAction::Trap,
    };
    filter(kind, action)
}

/// Installs the thread's filters. The strictest verdict of several filters applies (seccomp(2)).
/// The last filter must therefore allow the calls for which another filter returns an error.
fn filter(kind: ThreadKind, action: SeccompAction) -> Result<(), SeccompError> {
    let files: Vec<i64> = match kind {
        ThreadKind::LogFiles => {
            let needed = |call: &&i64| **call != libc::SYS_openat;
            FILES.iter().filter(needed).copied().collect()
        }
        _ => FILES.to_vec(),
    };
    seccompiler::apply_filter(&failing(&files, libc::EACCES)?)?;
    seccompiler::apply_filter(&failing(&[libc::SYS_clone3], libc::ENOSYS)?)?;
    seccompiler::apply_filter(&program(kind, action)?)?;
    Ok(())
}

fn failing(calls: &[i64], error: i32) -> Result<BpfProgram, SeccompError> {
    let filter = SeccompFilter::new(
        calls.iter().map(|call| (*call, vec![])).collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(error.unsigned_abs()),
        TargetArch::x86_64,
    )?;
    Ok(filter.try_into()?)
}

/// Calls that every thread needs: memory, time, locks, open files, its own signals and exit.
const COMMON: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
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
    libc::SYS_poll,
    libc::SYS_ppoll,
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

/// Calls refused with an error by a separate filter.
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
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
];

const KEYS: &[i64] = &[libc::SYS_fdatasync, libc::SYS_fsync, libc::SYS_ftruncate];

const LOG_FILES: &[i64] = &[
    libc::SYS_ftruncate,
    libc::SYS_pread64,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
];

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
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_geteuid,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_getuid,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
];

/// Allowed `fcntl` commands. `F_SETOWN` and `F_SETSIG` are not among them, because they could send
/// signals to any process.
const FCNTL_COMMANDS: [i32; 5] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
];

/// FIONBIO makes a stream non-blocking.
const DEVICE_IOCTLS: &[u64] = &[libc::FIONBIO];

/// FIONBIO, and the terminal modes that the API's thread restores at the end: `TCGETS`, `TCSETS`
/// and the `termios2` variants (`include/uapi/asm-generic/ioctls.h`).
const API_IOCTLS: &[u64] = &[libc::FIONBIO, 0x5401, 0x5402, 0x802c_542a, 0x402c_542b];

/// Requests of a running vCPU (`include/uapi/linux/kvm.h`): `KVM_RUN`, `KVM_GET_REGS`,
/// `KVM_GET_SREGS`, `KVM_GET_MSRS`, `KVM_GET_VCPU_EVENTS`, `KVM_KVMCLOCK_CTRL`.
const VCPU_IOCTLS: &[u64] = &[
    0xae80,
    0x8090_ae81,
    0x8138_ae83,
    0xc008_ae88,
    0x8040_ae9f,
    0xaead,
];

/// Requests that read a paused guest for a snapshot (`include/uapi/linux/kvm.h`): `KVM_GET_REGS`,
/// `KVM_GET_SREGS`, `KVM_GET_MSRS`, `KVM_GET_VCPU_EVENTS`, `KVM_GET_MP_STATE`, `KVM_GET_XSAVE`,
/// `KVM_GET_XCRS`, `KVM_GET_DEBUGREGS`, `KVM_GET_LAPIC`, `KVM_GET_TSC_KHZ`,
/// `KVM_GET_IRQCHIP`, `KVM_GET_PIT2`, `KVM_GET_CLOCK`.
const SAVE_IOCTLS: &[u64] = &[
    0x8090_ae81,
    0x8138_ae83,
    0xc008_ae88,
    0x8040_ae9f,
    0x8004_ae98,
    0x9000_aea4,
    0x8188_aea6,
    0x8080_aea1,
    0x8400_ae8e,
    0xaea3,
    0xc208_ae62,
    0x8070_ae9f,
    0x8030_ae7c,
];

fn program(kind: ThreadKind, action: SeccompAction) -> Result<BpfProgram, SeccompError> {
    let (more, ioctls): (&[i64], &[u64]) = match kind {
        ThreadKind::Vcpu => (&[], VCPU_IOCTLS),
        ThreadKind::Console => (&[], &[]),
        ThreadKind::Device => (DEVICE, DEVICE_IOCTLS),
        ThreadKind::Keys => (KEYS, SAVE_IOCTLS),
        ThreadKind::LogFiles => (LOG_FILES, &[]),
        ThreadKind::Trace => (TRACE, &[]),
        ThreadKind::Api => (API, API_IOCTLS),
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = COMMON
        .iter()
        .chain(FILES)
        .chain(&[libc::SYS_clone3])
        .chain(more)
        .map(|call| (*call, vec![]))
        .collect();
    let equal = |argument, value| only(argument, SeccompCmpOp::Eq, value);
    // Signals may go to this process only, and new memory cannot be executable.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![equal(0, own)?]);
    let executable = SeccompCmpOp::MaskedEq(u64::from(libc::PROT_EXEC.unsigned_abs()));
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![only(2, executable.clone(), 0)?]);
    }
    let commands = FCNTL_COMMANDS.map(|command| equal(1, command.unsigned_abs().into()));
    rules.insert(
        libc::SYS_fcntl,
        commands.into_iter().collect::<Result<_, _>>()?,
    );
    if !ioctls.is_empty() {
        let requests = ioctls.iter().map(|request| equal(1, *request));
        rules.insert(libc::SYS_ioctl, requests.collect::<Result<_, _>>()?);
    }
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    if matches!(kind, ThreadKind::Device | ThreadKind::Api) {
        rules.insert(libc::SYS_socket, vec![equal(0, unix)?]);
    }
    if kind == ThreadKind::Api {
        rules.insert(libc::SYS_socketpair, vec![equal(0, unix)?]);
        // Threads are allowed, processes are not.
        let thread = u64::from((libc::CLONE_VM | libc::CLONE_THREAD).unsigned_abs());
        let thread = only(0, SeccompCmpOp::MaskedEq(thread), thread)?;
        rules.insert(libc::SYS_clone, vec![thread]);
        let name = u64::from(libc::PR_SET_NAME.unsigned_abs());
        rules.insert(libc::SYS_prctl, vec![equal(0, name)?]);
    }
    let filter = SeccompFilter::new(rules, action, SeccompAction::Allow, TargetArch::x86_64)?;
    Ok(filter.try_into()?)
}

/// Returns a rule that allows the call if the comparison of this argument with `value` is true.
fn only(argument: u8, compare: SeccompCmpOp, value: u64) -> Result<SeccompRule, SeccompError> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// Reports the refused system call and ends the process. Runs as a signal handler: only
/// async-signal-safe calls, no allocation.
extern "C" fn refused(_signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // Offset of `si_syscall` in a SIGSYS: after signo, errno, code and padding (16 bytes) and the
    // calling address (8 bytes); `include/uapi/asm-generic/siginfo.h`.
    const SYSCALL: usize = 24;
    // SAFETY: the kernel hands over a whole siginfo, 128 bytes, to a handler
    // installed with SA_SIGINFO.
    let call = unsafe { info.cast::<u8>().add(SYSCALL) };
    // SAFETY: four bytes at that offset are the system call's number, an int.
    let call = unsafe { call.cast::<i32>().read_unaligned() };
    let mut message = *b"patchbay-vmm: ended: a thread made system call 0000, which its filter forbids; run with --jail log and report it\n";
    let digits = 47;
    let mut rest = call.unsigned_abs();
    for place in (0..4).rev() {
        message[digits + place] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    // Nothing can be done if stderr is closed.
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
    // SAFETY: `action` is initialised, the old action is not requested, and the handler makes only
    // async-signal-safe calls.
    let result = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
    debug_assert_eq!(result, 0);
}

#[cfg(test)]
mod tests;
