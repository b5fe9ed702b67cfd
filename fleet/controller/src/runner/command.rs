// SPDX-License-Identifier: Apache-2.0
//! The commands that people and the controller give to a rollout.

use crate::plan;
use crate::rollout::{Member, Millis, NotLegal, Rollout};
use crate::spec::Spec;

#[derive(Clone, Debug)]
pub enum Command {
    Approve {
        digest: String,
    },
    Start {
        digest: String,
    },
    /// Starts a plan without the required approvals.
    StartUnapproved {
        digest: String,
    },
    Pause,
    Resume,
    Promote,
    /// Promotes a rollout for which the policy demands approvals.
    PromoteUnapproved,
    Abort,
    Undo,
    /// Adds waves of further guests, which the spec cuts: all of its waves, or the last one only.
    Extend {
        name: String,
        added: Vec<Member>,
        by_waves: bool,
    },
    Adopt {
        drifted: Vec<usize>,
        joined: Vec<Member>,
    },
    /// Gives up the member with this index.
    Forget {
        member: usize,
    },
    /// Records the latest entry of the timeline that a webhook has accepted, or, if it has accepted
    /// none, the entry before the first one that was sent to it.
    Delivered {
        webhook: String,
        number: u64,
    },
    /// Records that guests differ from the state that the rollout set.
    Drifted {
        text: String,
    },
}

impl Command {
    /// Returns the name of the API method for the command.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Approve { .. } => "Approve",
            Self::Start { .. } | Self::StartUnapproved { .. } => "Start",
            Self::Pause => "Pause",
            Self::Resume => "Resume",
            Self::Promote | Self::PromoteUnapproved => "Promote",
            Self::Abort => "Abort",
            Self::Undo => "Undo",
            Self::Extend { .. } | Self::Adopt { .. } | Self::Drifted { .. } => "Drift",
            Self::Delivered { .. } => "Deliver",
            Self::Forget { .. } => "Forget",
        }
    }

    /// Returns whether the command advances the rollout.
    pub fn advances(&self) -> bool {
        match self {
            Self::Approve { .. } | Self::Start { .. } | Self::StartUnapproved { .. } => true,
            Self::Resume | Self::Promote | Self::PromoteUnapproved | Self::Extend { .. } => true,
            Self::Pause | Self::Abort | Self::Undo => false,
            Self::Adopt { .. } | Self::Forget { .. } => false,
            Self::Delivered { .. } | Self::Drifted { .. } => false,
        }
    }

    /// Returns whether the command needs the role `break-glass`.
    pub fn breaks_glass(&self) -> bool {
        matches!(self, Self::StartUnapproved { .. } | Self::PromoteUnapproved)
    }

    /// Changes the rollout as the principal wants.
    ///
    /// # Errors
    /// [`NotLegal`].
    pub fn apply(
        self,
        rollout: &mut Rollout,
        spec: &Spec,
        principal: &str,
        now: Millis,
    ) -> Result<(), NotLegal> {
        match self {
            Self::Approve { digest } => rollout.approve(principal, &digest, now),
            Self::Start { digest } => rollout.start(principal, &digest, now),
            Self::StartUnapproved { digest } => rollout.start_unapproved(principal, &digest, now),
            Self::Pause => rollout.pause(principal, now),
            Self::Resume => rollout.resume(principal, now),
            Self::Promote => rollout.promote(principal, now),
            Self::PromoteUnapproved => rollout.promote_unapproved(principal, now),
            Self::Abort => {
                rollout.abort(principal, now);
                Ok(())
            }
            Self::Undo => {
                rollout.undo(principal, now);
                Ok(())
            }
            Self::Extend {
                name,
                added,
                by_waves,
            } => {
                let cut = |guests| plan::added_waves(spec, &name, guests, by_waves);
                rollout.extend(cut, added, principal, now)
            }
            Self::Adopt { drifted, joined } => rollout.adopt(&drifted, joined, principal, now),
            Self::Forget { member } => rollout.forget(member, principal, now),
            Self::Delivered { webhook, number } => {
                rollout.delivered(webhook, number);
                Ok(())
            }
            Self::Drifted { text } => {
                rollout.drifted(principal, text, now);
                Ok(())
            }
        }
    }
}
