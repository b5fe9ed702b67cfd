// SPDX-License-Identifier: Apache-2.0
//! Compares the health of guests before and after a change. It is reported by their agents, or read
//! in the memory of guests without one.

use futures_util::StreamExt;
use patchbay_proto::v1;

use super::Obstacle;
use crate::hosts::{CallError, Host, Hosts};
use crate::plan::FAN_OUT;
use crate::rollout::{AgentLimits, Health, Member, bounded};
use crate::runner::no_host;

/// A changed guest, and its health before the change.
pub struct Observed {
    host: String,
    guest: String,
    before: Health,
}

/// Returns the changed members with their health before the change. A guest on which a claim has no
/// effect any more was changed all the same.
pub fn observed(members: &[Member]) -> Vec<Observed> {
    let observed = |member: &Member| {
        let before = member.health.clone()?;
        member.state.has_claims().then(|| Observed {
            host: member.host.clone(),
            guest: member.guest.clone(),
            before,
        })
    };
    members.iter().filter_map(observed).collect()
}

/// The health that a guest reports.
#[derive(Clone, Debug, Default, PartialEq)]
struct Report {
    boot_id: String,
    kernel_warnings: u64,
    /// The newest message of the kernel, if the source has one.
    last_message: String,
    /// Percent of the last 60 s, by resource.
    pressure: Vec<(String, f64)>,
}

/// The beginning of a boot id that does not come from an agent.
const MEMORY: &str = "memory ";

/// Returns the guest's present health, from its agent if one is connected, otherwise from the
/// guest's memory.
pub async fn observe(hosts: &Hosts, host: &str, guest: &str) -> Result<Health, String> {
    let host = hosts.get(host).ok_or_else(|| no_host(host))?;
    let agent = host.agent(guest).await?;
    let report = match agent.absent.is_empty() {
        true => Report::from(agent),
        false => from_memory(&host, guest)
            .await
            .map_err(|why| format!("{}; its memory does not tell either: {why}", agent.absent))?,
    };
    Ok(Health {
        boot_id: report.boot_id,
        kernel_warnings: report.kernel_warnings,
    })
}

/// Returns the present report of the source that reported the health `before`. The two sources do
/// not count the same.
async fn report(hosts: &Hosts, observed: &Observed) -> Result<Report, String> {
    let host = &observed.host;
    let host = hosts.get(host).ok_or_else(|| no_host(host))?;
    if observed.before.boot_id.starts_with(MEMORY) {
        let report = from_memory(&host, &observed.guest).await?;
        let kind = |boot_id: &str| boot_id.split(' ').nth(1).map(str::to_owned);
        return match kind(&report.boot_id) == kind(&observed.before.boot_id) {
            true => Ok(report),
            false => Err("its kernel's count of warnings was readable only once".to_owned()),
        };
    }
    let agent = host.agent(&observed.guest).await?;
    match agent.absent.is_empty() {
        true => Ok(Report::from(agent)),
        false => Err(agent.absent),
    }
}

async fn from_memory(host: &Host, guest: &str) -> Result<Report, String> {
    let state = host.kernel_state(guest).await?;
    let boot = host.boot(guest).await;
    let boot = boot.map_err(|status| CallError::new(&status).why)?;
    if boot.is_empty() {
        return Err("the boot of its kernel is not known".to_owned());
    }
    Ok(Report::of_memory(&boot, state))
}

impl Report {
    fn of_memory(boot: &str, state: v1::KernelState) -> Self {
        let (kind, kernel_warnings) = match state.warnings.zip(state.oopses) {
            Some((warnings, oopses)) => ("counted", warnings.saturating_add(oopses)),
            // A kernel that does not count its warnings has a taint from the first one on.
            None => {
                let taints = state.taints.unwrap_or(0) & REPORTED;
                ("taints", taints.count_ones().into())
            }
        };
        Self {
            boot_id: bounded(&format!("{MEMORY}{kind} {boot}")),
            kernel_warnings,
            last_message: state
                .last_warning
                .map_or_else(String::new, |message| bounded(&message.text)),
            pressure: averages(state.pressure),
        }
    }
}

fn averages(pressure: Vec<v1::Pressure>) -> Vec<(String, f64)> {
    let pressure = pressure.into_iter();
    pressure
        .map(|one| (one.resource, one.average_60s))
        .collect()
}

/// The taints of an oops (`TAINT_DIE`), a warning (`TAINT_WARN`) and a soft lockup
/// (`TAINT_SOFTLOCKUP`) in include/linux/panic.h.
const REPORTED: u64 = 1 << 7 | 1 << 9 | 1 << 14;

impl From<v1::DescribeAgentResponse> for Report {
    fn from(agent: v1::DescribeAgentResponse) -> Self {
        Self {
            boot_id: bounded(&agent.boot_id),
            kernel_warnings: agent.kernel_warnings,
            last_message: agent.warnings.last().cloned().unwrap_or_default(),
            pressure: averages(agent.pressure),
        }
    }
}

/// Checks that as many of these guests keep the limits as must.
pub async fn ask(
    limits: &AgentLimits,
    hosts: &Hosts,
    members: Vec<Observed>,
) -> Result<(), Obstacle> {
    let all = members.len();
    let found = futures_util::stream::iter(members)
        .map(|member| async move {
            let why = match report(hosts, &member).await {
                Ok(report) => Obstacle::Failed(unhealthy(limits, &member.before, &report)?),
                Err(why) => Obstacle::Inconclusive(why),
            };
            Some((member.guest, why))
        })
        .buffer_unordered(FAN_OUT)
        .filter_map(|found| async { found });
    let (mut ill, mut silent) = (Vec::new(), Vec::new());
    for (guest, obstacle) in found.collect::<Vec<_>>().await {
        match obstacle {
            Obstacle::Failed(why) => ill.push((guest, why)),
            Obstacle::Inconclusive(why) => silent.push((guest, why)),
        }
    }
    // The order must not depend on which guest answered first.
    ill.sort();
    silent.sort();
    let is_over = |count: usize| count * 100 > all * limits.unhealthy_percent as usize;
    let first = |guests: &[(String, String)]| match guests.first() {
        Some((guest, why)) => format!("the first is {guest}: {why}"),
        None => String::new(),
    };
    if is_over(ill.len()) {
        let (count, first) = (ill.len(), first(&ill));
        return Err(Obstacle::Failed(format!(
            "{count} of the wave's {all} changed guests are not healthy; {first}"
        )));
    }
    if is_over(ill.len() + silent.len()) {
        let (count, first) = (silent.len(), first(&silent));
        let why = format!("{count} of the wave's {all} changed guests do not report; {first}");
        return Err(why.into());
    }
    Ok(())
}

/// Returns the reason why the report breaks the limits; `None` if it keeps them.
fn unhealthy(limits: &AgentLimits, before: &Health, now: &Report) -> Option<String> {
    if now.boot_id != before.boot_id {
        return Some("it has booted since the wave began".to_owned());
    }
    // Fewer warnings than before mean that the agent was restarted, so all of its warnings may be
    // new.
    let new = now.kernel_warnings.checked_sub(before.kernel_warnings);
    let new = new.unwrap_or(now.kernel_warnings);
    if let Some(most) = limits.new_warnings.filter(|&most| new > most) {
        let mut why = format!("{new} kernel warnings since the wave began, more than {most}");
        match now.last_message.as_str() {
            "" => {}
            last => why.push_str(&format!("; its last message is {last:?}")),
        }
        return Some(why);
    }
    limits.pressure.iter().find_map(|(resource, &most)| {
        let name = format!("{resource} some");
        let mut reported = now.pressure.iter();
        match reported.find(|(reported, _)| *reported == name) {
            None => Some(format!(
                "it reports no pressure on {resource}; its kernel needs CONFIG_PSI"
            )),
            // NaN is not below the limit.
            Some((_, percent)) if *percent <= f64::from(most) => None,
            Some((_, percent)) => Some(format!(
                "some task waited for {resource} in {percent:.1} percent of the last 60 s, more than {most}"
            )),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::{Failure, State};

    fn report(boot_id: &str, kernel_warnings: u64) -> Report {
        Report {
            boot_id: boot_id.to_owned(),
            kernel_warnings,
            ..Report::default()
        }
    }

    #[test]
    fn memory_counts_warnings_and_oopses_and_otherwise_has_their_taints() {
        let state = v1::KernelState {
            taints: Some(1 << 9 | 1 << 12),
            ..v1::KernelState::default()
        };
        let of = |state| Report::of_memory("7f", state);
        assert_eq!(of(state.clone()).kernel_warnings, 1);
        let (warnings, oopses) = (Some(u64::MAX), Some(3));
        let counted = v1::KernelState {
            warnings,
            oopses,
            ..state
        };
        assert_eq!(of(counted.clone()).kernel_warnings, u64::MAX);
        assert_eq!(of(counted.clone()).boot_id, "memory counted 7f");
        assert_eq!(of(counted.clone()).last_message, "");
        let warned = v1::KernelState {
            last_warning: Some(v1::KernelMessage {
                text: "x".repeat(10_000),
                ..v1::KernelMessage::default()
            }),
            ..counted
        };
        assert!(of(warned).last_message.len() < 2000);
    }

    #[test]
    fn a_changed_guest_is_observed_also_if_a_claim_has_no_effect() {
        let member = |state| Member {
            state,
            health: Some(Health::default()),
            ..Member::new("host-0", "web-0")
        };
        let not_yet = |failure| State::NotYet {
            failure,
            why: String::new(),
        };
        let states = [
            State::AsWanted { pause_us: 1 },
            not_yet(Failure::Ineffective),
            not_yet(Failure::Refused),
            State::Pending,
        ];
        assert_eq!(observed(&states.map(member)).len(), 2);
    }

    #[test]
    fn warnings_are_counted_from_the_beginning_of_the_wave() {
        let before = Health {
            boot_id: "a".to_owned(),
            kernel_warnings: 3,
        };
        let limits = AgentLimits {
            new_warnings: Some(1),
            ..AgentLimits::default()
        };
        let why = |report| unhealthy(&limits, &before, &report);
        assert_eq!(why(report("a", 3)), None);
        assert_eq!(why(report("a", 4)), None);
        assert!(why(report("a", 5)).is_some_and(|why| why.starts_with("2 kernel warnings")));
        assert_eq!(why(report("a", 1)), None, "the kernel's buffer has wrapped");
        assert!(why(report("a", 2)).is_some_and(|why| why.starts_with("2 kernel warnings")));
        assert!(why(report("b", 0)).is_some_and(|why| why.contains("has booted")));
    }

    #[test]
    fn pressure_is_that_of_some_task_over_a_minute() {
        let limits = AgentLimits {
            pressure: [("memory".to_owned(), 10)].into(),
            ..AgentLimits::default()
        };
        let why = |resource: &str, average_60s| {
            let mut report = report("", 0);
            report.pressure = vec![(resource.to_owned(), average_60s)];
            unhealthy(&limits, &Health::default(), &report)
        };
        assert_eq!(why("memory some", 10.0), None);
        assert!(why("memory some", 10.1).is_some_and(|why| why.contains("10.1 percent")));
        assert!(why("memory some", f64::NAN).is_some());
        assert!(why("memory full", 0.0).is_some_and(|why| why.contains("CONFIG_PSI")));
    }
}
