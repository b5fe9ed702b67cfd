// SPDX-License-Identifier: Apache-2.0
//! Serves commands and expired holds, one at a time.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use patchbay_guest::guest::{Guest, PausedGuest};

use super::command::{Command, Queued, Reply};
use super::standstill::Standstill;
use super::state::Executor;
use crate::keys::error::KeysError;
use crate::keys::outcome::{PauseOutcome, PauseState};
use crate::keys::request::PauseRequest;

impl<G: Guest> Executor<G> {
    /// Serves commands until the last sender is dropped.
    pub fn run(mut self, commands: &Receiver<Queued>) {
        let guest = Arc::clone(&self.guest);
        let mut standstill = Standstill::none(&*guest);
        let mut ticks = Vec::new();
        loop {
            self.audit.set_trace(None);
            let mut next = self.next_expiry();
            if next == Some(Duration::ZERO) {
                // Batches and commands take turns, so that neither starves the other.
                self.expire(&mut standstill);
                next = self.next_expiry();
            }
            if next != Some(Duration::ZERO) {
                for reply in ticks.drain(..) {
                    let _ = Reply::send(reply, Ok(()));
                }
            }
            let now = self.shared.clock.now();
            let until = |at: Instant| at.saturating_duration_since(now);
            let expiry = standstill.expiry();
            let left = [expiry, self.plans.next_expiry()].map(|at| at.map(until));
            let next = left.into_iter().flatten().chain(next).min();
            let command = match next {
                None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(left) => commands.recv_timeout(left),
            };
            // Checked before each command, so that a stream of commands does not keep the guest
            // stopped.
            if expiry.is_some_and(|at| self.shared.clock.now() >= at) {
                self.resume(&mut standstill);
            }
            self.plans.expire(self.shared.clock.now());
            let command = command.map(|queued| {
                self.audit.set_trace(queued.trace_id);
                queued.command
            });
            match command {
                Ok(Command::Update(request, reply)) => {
                    let result = self.update(&request, &reply, &mut standstill);
                    // A client that is gone can repeat the request with the same id.
                    let _ = reply.send(result);
                }
                Ok(Command::Prepare(request, reply)) => {
                    let result = self.prepare(*request, &reply, &mut standstill);
                    // If the client is gone, the plan expires.
                    let _ = reply.send(result);
                }
                Ok(Command::Commit(request, reply)) => {
                    let result = self.commit(&request, &reply, &mut standstill);
                    let _ = reply.send(result);
                }
                Ok(Command::Discard(request, reply)) => {
                    let _ = reply.send(self.plans.discard(&request));
                }
                Ok(Command::Release(request, reply)) => {
                    let result = self.release(&request, &reply, &mut standstill);
                    let _ = reply.send(result);
                }
                Ok(Command::Renew(request, reply)) => {
                    let _ = reply.send(self.renew(&request));
                }
                Ok(Command::Repair(request, reply)) => {
                    let result = self.repair(&request, &reply, &mut standstill);
                    let _ = reply.send(result);
                }
                Ok(Command::Claim(request, reply)) => {
                    let result = self.set_claims(*request, &reply, &mut standstill);
                    // A client that is gone can repeat the request with the same generation.
                    let _ = reply.send(result);
                }
                Ok(Command::Adopt(reply)) => {
                    let _ = reply.send(self.adopt_ledger());
                }
                Ok(Command::Pause(request, reply)) => {
                    let _ = reply.send(self.hold(&request, &mut standstill));
                }
                Ok(Command::Resume(reply)) => {
                    self.resume(&mut standstill);
                    let _ = reply.send(Ok(()));
                }
                Ok(Command::Save(request, reply)) => {
                    let result = self.save(request, &standstill);
                    let _ = reply.send(result);
                }
                Ok(Command::AuditFile(file)) => self.audit.replace(file),
                Ok(Command::Tick(reply)) => ticks.push(reply),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Stops the guest for an operator, or extends the pause.
    fn hold(
        &self,
        request: &PauseRequest,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<PauseOutcome, KeysError> {
        let now = self.shared.clock.now();
        let until = now + request.ttl;
        let stop_time = if standstill.held().is_some() {
            standstill.prolong(until);
            Duration::ZERO
        } else {
            let paused = standstill.pause(request.timeout)?;
            let stop_time = paused.stop_time();
            standstill.hold(paused, Some(until));
            stop_time
        };
        let expires_at = standstill
            .expiry()
            .map(|at| SystemTime::now() + at.saturating_duration_since(now));
        self.shared.set_pause(match expires_at {
            Some(at) => PauseState::Until(at),
            None => PauseState::UntilResumed,
        });
        Ok(PauseOutcome {
            stop_time,
            expires_at,
        })
    }

    fn resume(&self, standstill: &mut Standstill<'_, G>) {
        standstill.end();
        self.shared.set_pause(PauseState::Running);
    }
}
