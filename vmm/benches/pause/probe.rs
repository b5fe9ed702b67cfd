// SPDX-License-Identifier: Apache-2.0

//! The bare probe: the same guest code on KVM with nothing but what a stop needs. A thread per
//! vCPU, `immediate_exit`, a signal, a counter of the stopped vCPUs, and a futex to resume them. No
//! devices, no interrupt controller, no deadline, no registers read.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_run, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::thread::{futex, gettid};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::bare_metal::{CODE, LOOP, branch_code, counters_address};

const MEMORY: usize = 4 << 20;
const PAGE_TABLES: u64 = 0x9000;

struct Shared {
    /// Odd while a stop is wanted.
    word: AtomicU32,
    stopped: AtomicU32,
    end: AtomicBool,
    vcpus: Vec<Kick>,
}

/// The means to stop one vCPU.
struct Kick {
    run: NonNull<c_void>,
    thread: AtomicI32,
}

// SAFETY: the page stays mapped until the process ends, and is only accessed atomically.
unsafe impl Send for Kick {}
// SAFETY: as above.
unsafe impl Sync for Kick {}

impl Kick {
    fn map(vcpu: &VcpuFd) -> Self {
        // SAFETY: `vcpu` owns the descriptor and is borrowed beyond its use here.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe { mmap(std::ptr::null_mut(), 4096, access, MapFlags::SHARED, fd, 0) };
        Self {
            run: NonNull::new(page.expect("kvm_run is mapped")).expect("not at 0"),
            thread: AtomicI32::new(0),
        }
    }

    fn exit_at_once(&self, exit: bool) {
        let offset = std::mem::offset_of!(kvm_run, immediate_exit);
        // SAFETY: the offset is in the mapped page.
        let byte = unsafe { self.run.as_ptr().cast::<u8>().add(offset) };
        // SAFETY: the page stays mapped, and no reference to it exists in this mapping.
        let byte = unsafe { AtomicU8::from_ptr(byte) };
        byte.store(exit.into(), SeqCst);
    }

    fn send(&self) {
        self.exit_at_once(true);
        let process = rustix::process::getpid().as_raw_nonzero().get();
        let thread = self.thread.load(SeqCst);
        // SAFETY: three integers; the signal has a handler.
        unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
    }
}

/// A guest whose vCPUs run [`branch_code`].
pub struct Probe {
    shared: Arc<Shared>,
    memory: GuestMemoryMmap,
    threads: Vec<JoinHandle<()>>,
    _vm: VmFd,
}

impl Probe {
    pub fn start(vcpus: u8) -> Self {
        install_handler();
        let memory = memory();
        let kvm = Kvm::new().expect("KVM");
        let vm = kvm.create_vm().expect("a VM");
        let region = memory.iter().next().expect("a region");
        let slot = kvm_userspace_memory_region {
            slot: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: region.as_ptr() as u64,
            flags: 0,
        };
        // SAFETY: `Probe` keeps the memory as long as the VM.
        unsafe { vm.set_user_memory_region(slot) }.expect("guest memory");
        let fds: Vec<VcpuFd> = (0..vcpus).map(|vcpu| create(&kvm, &vm, vcpu)).collect();
        let shared = Arc::new(Shared {
            word: AtomicU32::new(0),
            stopped: AtomicU32::new(0),
            end: AtomicBool::new(false),
            vcpus: fds.iter().map(Kick::map).collect(),
        });
        let spawn = |(index, fd)| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("vcpu{index}"));
            let spawned = thread.spawn(move || run(fd, &shared, index));
            spawned.expect("a thread")
        };
        let threads = fds.into_iter().enumerate().map(|(i, fd)| spawn((i, fd)));
        let threads = threads.collect();
        let probe = Self {
            shared,
            memory,
            threads,
            _vm: vm,
        };
        for vcpu in 0..vcpus {
            while probe.rounds(vcpu) == 0 {
                std::thread::yield_now();
            }
        }
        probe
    }

    /// Returns the number of loop iterations of a vCPU.
    pub fn rounds(&self, vcpu: u8) -> u64 {
        let counter = GuestAddress(counters_address(vcpu));
        self.memory.load(counter, SeqCst).expect("in memory")
    }

    /// Stops every vCPU.
    pub fn stop(&self) -> Duration {
        let Shared { stopped, vcpus, .. } = &*self.shared;
        let began = Instant::now();
        stopped.store(0, SeqCst);
        self.shared.word.fetch_add(1, SeqCst);
        vcpus.iter().for_each(Kick::send);
        while stopped.load(SeqCst) < u32::try_from(vcpus.len()).expect("few") {
            std::thread::yield_now();
        }
        began.elapsed()
    }

    /// Resumes every vCPU.
    pub fn resume(&self) {
        self.shared.word.fetch_add(1, SeqCst);
        let everyone = i32::MAX.cast_unsigned();
        let _ = futex::wake(&self.shared.word, futex::Flags::PRIVATE, everyone);
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.shared.end.store(true, SeqCst);
        self.stop();
        self.resume();
        for thread in self.threads.drain(..) {
            thread.join().expect("a vCPU's thread ends");
        }
    }
}

fn run(mut fd: VcpuFd, shared: &Shared, index: usize) {
    let kick = &shared.vcpus[index];
    kick.thread.store(gettid().as_raw_nonzero().get(), SeqCst);
    loop {
        match fd.run() {
            Err(error) if error.errno() == libc::EINTR => {}
            exit => panic!("unexpected exit {exit:?}"),
        }
        kick.exit_at_once(false);
        loop {
            let word = shared.word.load(SeqCst);
            if word.is_multiple_of(2) {
                break;
            }
            shared.stopped.fetch_add(1, SeqCst);
            while shared.word.load(SeqCst) == word {
                let _ = futex::wait(&shared.word, futex::Flags::PRIVATE, word, None);
            }
        }
        if shared.end.load(SeqCst) {
            return;
        }
    }
}

/// The code, and page tables that map the memory onto itself, for user mode.
fn memory() -> GuestMemoryMmap {
    const PRESENT_WRITABLE_USER: u64 = 7;
    const LARGE: u64 = 1 << 7;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
    let put = |address: u64, word: u64| {
        let address = GuestAddress(address);
        memory.write_obj(word, address).expect("in memory");
    };
    put(PAGE_TABLES, (PAGE_TABLES + 0x1000) | PRESENT_WRITABLE_USER);
    put(
        PAGE_TABLES + 0x1000,
        (PAGE_TABLES + 0x2000) | PRESENT_WRITABLE_USER,
    );
    for page in 0..2 {
        let entry = (page << 21) | PRESENT_WRITABLE_USER | LARGE;
        put(PAGE_TABLES + 0x2000 + page * 8, entry);
    }
    let code = memory.write_slice(&branch_code(), GuestAddress(CODE));
    code.expect("in memory");
    memory
}

/// A vCPU in 64-bit user mode at the loop.
fn create(kvm: &Kvm, vm: &VmFd, vcpu: u8) -> VcpuFd {
    let fd = vm.create_vcpu(vcpu.into()).expect("a vCPU");
    let cpuid = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES);
    fd.set_cpuid2(&cpuid.expect("CPUID")).expect("CPUID");
    let segment = |selector, type_, long: bool| kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        ..Default::default()
    };
    let mut sregs = fd.get_sregs().expect("registers");
    sregs.cs = segment(0x3b, 0xb, true);
    let data = segment(0x33, 3, false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 = 1 << 5;
    sregs.cr0 = 1 | 1 << 4 | 1 << 31;
    sregs.efer = 1 << 8 | 1 << 10;
    fd.set_sregs(&sregs).expect("registers");
    let mut regs = fd.get_regs().expect("registers");
    (regs.rip, regs.rdi, regs.rflags) = (LOOP, counters_address(vcpu), 2);
    fd.set_regs(&regs).expect("registers");
    fd
}

extern "C" fn ignore(_signal: libc::c_int) {}

/// A signal with a handler makes `KVM_RUN` return.
fn install_handler() {
    let handler = ignore as extern "C" fn(libc::c_int);
    // SAFETY: all-zero is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    // SAFETY: the handler only returns, which is safe at any point of any thread.
    let result = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(result, 0);
}
