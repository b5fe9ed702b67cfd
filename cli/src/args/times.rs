// SPDX-License-Identifier: Apache-2.0
//! Parses times on the command line. The ranges equal those that the service accepts.

use std::any::TypeId;
use std::ops::RangeInclusive;
use std::time::Duration;

use clap::{Arg, Command};

const DAY: Duration = Duration::from_secs(24 * 3600);

const US: Duration = Duration::from_micros(1);
const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const YEAR: Duration = DAY.saturating_mul(365);

pub const ANY: RangeInclusive<Duration> = US..=YEAR;
/// The range for the time to live of holds and armed events.
pub const TTL: RangeInclusive<Duration> = MS..=YEAR;
pub const PLAN: RangeInclusive<Duration> = S..=DAY;
pub const PAUSE: RangeInclusive<Duration> = MS..=HOUR;
pub const STOP: RangeInclusive<Duration> = US..=Duration::from_secs(30);
pub const INTERVAL: RangeInclusive<Duration> = MS..=HOUR;

/// Formats a time so that [`parse_duration`] reads it.
fn spelt(time: Duration) -> String {
    let units = [
        (86_400_000_000, "d"),
        (3_600_000_000, "h"),
        (60_000_000, "m"),
    ];
    let small = [(1_000_000, "s"), (1_000, "ms"), (1, "us")];
    let micros = time.as_micros();
    let mut units = units.into_iter().chain(small);
    let unit = units.find(|(unit, _)| micros >= *unit && micros.is_multiple_of(*unit));
    unit.map_or_else(
        || format!("{time:?}"),
        |(unit, name)| format!("{}{name}", micros / unit),
    )
}

/// Returns a parser of times within a range.
pub fn time_in(
    range: RangeInclusive<Duration>,
) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    move |text| {
        let time = match text.strip_prefix('-').map(parse_duration) {
            // A time below every range.
            Some(Ok(_)) => Duration::ZERO,
            _ => parse_duration(text)?,
        };
        match range.contains(&time) {
            true => Ok(time),
            false => Err(format!(
                "it must be {} to {}",
                spelt(*range.start()),
                spelt(*range.end())
            )),
        }
    }
}

/// Lets the value of an option that takes a time begin with a hyphen. Otherwise a negative time is
/// taken for an unknown option, and the message names no range.
pub fn take_hyphens(option: Arg) -> Arg {
    let is_time = option.get_value_parser().type_id() == TypeId::of::<Duration>();
    match is_time && option.get_action().takes_values() {
        true => option.allow_hyphen_values(true),
        false => option,
    }
}

/// Applies [`take_hyphens`] to a subcommand and to all its subcommands.
pub fn take_hyphens_in(command: Command) -> Command {
    command
        .mut_args(take_hyphens)
        .mut_subcommands(take_hyphens_in)
}

/// Parses "500us", "10ms", "5s", "2m", "3h" or "1d".
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let help = || format!("{text:?} is not a time; write for example 500ms, 10s, 5m or 2h");
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(help)?;
    let (digits, unit) = text.split_at(unit_at);
    let value: u64 = digits.parse().map_err(|_| help())?;
    let micros = match unit {
        "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return Err(help()),
    };
    match value.checked_mul(micros).map(Duration::from_micros) {
        Some(Duration::ZERO) => Err("it must be more than 0".to_owned()),
        Some(time) if time <= *ANY.end() => Ok(time),
        _ => Err("it must be at most 365d".to_owned()),
    }
}
