// SPDX-License-Identifier: Apache-2.0
//! Describes gates and durations in words.

use std::fmt;

use super::policy::{ErrorsOf, WaveGate, WaveGateKind};
use super::state::Millis;

/// Formats a duration as "2h 5m", "10m" or "45s", rounded up to seconds.
pub fn lasting(time: Millis) -> String {
    let seconds = time.div_ceil(1000);
    let units = [
        (seconds / 86_400, "d"),
        (seconds / 3600 % 24, "h"),
        (seconds / 60 % 60, "m"),
        (seconds % 60, "s"),
    ];
    let used = units.into_iter().skip_while(|(count, _)| *count == 0);
    // Two units are precise enough.
    let used = used.take(2).filter(|(count, _)| *count > 0);
    let parts: Vec<String> = used.map(|(count, unit)| format!("{count}{unit}")).collect();
    match parts.is_empty() {
        true => "0s".to_owned(),
        false => parts.join(" "),
    }
}

impl fmt::Display for WaveGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            WaveGateKind::Errors { max_percent, of } => {
                let of = match of {
                    ErrorsOf::Wave => "the wave's guests",
                    ErrorsOf::Rollout => "the rollout's guests",
                };
                write!(f, "max_errors {max_percent}% of {of}")
            }
            WaveGateKind::PauseP99 { budget_us } => write!(f, "pause_p99 {budget_us}us"),
            WaveGateKind::Command { argv, .. } => write!(f, "command {}", argv.join(" ")),
            WaveGateKind::NamedCommand { name, .. } => write!(f, "command {name}"),
            WaveGateKind::AgentHealth { limits, .. } => {
                write!(f, "agent_health")?;
                if let Some(most) = limits.new_warnings {
                    write!(f, " max_new_warnings {most}")?;
                }
                for (resource, most) in &limits.pressure {
                    write!(f, " max_pressure {resource} {most}%")?;
                }
                write!(f, " max_unhealthy {}%", limits.unhealthy_percent)
            }
            WaveGateKind::Grpc { url, service, .. } if service.is_empty() => {
                write!(f, "grpc {url}")
            }
            WaveGateKind::Grpc { url, service, .. } => write!(f, "grpc {service} at {url}"),
            WaveGateKind::Prometheus {
                query,
                above,
                below,
                ..
            } => {
                write!(f, "prometheus {query}")?;
                above.map_or(Ok(()), |bound| write!(f, " above {bound}"))?;
                below.map_or(Ok(()), |bound| write!(f, " below {bound}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_at_most_two_units() {
        for (time, text) in [
            (0, "0s"),
            (1, "1s"),
            (45_000, "45s"),
            (600_000, "10m"),
            (3_661_000, "1h 1m"),
            (3_601_000, "1h"),
            (7 * 86_400_000, "7d"),
            (u64::MAX, "213503982334d 14h"),
        ] {
            assert_eq!(lasting(time), text, "{time}");
        }
    }
}
