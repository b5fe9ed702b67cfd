// SPDX-License-Identifier: Apache-2.0
//! Compares the health that agents of guests report before and after a change.

use futures_util::StreamExt;
use patchbay_proto::v1;

use super::Obstacle;
use crate::hosts::Hosts;
use crate::plan::FAN_OUT;
use crate::rollout::{AgentLimits, Health, Member, State, bounded};
use crate::runner::no_host;

/// A changed guest, and its health before the change.
pub struct Observed {
    host: String,
    guest: String,
    before: Health,
}

/// Returns the changed members with their health before the change.
pub fn observed(members: &[Member]) -> Vec<Observed> {
    let observed = |member: &Member| {
        let before = member.health.clone()?;
        matches!(member.state, State::AsWanted { .. }).then(|| Observed {
            host: member.host.clone(),
            guest: member.guest.clone(),
            before,
        })
    };
    members.iter().filter_map(observed).collect()
}

/// Returns the present report of the guest's agent.
pub async fn observe(hosts: &Hosts, host: &str, guest: &str) -> Result<Health, String> {
    let report = report(hosts, host, guest).await?;
    Ok(Health {
        boot_id: bounded(&report.boot_id),
        kernel_warnings: report.kernel_warnings,
    })
}

async fn report(
    hosts: &Hosts,
    host: &str,
    guest: &str,
) -> Result<v1::DescribeAgentResponse, String> {
    let host = hosts.get(host).ok_or_else(|| no_host(host))?;
    host.health(guest).await
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
            let why = match report(hosts, &member.host, &member.guest).await {
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
fn unhealthy(
    limits: &AgentLimits,
    before: &Health,
    now: &v1::DescribeAgentResponse,
) -> Option<String> {
    if bounded(&now.boot_id) != before.boot_id {
        return Some("it has booted since the wave began".to_owned());
    }
    // Fewer warnings than before mean that the agent was restarted, so all of its warnings may be
    // new.
    let new = now.kernel_warnings.checked_sub(before.kernel_warnings);
    let new = new.unwrap_or(now.kernel_warnings);
    if let Some(most) = limits.new_warnings.filter(|&most| new > most) {
        let last = now.warnings.last().map_or("", String::as_str);
        return Some(format!(
            "{new} kernel warnings since the wave began, more than {most}; its last message is {last:?}"
        ));
    }
    limits.pressure.iter().find_map(|(resource, &most)| {
        let name = format!("{resource} some");
        let mut reported = now.pressure.iter();
        match reported.find(|pressure| pressure.resource == name) {
            None => Some(format!(
                "it reports no pressure on {resource}; its kernel needs CONFIG_PSI"
            )),
            // NaN is not below the limit.
            Some(pressure) if pressure.average_60s <= f64::from(most) => None,
            Some(pressure) => Some(format!(
                "some task waited for {resource} in {:.1} percent of the last 60 s, more than {most}",
                pressure.average_60s
            )),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(boot_id: &str, kernel_warnings: u64) -> v1::DescribeAgentResponse {
        v1::DescribeAgentResponse {
            boot_id: boot_id.to_owned(),
            kernel_warnings,
            ..v1::DescribeAgentResponse::default()
        }
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
            let pressure = v1::Pressure {
                resource: resource.to_owned(),
                average_10s: 100.0,
                average_60s,
            };
            let mut report = report("", 0);
            report.pressure = vec![pressure];
            unhealthy(&limits, &Health::default(), &report)
        };
        assert_eq!(why("memory some", 10.0), None);
        assert!(why("memory some", 10.1).is_some_and(|why| why.contains("10.1 percent")));
        assert!(why("memory some", f64::NAN).is_some());
        assert!(why("memory full", 0.0).is_some_and(|why| why.contains("CONFIG_PSI")));
    }
}
