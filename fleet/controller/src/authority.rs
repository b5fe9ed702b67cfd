// SPDX-License-Identifier: Apache-2.0
//! Authorizes the commands of people, records them, and passes them on.
//!
//! ```text
//!  page, api ─▶ policy: role, guests, keys ─▶ approvals ─▶ caps ─▶ intent ─▶ runner ─▶ outcome
//!                                                                (audit log)         (audit log)
//! ```
//!
//! The policy that is in force when a command is given decides about it. All guests and keys of the
//! rollout count as one change. Guests that join a rollout later are decided one by one, by the
//! rights of the principal that started it.

use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;

use patchbay_access::audit::{Audit, Entry, Pending};
use patchbay_access::policy::{Decision, Demand, LivePolicy, Policy, Question, Role, Want};

use crate::rollout::{Member, NotLegal, Phase, Rollout, State, Terms, Verb};
use crate::runner::{Command, NoAnswer, NotDeleted, Running};
use crate::sight::Sight;

/// The prefix of the names of commands in the audit log.
const SERVICE: &str = "/patchbay.fleet.v1.RolloutService/";

const NO_PROMOTION: &str = "the policy demands approvals for keys of the rollout, and a promotion \
                            skips the bake time and the gates that were approved; wait for them, \
                            or give --break-glass";

const NO_LEAVING: &str = "the policy demands approvals for keys of the rollout, and its gates do not \
                          count guests that leave it; abort the rollout, or wait until it is \
                          completed";

const NO_LOG: &str = "--break-glass requires an audit log; start the controller with --audit-log \
                      FILE";

/// The policy about rollouts, and the log of the commands.
#[derive(Clone)]
pub struct Authority {
    policy: LivePolicy,
    audit: Option<Audit>,
}

/// The reason why a command is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// No rule of the policy allows the command. The reason may name guests.
    #[error("{0}")]
    Denied(String),
    /// Approvals are missing.
    #[error("{0}")]
    Unapproved(String),
    #[error(transparent)]
    NotLegal(#[from] NotLegal),
    #[error("the audit log cannot be written, so the command is not carried out: {0}")]
    Audit(String),
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
}

impl Authority {
    pub fn new(policy: LivePolicy, audit: Option<Audit>) -> Self {
        Self { policy, audit }
    }

    pub fn policy(&self) -> &LivePolicy {
        &self.policy
    }

    pub fn audit(&self) -> Option<&Audit> {
        self.audit.as_ref()
    }

    /// Returns an authority with another policy and the same log.
    pub fn with_policy(&self, policy: LivePolicy) -> Self {
        let audit = self.audit.clone();
        Self { policy, audit }
    }

    /// Gives the rollout a command of this principal, and waits until its effect is saved.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn give(
        &self,
        principal: &str,
        running: &Running,
        command: Command,
    ) -> Result<(), Refused> {
        let rule = self.decide(principal, &running.rollout(), &command);
        let rule = rule.inspect_err(|refused| {
            let name = running.rollout().header().name.clone();
            self.denied(principal, command.name(), &name, &refused.to_string());
        })?;
        self.pass_on(principal, &rule, running, command).await
    }

    /// Records a command that the policy allows, and passes it on.
    ///
    /// # Errors
    /// [`Refused`] for any reason but the policy.
    pub async fn pass_on(
        &self,
        principal: &str,
        rule: &str,
        running: &Running,
        command: Command,
    ) -> Result<(), Refused> {
        let (name, trace_id) = {
            let rollout = running.rollout();
            (
                rollout.header().name.clone(),
                rollout.header().trace_id.clone(),
            )
        };
        let mut request = serde_json::json!({ "rollout": name });
        if command.breaks_glass() {
            request["break_glass"] = true.into();
        }
        let intent = self.intend(principal, command.name(), rule, &request, &trace_id);
        let intent = match intent.await {
            Ok(intent) => intent,
            Err(refused) if command.advances() => return Err(refused),
            // It must be possible to undo a change while the disk is full.
            Err(refused) => {
                let command = command.name();
                tracing::error!(
                    principal,
                    command,
                    rollout = name,
                    "not recorded: {refused}"
                );
                None
            }
        };
        let told = match running.command(command, principal).await {
            Ok(told) => told.map_err(Refused::NotLegal),
            Err(lost) => Err(lost.into()),
        };
        finish(intent, &told);
        told
    }

    /// Deletes a rollout for this principal, and returns the file to which it was written.
    ///
    /// # Errors
    /// [`Refused`]. The inner error is the reason why the runner does not delete the rollout.
    pub async fn delete(
        &self,
        principal: &str,
        running: &Running,
    ) -> Result<Result<PathBuf, NotDeleted>, Refused> {
        let (name, rule) = {
            let rollout = running.rollout();
            let policy = self.policy.current();
            let decision = about(principal, &rollout, concerned(&rollout), |question, _| {
                policy.decide_without_caps(question)
            });
            (rollout.header().name.clone(), allowed(decision))
        };
        let rule = rule.map_err(|why| {
            self.denied(principal, "Delete", &name, &why);
            Refused::Denied(why)
        })?;
        let request = serde_json::json!({ "rollout": name });
        let intent = self
            .intend(principal, "Delete", &rule, &request, "")
            .await?;
        let deleted = running.delete(principal).await?;
        finish(intent, &deleted);
        Ok(deleted)
    }

    /// Awaits `deleting`, which deletes a rollout whose records cannot be read, for this principal,
    /// and returns the file to which the records were written. The guests and keys of such a
    /// rollout are not known.
    ///
    /// # Errors
    /// [`Refused`]. The inner error is the reason why the rollout is not deleted.
    pub async fn delete_unreadable(
        &self,
        principal: &str,
        rollout: &str,
        deleting: impl Future<Output = Result<PathBuf, NotDeleted>>,
    ) -> Result<Result<PathBuf, NotDeleted>, Refused> {
        let policy = self.policy.current();
        let rule = policy.unlimited_admin(principal).ok_or_else(|| {
            let why = "deleting a rollout that cannot be read requires the role admin for all \
                       guests and keys";
            self.denied(principal, "Delete", rollout, why);
            Refused::Denied(why.to_owned())
        })?;
        let request = serde_json::json!({ "rollout": rollout, "unreadable": true });
        let intent = self.intend(principal, "Delete", rule, &request, "").await?;
        let deleted = deleting.await;
        finish(intent, &deleted);
        Ok(deleted)
    }

    /// Checks that the principal may change anything at all.
    ///
    /// # Errors
    /// The policy's reason.
    pub fn may_operate(&self, principal: &str) -> Result<(), String> {
        let decision = self.policy.current().decide_without_caps(&Question {
            principal,
            role: Role::Operator,
            guests: &[],
            want: Want::Nothing,
        });
        allowed(decision).map(drop)
    }

    /// Checks that the principal may carry out the rollout that it plans, and returns the rule that
    /// allows it. Nothing is counted against a cap.
    ///
    /// # Errors
    /// The policy's reason.
    pub fn may_plan(&self, principal: &str, rollout: &Rollout) -> Result<String, String> {
        let policy = self.policy.current();
        let decide = |question: &Question<'_>, _: &[&str]| policy.decide(question);
        let rule = allowed(about(principal, rollout, concerned(rollout), decide));
        rule.map_err(|why| {
            self.denied(principal, "Plan", &rollout.header().name, &why);
            Sight::new(&policy, principal).hidden(rollout).shown(&why)
        })
    }

    /// Decides whether the principal may extend the rollout to a guest, and counts the guest
    /// against the caps. The approvals must also suffice for the keys of this guest.
    ///
    /// # Errors
    /// The policy's reason, or that approvals are missing.
    pub fn may_extend(
        &self,
        principal: &str,
        rollout: &Rollout,
        member: &Member,
    ) -> Result<(), String> {
        self.about_guest(principal, rollout, member, |policy, question, counted| {
            // The member may claim other keys than those for which the start was approved.
            check_approvals(policy, question, rollout)?;
            let charged = allowed(self.policy.charge(question, counted));
            charged.map(drop).map_err(Refused::Denied)
        })
    }

    /// Decides whether the principal may make the rollout accept the guest as it is.
    ///
    /// # Errors
    /// The policy's reason.
    pub fn may_adopt(
        &self,
        principal: &str,
        rollout: &Rollout,
        member: &Member,
    ) -> Result<(), String> {
        self.about_guest(principal, rollout, member, |policy, question, _| {
            check_leaving(policy, question, rollout)
        })
    }

    /// Decides whether the principal may change one guest of the rollout, and records a refusal.
    /// `ask` checks the further conditions.
    fn about_guest(
        &self,
        principal: &str,
        rollout: &Rollout,
        member: &Member,
        ask: impl FnOnce(&Policy, &Question<'_>, &[&str]) -> Result<(), Refused>,
    ) -> Result<(), String> {
        let policy = self.policy.current();
        let decided = about(principal, rollout, [member], |question, counted| {
            allowed(policy.decide_without_caps(question))?;
            ask(&policy, question, counted).map_err(|refused| refused.to_string())
        });
        decided.inspect_err(|why| {
            self.denied(principal, "Drift", &rollout.header().name, why);
        })
    }

    /// Decides about the command, counts it against the caps, and returns the rule that allows it.
    pub(crate) fn decide(
        &self,
        principal: &str,
        rollout: &Rollout,
        command: &Command,
    ) -> Result<String, Refused> {
        let policy = self.policy.current();
        about(
            principal,
            rollout,
            concerned(rollout),
            |question, counted| {
                let decision = match command.breaks_glass() {
                    true => policy.decide_break_glass(question),
                    false => policy.decide_without_caps(question),
                };
                let rule = allowed(decision).map_err(Refused::Denied)?;
                if command.breaks_glass() && self.audit.is_none() {
                    return Err(Refused::Unapproved(NO_LOG.to_owned()));
                }
                match command {
                    Command::Start { .. } => check_approvals(&policy, question, rollout)?,
                    Command::Promote => check_promotion(&policy, question)?,
                    Command::Forget { .. } => check_leaving(&policy, question, rollout)?,
                    _ => {}
                }
                if command.advances() {
                    let charged = self.policy.charge(question, counted);
                    allowed(charged).map_err(Refused::Denied)?;
                }
                Ok(rule)
            },
        )
    }

    /// Records a command that the policy does not allow.
    pub fn denied(&self, principal: &str, method: &str, rollout: &str, why: &str) {
        if let Some(audit) = &self.audit {
            let why = format!("rollout {rollout}: {why}");
            audit.denied(principal, "", &format!("{SERVICE}{method}"), "", &why);
        }
    }

    /// Records that a command is about to be carried out; `None` without a log.
    ///
    /// # Errors
    /// [`Refused::Audit`]. The command must not be carried out.
    pub async fn intend(
        &self,
        principal: &str,
        method: &str,
        rule: &str,
        request: &serde_json::Value,
        trace_id: &str,
    ) -> Result<Option<Pending>, Refused> {
        let Some(audit) = &self.audit else {
            return Ok(None);
        };
        let entry = Entry::Intent {
            principal: principal.to_owned(),
            person: String::new(),
            method: format!("{SERVICE}{method}"),
            guest: String::new(),
            rule: rule.to_owned(),
            request: request.to_string(),
            trace_id: trace_id.to_owned(),
        };
        let intent = audit.intend(entry).await;
        intent.map(Some).map_err(Refused::Audit)
    }
}

/// Records the outcome of a command.
pub fn finish<T, E: std::fmt::Display>(intent: Option<Pending>, outcome: &Result<T, E>) {
    match (intent, outcome) {
        (Some(intent), Ok(_)) => intent.finish("OK", ""),
        (Some(intent), Err(error)) => intent.finish("FAILED_PRECONDITION", &error.to_string()),
        (None, _) => {}
    }
}

/// Checks that the principal may see the guest, or anything at all if no guest is given.
pub fn may_view(policy: &Policy, principal: &str, guest: Option<&str>) -> Result<(), String> {
    let decision = policy.decide(&Question {
        principal,
        role: Role::Viewer,
        guests: guest.as_slice(),
        want: Want::Nothing,
    });
    allowed(decision).map(drop)
}

/// Returns whether the principal is an operator of all guests of the rollout.
pub fn operates(policy: &Policy, principal: &str, rollout: &Rollout) -> bool {
    let members = rollout.members().iter();
    let guests: Vec<&str> = members.map(|member| member.guest.as_str()).collect();
    let question = Question {
        principal,
        role: Role::Operator,
        guests: &guests,
        want: Want::Nothing,
    };
    policy.decide_without_caps(&question).is_allowed()
}

/// Returns the conditions that the policy imposes on the commands for the rollout.
pub fn terms(policy: &Policy, rollout: &Rollout) -> Terms {
    about("", rollout, concerned(rollout), |question, _| {
        let demand = demand(policy, question);
        let by = rollout.header().approvals.iter().map(String::as_str);
        Terms {
            needed: needed(&demand, rollout),
            approved: counted(policy, &demand, question, rollout, by).len(),
            may_promote: check_promotion(policy, question).is_ok(),
            may_forget: check_leaving(policy, question, rollout).is_ok(),
        }
    })
}

/// Returns whether the policy allows in this phase that the rollout accepts the member's guest as
/// it is.
pub fn may_accept(policy: &Policy, rollout: &Rollout, member: &Member) -> bool {
    about("", rollout, [member], |question, _| {
        check_leaving(policy, question, rollout).is_ok()
    })
}

/// Returns the number of approvals that the rollout needs if the policy has this demand.
fn needed(demand: &Demand, rollout: &Rollout) -> usize {
    demand.min.max(rollout.header().policy.approvals).max(1)
}

/// The decisions about the commands that a principal may give for a rollout.
pub struct Verdicts {
    advance: Result<(), String>,
    /// The decision about commands that stop or undo the rollout. Caps do not apply to them.
    stop: Result<(), String>,
    start: Result<(), String>,
    promote: Result<(), String>,
}

impl Verdicts {
    /// Decides without counting anything. Caps are compared with this rollout alone.
    pub fn new(policy: &Policy, principal: &str, rollout: &Rollout) -> Self {
        let text = |refused: Refused| refused.to_string();
        about(principal, rollout, concerned(rollout), |question, _| Self {
            advance: allowed(policy.decide(question)).map(drop),
            stop: allowed(policy.decide_without_caps(question)).map(drop),
            start: check_approvals(policy, question, rollout).map_err(text),
            promote: check_promotion(policy, question).map_err(text),
        })
    }

    /// Returns the decision about a command.
    pub fn of(&self, verb: Verb) -> Result<(), String> {
        match verb {
            Verb::Approve | Verb::Resume => self.advance.clone(),
            Verb::Start => self.advance.clone().and(self.start.clone()),
            Verb::Promote => self.advance.clone().and(self.promote.clone()),
            Verb::Pause | Verb::Abort | Verb::Undo => self.stop.clone(),
        }
    }
}

/// Checks that enough people approve the rollout, counting the principal of the question. Approvals
/// of principals that the policy no longer allows to change the rollout do not count.
fn check_approvals(
    policy: &Policy,
    question: &Question<'_>,
    rollout: &Rollout,
) -> Result<(), Refused> {
    let demand = demand(policy, question);
    let needed = needed(&demand, rollout);
    let people = rollout.header().approvals.iter().map(String::as_str);
    let people = people.chain([question.principal]);
    let given = counted(policy, &demand, question, rollout, people).len();
    if given >= needed {
        return Ok(());
    }
    let planner = match demand.planner_may_approve {
        true => "",
        false => "; the policy does not count the person who planned it",
    };
    Err(Refused::Unapproved(format!(
        "{given} of {needed} people who may change the rollout have approved the plan{planner}; \
         someone else must run `rollout approve` first"
    )))
}

/// Returns the people whose approval of the rollout counts if the policy has this demand.
fn counted<'a>(
    policy: &Policy,
    demand: &Demand,
    question: &Question<'_>,
    rollout: &Rollout,
    people: impl Iterator<Item = &'a str>,
) -> BTreeSet<&'a str> {
    let counts = |by: &&str| {
        let is_planner = *by == rollout.header().planned_by();
        let asked = Question {
            principal: by,
            ..question.clone()
        };
        (demand.planner_may_approve || !is_planner)
            && policy.decide_without_caps(&asked).is_allowed()
    };
    people.filter(counts).collect()
}

/// Checks that a promotion skips no gates whose approval the policy demands.
fn check_promotion(policy: &Policy, question: &Question<'_>) -> Result<(), Refused> {
    match demand(policy, question) == Demand::NONE {
        true => Ok(()),
        false => Err(Refused::Unapproved(NO_PROMOTION.to_owned())),
    }
}

/// Checks that no guest leaves a rollout while it is running or paused, if the policy demands
/// approvals for it. Gates count only guests that have not left, so this could open them.
fn check_leaving(
    policy: &Policy,
    question: &Question<'_>,
    rollout: &Rollout,
) -> Result<(), Refused> {
    match rollout.header().phase {
        Phase::Running(_) | Phase::Paused if demand(policy, question) != Demand::NONE => {
            Err(Refused::Unapproved(NO_LEAVING.to_owned()))
        }
        _ => Ok(()),
    }
}

fn demand(policy: &Policy, question: &Question<'_>) -> Demand {
    match question.want {
        Want::Keys(keys) => policy.demand(keys),
        Want::Nothing | Want::AnyKeys => Demand::NONE,
    }
}

/// Returns the role that a command for the rollout needs.
fn role(rollout: &Rollout) -> Role {
    match rollout.header().policy.allow_guarded {
        true => Role::Admin,
        false => Role::Operator,
    }
}

/// Returns the members that a command for the rollout concerns.
fn concerned(rollout: &Rollout) -> impl Iterator<Item = &Member> {
    let members = rollout.members().iter();
    members.filter(|member| !matches!(member.state, State::Skipped { .. }))
}

/// Calls `ask` with the policy question about a change of these members, and with the names of
/// their guests qualified by their hosts.
fn about<'m, T>(
    principal: &str,
    rollout: &Rollout,
    members: impl IntoIterator<Item = &'m Member>,
    ask: impl FnOnce(&Question<'_>, &[&str]) -> T,
) -> T {
    let (mut guests, mut counted) = (Vec::new(), Vec::new());
    // Guests with the same kernel have the same set.
    let (mut sets, mut keys) = (HashSet::new(), BTreeSet::new());
    for member in members {
        guests.push(member.guest.as_str());
        counted.push(format!("{}/{}", member.host, member.guest));
        let set = &member.plan.set;
        if sets.insert(set.digest()) {
            keys.extend(set.claims().iter().map(|claim| claim.key.as_str()));
        }
    }
    let counted: Vec<&str> = counted.iter().map(String::as_str).collect();
    let keys: Vec<&str> = keys.into_iter().collect();
    let question = Question {
        principal,
        role: role(rollout),
        guests: &guests,
        want: Want::Keys(&keys),
    };
    ask(&question, &counted)
}

/// Returns the rule that allows a call, or the policy's reason for its refusal.
fn allowed(decision: Decision) -> Result<String, String> {
    match decision {
        Decision::Allowed { rule, .. } => Ok(rule),
        Decision::Denied { why } => Err(why),
    }
}
