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
//!  in a wave:  Committing ──all settled──▶ Baking ──over──▶ Gating ──passed──▶ next wave
//!
//!  a guest:    Pending ──▶ Committing ──▶ Committed ──▶ Reverted
//!                 ▲            │ ▲            └──▶ RevertFailed ──abort, undo──▶ Committed
//!                 │            ▼ └─────────────────────────────── Unresolved
//!                 └──resume── Failed ──resume, abort, undo if unknown──▶┘
//! ```
//!
//! A driver calls [`Rollout::step`], saves the changes that [`Rollout::take_changes`] names,
//! performs the actions, and reports each outcome. The driver may be killed between any two of
//! these steps. Another driver then loads the saved state and calls `step`, which returns again
//! every action whose outcome was not saved. All actions are idempotent, because a commit names its
//! plan and an inverse carries a request id. Therefore, no op is applied twice.
//!
//! A driver's calls must end with the driver. For that reason, the runner drops its connections
//! when it loses the election.
//!
//! The machine guarantees the following for any order of calls (tested in `tests.rs`):
//!
//! * A guest is `Committing` in the store before its commit is sent. At most as many guests as the
//!   caps allow are `Committing`, in all and in each failure domain.
//! * No commit is started while the rollout is planned, paused or frozen. While it reverts, no
//!   guest is committed for the first time. Reverting is subject to no cap and no freeze.
//! * Abort and undo are legal in every phase. When they end, no guest is `Committed`.
//! * With a gate on the agents' health, a guest is not committed before its agent's report is
//!   saved.
//! * A guest whose commit has an unknown outcome is never assumed to be unchanged. It is committed
//!   again before it is reverted, which reveals the outcome of the first commit.

mod amend;
mod commands;
mod gates;
mod keys;
mod legal;
mod machine;
mod policy;
mod state;
#[cfg(test)]
mod tests;

pub use self::keys::{InverseOp, KeySet, KeySets, Tracepoint};
pub use self::legal::{NotLegal, Verb};
pub(crate) use self::machine::bounded;
pub use self::machine::{Action, CommitOutcome, RevertOutcome, Step};
pub use self::policy::{AgentLimits, Caps, Freeze, OnFailure, Policy, WaveGate, WaveGateKind};
pub use self::state::{
    Changes, End, Failure, Header, Health, Member, Millis, Phase, PreparedPlan, Rollout, Stage,
    State, TimelineEntry, Wave,
};
