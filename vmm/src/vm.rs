// SPDX-License-Identifier: Apache-2.0
//! A guest, from its creation until its end.
//!
//! ```text
//!   Vm::new ──▶ created ── start ──▶ running ◀── pause / drop ──▶ paused
//!                                      │                            │
//!                guest's power-off, reset, fault; shutdown ◀────────┘
//!                                      ▼
//!                                    ended: every vCPU thread has returned
//! ```
//!
//! Lock rule: `threads` and `ended` are held only for short accesses, never across `KVM_RUN` or
//! while waiting for a vCPU.

use std::os::fd::IntoRawFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_bindings::{
    CpuId, KVM_PIT_SPEAKER_DUMMY, KVM_SYNC_X86_EVENTS, KVM_SYNC_X86_REGS, MsrList, kvm_pit_config,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use patchbay_guest::requests::GuestRequests;
use patchbay_guest::snapshot::{ControlState, MemorySink, SaveError};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::boot::{BootError, layout};
use crate::config::{Payload, VmConfig};
use crate::devices::{Bus, Console, ConsoleError, GuestPower, PowerManagement, Virtio};
pub use crate::error::VmError;
use crate::kick::{self, ImmediateExit};
use crate::memory::GuestRam;
use crate::pause::{PauseError, Paused, Pauser};
use crate::payload;
use crate::probe::{self, Transports};
use crate::request::RequestPort;
use crate::seccomp::ThreadKind;
use crate::snapshot::{self, MachineState};
use crate::system_registers::{RegistersError, SystemRegisters};
use crate::thread::{self, lock};
use crate::vcpu::{Vcpu, VcpuEnd};
use crate::x86::acpi;
use crate::x86::cpuid::{self, VCPUS_MAX};
use crate::x86::registers;

/// IRQ of the serial console (COM1).
const SERIAL_IRQ: u32 = 4;

/// Time allowed for writing the console's remaining output after the guest has ended.
pub const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// The end of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest powered off.
    PowerOff,
    /// The guest reset itself. The monitor does not restart it.
    Reset,
    /// A vCPU had a triple fault.
    #[allow(missing_docs, reason = "the message names the fields")]
    TripleFault { vcpu: usize, rip: u64 },
    /// All vCPUs have halted, and nothing can wake them.
    Halted,
    /// [`Vm::shutdown`] was called.
    Shutdown,
    /// KVM or the monitor could not continue.
    Failed(String),
}

impl std::fmt::Display for ExitReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PowerOff => write!(f, "the guest powered off"),
            Self::Reset => write!(f, "the guest reset itself"),
            Self::TripleFault { vcpu, rip } => {
                write!(
                    f,
                    "the guest's vCPU {vcpu} reset it by a triple fault at {rip:#x}"
                )
            }
            Self::Halted => write!(f, "every vCPU of the guest halted for good"),
            Self::Shutdown => write!(f, "the guest was shut down"),
            Self::Failed(why) => write!(f, "{why}"),
        }
    }
}

pub(crate) fn open_kvm() -> Result<Kvm, VmError> {
    Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => VmError::KvmMissing,
        libc::EACCES | libc::EPERM => VmError::KvmPermission,
        _ => VmError::KvmOpen(error),
    })
}

/// Registers guest memory with the VM.
pub(crate) fn map_memory(vm: &VmFd, ram: &GuestRam) -> Result<(), VmError> {
    for (slot, region) in (0..).zip(ram.mmap().iter()) {
        let slot = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            flags: 0,
        };
        // SAFETY: the range is a mapping that `ram` owns. It is not moved or unmapped while `ram`
        // or a clone of it lives. Callers keep a clone for as long as the VM exists.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(VmError::kvm("take the guest's memory"))?;
    }
    Ok(())
}

#[derive(Default)]
struct Ended {
    /// Number of vCPU threads that have not returned.
    running: usize,
    reason: Option<ExitReason>,
}

struct Shared {
    pauser: Pauser,
    console: Arc<Console>,
    ended: Mutex<Ended>,
    changed: Condvar,
}

impl Shared {
    fn vcpu_ended(&self, vcpu: usize, end: VcpuEnd) {
        let reason = match end {
            VcpuEnd::Terminated | VcpuEnd::Halted => None,
            VcpuEnd::Power(GuestPower::Off) => Some(ExitReason::PowerOff),
            VcpuEnd::Power(GuestPower::Reset) => Some(ExitReason::Reset),
            VcpuEnd::TripleFault { rip } => Some(ExitReason::TripleFault { vcpu, rip }),
            VcpuEnd::Failed(why) => Some(ExitReason::Failed(why)),
        };
        let terminate = reason.is_some();
        let mut ended = lock(&self.ended);
        ended.running -= 1;
        let last = ended.running == 0;
        if ended.reason.is_none() {
            ended.reason = reason.or(last.then_some(ExitReason::Halted));
        }
        drop(ended);
        if terminate {
            self.pauser.terminate();
        }
        self.changed.notify_all();
        if last {
            self.console.close();
        }
    }

    /// Ends the guest because the monitor cannot serve it any longer.
    fn fail(&self, why: String) {
        lock(&self.ended)
            .reason
            .get_or_insert(ExitReason::Failed(why));
        self.pauser.terminate();
        self.changed.notify_all();
    }
}

/// One guest.
pub struct Vm {
    shared: Arc<Shared>,
    waiting: Mutex<Vec<Vcpu>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    transports: Transports,
    vcpus: u8,
    virtio: Arc<Virtio>,
    power: Arc<PowerManagement>,
    ram: GuestRam,
    /// MSRs that KVM saves.
    msrs: MsrList,
    /// A second descriptor of each vCPU, for reading the state of a parked vCPU, and its CPUID.
    hardware: Vec<(VcpuFd, CpuId)>,
    // Dropped last, because the vCPUs and the memory slots refer to it.
    vm: VmFd,
}

impl Vm {
    /// Creates a guest: maps its memory, loads its payload and creates its vCPUs. The guest does
    /// not run until [`start`](Self::start) is called.
    ///
    /// # Errors
    /// [`VmError`] names the problem with the configuration, its files or the host.
    pub fn new(config: VmConfig, requests: Arc<dyn GuestRequests>) -> Result<Self, VmError> {
        if !(1..=VCPUS_MAX).contains(&config.vcpus) {
            return Err(VmError::VcpuCount(config.vcpus));
        }
        let kvm = open_kvm()?;
        check_capabilities(&kvm)?;
        kick::install_handler();
        let saved = match &config.payload {
            Payload::Snapshot(snapshot) => Some(&**snapshot),
            Payload::Linux(_) | Payload::Raw(_) => None,
        };
        let ram = match saved {
            Some(snapshot) => GuestRam::of_file(config.memory_bytes, snapshot.memory())?,
            None => GuestRam::new(config.memory_bytes)?,
        };
        let virtio = Arc::new(Virtio::new(&config.virtio, ram.mmap())?);
        if saved.is_none() {
            registers::write_tables(&ram).map_err(BootError::from)?;
        }
        // The probe runs in a guest of its own and takes about as long as loading a kernel, so both
        // run in parallel.
        let (starts, transports) = std::thread::scope(|scope| {
            let probing = config
                .offer_patchbay
                .then(|| scope.spawn(|| probe::probe(&kvm)));
            let starts = payload::load(&ram, &config, &virtio);
            let transports = match probing {
                Some(thread) => thread.join().unwrap_or(Ok(Transports::default())),
                None => Ok(Transports::default()),
            };
            (starts, transports)
        });
        let (starts, transports) = (starts?, transports?);
        let console = Arc::new(Console::new(&config.console)?);
        let power = Arc::new(PowerManagement::new().map_err(ConsoleError::Host)?);

        let vm = kvm.create_vm().map_err(VmError::kvm("create a VM"))?;
        if transports.any() {
            probe::enable(&vm);
        }
        map_memory(&vm, &ram)?;
        set_up_chips(&vm, &console, &power)?;
        virtio.connect(&vm)?;
        let supported = kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(VmError::kvm("report its CPUID"))?;
        let bus = Arc::new(Bus::new(
            console.clone(),
            virtio.clone(),
            power.clone(),
            config.ports,
            config.memory_devices,
        ));
        let port = Arc::new(RequestPort::new(ram.clone(), requests));
        let wanted = KVM_SYNC_X86_REGS | KVM_SYNC_X86_EVENTS;
        let sync_regs = u32::try_from(kvm.check_extension_int(Cap::SyncRegs))
            .is_ok_and(|offered| offered & wanted == wanted);

        let msrs = kvm
            .get_msr_index_list()
            .map_err(VmError::kvm("list its MSRs"))?;
        if let Some(snapshot) = saved {
            snapshot::check(snapshot.state(), supported.as_slice(), transports)?;
        }

        let mut vcpus = vec![];
        let mut hardware = vec![];
        let mut immediate_exits = vec![];
        // All vCPUs exist before the first one is restored. When KVM creates a vCPU, it forgets the
        // TSC that was written last, and then does not synchronise the next one with it.
        let fds = (0..config.vcpus).map(|id| vm.create_vcpu(id.into()));
        let fds: Result<Vec<_>, _> = fds.collect();
        let fds = fds.map_err(VmError::kvm("create a vCPU"))?;
        for ((id, start), fd) in (0..config.vcpus).zip(starts).zip(fds) {
            let cpuid = match saved {
                Some(snapshot) => snapshot::restore_vcpu(&fd, snapshot.state(), id)?,
                None => {
                    let cpuid = cpuid::build(supported.as_slice(), id, config.vcpus, transports)
                        .map_err(|_| VmError::Cpuid)?;
                    fd.set_cpuid2(&cpuid)
                        .map_err(VmError::kvm("set a vCPU's CPUID"))?;
                    payload::set_up_vcpu(&fd, start)?;
                    cpuid
                }
            };
            hardware.push((duplicate(&vm, &fd)?, cpuid));
            immediate_exits.push(ImmediateExit::map(&fd).map_err(VmError::Map)?);
            vcpus.push(Vcpu {
                index: id.into(),
                fd,
                bus: bus.clone(),
                requests: port.clone(),
                sync_regs,
            });
        }
        if let Some(snapshot) = saved {
            let state = snapshot.state();
            snapshot::restore_chips(&vm, state)?;
            snapshot::restore_devices(state, &console, &power, &virtio)?;
        }
        Ok(Self {
            shared: Arc::new(Shared {
                pauser: Pauser::new(immediate_exits),
                console,
                ended: Mutex::default(),
                changed: Condvar::new(),
            }),
            waiting: Mutex::new(vcpus),
            threads: Mutex::default(),
            transports,
            vcpus: config.vcpus,
            virtio,
            power,
            ram,
            msrs,
            hardware,
            vm,
        })
    }

    /// Starts one thread per vCPU.
    ///
    /// # Errors
    /// [`VmError::Started`] if the guest was started before, [`VmError::Thread`] or
    /// [`VmError::Virtio`] if threads or their filters cannot be set up.
    pub fn start(&self) -> Result<(), VmError> {
        let vcpus = std::mem::take(&mut *lock(&self.waiting));
        if vcpus.is_empty() {
            return Err(VmError::Started);
        }
        let shared = self.shared.clone();
        self.virtio.start(move |why| shared.fail(why))?;
        lock(&self.shared.ended).running = vcpus.len();
        let mut left = vcpus.len();
        for vcpu in vcpus {
            let shared = self.shared.clone();
            let index = vcpu.index;
            let name = format!("vcpu{index}");
            let run = move || {
                let end = thread::contain(&format!("vCPU {index}"), || vcpu.run(&shared.pauser));
                shared.vcpu_ended(index, end.unwrap_or_else(VcpuEnd::Failed));
            };
            let spawned = thread::spawn(&name, ThreadKind::Vcpu, run);
            match spawned {
                Ok(thread) => lock(&self.threads).push(thread),
                Err(error) => {
                    lock(&self.shared.ended).running -= left;
                    self.shutdown();
                    return Err(VmError::Thread(error));
                }
            }
            left -= 1;
        }
        Ok(())
    }

    /// Stops every vCPU until the returned guard is dropped; see [`Pauser::pause`].
    ///
    /// # Errors
    /// [`PauseError`]. This call has then changed nothing.
    pub fn pause(&self, deadline: Duration) -> Result<Paused<'_>, PauseError> {
        self.shared.pauser.pause(deadline)
    }

    /// Saves the guest, which `paused` stops: passes its memory to `sink` and returns the content
    /// of the file `state` ([`snapshot`](crate::snapshot)). Devices of a configuration on ports and
    /// in memory are not saved.
    ///
    /// # Errors
    /// [`SaveError`]. The guest is unchanged.
    pub fn save(
        &self,
        paused: &Paused<'_>,
        control: ControlState,
        sink: &mut dyn MemorySink,
    ) -> Result<Vec<u8>, SaveError> {
        if let Some(vcpu) = paused.not_parked() {
            let why =
                format!("vCPU {vcpu} does not run, because the guest has not started or has ended");
            return Err(SaveError::Unable(why));
        }
        let frozen = self.virtio.freeze(sink)?;
        let mut state = MachineState {
            memory_bytes: self.ram.bytes(),
            memory_digest: snapshot::save_memory(&self.ram, sink)?,
            transports: self.transports.bits(),
            serial: Some(self.shared.console.save()),
            power: Some(snapshot::save_power(&self.power)),
            devices: frozen.save(),
            control: Some(snapshot::save_control(control)),
            ..MachineState::default()
        };
        for (fd, cpuid) in &self.hardware {
            let vcpu = snapshot::save_vcpu(fd, cpuid.as_slice(), self.msrs.as_slice())?;
            state.vcpus.push(vcpu);
        }
        snapshot::save_chips(&self.vm, &mut state)?;
        snapshot::seal(&state)
    }

    /// Returns whether the guest is paused, or a pause is being requested.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.shared.pauser.is_held()
    }

    /// Returns the system registers of the vCPUs that have started. Each vCPU's registers are read
    /// between two of its instructions. The guest is not paused.
    ///
    /// # Errors
    /// [`RegistersError`]. Also returned for a paused guest, because a parked vCPU does not answer.
    pub fn system_registers(
        &self,
        timeout: Duration,
    ) -> Result<Vec<SystemRegisters>, RegistersError> {
        self.shared.pauser.system_registers(timeout)
    }

    /// Ends the guest at once, like a power cut. May be called more than once, at any time, also
    /// while the guest is paused, and from any thread except a vCPU's.
    pub fn shutdown(&self) {
        let mut ended = lock(&self.shared.ended);
        ended.reason.get_or_insert(ExitReason::Shutdown);
        let never_ran = ended.running == 0;
        drop(ended);
        self.shared.pauser.terminate();
        if never_ran {
            self.shared.console.close();
        }
        self.shared.changed.notify_all();
    }

    /// Presses the guest's power button. The guest decides what to do.
    pub fn press_power_button(&self) {
        self.power.press();
    }

    /// Withdraws a press of the power button. Returns false if the guest has seen it.
    pub fn take_back_press(&self) -> bool {
        self.power.take_back()
    }

    /// Waits until the guest has ended and its console output is written. The output may take
    /// [`LAST_OUTPUT`]. Returns immediately if the guest has ended. Also waits while the guest has
    /// not been started.
    #[must_use]
    pub fn wait(&self) -> ExitReason {
        let mut ended = lock(&self.shared.ended);
        let reason = loop {
            match &ended.reason {
                Some(reason) if ended.running == 0 => break reason.clone(),
                _ => {
                    ended = self
                        .shared
                        .changed
                        .wait(ended)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(ended);
        self.join();
        reason
    }

    /// Returns the reason for the guest's end, or `None` if it has not ended.
    #[must_use]
    pub fn exit_reason(&self) -> Option<ExitReason> {
        let ended = lock(&self.shared.ended);
        if ended.running == 0 {
            ended.reason.clone()
        } else {
            None
        }
    }

    /// Returns the guest's memory.
    #[must_use]
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Returns the serial console.
    #[must_use]
    pub fn console(&self) -> &Arc<Console> {
        &self.shared.console
    }

    /// Returns the transports of Patchbay's requests that work on this host and are offered to the
    /// guest.
    #[must_use]
    pub fn transports(&self) -> Transports {
        self.transports
    }

    /// Returns the number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> u8 {
        self.vcpus
    }

    fn join(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // A panic of the thread has already ended the guest.
            let _ = thread.join();
        }
        self.virtio.close();
        self.shared.console.drain(LAST_OUTPUT);
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.shutdown();
        self.join();
    }
}

/// Opens a second descriptor of a vCPU.
fn duplicate(vm: &VmFd, vcpu: &VcpuFd) -> Result<VcpuFd, VmError> {
    let fd = rustix::io::fcntl_dupfd_cloexec(kick::as_fd(vcpu), 0).map_err(VmError::Map)?;
    // SAFETY: the descriptor is a vCPU's of this VM, and only the returned value owns it.
    unsafe { vm.create_vcpu_from_rawfd(fd.into_raw_fd()) }.map_err(VmError::kvm("map a vCPU"))
}

fn check_capabilities(kvm: &Kvm) -> Result<(), VmError> {
    for (capability, name) in [
        (Cap::UserMemory, "memory slots (KVM_CAP_USER_MEMORY)"),
        (Cap::Irqchip, "interrupt controllers (KVM_CAP_IRQCHIP)"),
        (Cap::Pit2, "a timer (KVM_CAP_PIT2)"),
        (Cap::ExtCpuid, "CPUID (KVM_CAP_EXT_CPUID)"),
        (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
        (
            Cap::ImmediateExit,
            "a way to stop vCPUs (KVM_CAP_IMMEDIATE_EXIT)",
        ),
        (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
    ] {
        if !kvm.check_extension(capability) {
            return Err(VmError::KvmLacks(name));
        }
    }
    Ok(())
}

/// Creates the interrupt controllers and the timer, and connects the interrupts of the console and
/// the power button.
fn set_up_chips(vm: &VmFd, console: &Console, power: &PowerManagement) -> Result<(), VmError> {
    vm.set_tss_address(layout::KVM_TSS)
        .map_err(VmError::kvm("set its TSS address"))?;
    vm.create_irq_chip()
        .map_err(VmError::kvm("create interrupt controllers"))?;
    // Includes a dummy speaker port, because kernels calibrate their clocks with that port.
    vm.create_pit2(kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    })
    .map_err(VmError::kvm("create a timer"))?;
    vm.register_irqfd(console.interrupt(), SERIAL_IRQ)
        .map_err(VmError::kvm("connect the console's interrupt"))?;
    vm.register_irqfd(power.interrupt(), acpi::SCI.into())
        .map_err(VmError::kvm("connect the power button's interrupt"))
}
