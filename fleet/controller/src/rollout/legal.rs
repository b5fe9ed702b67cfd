// SPDX-License-Identifier: Apache-2.0
//! Decides whether a command is legal in a rollout's state.

use super::state::{Member, Phase, Rollout};

pub(super) const PROMOTABLE: &str = "baking, at a gate, or paused there";

/// A command without its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Approve,
    Start,
    Pause,
    Resume,
    Promote,
    Abort,
    Undo,
}

impl Verb {
    pub const ALL: [Self; 7] = [
        Self::Approve,
        Self::Start,
        Self::Pause,
        Self::Resume,
        Self::Promote,
        Self::Abort,
        Self::Undo,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Approve => "approve",
            Self::Start => "start",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Promote => "promote",
            Self::Abort => "abort",
            Self::Undo => "undo",
        }
    }
}

/// The reason why a command is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotLegal {
    #[error("rollout {rollout} is {phase}; {command} is legal while it is {legal}")]
    Phase {
        rollout: String,
        phase: &'static str,
        command: &'static str,
        legal: &'static str,
    },
    #[error("the plan's digest is {found}, not {given}; review the plan, then start that digest")]
    Digest { found: String, given: String },
    #[error(
        "{given} of {needed} people approve the plan; another one runs `rollout approve` first"
    )]
    Approvals { given: usize, needed: usize },
    #[error(
        "{guests} guests of rollout {rollout} are changed, or may be; undo it before it is deleted"
    )]
    Changed { rollout: String, guests: usize },
    #[error("the rollout does not wait for guest {guest}; `rollout explain` shows its state")]
    Forget { guest: String },
    #[error("rollout {rollout} has {waves} waves, the maximum; undo it and plan another")]
    Waves { rollout: String, waves: usize },
}

impl Rollout {
    /// Checks that the command would change the rollout now. This is stricter than the commands
    /// themselves, which accept a repeat that changes nothing.
    ///
    /// # Errors
    /// [`NotLegal`].
    pub fn would_change(&self, verb: Verb, principal: &str) -> Result<(), NotLegal> {
        let phase = self.header.phase;
        let (is_legal, legal) = match verb {
            Verb::Approve => (
                phase == Phase::Planned && !self.has_approved(principal),
                "planned, once for each person",
            ),
            Verb::Start => {
                if phase == Phase::Planned {
                    self.check_approvals(principal)?;
                }
                (phase == Phase::Planned, "planned")
            }
            Verb::Pause => (matches!(phase, Phase::Running(_)), "running"),
            Verb::Resume => (phase == Phase::Paused, "paused"),
            Verb::Promote => (self.may_promote(), PROMOTABLE),
            Verb::Abort | Verb::Undo => {
                (self.may_revert(), "planned, running, paused or completed")
            }
        };
        match is_legal {
            true => Ok(()),
            false => Err(self.not_legal(verb.name(), legal)),
        }
    }

    /// Checks that the rollout is over and that no guest has its changes.
    ///
    /// # Errors
    /// [`NotLegal`].
    pub fn check_deletable(&self) -> Result<(), NotLegal> {
        if self.header.phase.is_active() {
            return Err(self.not_legal("delete", "completed, aborted or undone"));
        }
        let may_be_changed = |member: &&Member| member.may_be_changed();
        match self.members.iter().filter(may_be_changed).count() {
            0 => Ok(()),
            guests => Err(NotLegal::Changed {
                rollout: self.header.name.clone(),
                guests,
            }),
        }
    }

    pub(super) fn has_approved(&self, principal: &str) -> bool {
        self.header.approvals.iter().any(|by| by == principal)
    }

    /// Checks that enough people approve the plan, counting the principal.
    pub(super) fn check_approvals(&self, principal: &str) -> Result<(), NotLegal> {
        let given = self.header.approvals.len() + usize::from(!self.has_approved(principal));
        let needed = self.header.policy.approvals.max(1);
        match given >= needed {
            true => Ok(()),
            false => Err(NotLegal::Approvals { given, needed }),
        }
    }

    pub fn may_promote(&self) -> bool {
        matches!(self.header.phase, Phase::Running(_) | Phase::Paused) && self.is_settled()
    }

    pub(super) fn may_revert(&self) -> bool {
        !self.header.phase.reverts()
    }

    pub(super) fn not_legal(&self, command: &'static str, legal: &'static str) -> NotLegal {
        NotLegal::Phase {
            rollout: self.header.name.clone(),
            phase: self.header.phase.name(),
            command,
            legal,
        }
    }
}
