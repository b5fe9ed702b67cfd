// SPDX-License-Identifier: Apache-2.0
//! Implements a rollout as a state machine without I/O, clocks or threads.
//!
//! ```text
//!             start                      every wave is done
//!  Planned ──────────▶ Running ───────────────────────────────▶ Completed
//!     │                 │   ▲                                       │
//!     │   pause, a gate │   │ resume                                │
//!     │                 ▼   │                                       │
//!     │                Paused ──promote──▶ Running                  │
//!     │                   │                                         │
//!     └───────────────────┴── abort, undo, a gate ──────────────────┘
//!                               ▼
//!                           Reverting ──nothing is left──▶ Aborted, Undone
//!
//!  in a wave:  Changing ──all settled──▶ Baking ──over──▶ Gating ──passed──▶ next wave
//!
//!  a guest:    Pending ──▶ Claiming ──▶ AsWanted ──▶ Releasing ──▶ Released
//!                             │  ▲           │             ▲
//!                             ▼  │           ▼             │
//!                            NotYet ◀─── lost, no effect   │
//!                               └──────── abort, undo ─────┘
//!
//!  NotYet, and any state in which the guest may have claims:  forget ──▶ Forgotten
//! ```
//!
//! A rollout is an owner of claims (`patchbay.v1.SetClaims`). It sends a guest the whole set that
//! it wants, which is empty after an abort or undo, with a generation that fences every earlier
//! call. The same set may be sent any number of times, so an answer that is lost costs only time.
//! No failure is final: a set that is not made is sent again, with a growing delay, until it is
//! made or a person gives the guest up. A guest that has made its claims is asked whether they
//! still hold. Claims that are void because their key's module was unloaded are sent again once it
//! is loaded, unless it is loaded again soon after each change. If claims have no effect for
//! another reason, the guest is `NotYet` and nothing is sent. It is `AsWanted` again when another
//! owner's claim or a hold has ended, or when a person has the claims made again.
//!
//! A driver calls [`Rollout::step`], saves the changes that [`Rollout::take_changes`] names,
//! performs the actions, and reports each outcome. The driver may be killed between any two of
//! these steps. Another driver then loads the saved state and calls `step`, which returns again
//! every action whose outcome was not saved. A deposed driver's calls have a generation that was
//! saved before, so they have no effect after a call of its successor.
//!
//! The machine guarantees the following for any order of calls (tested in `tests.rs`):
//!
//! * A guest is `Claiming` in the store, with its generation, before its claims are sent. At most
//!   as many guests as the caps allow are `Claiming`, in all and in each failure domain.
//! * No guest's claims are sent in a new generation while the rollout is planned, paused or frozen.
//!   While it reverts, no claims are sent at all. Reverting is subject to no cap and no freeze.
//! * Abort and undo are legal until the rollout has ended. When they end, every guest to which
//!   claims may have been sent has confirmed that it has none, unless a person has adopted its
//!   drift or has given it up.
//! * With a gate on the agents' health, a guest is not changed before its agent's report is saved.

mod amend;
mod answers;
mod commands;
mod describe;
mod gates;
mod keys;
mod legal;
mod machine;
mod outcomes;
mod policy;
mod standing;
mod state;
#[cfg(test)]
mod tests;
mod unknown;
mod waves;

pub use self::answers::{ClaimOutcome, Found, FoundClaims, GateAnswer, ReleaseOutcome};
pub use self::describe::lasting;
pub use self::keys::{Claim, Guarded, KeySet, KeySets, Tracepoint, Want};
pub use self::legal::{NotLegal, Verb};
pub(crate) use self::machine::bounded;
pub use self::machine::{Action, Step};
pub use self::policy::{
    AfterReboot, AgentLimits, Caps, ErrorsOf, Freeze, OnFailure, Policy, WaveGate, WaveGateKind,
};
pub use self::standing::{GateStanding, NextStep, Standing, Terms};
pub use self::state::{
    Changes, End, Event, Failure, Header, Health, LeftOut, Member, Millis, Phase, Plan, Record,
    Rollout, Stage, State, TimelineEntry, Wave,
};
pub(crate) use self::state::{NO_RECORD, NO_RECORD_ADVICE};
