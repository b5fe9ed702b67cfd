// SPDX-License-Identifier: Apache-2.0
//! Stops the guest by QMP, and resumes it.
//!
//! QMP has no command that checks the run state and stops the guest atomically, so another client's
//! `stop` or `cont` may take effect between the query and the `stop`, which are sent in one write.
//! QEMU reports both by events, in order with its answers, so the events between the two answers
//! show which client stopped the guest ([`Life::stop_was_answered`]):
//!
//! | the query finds the guest | events until the answer to `stop` | the guest was stopped by |
//! |---|---|---|
//! | running | STOP, or a RESUME and a STOP at the end | this process |
//! | paused | none | another client |
//! | paused | RESUME, STOP | this process |
//! | running or paused | RESUME at the end | no client: it runs |
//!
//! A STOP does not name the client that caused it. So this process takes another client's `stop`
//! for its own if that `stop` takes effect between this process's query and `stop`. The same
//! applies to a `stop` that arrives while the guest is stopped, because such a `stop` causes no
//! event.
//!
//! [`Life::stop_was_answered`]: crate::life::Life::stop_was_answered

use std::cell::RefCell;
use std::time::{Duration, Instant};

use patchbay_guest::pause::PauseError;
use serde_json::Value;

use crate::freeze::Point;
use crate::guest::{CONFIRM, LOOK, QemuGuest, check_status, unable};
use crate::host;
use crate::monitor::{Connection, Monitor, PATIENCE};
use crate::qmp::{QmpError, Turn};
use crate::registers::Requested;
use crate::resume::resume;

/// The maximum number of attempts to resume the guest while QEMU does not answer. Each attempt
/// begins with a query and sends `cont` only after the answer, so further attempts only lengthen
/// the wait for a QEMU that hangs.
const RESUMES: u32 = 12;
/// Time allowed for a cancelled migration to end.
const CANCEL: Duration = Duration::from_secs(10);

/// A stop that was sent and may have taken effect. Dropping it resumes the guest.
#[derive(Debug)]
pub struct Lease<'g> {
    guest: &'g QemuGuest,
    /// The last stop, until it is known which client stopped the guest.
    sent: RefCell<Option<Sent>>,
    /// `None` if the registers are unknown.
    rips: Option<Vec<u64>>,
}

/// The commands that stop the guest.
#[derive(Debug)]
enum Sent {
    /// `query-status` and `stop`, in one write.
    InTurn(Turn<2>),
    /// `query-status`, then `stop` if the guest ran. The value is true if the guest ran. This way
    /// is used through libvirt, where events and answers come in no common order.
    OneByOne(bool),
}

impl<'g> Lease<'g> {
    /// Stops the guest.
    ///
    /// # Errors
    /// [`PauseError`]. The guest runs, or another client holds it stopped.
    pub fn stop(guest: &'g QemuGuest, timeout: Duration) -> Result<Self, PauseError> {
        let requested = request(&guest.monitor);
        guest.arm(&[], Point::Any)?;
        let mut lease = Self {
            guest,
            sent: RefCell::default(),
            rips: None,
        };
        let [before, stopped] = lease.send(timeout).map_err(unable)?;
        match stopped {
            Ok(_) => {}
            Err(QmpError::TimedOut { .. }) => {
                // QEMU executes commands in order, so dropping the lease also ends a `stop` that
                // takes effect late.
                return Err(guest.late(timeout, 0..guest.description.vcpus as usize));
            }
            Err(error) => return Err(unable(error)),
        }
        // If another client has resumed the guest since this check, the check before the first
        // write fails.
        if !lease.is_ours()
            && let Ok(before) = before
        {
            check_status(run_state(&before))?;
        }
        let registers = match requested {
            Some(requested) => requested.read().map_err(unable)?,
            None if guest.monitor.uses_kvm() => None,
            None => Some(guest.monitor.registers(CONFIRM).map_err(unable)?),
        };
        lease.rips = registers.map(|vcpus| vcpus.iter().map(|vcpu| vcpu.rip).collect());
        Ok(lease)
    }

    /// Returns the address of the next instruction of each vCPU; `None` if it is unknown.
    #[must_use]
    pub fn rips(&self) -> Option<&[u64]> {
        self.rips.as_deref()
    }

    /// Stops a guest that another client has resumed during a change, so that the change is undone
    /// while no vCPU runs. Dropping the lease resumes the guest.
    pub fn stop_again(&self) {
        let stopped = self.guest.arm(&[], Point::Any).and_then(|()| {
            let [_, stopped] = self.send(LOOK).map_err(unable)?;
            stopped.map_err(unable)
        });
        if let Err(error) = stopped {
            tracing::error!(%error, "another client has resumed the guest during a change, which is undone while the guest runs");
        }
    }

    /// Sends `stop` after a query, and waits for both answers.
    fn send(&self, timeout: Duration) -> Result<[Result<Value, QmpError>; 2], QmpError> {
        self.guest.life.stop_begins();
        match self.guest.monitor.connection() {
            Connection::Socket(qmp) => {
                let commands = ["query-status", "stop"].map(|command| (command, Value::Null));
                let turn = qmp.send_in_turn(commands)?;
                let answers = turn.wait(timeout);
                *self.sent.borrow_mut() = Some(Sent::InTurn(turn));
                answers
            }
            Connection::Libvirt(domain) => {
                let deadline = Instant::now() + timeout;
                let execute = |command: &str| {
                    let left = deadline.saturating_duration_since(Instant::now());
                    domain.execute(command, Value::Null, left)
                };
                let before = execute("query-status");
                let ran = before.as_ref().is_ok_and(|it| run_state(it) == "running");
                *self.sent.borrow_mut() = Some(Sent::OneByOne(ran));
                let stopped = match ran {
                    true => execute("stop"),
                    false => before.clone(),
                };
                Ok([before, stopped])
            }
            Connection::None => Err(host::not_asked("stop")),
        }
    }

    /// Returns whether this process stopped the guest and no client has resumed it since. A missing
    /// answer counts as lost, so call this after QEMU has answered.
    fn is_ours(&self) -> bool {
        let life = &self.guest.life;
        let Some(sent) = self.sent.borrow_mut().take() else {
            return life.is_stopped_by_us();
        };
        match sent {
            Sent::OneByOne(ran) => life.stop_was_answered(ran, None),
            Sent::InTurn(turn) => {
                let before = turn.wait(Duration::ZERO).ok();
                let before = before.and_then(|[before, _]| before.ok());
                let ran = before.is_none_or(|before| run_state(&before) == "running");
                let [first, last] = turn.events_before();
                let window = first.unwrap_or(0)..last.unwrap_or(u64::MAX);
                life.stop_was_answered(ran, Some(window))
            }
        }
    }
}

/// Requests the registers that the vCPUs store when they stop. If that fails, they are unknown, and
/// the gates of the kernel's text decide instead.
fn request(monitor: &Monitor) -> Option<Requested<'_>> {
    if !monitor.uses_kvm() {
        return None;
    }
    match monitor.request_registers(CONFIRM) {
        Ok(requested) => requested,
        Err(error) => {
            tracing::debug!(%error, "the registers of the stop are unknown");
            None
        }
    }
}

/// Returns the run state in an answer to `query-status`.
fn run_state(answer: &Value) -> &str {
    answer["status"].as_str().unwrap_or_default()
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let (life, monitor) = (&self.guest.life, &self.guest.monitor);
        for _ in 0..RESUMES {
            let execute = |command: &str| monitor.execute(command, Value::Null, PATIENCE);
            let stop = (|| self.is_ours(), || life.stop_ends());
            match resume(execute, stop, Instant::now() + CANCEL) {
                Ok(resumed) => {
                    if let Some(complaint) = resumed.complaint() {
                        tracing::error!("{complaint}");
                    }
                    life.stop_is_over();
                    return self.guest.watchdog().disarm();
                }
                // No other process resumes the guest while this process runs.
                Err(error @ QmpError::TimedOut { .. }) => {
                    tracing::warn!(%error, "the guest may still be stopped");
                }
                Err(error) => {
                    tracing::error!(%error, "the guest was not resumed");
                    return;
                }
            }
        }
        // The watchdog tries again when this process ends.
        tracing::error!("the guest was not resumed; send cont to QEMU, or end this process");
    }
}
