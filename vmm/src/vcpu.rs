// SPDX-License-Identifier: Apache-2.0

//! The thread of one vCPU: enters the guest, carries out what the guest's exits
//! ask for, and parks when a pause is wanted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};

use crate::devices::{Bus, GuestPower};
use crate::pause::{Activity, Next, Pauser, Stopped, VcpuSide};
use crate::request::RequestPort;

/// A vCPU stopped longer than this tells the guest's watchdog about it
/// (KVM API 4.57, `KVM_KVMCLOCK_CTRL`).
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// Vector of the breakpoint exception, #BP.
const BREAKPOINT: u8 = 3;

/// Why a vCPU thread ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VcpuEnd {
    /// The guest as a whole is being ended.
    Terminated,
    /// The vCPU halted where nothing can wake it.
    Halted,
    /// The guest switched itself off or reset itself.
    Power(GuestPower),
    /// The vCPU met an exception while delivering an exception (triple fault).
    TripleFault {
        /// Instruction pointer.
        rip: u64,
    },
    /// KVM cannot go on, or gave an exit that this monitor has no use for.
    Failed(String),
}

/// How one `KVM_RUN` went.
enum Turn {
    /// The guest's exit has been carried out.
    Handled,
    /// `KVM_RUN` was interrupted, or held back: nothing is pending.
    Interrupted,
    /// The vCPU cannot go on.
    End(VcpuEnd),
}

/// Everything the thread of one vCPU needs.
pub(crate) struct Vcpu {
    pub index: usize,
    pub fd: VcpuFd,
    pub bus: Arc<Bus>,
    pub requests: Arc<RequestPort>,
    /// Whether KVM can leave RIP and pending events in `kvm_run`, which saves
    /// two system calls per stop.
    pub sync_regs: bool,
}

impl Vcpu {
    /// Runs the vCPU until it ends. To be called on a thread of its own.
    pub fn run(mut self, pauser: &Pauser) -> VcpuEnd {
        let side = pauser.vcpu(self.index);
        side.start();
        self.run_loop(&side)
    }

    fn run_loop(&mut self, side: &VcpuSide<'_>) -> VcpuEnd {
        if self.sync_regs {
            // With every exit, because the exit by which the vCPU stops is not known before.
            self.fd.set_sync_valid_reg(SyncReg::Register);
            self.fd.set_sync_valid_reg(SyncReg::VcpuEvents);
        }
        // Whether the last KVM_RUN left nothing pending, and the registers of a whole instruction.
        let mut settled = false;
        loop {
            let turn = match side.next() {
                Next::Run => self.enter(side),
                Next::Park(word) if settled => self.park(side, word),
                Next::Park(_) => self.settle(side),
                Next::End => return VcpuEnd::Terminated,
            };
            settled = match turn {
                Turn::Interrupted => true,
                Turn::Handled => false,
                Turn::End(end) => return end,
            };
        }
    }

    /// One more `KVM_RUN`, held back from entering the guest, completes a port
    /// or memory access that the guest is in the middle of (KVM API, 5, `exit_reason`
    /// `KVM_EXIT_IO` and following), so that the published RIP is that of a
    /// whole instruction. Completing one access may ask for the next one of the
    /// same instruction: then the loop comes here again. A vCPU that the signal
    /// took out of the guest needs none of this: it has completed all before it entered.
    fn settle(&mut self, side: &VcpuSide<'_>) -> Turn {
        side.hold_back();
        self.enter(side)
    }

    /// Running ──── pause wanted ────▶ Parked
    fn park(&mut self, side: &VcpuSide<'_>, word: u32) -> Turn {
        match self.stopped() {
            Ok(stopped) => {
                let began = Instant::now();
                side.park(word, stopped);
                if began.elapsed() >= LONG_PAUSE {
                    // Refused for a guest without kvmclock, which has no use for it.
                    let _ = self.fd.kvmclock_ctrl();
                }
                Turn::Interrupted
            }
            Err(error) => Turn::End(VcpuEnd::Failed(format!(
                "KVM does not tell where vCPU {} stopped: {error}",
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

    /// One `KVM_RUN`, and what the guest asked for by leaving it.
    fn enter(&mut self, side: &VcpuSide<'_>) -> Turn {
        side.busy(Activity::Guest);
        let result = self.fd.run();
        side.busy(Activity::Monitor);
        let exit = match result {
            Ok(exit) => exit,
            // EAGAIN: the vCPU waits for its start-up interrupt.
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                return Turn::Interrupted;
            }
            Err(error) => {
                return Turn::End(VcpuEnd::Failed(format!(
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
                        // The answer is in the page; the instruction itself succeeds.
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
            VcpuExit::Intr => return Turn::Interrupted,
            VcpuExit::Hlt => return Turn::End(VcpuEnd::Halted),
            VcpuExit::Shutdown => {
                let rip = self.fd.get_regs().map_or(0, |regs| regs.rip);
                return Turn::End(VcpuEnd::TripleFault { rip });
            }
            other => {
                let what = format!("{other:?}");
                let rip = self.fd.get_regs().map_or(0, |regs| regs.rip);
                return Turn::End(VcpuEnd::Failed(format!(
                    "vCPU {} stopped at {rip:#x} with an exit that has no meaning here: {what}",
                    self.index
                )));
            }
        };
        side.busy(Activity::Monitor);
        match power {
            Some(power) => Turn::End(VcpuEnd::Power(power)),
            None => Turn::Handled,
        }
    }
}
