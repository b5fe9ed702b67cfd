// SPDX-License-Identifier: Apache-2.0
//! The one thread that changes the guest's keys.
//!
//! ```text
//!            ┌────────────────────────── wait ◀──────────────────────────────┐
//!            │ command, or a batch of expired holds                          │
//!            ▼                                                               │
//!        ┌─ check ── replayed, or refused: answer ──────────────────────────▶│
//!        │   │ names, etags, holds                                           │
//!        │   ▼                                                               │
//!        │  plan ─── refused: answer; validate only: answer ────────────────▶│
//!        │   │ intent written to the audit log (first attempt)               │
//!        │   │                                                               │
//!        │   ├─ nothing crosses zero ─▶ compare-and-swap ──────┬─ done ──┐   │
//!        │   ▼                                                 │ raced   │   │
//!        │  pause ── late vCPU: answer ─────────────────────── │ ───────▶│──▶│
//!        │   ▼                                                 │         │   │
//!        │  verify ─ foreign bytes: quarantine, answer ─────── │ ───────▶│──▶│
//!        │   │    └─ a gate is closed, or another version ─▶ busy        │   │
//!        │   ▼                                                 │         │   │
//!        │  commit ─ fault: undone, answer ─────────────────── │ ───────▶│──▶│
//!        │   ▼                                                 │         │   │
//!        │  resume ───────────────────────────────────────────────────▶ report
//!        │                                                     │   holds, journal,
//!        └──── wait ≥ 1 ms with jitter, unless the deadline ◀──┘   audit, replay
//! ```
//!
//! A prepare goes as far as the plan, and keeps the plan. A commit starts with the holds and etags
//! of a kept plan. If a gate finds the plan out of date, the answer is PLAN_STALE, because a commit
//! does not plan again.
//!
//! There is one thread because flips of one guest exclude each other anyway: there is only one
//! pause. With one thread the holds, replayed answers and an operator's pause need no locks between
//! them and are always consistent. The audit log has a lock of its own, because readers write to
//! it, too. It is a plain thread because verify and commit must not share a thread with other
//! tasks.
//!
//! Deadlock rule: a vCPU thread may hold the registry's mutex when it is asked to stop. So no lock
//! that a vCPU thread takes is held or taken between the start of the pause and the resume. One
//! atomic load tells whether the plan's registration is current. The registry's fence follows the
//! rule too: it is held only for a change while the guest runs, around the version check and the
//! compare-and-swaps, without a pause or I/O in between. vCPUs that an operator holds paused have
//! stopped outside of requests and do not hold the fence.
//!
//! Cancellation: each attempt first checks that the client still waits. From the pause on the
//! change is completed, and its answer is kept for the request id.

mod claim_checks;
mod claim_end;
mod claim_patterns;
mod claim_step;
mod claims;
mod command;
mod expiry;
mod flip;
mod ledger;
mod opening;
mod planning;
mod prepare;
mod release;
mod repair;
mod report;
mod retry;
mod run;
mod save;
mod standstill;
mod state;
mod transaction;
mod update;

pub(super) use self::command::{Command, Queued, Reply};
pub(super) use self::ledger::Keeper;
pub(super) use self::state::{Executor, Settings};
