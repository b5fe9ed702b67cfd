// SPDX-License-Identifier: Apache-2.0
//! Observes a guest by the host's kernel: its memory slots, the threads of its vCPUs, dirty logging
//! and protection, from KVM's structures ([`patchbay_host_kernel`]). A monitor cannot forge these.
//!
//! Every answer comes from a walk that begins at the process's descriptor, because the structures
//! of a closed VM can still be read and look unchanged. A walk counts only if the process has not
//! ended since, because another process may get its number. This process holds the VM's file open,
//! so that no later VM gets the address by which this VM is known.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use patchbay_host_kernel::{HostKernel, Kind, Monitor, Refusal, Slot, Vm, WalkError};

use crate::error::AttachError;
use crate::flat_view::{MAX_RANGES, RamRange, Removal};
use crate::kvm::VM;
use crate::process::{Mappings, Process};
use crate::qmp::QmpError;

/// The maximum number of descriptors of VMs that are read.
const MAX_DESCRIPTORS: usize = 1024;
/// The maximum time for which an attacher waits until the memory slots can be read.
const MAX_BUSY: Duration = Duration::from_secs(2);
/// The time between two attempts to read them.
const BETWEEN_WALKS: Duration = Duration::from_millis(20);
/// Mappings of devices' registers. They are not RAM, and reading them may have effects.
const DEVICES: [&str; 3] = ["/dev/", "/sys/", "anon_inode:"];
/// Mappings below `/dev/` that are RAM.
const DEVICES_OF_RAM: [&str; 4] = ["/dev/zero", "/dev/shm/", "/dev/hugepages/", "/dev/dax"];

/// The treatment of a guest whose dirty pages KVM logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logging {
    /// The guest is refused while its largest slot is logged. A smaller slot that is logged, such
    /// as the memory of a display, is left out.
    Refuse,
    /// The operator allows writes to memory that is logged.
    Allow,
    /// The monitor reports migrations, so the guest is also attached to during one. A change is
    /// refused while KVM logs memory that is used. A dirty ring alone logs nothing. The monitor has
    /// also said that the guest is not confidential.
    Reported,
}

impl Logging {
    /// Returns the next step if the process does not run the guest.
    fn who_has_the_vm(self) -> &'static str {
        match self {
            Self::Reported => {
                "give the process id of the guest's QEMU with --pid, and check which process listens on its QMP socket"
            }
            _ => "`patchbay host list` shows the processes that run one",
        }
    }
}

/// The state of KVM's memory slots. If it differs, a slot has changed or a dirty log has begun or
/// ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    generations: Vec<u64>,
    /// KVM logs the dirty pages of memory that is used, and writes to such memory are not allowed.
    pub is_logged: bool,
}

/// A guest that the host's kernel shows.
#[derive(Debug)]
pub struct Host {
    process: Arc<Process>,
    descriptor: u32,
    logging: Logging,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    kernel: HostKernel,
    /// The VM's file; `None` once the monitor has closed it.
    held: Option<OwnedFd>,
    /// The VM as it was read last.
    vm: Vm,
    /// The guest-physical addresses of the RAM that is used.
    used: Vec<Range<u64>>,
}

impl Host {
    /// Finds the VM of a process.
    ///
    /// # Errors
    /// The process has no VM or several, the host's kernel cannot be read, or the guest cannot be
    /// patched from outside.
    pub fn open(process: &Arc<Process>, logging: Logging) -> Result<Self, AttachError> {
        let descriptors = vms_of(process, logging)?;
        let kernel = HostKernel::open().map_err(|error| AttachError::Process {
            what: "the host's kernel cannot be read, so the guest's memory is unknown".to_owned(),
            error: error.to_string(),
            next: "run as root, and see the requirements of `patchbay host list`".to_owned(),
        })?;
        Self::find(kernel, process, &descriptors, logging)
    }

    /// Finds the VM of a process whose monitor is asked too; `None` if the host's kernel cannot be
    /// read, which is logged.
    ///
    /// # Errors
    /// The process has no VM or several, or the guest cannot be patched from outside.
    pub fn beside_monitor(process: &Arc<Process>) -> Result<Option<Self>, AttachError> {
        let logging = Logging::Reported;
        let descriptors = vms_of(process, logging)?;
        match HostKernel::open() {
            Ok(kernel) => Self::find(kernel, process, &descriptors, logging).map(Some),
            Err(error) => {
                tracing::warn!(%error, "the host's kernel cannot be read, so QEMU itself is asked for the map of its guest's memory");
                Ok(None)
            }
        }
    }

    fn find(
        mut kernel: HostKernel,
        process: &Arc<Process>,
        descriptors: &[u32],
        logging: Logging,
    ) -> Result<Self, AttachError> {
        let pid = process.pid();
        let begin = Instant::now();
        let mut vms = kernel.vms(pid, descriptors);
        // A guest whose firmware runs changes its memory slots again and again.
        while vms
            .iter()
            .any(|(_, vm)| matches!(vm, Err(WalkError::Busy(_))))
            && begin.elapsed() < MAX_BUSY
        {
            thread::sleep(BETWEEN_WALKS);
            vms = kernel.vms(pid, descriptors);
        }
        if process.has_ended_within(Duration::ZERO) {
            return Err(unseen(&WalkError::NoProcess(pid)));
        }
        // A process may hold the VM of another process. A VM may also have been closed meanwhile.
        vms.retain(|(_, vm)| {
            !matches!(
                vm,
                Err(WalkError::OtherProcess { .. }
                    | WalkError::NotAVm { .. }
                    | WalkError::NoDescriptor { .. })
            )
        });
        if vms.len() > 1 {
            return Err(AttachError::Refused(format!(
                "process {pid} has {} VMs, and a change of one cannot be kept apart from the others; attach to a process with one VM",
                vms.len()
            )));
        }
        let Some((descriptor, vm)) = vms.pop() else {
            return Err(AttachError::Refused(format!(
                "process {pid} only holds the VM of another process; {}",
                logging.who_has_the_vm()
            )));
        };
        let vm = vm.map_err(|error| unseen(&error))?;
        if let Some(refusal) = refusal(&vm, logging) {
            return Err(AttachError::Refused(why(refusal)));
        }
        let held = process.duplicate(descriptor)?;
        let own = u32::try_from(held.as_raw_fd()).unwrap_or(u32::MAX);
        let same = kernel.is_same_file((std::process::id(), own), (pid, descriptor));
        if same != Ok(true) {
            return Err(unseen(&WalkError::NoDescriptor { pid, descriptor }));
        }
        let host = Self {
            descriptor,
            logging,
            process: Arc::clone(process),
            state: Mutex::new(State {
                kernel,
                held: Some(held),
                vm,
                used: Vec::new(),
            }),
        };
        // The VM may have been closed after it was read and before its file was held.
        drop(host.look(true).map_err(|error| unseen(&error))?);
        Ok(host)
    }

    /// Returns the guest's name on the monitor's command line; empty if it has none.
    #[must_use]
    pub fn name(&self) -> String {
        monitor_of(&self.process).name.unwrap_or_default()
    }

    /// Kills the monitor.
    ///
    /// # Errors
    /// This user may not kill the process.
    pub fn kill(&self) -> Result<(), QmpError> {
        self.process.kill().map_err(|error| {
            let pid = self.process.pid();
            QmpError::Host(format!("process {pid} cannot be killed: {error}"))
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The VM is assigned as a whole, so a panic leaves no partial state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state. Reads the VM first if `again` is set or if a slot has changed since the
    /// last read.
    fn look(&self, again: bool) -> Result<MutexGuard<'_, State>, WalkError> {
        let (pid, descriptor) = (self.process.pid(), self.descriptor);
        let mut state = self.state();
        let State {
            kernel, held, vm, ..
        } = &mut *state;
        // The kernel may reuse this VM's address now.
        if held.is_none() {
            return Err(WalkError::NoDescriptor { pid, descriptor });
        }
        if again || !matches!(kernel.is_unchanged(pid, descriptor, vm), Ok(true)) {
            let now = kernel.vm(pid, descriptor)?;
            if !now.is_same(vm) {
                // The VM was closed, and its descriptor's number now belongs to another VM.
                return Err(WalkError::NoDescriptor { pid, descriptor });
            }
            *vm = now;
        }
        match self.process.has_ended_within(Duration::ZERO) {
            true => Err(WalkError::NoProcess(pid)),
            false => Ok(state),
        }
    }

    /// Returns whether the monitor has closed the VM. This ends the guest although the process
    /// continues to run.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        use WalkError::{NoDescriptor, NotAVm, OtherProcess};
        let is_closed = matches!(
            self.look(false).map(drop),
            Err(NoDescriptor { .. } | NotAVm { .. } | OtherProcess { .. })
        );
        if is_closed {
            self.state().held = None;
        }
        is_closed
    }

    /// Returns the state of the memory slots.
    ///
    /// # Errors
    /// The VM has been closed, or it can no longer be patched.
    pub fn slots(&self) -> Result<Slots, QmpError> {
        let state = self.look(false).map_err(|error| unknown(&error))?;
        self.slots_of(&state)
    }

    /// Returns the state of the memory slots as the last call of any method has read it.
    ///
    /// # Errors
    /// The VM can no longer be patched.
    pub fn known_slots(&self) -> Result<Slots, QmpError> {
        self.slots_of(&self.state())
    }

    fn slots_of(&self, state: &State) -> Result<Slots, QmpError> {
        let is_logged = match refusal(&state.vm, self.logging) {
            Some(Refusal::DirtyLogging) => true,
            Some(refusal) => return Err(QmpError::Host(why(refusal))),
            None => logs_any(&state.vm, &state.used, self.logging),
        };
        Ok(Slots {
            generations: state.vm.generations.clone(),
            is_logged,
        })
    }

    /// Returns the thread that ran each vCPU last, as this PID namespace numbers it; `None` if the
    /// vCPU has not run yet or its thread has ended.
    ///
    /// # Errors
    /// The VM has been closed.
    pub fn vcpus(&self) -> Result<Vec<Option<u32>>, QmpError> {
        // The thread of a vCPU changes without a change of a slot.
        let state = self.look(true).map_err(|error| unknown(&error))?;
        Ok(state.vm.vcpus.iter().map(|vcpu| vcpu.thread).collect())
    }

    /// Returns the threads that ran the vCPUs last, as this PID namespace numbers them.
    ///
    /// # Errors
    /// The VM has been closed, or a vCPU has not run yet.
    pub fn vcpu_threads(&self) -> Result<Vec<u32>, QmpError> {
        let threads: Option<Vec<u32>> = self.vcpus()?.into_iter().collect();
        let threads = threads.filter(|threads| !threads.is_empty());
        threads.ok_or_else(|| {
            QmpError::Host(format!(
                "a vCPU of process {} has not run yet; wait until the guest has started",
                self.process.pid()
            ))
        })
    }

    /// Returns the guest's RAM. A slot whose dirty pages are logged, such as the memory of a
    /// display, is left out and therefore never written. So is a slot for which `removal` returns
    /// `None`.
    ///
    /// # Errors
    /// The VM has been closed, the dirty log of its largest slot is on, it has more slots than are
    /// supported, or the monitor's mappings were not read before the deadline.
    pub fn ram(
        &self,
        deadline: Instant,
        removal: impl Fn(&Range<u64>) -> Option<Removal>,
    ) -> Result<Vec<RamRange>, AttachError> {
        let mut state = self.look(false).map_err(|error| unseen(&error))?;
        if let Some(refusal) = refusal(&state.vm, self.logging) {
            return Err(AttachError::Refused(why(refusal)));
        }
        let mappings = |addresses| self.process.mappings(addresses, deadline);
        let ranges = ram_of(&state.vm, &state.used, self.logging, removal, mappings)?;
        state.used = ranges.iter().map(|range| range.addresses.clone()).collect();
        Ok(ranges)
    }

    /// Translates the first address of a guest-physical range to an address in the monitor's
    /// process, by the slots that were read last. During a stop, these were read after the vCPUs
    /// had stopped.
    ///
    /// # Errors
    /// No slot contains the whole range, or the slot must not be written because its dirty pages
    /// are logged.
    pub fn host_address(&self, range: &Range<u64>) -> Result<u64, AttachError> {
        let state = self.state();
        place(&state.vm, range, self.logging).ok_or_else(|| {
            AttachError::Refused(format!(
                "no memory slot of KVM that may be written contains the guest-physical addresses {range:#x?}; try again"
            ))
        })
    }
}

/// Returns the RAM of a VM. `used` has the addresses of the RAM that was found before. `mappings`
/// reads the process's mappings at the given addresses. It is called once, for at most
/// [`MAX_RANGES`] slots, because a monitor may have tens of thousands of slots and mappings.
fn ram_of(
    vm: &Vm,
    used: &[Range<u64>],
    logging: Logging,
    removal: impl Fn(&Range<u64>) -> Option<Removal>,
    mappings: impl FnOnce(Vec<u64>) -> Result<Mappings, AttachError>,
) -> Result<Vec<RamRange>, AttachError> {
    let removable = vm.ram().filter_map(|slot| {
        let removal = removal(&addresses(slot))?;
        Some((slot, removal))
    });
    let mut slots: Vec<(&Slot, Removal)> = removable.take(MAX_RANGES + 1).collect();
    if slots.len() > MAX_RANGES {
        return Err(AttachError::Refused(format!(
            "the guest has more than {MAX_RANGES} memory slots"
        )));
    }
    let places = slots.iter().map(|(slot, _)| slot.process_address);
    let mappings = mappings(places.collect())?;
    slots.retain(|(slot, _)| {
        let mapping = mappings.at(slot.process_address, slot.bytes);
        !mapping.is_ok_and(|mapping| is_device(&mapping.path))
    });
    // The memory of a device may be larger than the RAM, so only what is left counts.
    let largest = slots.iter().max_by_key(|(slot, _)| slot.bytes);
    let all_logged = largest.is_some_and(|(slot, _)| logs(vm, slot, logging));
    if all_logged && logging == Logging::Refuse {
        return Err(AttachError::Refused(why(Refusal::DirtyLogging)));
    }
    // During a migration the log does not tell the memory of a display from RAM.
    slots.retain(|(slot, _)| match all_logged {
        true => used.is_empty() || overlaps(slot, used),
        false => !logs(vm, slot, logging),
    });
    let range = |(slot, removal): (&Slot, Removal)| RamRange {
        addresses: addresses(slot),
        backend: format!("at {:#x}", slot.process_address),
        offset: 0,
        removal,
    };
    Ok(slots.into_iter().map(range).collect())
}

/// Returns the process's descriptors of VMs.
fn vms_of(process: &Process, logging: Logging) -> Result<Vec<u32>, AttachError> {
    let pid = process.pid();
    let descriptors = process.descriptors()?.into_iter();
    let mut descriptors: Vec<u32> = descriptors
        .filter(|(_, name)| name.as_os_str() == VM)
        .filter_map(|(number, _)| u32::try_from(number).ok())
        .collect();
    if descriptors.is_empty() {
        return Err(AttachError::Refused(format!(
            "process {pid} has no KVM VM; {}",
            logging.who_has_the_vm()
        )));
    }
    if monitor_of(process).kind == Kind::Patchbay {
        return Err(AttachError::Refused(format!(
            "process {pid} is a patchbay-vmm, which serves its guest's keys itself; use its API socket"
        )));
    }
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(AttachError::Refused(format!(
            "process {pid} has {} descriptors of VMs; no more than {MAX_DESCRIPTORS} are read",
            descriptors.len()
        )));
    }
    descriptors.sort_unstable();
    Ok(descriptors)
}

/// Returns the guest-physical addresses of a slot.
fn addresses(slot: &Slot) -> Range<u64> {
    slot.guest_address..slot.guest_address.saturating_add(slot.bytes)
}

/// Returns the process's address of the first byte of a range, if one slot contains the whole
/// range and may be written. If the monitor reports migrations, a log does not matter here: the
/// whole change is refused while memory that is used is logged.
fn place(vm: &Vm, range: &Range<u64>, logging: Logging) -> Option<u64> {
    vm.ram().find_map(|slot| {
        let offset = range.start.checked_sub(slot.guest_address)?;
        let end = range.end.checked_sub(slot.guest_address)?;
        let may_be_written = logging != Logging::Refuse || !vm.logs(slot);
        (offset < slot.bytes && end <= slot.bytes && may_be_written)
            .then(|| slot.process_address.saturating_add(offset))
    })
}

/// Returns whether a write to a slot would be missing from a migration or a snapshot.
fn logs(vm: &Vm, slot: &Slot, logging: Logging) -> bool {
    match logging {
        Logging::Refuse => vm.logs(slot),
        Logging::Allow => false,
        Logging::Reported => slot.logs_dirty_pages,
    }
}

/// Returns whether KVM logs the dirty pages of a slot that overlaps one of these ranges.
fn logs_any(vm: &Vm, used: &[Range<u64>], logging: Logging) -> bool {
    let mut ram = vm.ram();
    ram.any(|slot| logs(vm, slot, logging) && overlaps(slot, used))
}

/// Returns whether a slot overlaps one of these ranges.
fn overlaps(slot: &Slot, used: &[Range<u64>]) -> bool {
    let slot = addresses(slot);
    let mut used = used.iter();
    used.any(|used| used.start < slot.end && slot.start < used.end)
}

/// Returns the size of the host's memory and swap in bytes.
pub(crate) fn host_memory() -> u64 {
    let host = rustix::system::sysinfo();
    let units = host.totalram.saturating_add(host.totalswap);
    units.saturating_mul(host.mem_unit.into())
}

/// Recognises the monitor that a process runs, by its program. This proves nothing, because a
/// process can choose its command line.
pub(crate) fn monitor_of(process: &Process) -> Monitor {
    let line = process.command_line().unwrap_or_default();
    Monitor::recognise(&process.program(), &line, Vec::new)
}

fn is_device(path: &str) -> bool {
    let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| path.starts_with(prefix));
    begins(&DEVICES) && !begins(&DEVICES_OF_RAM)
}

fn unseen(error: &WalkError) -> AttachError {
    AttachError::Refused(format!(
        "the host's kernel does not show the guest: {error}"
    ))
}

fn unknown(error: &WalkError) -> QmpError {
    QmpError::Host(format!(
        "the host's kernel does not show the guest: {error}"
    ))
}

/// Returns the first reason against patching a guest from outside. A monitor that is asked has said
/// that the guest is not protected, which decides if the host's kernel does not tell.
fn refusal(vm: &Vm, logging: Logging) -> Option<Refusal> {
    let is_allowed = |refusal: &Refusal| match refusal {
        Refusal::DirtyLogging => logging != Logging::Refuse,
        Refusal::Unknown(_) => logging == Logging::Reported,
        _ => false,
    };
    vm.refusals()
        .into_iter()
        .find(|refusal| !is_allowed(refusal))
}

/// Returns a sentence about a refusal, with the next step.
fn why(refusal: Refusal) -> String {
    let next = match refusal {
        Refusal::DirtyLogging => {
            "wait for the end of the migration, or give --dirty-logging-ok if nothing needs the log"
        }
        Refusal::NoMemory => "wait until the monitor has started it",
        _ => "its keys can only be changed from inside",
    };
    format!("{refusal}; {next}")
}

/// Returns the error of a command that only a monitor carries out.
pub(crate) fn not_asked(command: &str) -> QmpError {
    QmpError::Host(format!(
        "{command} needs the guest's monitor, and the guest is attached to by its process alone"
    ))
}

#[cfg(test)]
mod tests;
