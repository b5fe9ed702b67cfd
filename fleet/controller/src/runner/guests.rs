// SPDX-License-Identifier: Apache-2.0
//! Commits and reverts the plan of one guest.

use patchbay_proto::v1;

use crate::hosts::{CallError, Host, Hosts, Verdict};
use crate::plan;
use crate::rollout::{CommitOutcome, Failure, Member, RevertOutcome};
use crate::spec::Spec;

pub(super) async fn commit(
    hosts: &Hosts,
    name: &str,
    spec: &Spec,
    member: &Member,
) -> CommitOutcome {
    let Some(host) = hosts.get(&member.host) else {
        return CommitOutcome::Failed {
            failure: Failure::Unknown,
            why: no_host(&member.host),
        };
    };
    let request = v1::CommitUpdateRequest {
        guest: member.guest.clone(),
        plan_id: member.plan.plan_id.clone(),
        digest: member.plan.digest.clone(),
        result_view: v1::ResultView::Summary.into(),
        ..v1::CommitUpdateRequest::default()
    };
    let mut answer = host.commit(request.clone()).await;
    if let Err(status) = &answer
        && CallError::new(status).is_plan_unknown
    {
        answer = match prepare_again(&host, name, spec, member).await {
            Ok(true) => host.commit(request).await,
            Ok(false) => answer,
            Err(status) => Err(status),
        };
    }
    match answer {
        Ok(answer) => CommitOutcome::Committed {
            pause_us: answer.report.as_ref().map_or(0, pause_us),
        },
        Err(status) => {
            let error = CallError::new(&status);
            let elsewhere = match error.is_guest_gone {
                true => hosts.elsewhere(&member.host, &member.guest),
                false => None,
            };
            let why = match elsewhere {
                Some(host) => format!(
                    "{}; host {host} has a guest of that name now: plan another rollout for it",
                    error.why
                ),
                None => error.why.clone(),
            };
            let failure = plan::commit_failure(&error);
            CommitOutcome::Failed { failure, why }
        }
    }
}

/// Repeats the request that prepared the member's plan, and returns whether the guest still has
/// that plan. A repeat changes nothing. If the guest has lost the plan, it prepares another one,
/// which is discarded.
async fn prepare_again(
    host: &Host,
    name: &str,
    spec: &Spec,
    member: &Member,
) -> Result<bool, tonic::Status> {
    let (plan, guest) = (&member.plan, &member.guest);
    let request = plan::request(name, &plan.request_id, spec, guest, plan.set.tracepoints());
    let again = host.prepare(request).await?;
    if again.plan_id == plan.plan_id {
        return Ok(true);
    }
    let request = v1::DiscardUpdateRequest {
        guest: guest.clone(),
        plan_id: again.plan_id,
    };
    // If this fails, the plan expires.
    let _ = host.discard(request).await;
    Ok(false)
}

pub(super) async fn revert(hosts: &Hosts, name: &str, id: &str, member: &Member) -> RevertOutcome {
    let Some(host) = hosts.get(&member.host) else {
        let (again, why) = (false, no_host(&member.host));
        return RevertOutcome::Failed { again, why };
    };
    let ops = member.plan.set.inverse();
    let all = plan::revert_request(name, &member.guest, ops, format!("{id}/all"));
    match host.update(all).await {
        Ok(_) => RevertOutcome::Reverted { void: false },
        Err(status) => match CallError::new(&status).verdict {
            Verdict::NotHolder | Verdict::WouldWarn => revert_each(&host, name, id, member).await,
            _ => revert_failed(CallError::new(&status)),
        },
    }
}

/// Reverts each op separately. The guest has dropped part of the change already, so it refuses the
/// inverse as a whole.
async fn revert_each(host: &Host, name: &str, id: &str, member: &Member) -> RevertOutcome {
    let mut void = true;
    for (index, op) in member.plan.set.inverse().iter().enumerate() {
        let one = std::slice::from_ref(op);
        let request = plan::revert_request(name, &member.guest, one, format!("{id}/{index}"));
        let Err(status) = host.update(request).await else {
            void = false;
            continue;
        };
        let error = CallError::new(&status);
        // DEC warns only at a count of 0, which means that the reference is gone. DISABLE warns
        // about the references of other holders.
        let is_dec = op.op == i32::from(v1::KeyOp::Dec);
        match error.verdict {
            Verdict::NotHolder => {}
            Verdict::WouldWarn if is_dec => {}
            _ => return revert_failed(error),
        }
    }
    RevertOutcome::Reverted { void }
}

fn revert_failed(error: CallError) -> RevertOutcome {
    let again = matches!(error.verdict, Verdict::Busy | Verdict::Unknown);
    let why = error.why;
    RevertOutcome::Failed { again, why }
}

pub fn no_host(name: &str) -> String {
    format!(
        "host {name} is neither registered nor configured; start its patchbayd, then resume or abort"
    )
}

/// Returns the time in microseconds for which all vCPUs were stopped.
fn pause_us(report: &v1::FlipReport) -> u64 {
    let times = [&report.stop_time, &report.patch_time, &report.resume_time];
    let micros = times.into_iter().flatten().map(|time| {
        let micros = time.seconds.saturating_mul(1_000_000) + i64::from(time.nanos / 1000);
        u64::try_from(micros).unwrap_or(0)
    });
    micros.sum()
}
