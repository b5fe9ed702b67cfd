// SPDX-License-Identifier: Apache-2.0
//! Observes a guest without its monitor: by the host's kernel and by the monitor's process.
//!
//! | what | from |
//! |---|---|
//! | slots, vCPU threads, dirty logging, protection | KVM's structures ([`patchbay_host_kernel`]) |
//! | the guest's bytes | the process's memory, as for every guest |
//! | registers | the run page of each vCPU ([`crate::run_page`]) |
//!
//! Every answer comes from a walk that begins at the process's descriptor, because the structures
//! of a closed VM can still be read and look unchanged. A walk counts only if the process has not
//! ended since, because another process may get its number. This process holds the VM's file open,
//! so that no later VM gets the address by which this VM is known.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_host_kernel::{HostKernel, Kind, Monitor, Refusal, Slot, Vm, WalkError};
use serde_json::json;

use crate::error::AttachError;
use crate::flat_view::{MAX_RANGES, RamRange, Removal};
use crate::freeze::{FreezeError, Point, freeze};
use crate::monitor::Migration;
use crate::process::Process;
use crate::qmp::QmpError;
use crate::registers::Registers;
use crate::run_page::RunPage;

/// The name of the descriptor of a VM.
const VM: &str = "anon_inode:kvm-vm";
/// The maximum number of descriptors of VMs that are read.
const MAX_DESCRIPTORS: usize = 1024;
/// The status of a migration that KVM's dirty log suggests.
const LOGGED: &str = "dirty logging";
/// The maximum number of stops for one reading of the registers. The first stop requests them. If
/// no later stop can read them, they are reported as unknown.
const ATTEMPTS: u32 = 20;
/// The time between two attempts. A vCPU that is between two calls of `KVM_RUN` soon makes the next
/// one.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);
/// Mappings of devices' registers. They are not RAM, and reading them may have effects.
const DEVICES: [&str; 3] = ["/dev/", "/sys/", "anon_inode:"];
/// Mappings below `/dev/` that are RAM.
const DEVICES_OF_RAM: [&str; 4] = ["/dev/zero", "/dev/shm/", "/dev/hugepages/", "/dev/dax"];

/// A guest that the host's kernel shows.
#[derive(Debug)]
pub struct Host {
    process: Arc<Process>,
    descriptor: u32,
    dirty_logging_ok: bool,
    memory: File,
    /// The VM's file; `None` once the monitor has closed it.
    held: Mutex<Option<OwnedFd>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    kernel: HostKernel,
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
    pub fn open(process: &Arc<Process>, dirty_logging_ok: bool) -> Result<Self, AttachError> {
        let pid = process.pid();
        let descriptors = process.descriptors()?.into_iter();
        let mut descriptors: Vec<u32> = descriptors
            .filter(|(_, name)| name.as_os_str() == VM)
            .filter_map(|(number, _)| u32::try_from(number).ok())
            .collect();
        if descriptors.is_empty() {
            return Err(AttachError::Refused(format!(
                "process {pid} has no KVM VM; `patchbay host list` shows those that have one"
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
        let mut kernel = HostKernel::open().map_err(|error| AttachError::Process {
            what: "the host's kernel cannot be read, so the guest's memory is unknown".to_owned(),
            error: error.to_string(),
            next: "run as root, and see the requirements of `patchbay host list`".to_owned(),
        })?;
        let mut vms = kernel.vms(pid, &descriptors);
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
                "process {pid} only holds the VM of another process; `patchbay host list` shows which process runs it"
            )));
        };
        let vm = vm.map_err(|error| unseen(&error))?;
        if let Some(refusal) = refusal(&vm, dirty_logging_ok) {
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
            dirty_logging_ok,
            memory: process.memory()?,
            process: Arc::clone(process),
            held: Mutex::new(Some(held)),
            state: Mutex::new(State {
                kernel,
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
        let State { kernel, vm, .. } = &mut *state;
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
            *self.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        is_closed
    }

    /// Returns a report in the form of QEMU's. A migration is in progress while KVM logs the dirty
    /// pages of memory that is used here. The report contains the generations of the slots, so it
    /// differs after each change of a slot.
    ///
    /// # Errors
    /// The VM has been closed, or it can no longer be patched.
    pub fn migration(&self) -> Result<Migration, QmpError> {
        let state = self.look(false).map_err(|error| unknown(&error))?;
        let is_logged = !self.dirty_logging_ok && logs_any(&state.vm, &state.used);
        let status = match refusal(&state.vm, self.dirty_logging_ok) {
            Some(Refusal::DirtyLogging) => LOGGED,
            Some(refusal) => return Err(QmpError::Host(why(refusal))),
            None if is_logged => LOGGED,
            None => "none",
        };
        let generations = &state.vm.generations;
        Ok(Migration::new(
            json!({ "status": status, "generations": generations }),
        ))
    }

    /// Returns the threads that ran the vCPUs last, as this PID namespace numbers them.
    ///
    /// # Errors
    /// The VM has been closed, or a vCPU has not run yet.
    pub fn vcpu_threads(&self) -> Result<Vec<u32>, QmpError> {
        // The thread of a vCPU changes without a change of a slot.
        let state = self.look(true).map_err(|error| unknown(&error))?;
        let threads: Option<Vec<u32>> = state.vm.vcpus.iter().map(|vcpu| vcpu.thread).collect();
        let threads = threads.filter(|threads| !threads.is_empty());
        threads.ok_or_else(|| {
            QmpError::Host(format!(
                "a vCPU of process {} has not run yet; wait until the guest has started",
                self.process.pid()
            ))
        })
    }

    /// Returns the guest's RAM. A slot whose dirty pages are logged, such as the memory of a
    /// display, is left out and therefore never written.
    ///
    /// # Errors
    /// The VM has been closed, the dirty log of its largest slot is on, or it has more memory than
    /// the host.
    pub fn ram(&self) -> Result<Vec<RamRange>, AttachError> {
        let mut state = self.look(false).map_err(|error| unseen(&error))?;
        if let Some(refusal) = refusal(&state.vm, self.dirty_logging_ok) {
            return Err(AttachError::Refused(why(refusal)));
        }
        let is_ram = |slot: &&Slot| {
            let mapping = self.process.mapping(slot.process_address, slot.bytes);
            !mapping.is_ok_and(|mapping| is_device(&mapping.path))
        };
        let slots: Vec<&Slot> = state.vm.ram().filter(is_ram).collect();
        let is_logged = |slot: &Slot| !self.dirty_logging_ok && state.vm.logs(slot);
        let largest = slots.iter().max_by_key(|slot| slot.bytes);
        if largest.is_some_and(|slot| is_logged(slot)) {
            return Err(AttachError::Refused(why(Refusal::DirtyLogging)));
        }
        let used = slots.into_iter().filter(|slot| !is_logged(slot));
        let ranges: Vec<RamRange> = used.map(range).collect();
        if ranges.len() > MAX_RANGES {
            return Err(AttachError::Refused(format!(
                "the guest's RAM lies in more than {MAX_RANGES} memory slots"
            )));
        }
        let bytes = ranges.iter().fold(0_u64, |sum, range| {
            sum.saturating_add(range.addresses.end - range.addresses.start)
        });
        // The bitmap of written pages takes memory in proportion to the guest's RAM, so that size
        // is limited.
        let limit = host_memory().saturating_mul(4);
        if bytes > limit {
            return Err(AttachError::Refused(format!(
                "the guest has {bytes} bytes of RAM, more than four times the host's memory and swap"
            )));
        }
        state.used = ranges.iter().map(|range| range.addresses.clone()).collect();
        Ok(ranges)
    }

    /// Translates the first address of a guest-physical range to an address in the monitor's
    /// process, by the slots that were read last. During a stop, these were read after the vCPUs
    /// had stopped.
    ///
    /// # Errors
    /// No slot contains the whole range, or the slot's dirty pages are logged.
    pub fn host_address(&self, range: &Range<u64>) -> Result<u64, AttachError> {
        let state = self.state();
        place(&state.vm, range, self.dirty_logging_ok).ok_or_else(|| {
            AttachError::Refused(format!(
                "no memory slot of KVM that may be written contains the guest-physical addresses {range:#x?}; try again"
            ))
        })
    }

    /// Stops the vCPUs repeatedly for a moment, and returns the registers of each. The first stop
    /// requests the registers, and a later one reads them.
    ///
    /// # Errors
    /// A vCPU did not leave `KVM_RUN` in time, or its run page cannot be found.
    pub fn registers(&self, patience: Duration) -> Result<Vec<Registers>, QmpError> {
        let deadline = Instant::now() + patience;
        let failed = |why: String| QmpError::Host(why);
        let not_returned = || {
            failed(
                "a vCPU does not return from KVM_RUN, so its registers are unknown: its monitor has paused the guest; resume it"
                    .to_owned(),
            )
        };
        let vcpus = self.vcpu_threads()?;
        let threads: BTreeSet<u32> = vcpus.iter().copied().collect();
        let threads: Vec<u32> = threads.into_iter().collect();
        let addresses = self.process.run_pages();
        let addresses = addresses.map_err(|error| failed(error.to_string()))?;
        if addresses.len() != vcpus.len() {
            return Err(failed(format!(
                "process {} maps {} run pages for {} vCPUs",
                self.process.pid(),
                addresses.len(),
                vcpus.len()
            )));
        }
        let stop = || {
            let has_ended = || failed("a vCPU's thread has ended".to_owned());
            let is_there = || threads.iter().all(|id| self.process.has_thread(*id));
            if !is_there() {
                return Err(has_ended());
            }
            let frozen = match freeze(&threads, Point::Running, deadline) {
                Err(FreezeError::Late(_)) => return Err(not_returned()),
                frozen => frozen.map_err(|error| failed(error.to_string()))?,
            };
            // A stopped thread keeps its id, but another process may have got the id before the
            // stop.
            is_there().then_some(frozen).ok_or_else(has_ended)
        };
        let unusable = |error| failed(format!("a vCPU's run page cannot be used: {error}"));
        let mut requested: Option<Vec<RunPage<'_>>> = None;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(BETWEEN_ATTEMPTS);
            }
            let frozen = stop()?;
            let read: Option<Vec<Registers>> = match &requested {
                Some(pages) => {
                    let read: io::Result<_> = pages.iter().map(RunPage::registers).collect();
                    read.map_err(unusable)?
                }
                None => {
                    let request = |address: &u64| RunPage::request(&self.memory, *address);
                    let pages: io::Result<_> = addresses.iter().map(request).collect();
                    requested = pages.map_err(unusable)?;
                    None
                }
            };
            let is_last = attempt + 1 == ATTEMPTS || Instant::now() >= deadline;
            if read.is_some() || is_last {
                // The requests are withdrawn while no vCPU runs.
                drop(requested);
                drop(frozen);
                return read.ok_or_else(not_returned);
            }
        }
        Err(not_returned())
    }
}

/// Returns the range of RAM in a slot.
fn range(slot: &Slot) -> RamRange {
    RamRange {
        addresses: slot.guest_address..slot.guest_address.saturating_add(slot.bytes),
        backend: format!("at {:#x}", slot.process_address),
        offset: 0,
        // Each stop confirms that KVM still has the slot. Each change confirms that no slot has
        // changed during the change.
        removal: Removal::ByVcpu,
    }
}

/// Returns the process's address of the first byte of a range, if one slot contains the whole range
/// and may be written.
fn place(vm: &Vm, range: &Range<u64>, dirty_logging_ok: bool) -> Option<u64> {
    vm.ram().find_map(|slot| {
        let offset = range.start.checked_sub(slot.guest_address)?;
        let end = range.end.checked_sub(slot.guest_address)?;
        let may_be_written = dirty_logging_ok || !vm.logs(slot);
        (offset < slot.bytes && end <= slot.bytes && may_be_written)
            .then(|| slot.process_address.saturating_add(offset))
    })
}

/// Returns whether KVM logs the dirty pages of a slot that overlaps one of these ranges.
fn logs_any(vm: &Vm, used: &[Range<u64>]) -> bool {
    let mut logged = vm.ram().filter(|slot| vm.logs(slot));
    logged.any(|slot| {
        let end = slot.guest_address.saturating_add(slot.bytes);
        let mut used = used.iter();
        used.any(|used| used.start < end && slot.guest_address < used.end)
    })
}

/// Returns the size of the host's memory and swap in bytes.
fn host_memory() -> u64 {
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

/// Returns the first reason against patching a guest from outside.
fn refusal(vm: &Vm, dirty_logging_ok: bool) -> Option<Refusal> {
    let is_allowed = |refusal: &Refusal| dirty_logging_ok && *refusal == Refusal::DirtyLogging;
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
mod tests {
    use patchbay_host_kernel::Protection;

    use super::*;

    fn slot(guest_address: u64, bytes: u64, process_address: u64) -> Slot {
        Slot {
            space: 0,
            guest_address,
            bytes,
            process_address,
            readonly: false,
            guest_memfd: false,
            logs_dirty_pages: false,
        }
    }

    fn vm(slots: &[Slot]) -> Vm {
        let mut vm = Vm::default();
        vm.slots = slots.to_vec();
        vm
    }

    #[test]
    fn a_range_is_confirmed_only_as_a_whole() {
        const GIB: u64 = 1 << 30;
        let range = 4 * GIB..8 * GIB;
        let at = |slots: &[Slot]| place(&vm(slots), &range, false);
        let whole = slot(4 * GIB, 4 * GIB, 1 << 40);
        assert_eq!(at(&[slot(0, GIB, 1 << 41), whole]), Some(1 << 40));
        assert_eq!(
            at(&[slot(3 * GIB, 6 * GIB, 1 << 40)]),
            Some((1 << 40) + GIB)
        );
        // The slot is shorter, in two parts, at a later address, or missing.
        let (half, rest) = (2 * GIB, slot(6 * GIB, 2 * GIB, 1 << 42));
        assert_eq!(at(&[slot(4 * GIB, half, 1 << 40)]), None);
        assert_eq!(at(&[slot(4 * GIB, half, 1 << 40), rest]), None);
        assert_eq!(at(&[slot(5 * GIB, 4 * GIB, 1 << 40)]), None);
        assert_eq!(at(&[]), None);
        let mut logged = whole;
        logged.logs_dirty_pages = true;
        assert_eq!(at(&[logged]), None);
        assert_eq!(place(&vm(&[logged]), &range, true), Some(1 << 40));
    }

    #[test]
    fn logging_of_a_part_that_is_used_is_a_migration() {
        let ram = slot(0, 1 << 30, 1 << 40);
        let display = slot(0xe000_0000, 1 << 24, 1 << 41);
        let used = [range(&ram).addresses];
        let logged = |one: Slot| Slot {
            logs_dirty_pages: true,
            ..one
        };
        assert!(!logs_any(&vm(&[ram, display]), &used));
        assert!(!logs_any(&vm(&[ram, logged(display)]), &used));
        assert!(logs_any(&vm(&[logged(ram), display]), &used));
        // A part of the range now has another slot.
        let part = slot(1 << 29, 1 << 20, 1 << 42);
        assert!(logs_any(&vm(&[logged(part), display]), &used));
    }

    #[test]
    fn guests_that_cannot_be_patched_are_refused() {
        let slot = slot(0, 1 << 20, 1 << 30);
        let mut vm = Vm::default();
        assert!(refusal(&vm, true).is_some_and(|refusal| why(refusal).contains("no memory")));
        vm.slots = vec![slot];
        assert_eq!(refusal(&vm, false), None);
        vm.slots[0].logs_dirty_pages = true;
        let logged = why(refusal(&vm, false).expect("logged"));
        assert!(logged.contains("--dirty-logging-ok"), "{logged}");
        assert_eq!(refusal(&vm, true), None);
        vm.slots[0].guest_memfd = true;
        assert!(refusal(&vm, true).is_some_and(|refusal| why(refusal).contains("guest_memfd")));
        for protection in [
            Protection::Protected("a test"),
            Protection::Unknown("a test"),
        ] {
            vm.slots = vec![slot];
            vm.protection = protection;
            assert!(refusal(&vm, true).is_some_and(|refusal| why(refusal).contains("a test")));
        }
    }

    #[test]
    fn a_process_without_a_vm_is_refused() {
        let sleep = std::process::Command::new("sleep").arg("1000").spawn();
        let mut sleep = sleep.expect("coreutils");
        let process = Arc::new(Process::open(sleep.id()).expect("it runs"));
        let error = Host::open(&process, false).expect_err("no VM").to_string();
        sleep.kill().expect("it runs");
        sleep.wait().expect("it has ended");
        assert!(error.contains("has no KVM VM"), "{error}");
    }

    #[test]
    fn registers_of_devices_are_not_ram() {
        for device in [
            "/dev/vfio/7",
            "anon_inode:[vfio-device]",
            "/sys/bus/pci/resource0",
        ] {
            assert!(is_device(device), "{device}");
        }
        for ram in [
            "",
            "[heap]",
            "/memfd:ram (deleted)",
            "/dev/zero (deleted)",
            "/dev/shm/ram",
            "/dev/hugepages/vm-1",
        ] {
            assert!(!is_device(ram), "{ram}");
        }
    }
}
