// SPDX-License-Identifier: Apache-2.0

//! Runs one vCPU: enters the guest, handles its exits, and parks when a pause is requested.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};

use crate::devices::{Bus, GuestPower};
use crate::pause::{Activity, NextStep, Pauser, Stopped, VcpuSide};
use crate::request::RequestPort;
use crate::system_registers::SystemRegisters;

/// If a vCPU was stopped for at least this time, the guest is told so, and its soft-lockup watchdog
/// ignores the pause (KVM API 4.57, `KVM_KVMCLOCK_CTRL`).
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// Vector of the breakpoint exception, #BP.
const BREAKPOINT: u8 = 3;

/// The reason why a vCPU thread ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VcpuEnd {
    /// The guest is being ended.
    Terminated,
    /// The vCPU halted and nothing can wake it.
    Halted,
    /// The guest powered off or reset itself.
    Power(GuestPower),
    /// A triple fault: an exception during the delivery of a double fault.
    TripleFault { rip: u64 },
    /// KVM cannot continue, or it returned an exit that the monitor does not handle.
    Failed(String),
}

/// Result of one `KVM_RUN`.
enum RunOutcome {
    /// The exit has been handled.
    Handled,
    /// `KVM_RUN` was interrupted or returned because of `immediate_exit`. Nothing is pending.
    Interrupted,
    /// The vCPU cannot continue.
    End(VcpuEnd),
}

/// State of a vCPU's thread.
pub(crate) struct Vcpu {
    pub index: usize,
    pub fd: VcpuFd,
    pub bus: Arc<Bus>,
    pub requests: Arc<RequestPort>,
    /// KVM can store RIP and pending events in `kvm_run`, which saves two system calls per stop.
    pub sync_regs: bool,
}

impl Vcpu {
    /// Runs the vCPU until it ends. Call it on a dedicated thread.
    pub fn run(mut self, pauser: &Pauser) -> VcpuEnd {
        let side = pauser.vcpu(self.index);
        side.start();
        self.run_loop(&side)
    }

    fn run_loop(&mut self, side: &VcpuSide<'_>) -> VcpuEnd {
        if self.sync_regs {
            // Requested for every exit, because the last exit before a stop is not known in
            // advance.
            self.fd.set_sync_valid_reg(SyncReg::Register);
            self.fd.set_sync_valid_reg(SyncReg::VcpuEvents);
        }
        // True if the last `KVM_RUN` left nothing pending, so that the vCPU is between two
        // instructions.
        let mut settled = false;
        loop {
            let step = side.next();
            side.report_registers(|| SystemRegisters::read(&self.fd));
            let turn = match step {
                NextStep::Run => self.enter(side),
                NextStep::Park(word) if settled => self.park(side, word),
                NextStep::Park(_) => self.settle(side),
                NextStep::End => return VcpuEnd::Terminated,
            };
            settled = match turn {
                RunOutcome::Interrupted => true,
                RunOutcome::Handled => false,
                RunOutcome::End(end) => return end,
            };
        }
    }

    /// Completes a pending port or memory access of the guest with one more `KVM_RUN` with
    /// `immediate_exit` set (KVM API, 5, `exit_reason` `KVM_EXIT_IO` and following). The published
    /// RIP is then that of the next instruction. Completing one access may start the next access of
    /// the same instruction, so the caller loops. A vCPU that the signal interrupted in guest mode
    /// does not need this, because it entered the guest with nothing pending.
    fn settle(&mut self, side: &VcpuSide<'_>) -> RunOutcome {
        side.hold_back();
        self.enter(side)
    }

    /// Running ──── pause requested ────▶ Parked
    fn park(&mut self, side: &VcpuSide<'_>, word: u32) -> RunOutcome {
        match self.stopped() {
            Ok(stopped) => {
                let began = Instant::now();
                side.park(word, stopped);
                if began.elapsed() >= LONG_PAUSE {
                    // KVM refuses this call for a guest without kvmclock. Such a guest does not
                    // need the call.
                    let _ = self.fd.kvmclock_ctrl();
                }
                RunOutcome::Interrupted
            }
            Err(error) => RunOutcome::End(VcpuEnd::Failed(format!(
                "KVM does not report where vCPU {} stopped: {error}",
                self.index
            ))),
        }
    }

    fn stopped(&self) -> Result<Stopped, kvm_ioctls::Error> {
        let (rip, events) = if self.sync_regs {
            let sync = self.fd.sync_regs();
            (sync.regs.rip, sync.events)
        } else {
            (self.fd.get_regs()?.rip, self.fd.get_vcpu_events()?)
        };
        let exception = events.exception;
        Ok(Stopped {
            rip,
            breakpoint: exception.nr == BREAKPOINT
                && (exception.injected != 0 || exception.pending != 0),
        })
    }

    /// Enters the guest once and handles its exit.
    fn enter(&mut self, side: &VcpuSide<'_>) -> RunOutcome {
        side.busy(Activity::Guest);
        let result = self.fd.run();
        side.busy(Activity::Monitor);
        let exit = match result {
            Ok(exit) => exit,
            // EAGAIN: the vCPU waits for its start-up interrupt.
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                return RunOutcome::Interrupted;
            }
            Err(error) => {
                return RunOutcome::End(VcpuEnd::Failed(format!(
                    "KVM cannot run vCPU {}: {error}",
                    self.index
                )));
            }
        };
        let power = match exit {
            VcpuExit::IoOut(port, data) => {
                side.busy(Activity::PortIo(port));
                self.bus.port_write(port, data)
            }
            VcpuExit::IoIn(port, data) => {
                side.busy(Activity::PortIo(port));
                self.bus.port_read(port, data);
                None
            }
            VcpuExit::MmioRead(address, data) => {
                side.busy(Activity::Mmio(address));
                self.bus.memory_read(address, data);
                None
            }
            VcpuExit::MmioWrite(address, data) => {
                side.busy(Activity::Mmio(address));
                self.bus.memory_write(address, data);
                None
            }
            VcpuExit::Hypercall(exit) => {
                *exit.ret = match self.requests.decode_hypercall(exit.nr, &exit.args) {
                    Some(request) => {
                        side.busy(Activity::Request(request.op));
                        i64::from(self.requests.answer(request)).cast_unsigned()
                    }
                    None => crate::request::KVM_ENOSYS.cast_unsigned(),
                };
                None
            }
            VcpuExit::X86Wrmsr(exit) => {
                match self.requests.decode_msr(exit.index, exit.data) {
                    Some(request) => {
                        side.busy(Activity::Request(request.op));
                        // The result is in the page; the instruction itself succeeds.
                        self.requests.answer(request);
                        *exit.error = 0;
                    }
                    // #GP, as for any unknown MSR.
                    None => *exit.error = 1,
                }
                None
            }
            VcpuExit::X86Rdmsr(exit) => {
                *exit.error = 1;
                None
            }
            VcpuExit::Intr => return RunOutcome::Interrupted,
            VcpuExit::Hlt => return RunOutcome::End(VcpuEnd::Halted),
            VcpuExit::Shutdown => {
                let rip = self.fd.get_regs().map_or(0, |regs| regs.rip);
                return RunOutcome::End(VcpuEnd::TripleFault { rip });
            }
            other => {
                let what = format!("{other:?}");
                let rip = self.fd.get_regs().map_or(0, |regs| regs.rip);
                return RunOutcome::End(VcpuEnd::Failed(format!(
                    "vCPU {} stopped at {rip:#x} with the unexpected exit {what}",
                    self.index
                )));
            }
        };
        side.busy(Activity::Monitor);
        match power {
            Some(power) => RunOutcome::End(VcpuEnd::Power(power)),
            None => RunOutcome::Handled,
        }
    }
}
