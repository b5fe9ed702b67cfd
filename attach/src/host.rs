// SPDX-License-Identifier: Apache-2.0
//! Knows a guest without its monitor: from the host's kernel and from the monitor's process.
//!
//! | what | from |
//! |---|---|
//! | memory, threads of the vCPUs, dirty logging, protection | KVM's structures ([`patchbay_host_kernel`]) |
//! | the guest's bytes | the process's memory, as for every guest |
//! | registers | the run page of each vCPU ([`RunPage`]) |
//!
//! Every answer comes from a walk that begins at the process's descriptor, because a VM that has
//! been closed reads as before.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_host_kernel::{HostKernel, Refusal, Vm, WalkError};
use serde_json::{Value, json};

use crate::error::AttachError;
use crate::flat_view::{RamRange, Removal};
use crate::freeze::{Point, freeze};
use crate::process::Process;
use crate::qmp::QmpError;
use crate::registers::Registers;

/// The name of the descriptor of a VM.
const VM: &str = "anon_inode:kvm-vm";
/// Number of stops that read registers, before they are reported as unknown.
const ATTEMPTS: u32 = 20;
/// The time between two attempts. A vCPU that is between two `KVM_RUN` soon enters the next.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

/// A guest that the host's kernel shows.
#[derive(Debug)]
pub struct Host {
    process: Process,
    descriptor: u32,
    dirty_logging_ok: bool,
    memory: File,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    kernel: HostKernel,
    vm: Vm,
}

impl Host {
    /// Finds the VM of a process.
    ///
    /// # Errors
    /// The process has no VM or several, the host's kernel cannot be read, or the guest cannot be
    /// patched from outside.
    pub fn open(process: &Process, dirty_logging_ok: bool) -> Result<Self, AttachError> {
        let pid = process.pid();
        let process = Process::open_started(pid, process.started()?)?;
        let descriptors = process.descriptors()?.into_iter();
        let vms: Vec<i32> = descriptors
            .filter(|(_, name)| name.as_os_str() == VM)
            .map(|(number, _)| number)
            .collect();
        if vms.is_empty() {
            return Err(AttachError::Refused(format!(
                "process {pid} has no KVM VM; `patchbay host list` shows those that have one"
            )));
        }
        let mut kernel = HostKernel::open().map_err(|error| AttachError::Process {
            what: "the host's kernel cannot be read, so the guest's memory is unknown".to_owned(),
            error: error.to_string(),
            next: "run as root".to_owned(),
        })?;
        let mut found: Option<(u32, Vm)> = None;
        for number in vms.iter().filter_map(|number| u32::try_from(*number).ok()) {
            let vm = match kernel.vm(pid, number) {
                Err(WalkError::OtherProcess { .. }) => continue,
                vm => vm.map_err(|error| unseen(&error))?,
            };
            match &found {
                // A descriptor may have been duplicated.
                Some((_, first)) if first.is_same(&vm) => {}
                Some(_) => {
                    return Err(AttachError::Refused(format!(
                        "process {pid} has several VMs, and a change of one cannot be kept apart from the others"
                    )));
                }
                None => found = Some((number, vm)),
            }
        }
        let Some((descriptor, vm)) = found else {
            return Err(AttachError::Refused(format!(
                "process {pid} only holds a VM that another process created; give that process"
            )));
        };
        if let Some(why) = refusal(&vm, dirty_logging_ok) {
            return Err(AttachError::Refused(why));
        }
        Ok(Self {
            descriptor,
            dirty_logging_ok,
            memory: process.memory()?,
            process,
            state: Mutex::new(State { kernel, vm }),
        })
    }

    /// Returns the guest's name on the monitor's command line; empty if it has none.
    #[must_use]
    pub fn name(&self) -> String {
        let line = self.process.command_line().unwrap_or_default();
        let program = self.process.program();
        let monitor = patchbay_host_kernel::Monitor::recognise(&program, &line, Vec::new);
        monitor.name.unwrap_or_default()
    }

    /// Kills the monitor.
    ///
    /// # Errors
    /// This user may not.
    pub fn kill(&self) -> Result<(), QmpError> {
        self.process.kill().map_err(|error| {
            QmpError::Host(format!(
                "process {} cannot be killed: {error}",
                self.process.pid()
            ))
        })
    }

    /// Returns the VM as it is now.
    fn vm(&self) -> Result<MutexGuard<'_, State>, WalkError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { kernel, vm } = &mut *state;
        if !kernel.is_unchanged(self.process.pid(), self.descriptor, vm)? {
            *vm = kernel.vm(self.process.pid(), self.descriptor)?;
        }
        Ok(state)
    }

    /// Returns a report in the form of QEMU's of a migration. It changes when a slot changes, and it
    /// tells of a migration while all memory is logged.
    ///
    /// # Errors
    /// The VM has been closed, or it changes all the time.
    pub fn migration(&self) -> Result<Value, QmpError> {
        let state = self.vm().map_err(|error| unknown(&error))?;
        let refused = refusal(&state.vm, self.dirty_logging_ok).is_some();
        let status = if refused { "dirty logging" } else { "none" };
        Ok(json!({ "status": status, "generations": state.vm.generations }))
    }

    /// Returns the threads of the vCPUs, as the process's own PID namespace numbers them.
    ///
    /// # Errors
    /// The VM has been closed, or a vCPU has not run yet.
    pub fn vcpu_threads(&self) -> Result<Vec<u32>, QmpError> {
        // The thread of a vCPU may change without a change of a slot.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let vm = state.kernel.vm(self.process.pid(), self.descriptor);
        let vm = vm.map_err(|error| unknown(&error))?;
        let threads: Option<Vec<u32>> = vm.vcpus.iter().map(|vcpu| vcpu.thread).collect();
        state.vm = vm;
        let own = threads.as_ref().and_then(|ids| self.process.own_ids(ids));
        own.filter(|ids| !ids.is_empty()).ok_or_else(|| {
            QmpError::Host(format!(
                "the vCPUs of process {} run in threads {threads:?}, of which one is unknown; wait until the guest has started",
                self.process.pid()
            ))
        })
    }

    /// Returns the guest's RAM. A slot whose dirty pages are logged, such as the memory of a
    /// display, is left out, so that it is not written.
    ///
    /// # Errors
    /// The VM has been closed, or all memory is logged.
    pub fn ram(&self) -> Result<Vec<RamRange>, AttachError> {
        let state = self.vm().map_err(|error| unseen(&error))?;
        if let Some(why) = refusal(&state.vm, self.dirty_logging_ok) {
            return Err(AttachError::Refused(why));
        }
        let writable = state.vm.ram();
        let mut ranges = Vec::new();
        for slot in writable.filter(|slot| self.dirty_logging_ok || !state.vm.logs(slot)) {
            let mapping = self.process.mapping(slot.process_address, slot.bytes);
            // A device's registers are not RAM, and reading them may have effects.
            let is_device = |path: &str| {
                ["/dev/vfio", "anon_inode:", "/sys/"]
                    .iter()
                    .any(|prefix| path.starts_with(prefix))
            };
            if mapping.is_ok_and(|mapping| is_device(&mapping.path)) {
                continue;
            }
            ranges.push(RamRange {
                addresses: slot.guest_address..slot.guest_address + slot.bytes,
                backend: format!("at {:#x}", slot.process_address),
                offset: 0,
                // Each stop confirms that KVM still has the slot. Memory that the monitor alone can
                // remove would not be written, but no monitor removes a slot while no vCPU runs.
                removal: Removal::ByVcpu,
            });
        }
        Ok(ranges)
    }

    /// Translates a guest-physical address to an address in the process.
    ///
    /// # Errors
    /// No slot has this address.
    pub fn host_address(&self, address: u64) -> Result<u64, AttachError> {
        let state = self.vm().map_err(|error| unseen(&error))?;
        let mut slots = state.vm.ram();
        let within = slots.find_map(|slot| {
            let offset = address.checked_sub(slot.guest_address)?;
            (offset < slot.bytes).then_some(slot.process_address + offset)
        });
        within.ok_or_else(|| {
            AttachError::Refused(format!("KVM has no memory at guest-physical {address:#x}"))
        })
    }

    /// Stops the vCPUs for a moment and returns the registers of each.
    ///
    /// # Errors
    /// A vCPU did not leave `KVM_RUN` in time, or its run page cannot be found.
    pub fn registers(&self, patience: Duration) -> Result<Vec<Registers>, QmpError> {
        let deadline = Instant::now() + patience;
        let own = self.vcpu_threads()?;
        let failed = |why: String| QmpError::Host(why);
        let threads = self.process.threads(&own);
        let threads = threads.ok_or_else(|| failed("a vCPU's thread has ended".to_owned()))?;
        let pages = self.process.run_pages();
        let pages = pages.map_err(|error| failed(error.to_string()))?;
        if pages.len() != threads.len() {
            return Err(failed(format!(
                "process {} maps {} run pages for {} vCPUs",
                self.process.pid(),
                pages.len(),
                threads.len()
            )));
        }
        let pages: Result<Vec<_>, _> = pages
            .into_iter()
            .map(|address| RunPage::open(&self.memory, address))
            .collect();
        let pages = pages.map_err(|error| failed(format!("a run page cannot be used: {error}")))?;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(BETWEEN_ATTEMPTS);
            }
            let frozen = freeze(&threads, Point::Unlocked, deadline);
            let frozen = frozen.map_err(|error| failed(error.to_string()))?;
            let registers: Result<Vec<_>, _> = pages.iter().map(RunPage::registers).collect();
            drop(frozen);
            let registers =
                registers.map_err(|error| failed(format!("a run page cannot be read: {error}")))?;
            if let Some(registers) = registers.into_iter().collect() {
                return Ok(registers);
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        Err(failed(
            "a vCPU has not returned from KVM_RUN, so its registers are unknown; wait until the monitor runs it"
                .to_owned(),
        ))
    }
}

fn unseen(error: &WalkError) -> AttachError {
    AttachError::Refused(format!(
        "the host's kernel does not show the guest: {error}"
    ))
}

fn unknown(error: &WalkError) -> QmpError {
    QmpError::Host(error.to_string())
}

/// Returns the reason why a guest cannot be patched from outside.
fn refusal(vm: &Vm, dirty_logging_ok: bool) -> Option<String> {
    let mut refusals = vm.refusals().into_iter();
    let refusal =
        refusals.find(|refusal| !(dirty_logging_ok && *refusal == Refusal::DirtyLogging))?;
    let next = match refusal {
        Refusal::DirtyLogging => {
            "wait for the end of the migration, or give --dirty-logging-ok if nothing needs the log"
        }
        Refusal::NoMemory => "wait until the monitor has started it",
        _ => "its keys can only be changed from inside",
    };
    Some(format!("{refusal}; {next}"))
}

/// The run page of a vCPU, `struct kvm_run` (`include/uapi/linux/kvm.h`), in the monitor's process.
///
/// While `kvm_valid_regs` names a set of registers, KVM stores it in the page whenever `KVM_RUN`
/// returns, also when a signal or ptrace interrupts it. `kvm_dirty_regs`, by which a monitor changes
/// registers, is never written here.
#[derive(Debug)]
struct RunPage<'m> {
    memory: &'m File,
    address: u64,
    /// The monitor's own `kvm_valid_regs`.
    before: u64,
}

/// Offsets in `struct kvm_run` and in the `struct kvm_sync_regs` in it, since Linux 4.17.
const VALID_REGS: u64 = 288;
const REGS: u64 = 304;
const RIP: u64 = REGS + 16 * 8;
const SREGS: u64 = REGS + 18 * 8;
/// The base in `kvm_sregs.idt`, after eight segments of 24 bytes and `gdt` of 16.
const IDT: u64 = SREGS + 8 * 24 + 16;
const CR0: u64 = IDT + 16;
const CR3: u64 = CR0 + 16;
const CR4: u64 = CR0 + 24;
const EFER: u64 = CR0 + 40;

/// `KVM_SYNC_X86_REGS` and `KVM_SYNC_X86_SREGS`
const GENERAL: u64 = 1;
const SYSTEM: u64 = 2;

impl<'m> RunPage<'m> {
    /// Requests the registers until this is dropped.
    fn open(memory: &'m File, address: u64) -> std::io::Result<Self> {
        let mut page = Self {
            memory,
            address,
            before: 0,
        };
        let before = page.word(VALID_REGS)?;
        page.write(VALID_REGS, before | GENERAL | SYSTEM)?;
        // If the monitor itself uses the general registers, they are always stored, and a change of
        // them here could reach the vCPU.
        if before & GENERAL == 0 {
            page.write(RIP, 0)?;
        }
        page.before = before;
        Ok(page)
    }

    fn word(&self, offset: u64) -> std::io::Result<u64> {
        let mut word = [0; 8];
        self.memory
            .read_exact_at(&mut word, self.address.saturating_add(offset))?;
        Ok(u64::from_le_bytes(word))
    }

    fn write(&self, offset: u64, word: u64) -> std::io::Result<()> {
        self.memory
            .write_all_at(&word.to_le_bytes(), self.address.saturating_add(offset))
    }

    /// Returns the registers of the last return from `KVM_RUN`; `None` if it has not returned since
    /// they were requested.
    fn registers(&self) -> std::io::Result<Option<Registers>> {
        let registers = Registers {
            rip: self.word(RIP)?,
            cr0: self.word(CR0)?,
            cr3: self.word(CR3)?,
            cr4: self.word(CR4)?,
            efer: self.word(EFER)?,
            idt_base: self.word(IDT)?,
        };
        Ok((registers.rip != 0).then_some(registers))
    }
}

impl Drop for RunPage<'_> {
    fn drop(&mut self) {
        // Bits that the monitor has set meanwhile stay.
        if let Ok(now) = self.word(VALID_REGS) {
            let ours = (GENERAL | SYSTEM) & !self.before;
            let _ = self.write(VALID_REGS, now & !ours);
        }
    }
}

/// Wraps the answers for [`crate::monitor::Monitor`].
pub(crate) fn not_asked(command: &str) -> QmpError {
    QmpError::Host(format!(
        "{command} needs the guest's monitor, and the guest is attached to by its process alone"
    ))
}

#[cfg(test)]
mod tests {
    use patchbay_host_kernel::{Protection, Slot};

    use super::*;

    /// A run page in a file, as the monitor's memory.
    fn page(valid: u64) -> File {
        let file = tempfile::tempfile().expect("room");
        file.set_len(2 * 4096).expect("room");
        let words = [(VALID_REGS, valid), (RIP, 7), (CR3, 0x1000), (EFER, 0x500)];
        for (at, word) in words {
            let written = file.write_all_at(&u64::to_le_bytes(word), 4096 + at);
            written.expect("room");
        }
        file
    }

    fn valid(file: &File) -> u64 {
        let page = RunPage {
            memory: file,
            address: 4096,
            before: GENERAL | SYSTEM,
        };
        page.word(VALID_REGS).expect("there")
    }

    #[test]
    fn registers_count_only_after_a_return_from_the_guest() {
        let file = page(0);
        let run_page = RunPage::open(&file, 4096).expect("a page");
        assert_eq!(valid(&file), GENERAL | SYSTEM);
        assert_eq!(run_page.registers().expect("there"), None);
        run_page.write(RIP, 0xffff_ffff_8100_0000).expect("there");
        let registers = run_page.registers().expect("there").expect("fresh");
        let expected = Registers {
            rip: 0xffff_ffff_8100_0000,
            cr3: 0x1000,
            efer: 0x500,
            ..Registers::default()
        };
        assert_eq!(registers, expected);
        drop(run_page);
        assert_eq!(valid(&file), 0);
        RunPage::open(&file, 1 << 20).expect_err("no page");
    }

    #[test]
    fn a_monitor_that_uses_the_run_page_keeps_its_registers() {
        for (before, zeroed) in [(GENERAL, false), (SYSTEM, true), (7, false), (4, true)] {
            let file = page(before);
            let run_page = RunPage::open(&file, 4096).expect("a page");
            assert_eq!(valid(&file), before | 3);
            let fresh = run_page.registers().expect("there").is_some();
            assert_eq!(fresh, !zeroed, "{before}");
            // The monitor asks for more.
            run_page.write(VALID_REGS, before | 3 | 4).expect("there");
            drop(run_page);
            assert_eq!(valid(&file), before | 4);
        }
    }

    #[test]
    fn guests_that_cannot_be_patched_are_refused() {
        let slot = Slot {
            space: 0,
            guest_address: 0,
            bytes: 1 << 20,
            process_address: 1 << 30,
            readonly: false,
            guest_memfd: false,
            logs_dirty_pages: false,
        };
        let mut vm = Vm::default();
        assert!(refusal(&vm, true).is_some_and(|why| why.contains("no memory")));
        vm.slots = vec![slot];
        assert_eq!(refusal(&vm, false), None);
        vm.slots[0].logs_dirty_pages = true;
        let why = refusal(&vm, false).expect("logged");
        assert!(why.contains("--dirty-logging-ok"), "{why}");
        assert_eq!(refusal(&vm, true), None);
        vm.slots[0].guest_memfd = true;
        assert!(refusal(&vm, true).is_some_and(|why| why.contains("guest_memfd")));
        for protection in [
            Protection::Protected("a test"),
            Protection::Unknown("a test"),
        ] {
            vm.slots = vec![slot];
            vm.protection = protection;
            assert!(refusal(&vm, true).is_some_and(|why| why.contains("a test")));
        }
    }

    #[test]
    fn a_process_without_a_vm_is_refused() {
        let sleep = std::process::Command::new("sleep").arg("1000").spawn();
        let mut sleep = sleep.expect("coreutils");
        let process = Process::open(sleep.id()).expect("it runs");
        let error = Host::open(&process, false).expect_err("no VM").to_string();
        sleep.kill().expect("it runs");
        sleep.wait().expect("it has ended");
        assert!(error.contains("has no KVM VM"), "{error}");
    }
}
