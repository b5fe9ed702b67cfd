// SPDX-License-Identifier: Apache-2.0
//! Plans rollouts, and stores their plans.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Leadership, Start};
use crate::authority::{Refused, finish};
use crate::gates::commands::NotUsable;
use crate::names::is_name;
use crate::plan;
use crate::rollout::{Rollout, State};
use crate::runner::{Running, now};
use crate::sight::Sight;
use crate::spec::{Spec, SpecError};
use crate::storage::{self, TooLarge};
use crate::store::{StoreError, commit_all};

/// The reason why a plan is refused.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The policy does not allow the planner to change these guests and keys. The reason may name
    /// guests that the planner may not see.
    #[error("{0}")]
    Denied(String),
    #[error("{0:?} is no name of a rollout; give 1 to 64 letters, digits and hyphens")]
    Name(String),
    #[error(
        "rollout {0} exists with another spec; give this one another name, or compare them with \
         `rollout diff`"
    )]
    NameTaken(String),
    #[error(
        "rollout {name} has ended and is {phase}; delete it with `rollout delete {name}`, or give \
         the new one another --name"
    )]
    Ended { name: String, phase: &'static str },
    #[error("rollout {name} exists and cannot be read: {why}; give this one another name")]
    Unreadable { name: String, why: String },
    #[error("rollout {other} changes {what} and has not ended; wait for it, or abort it")]
    Overlap { other: String, what: String },
    #[error(
        "rollout {other}, which is out of service, changes {what}; wait until it is in service \
         again, or delete it with `rollout delete {other} --unreadable`"
    )]
    Held { other: String, what: String },
    #[error(
        "rollout {name} is out of service, and the keys that it changes are not known: {why}; \
         repair it, or delete it with `rollout delete {name} --unreadable`"
    )]
    KeysUnknown { name: String, why: String },
    #[error("the spec selects no guest that can be changed: {0}")]
    Nothing(String),
    #[error(transparent)]
    Gate(#[from] NotUsable),
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{0}")]
    Audit(Refused),
    #[error("this replica does not lead any more")]
    Deposed,
}

impl Leadership {
    /// Plans a rollout and stores it. A repeat with the same spec returns the stored rollout.
    ///
    /// # Errors
    /// [`PlanError`].
    pub async fn plan(
        self: &Arc<Self>,
        name: &str,
        text: &str,
        principal: &str,
    ) -> Result<Arc<Running>, PlanError> {
        if !is_name(name, b"-") {
            return Err(PlanError::Name(name.to_owned()));
        }
        let spec = Spec::parse(text)?;
        let may_operate = self.authority.may_operate(principal);
        may_operate.map_err(PlanError::Denied)?;
        let may_plan = |rollout: &Rollout| {
            let may_plan = self.authority.may_plan(principal, rollout);
            may_plan.map_err(PlanError::Denied)
        };
        let planning = Arc::clone(&self.planning).lock_owned().await;
        if let Some(existing) = self.rollout(name) {
            let spec_digest = plan::spec_digest(text);
            let rollout = existing.rollout();
            may_plan(&rollout)?;
            let (name, phase) = (name.to_owned(), rollout.header().phase);
            return if phase.reverts() {
                let phase = phase.name();
                Err(PlanError::Ended { name, phase })
            } else if rollout.header().spec_digest == spec_digest {
                Ok(Arc::clone(&existing))
            } else {
                Err(PlanError::NameTaken(name))
            };
        }
        if let Some(why) = self.unreadable().remove(name) {
            let name = name.to_owned();
            return Err(PlanError::Unreadable { name, why });
        }
        // No guest needs to be asked for a plan that is refused for this.
        self.retired()?;
        self.context.commands.check(&spec).await?;
        let rollout = plan::plan(self.hosts(), name, text, &spec, principal, now()).await;
        if rollout.header().waves.is_empty() {
            let policy = self.authority.policy().current();
            let hidden = Sight::new(&policy, principal).hidden(&rollout);
            return Err(PlanError::Nothing(hidden.shown(&nothing(&rollout))));
        }
        let rule = may_plan(&rollout)?;
        // A rollout that is retired meanwhile is among the retired ones before it leaves these.
        let mut active = self.rollouts();
        active.retain(|other| other.rollout().header().phase.is_active());
        let overlap = |others: &[Arc<Running>]| {
            others.iter().find_map(|other| {
                let other = other.rollout();
                let what = plan::overlap(rollout.members(), other.members())?;
                Some((other.header().name.clone(), what))
            })
        };
        let retired = self.retired()?;
        if let Some((other, what)) = overlap(&active) {
            return Err(PlanError::Overlap { other, what });
        }
        if let Some((other, what)) = overlap(&retired) {
            return Err(PlanError::Held { other, what });
        }
        let request = serde_json::json!({ "rollout": name, "digest": rollout.header().digest });
        let trace_id = rollout.header().trace_id.clone();
        let intent = self
            .authority
            .intend(principal, "Plan", &rule, &request, &trace_id);
        let intent = intent.await.map_err(PlanError::Audit)?;
        let (leadership, text) = (Arc::clone(self), text.to_owned());
        // If the client disconnects, what is stored must still be started.
        let kept = tokio::spawn(async move {
            let _planning = planning;
            leadership.keep(rollout, spec, &text).await
        });
        let kept = kept.await.unwrap_or(Err(PlanError::Deposed));
        finish(intent, &kept);
        kept
    }

    /// Stores a rollout and has it started.
    async fn keep(
        &self,
        mut rollout: Rollout,
        spec: Spec,
        text: &str,
    ) -> Result<Arc<Running>, PlanError> {
        let writes = storage::planned(&mut rollout, text)?;
        let writes = self.context.keys.signed(&rollout.header().run, writes);
        let (store, fence) = (self.context.store.as_ref(), &self.context.fence);
        // An earlier plan may have been stored although its last answer was lost. While its header
        // existed, the records of both would be taken for one rollout.
        let earlier = storage::header_deletion(&rollout.header().name);
        commit_all(store, fence, &[earlier]).await?;
        commit_all(store, fence, &writes).await?;
        let (reply, running) = oneshot::channel();
        let start = Start {
            rollout,
            spec,
            reply,
        };
        let sent = self.starts.send(start).await;
        sent.map_err(|_| PlanError::Deposed)?;
        running.await.map_err(|_| PlanError::Deposed)
    }
}

/// Returns the reason why a plan changes nothing, which is the reason of its first guest.
fn nothing(rollout: &Rollout) -> String {
    let first = rollout.members().first();
    match first.map(|member| (&member.guest, &member.state)) {
        Some((guest, State::Skipped { why })) => format!("{guest}: {why}"),
        _ if rollout.header().message.is_empty() => "no guest matches the selector".to_owned(),
        _ => rollout.header().message.clone(),
    }
}
