// SPDX-License-Identifier: Apache-2.0

//! Forces a vCPU thread out of `KVM_RUN` with the `immediate_exit` byte and a directed signal.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Returns the signal that interrupts `KVM_RUN`. A real-time signal does not collide with the
/// signals of the C library or the program.
fn kick_signal() -> i32 {
    libc::SIGRTMIN() + 1
}

/// Returns the descriptor of a vCPU.
pub(crate) fn as_fd(vcpu: &VcpuFd) -> BorrowedFd<'_> {
    // SAFETY: `vcpu` owns the descriptor and stays borrowed as long as the returned value lives.
    unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) }
}

/// A vCPU's `immediate_exit` byte, in a separate mapping.
///
/// kvm-ioctls maps the same page and hands out `&mut kvm_run` on the vCPU's thread. A second
/// mapping and an atomic let other threads set the byte without aliasing that reference.
#[derive(Debug)]
pub(crate) struct ImmediateExit {
    page: NonNull<c_void>,
}

/// Length of the mapping: `immediate_exit` is in the first page of `kvm_run`.
const MAPPED: usize = 4096;

// SAFETY: the mapping belongs to the process and not to a thread, and it is only accessed through
// one atomic byte.
unsafe impl Send for ImmediateExit {}
// SAFETY: as above; the byte is only accessed atomically.
unsafe impl Sync for ImmediateExit {}

impl ImmediateExit {
    /// Maps the first page of the vCPU's `kvm_run`.
    pub fn map(vcpu: &VcpuFd) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses does not change existing
        // memory.
        let page = unsafe {
            mmap(
                std::ptr::null_mut(),
                MAPPED,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                as_fd(vcpu),
                0,
            )
        }?;
        let page = NonNull::new(page).ok_or(rustix::io::Errno::FAULT)?;
        Ok(Self { page })
    }

    pub fn set(&self, exit: bool) {
        let offset = std::mem::offset_of!(kvm_run, immediate_exit);
        // SAFETY: the offset is less than `MAPPED`, the size of the mapping.
        let byte = unsafe { self.page.as_ptr().cast::<u8>().add(offset) };
        // SAFETY: the byte is mapped as long as `self` lives, a byte is always
        // aligned, and no reference to it exists in this mapping.
        let byte = unsafe { AtomicU8::from_ptr(byte) };
        byte.store(u8::from(exit), Ordering::SeqCst);
    }
}

impl Drop for ImmediateExit {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and nothing
        // points into it once `self` is gone.
        let unmapped = unsafe { munmap(self.page.as_ptr(), MAPPED) };
        debug_assert!(unmapped.is_ok());
    }
}

extern "C" fn ignore(_signal: libc::c_int) {}

/// Installs the handler of the kick signal. The handler does nothing, but a signal with a handler
/// makes `KVM_RUN` return EINTR.
pub(crate) fn install_handler() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let handler = ignore as extern "C" fn(libc::c_int);
        // SAFETY: all-zero is a valid sigaction: no flags, an empty mask, SIG_DFL.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as usize;
        // SAFETY: `action` is initialised, the old action is not requested, and the handler only
        // returns, which is safe at any point of any thread.
        let result =
            unsafe { libc::sigaction(kick_signal(), &raw const action, std::ptr::null_mut()) };
        debug_assert_eq!(result, 0);
    });
}

/// Sends the kick signal to a thread of this process. A thread that has already ended is not an
/// error.
pub(crate) fn kick_thread(thread: i32) {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: tgkill takes three integers and accesses no memory. The signal has a handler, which
    // was installed before the first vCPU thread started.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, kick_signal()) };
}
