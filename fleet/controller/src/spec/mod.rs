// SPDX-License-Identifier: Apache-2.0
//! Parses a rollout's spec in YAML. Every error has a line and a column. Unknown fields are
//! refused.

mod describe;
mod gates;
mod values;

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

pub use self::gates::GateSpec;
use self::values::checked_from;
pub use self::values::{Count, Duration, Glob, Percent, Size, Time};
use crate::rollout::{AfterReboot, Caps, Freeze, Policy, Want, WaveGateKind};

/// The maximum size of a spec in bytes. A larger one is refused without being read.
pub const MAX_BYTES: usize = 1 << 20;

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    #[serde(default)]
    pub title: String,
    pub selector: Selector,
    pub claims: values::NonEmpty<SpecClaim>,
    /// The field of earlier specs that `claims` replaces. It is refused with a hint.
    #[serde(default, deserialize_with = "replaced")]
    #[allow(dead_code, reason = "no spec with it is parsed")]
    ops: (),
    pub waves: values::NonEmpty<Wave>,
    /// A label of hosts. Each wave is spread evenly over the values of this label.
    pub spread_over: Option<String>,
    #[serde(default)]
    pub max_concurrent: MaxConcurrent,
    #[serde(default)]
    pub gates: Vec<GateSpec>,
    #[serde(default)]
    pub freeze: Vec<Window>,
    /// The time after which the guests end the claims.
    pub ttl: Option<Duration>,
    pub approvals: Option<Count>,
    /// The number of guests of each wave that must be as wanted before the next wave begins.
    pub min_success: Option<Count>,
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub late_guests: LateGuests,
    #[serde(default)]
    pub after_reboot: AfterReboot,
    /// Allows claims on guarded keys.
    #[serde(default)]
    pub allow_guarded: bool,
}

/// The error of a spec of the earlier form.
const REPLACED: &str = "`ops` is replaced by `claims`: write `want: on` instead of `op: enable` or `op: fire`, \
     `want: off` instead of `op: disable` or `op: park`, and `want: held` instead of `op: inc`; \
     nothing replaces `op: dec`";

/// The error of a spec that contains the command line of a gate.
const INLINE_COMMAND: &str = "gates: a spec must not contain the command line of a gate; write \
     `command: NAME`, and have an administrator of the controller write the command to NAME.yaml \
     in the folder of its option --gates";

fn replaced<'de, D: Deserializer<'de>>(_: D) -> Result<(), D::Error> {
    Err(serde::de::Error::custom(REPLACED))
}

/// Returns the number of the line in which a field of the spec begins, or 1.
fn line_of(text: &str, field: &str) -> usize {
    let line = text.lines().position(|line| line.starts_with(field));
    line.map_or(1, |index| index + 1)
}

/// The treatment of guests that the spec selects and that join after the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LateGuests {
    /// Late guests are reported as drift.
    #[default]
    Report,
    /// An additional wave changes them once the rollout is completed.
    Change,
}

checked_from!(Selector: SelectorFields);
checked_from!(SpecClaim: SpecClaimFields);
checked_from!(Window: WindowFields);

/// Selects guests that match all given fields. At least one field is given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selector {
    /// Labels of the host.
    pub labels: BTreeMap<String, String>,
    pub guests: Vec<Glob>,
    pub kernel_release: Option<Glob>,
    pub kernel_build_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SelectorFields {
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    guests: Vec<Glob>,
    kernel_release: Option<Glob>,
    kernel_build_id: Option<String>,
}

impl TryFrom<SelectorFields> for Selector {
    type Error = &'static str;

    fn try_from(fields: SelectorFields) -> Result<Self, Self::Error> {
        let SelectorFields {
            labels,
            guests,
            kernel_release,
            kernel_build_id,
        } = fields;
        let none = labels.is_empty()
            && guests.is_empty()
            && kernel_release.is_none()
            && kernel_build_id.is_none();
        if none {
            return Err(
                "an empty selector selects nothing; give labels, guests, kernel_release or \
                 kernel_build_id, or `guests: [\"*\"]` for all",
            );
        }
        Ok(Self {
            labels,
            guests,
            kernel_release,
            kernel_build_id,
        })
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct SpecClaim {
    pub want: Want,
    pub of: ClaimOf,
    /// Globs of "name" or "module:name" of keys, or "name" or "system:name" of tracepoints. A
    /// leading `!` excludes the names that the glob matches. There is at least one glob.
    pub patterns: Vec<String>,
}

/// The kind of names that a claim's patterns select.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOf {
    Keys,
    /// Each guest names the keys of its tracepoints.
    Tracepoints,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SpecClaimFields {
    want: Want,
    keys: Option<values::NonEmpty<String>>,
    tracepoints: Option<values::NonEmpty<String>>,
}

impl TryFrom<SpecClaimFields> for SpecClaim {
    type Error = &'static str;

    fn try_from(fields: SpecClaimFields) -> Result<Self, Self::Error> {
        let SpecClaimFields {
            want,
            keys,
            tracepoints,
        } = fields;
        let (of, patterns) = match (keys, tracepoints) {
            (Some(keys), None) => (ClaimOf::Keys, keys.0),
            (None, Some(tracepoints)) if want != Want::Held => {
                (ClaimOf::Tracepoints, tracepoints.0)
            }
            (None, Some(_)) => {
                return Err(
                    "the key of a tracepoint is not counted; write `want: on` or `want: off`",
                );
            }
            _ => return Err("a claim needs either `keys` or `tracepoints`"),
        };
        Ok(Self { want, of, patterns })
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wave {
    pub name: Option<String>,
    pub size: Size,
    #[serde(default)]
    pub bake: Duration,
}

impl Wave {
    /// Returns the name; the number of the wave if the spec gives none.
    pub fn name_at(&self, index: usize) -> String {
        let name = self.name.clone();
        name.unwrap_or_else(|| (index + 1).to_string())
    }
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaxConcurrent {
    pub count: Option<Count>,
    pub percent: Option<Percent>,
    pub per_domain: Option<PerDomain>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerDomain {
    /// The label of hosts that names the failure domain.
    pub label: String,
    pub count: Count,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Window(pub Freeze);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WindowFields {
    from: Time,
    until: Time,
    #[serde(default)]
    reason: String,
}

impl TryFrom<WindowFields> for Window {
    type Error = &'static str;

    fn try_from(fields: WindowFields) -> Result<Self, Self::Error> {
        if fields.from.0 >= fields.until.0 {
            return Err("a freeze must begin before it ends");
        }
        Ok(Self(Freeze {
            from: fields.from.0,
            until: fields.until.0,
            reason: fields.reason,
        }))
    }
}

/// The reason why a spec is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    #[error("the spec has {bytes} bytes, at most {MAX_BYTES} are read")]
    TooLarge { bytes: usize },
    #[error("line {line}, column {column}: {message}")]
    At {
        line: usize,
        column: usize,
        message: String,
    },
}

impl Spec {
    /// Parses a spec.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let spec = Self::parse_stored(text)?;
        let mut gates = spec.gates.iter();
        if gates.any(|gate| matches!(gate.0.kind, WaveGateKind::Command { .. })) {
            let first = line_of(text, "gates");
            let mut lines = text.lines().skip(first - 1);
            let line = lines.position(|line| line.contains("command"));
            return Err(SpecError::At {
                line: first + line.unwrap_or(0),
                column: 1,
                message: INLINE_COMMAND.to_owned(),
            });
        }
        Ok(spec)
    }

    /// Parses the spec of an existing rollout. Specs of earlier versions may contain the command
    /// lines of gates.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn parse_stored(text: &str) -> Result<Self, SpecError> {
        let bytes = text.len();
        if bytes > MAX_BYTES {
            return Err(SpecError::TooLarge { bytes });
        }
        let spec: Self = serde_yaml_ng::from_str(text).map_err(|error| {
            let place = error.location();
            let (line, column) = place.map_or((1, 1), |place| (place.line(), place.column()));
            let message = error.to_string();
            // The parser has no position for an error about a whole field.
            let (line, column) = match message.contains(REPLACED) {
                true => (line_of(text, "ops"), 1),
                false => (line, column),
            };
            // The message gives the position only once, at its beginning.
            let message = match message.rfind(" at line ") {
                Some(end) => message[..end].to_owned(),
                None => message,
            };
            // The value is a number or a word such as `yes`, which YAML reads as text only in
            // quotes.
            let message = match message.strip_suffix("expected a string") {
                Some(found) => format!("{found}expected text; put it in quotes"),
                None => message,
            };
            SpecError::At {
                line,
                column,
                message,
            }
        })?;
        spec.check(text)?;
        Ok(spec)
    }

    /// Checks conditions on several fields. An error has the position of the field that it names.
    fn check(&self, text: &str) -> Result<(), SpecError> {
        let at = |field: &str, message: &str| {
            let message = message.to_owned();
            SpecError::At {
                line: line_of(text, field),
                column: 1,
                message,
            }
        };
        let last = self.waves.0.len() - 1;
        let rest = self.waves.0.iter().position(|wave| wave.size == Size::Rest);
        if rest.is_some_and(|rest| rest != last) {
            let message = "waves: only the last wave can have the size `rest`";
            return Err(at("waves", message));
        }
        Ok(())
    }

    /// Returns the part of the spec that the machine follows.
    pub fn policy(&self) -> Policy {
        let max = &self.max_concurrent;
        Policy {
            caps: Caps {
                count: max.count.map(|count| count.0),
                percent: max.percent.map(|percent| percent.0),
                per_domain: max.per_domain.as_ref().map(|domain| domain.count.0),
            },
            gates: self.gates.iter().map(|gate| gate.0.clone()).collect(),
            freezes: self.freeze.iter().map(|window| window.0.clone()).collect(),
            approvals: self.approvals.map_or(1, |count| count.0 as usize),
            min_success: self.min_success.map_or(1, |count| count.0 as usize),
            after_reboot: self.after_reboot,
            allow_guarded: self.allow_guarded,
        }
    }
}

#[cfg(test)]
mod tests;
