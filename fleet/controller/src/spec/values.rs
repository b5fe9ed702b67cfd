// SPDX-License-Identifier: Apache-2.0
//! Defines values that are checked while they are read, so that an error has the value's position.

use std::fmt;
use std::marker::PhantomData;
use std::sync::OnceLock;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Error, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads `F` and converts it to `T` while the reader is still at the value's position. An error of
/// `#[serde(try_from)]` would have the position of the enclosing mapping.
struct Checked<F, T>(PhantomData<(F, T)>);

/// Deserializes a [`Checked`] value.
pub(super) fn checked<'de, D, F, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    F: Deserialize<'de>,
    T: TryFrom<F, Error: fmt::Display>,
{
    deserializer.deserialize_any(Checked::<F, T>(PhantomData))
}

impl<'de, F: Deserialize<'de>, T: TryFrom<F, Error: fmt::Display>> Checked<F, T> {
    fn check<D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        T::try_from(F::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl<'de, F: Deserialize<'de>, T: TryFrom<F, Error: fmt::Display>> Visitor<'de> for Checked<F, T> {
    type Value = T;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value")
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<T, E> {
        Self::check(value.into_deserializer())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
        Self::check(value.into_deserializer())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
        Self::check(value.into_deserializer())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<T, E> {
        Self::check(value.into_deserializer())
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        Self::check(MapAccessDeserializer::new(map))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<T, A::Error> {
        Self::check(SeqAccessDeserializer::new(items))
    }
}

macro_rules! checked_from {
    ($value:ty: $raw:ty) => {
        impl<'de> serde::Deserialize<'de> for $value {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::spec::values::checked::<D, $raw, Self>(deserializer)
            }
        }
    };
}
pub(super) use checked_from;

checked_from!(Percent: u32);
checked_from!(Count: u32);
checked_from!(Duration: DurationText);
checked_from!(Time: String);
checked_from!(Glob: String);
checked_from!(Size: SizeText);
checked_from!(HttpUrl: String);
checked_from!(Number: f64);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for NonEmpty<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        checked::<D, Vec<T>, Self>(deserializer)
    }
}

/// A list with at least one item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonEmpty<T>(pub Vec<T>);

impl<T> TryFrom<Vec<T>> for NonEmpty<T> {
    type Error = &'static str;

    fn try_from(items: Vec<T>) -> Result<Self, Self::Error> {
        if items.is_empty() {
            return Err("the list is empty; give at least one");
        }
        Ok(Self(items))
    }
}

/// A percentage, 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percent(pub u32);

impl TryFrom<u32> for Percent {
    type Error = String;

    fn try_from(value: u32) -> Result<Self, String> {
        match value {
            0..=100 => Ok(Self(value)),
            _ => Err(format!("{value} is no percentage; give 0 to 100")),
        }
    }
}

/// A count, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count(pub u32);

impl TryFrom<u32> for Count {
    type Error = &'static str;

    fn try_from(value: u32) -> Result<Self, Self::Error> {
        if value == 0 {
            return Err("0 would stop everything; give at least 1");
        }
        Ok(Self(value))
    }
}

/// A duration, such as "100us", "15ms", "30s", "10m", "2h" or "7d".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Duration(pub std::time::Duration);

impl Duration {
    pub fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }

    pub fn micros(self) -> u64 {
        u64::try_from(self.0.as_micros()).unwrap_or(u64::MAX)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum DurationText {
    Number(u64),
    Text(String),
}

impl TryFrom<DurationText> for Duration {
    type Error = String;

    fn try_from(given: DurationText) -> Result<Self, String> {
        const YEAR_US: u64 = 365 * 86_400_000_000;
        let text = match given {
            DurationText::Number(number) => {
                return Err(format!(
                    "{number} has no unit; write for example {number}s, {number}m or {number}h"
                ));
            }
            DurationText::Text(text) => text,
        };
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit: Option<u64> = match unit {
            "us" => Some(1),
            "ms" => Some(1_000),
            "s" => Some(1_000_000),
            "m" => Some(60_000_000),
            "h" => Some(3_600_000_000),
            "d" => Some(86_400_000_000),
            _ => None,
        };
        let micros = unit.and_then(|unit| number.parse::<u64>().ok()?.checked_mul(unit));
        match micros {
            Some(micros) if micros <= YEAR_US => Ok(Self(std::time::Duration::from_micros(micros))),
            _ => Err(format!(
                "{text:?} is no duration of at most 365d; write a number and us, ms, s, m, h or d"
            )),
        }
    }
}

/// A time in RFC 3339, such as "2026-12-24T00:00:00Z".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time(pub u64);

impl TryFrom<String> for Time {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let parsed = text.parse::<prost_types::Timestamp>().ok();
        let seconds = parsed.and_then(|time| u64::try_from(time.seconds).ok());
        match seconds {
            Some(seconds) => Ok(Self(seconds.saturating_mul(1000))),
            None => Err(format!(
                "{text:?} is no moment; write it as 2026-12-24T00:00:00Z"
            )),
        }
    }
}

/// The maximum length of a glob. A glob of this length can always be compiled, so a stored spec
/// cannot make a leader panic.
const MAX_GLOB_BYTES: usize = 1024;

/// A glob for names, which may contain `*`, `?` and sets such as `[a-z]`.
#[derive(Clone, Debug)]
pub struct Glob {
    glob: globset::Glob,
    /// Compiled at the first use, because a leader parses the specs of all rollouts and uses few.
    matcher: OnceLock<globset::GlobMatcher>,
}

impl Glob {
    pub fn matches(&self, name: &str) -> bool {
        let matcher = self.matcher.get_or_init(|| self.glob.compile_matcher());
        matcher.is_match(name)
    }
}

impl PartialEq for Glob {
    fn eq(&self, other: &Self) -> bool {
        self.glob == other.glob
    }
}

impl TryFrom<String> for Glob {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.len() > MAX_GLOB_BYTES {
            let bytes = text.len();
            return Err(format!(
                "a glob of {bytes} bytes is too long; give at most {MAX_GLOB_BYTES}"
            ));
        }
        match globset::Glob::new(&text) {
            Ok(glob) => Ok(Self {
                glob,
                matcher: OnceLock::new(),
            }),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// A URL, "http://HOST[:PORT][/PATH]".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpUrl(pub String);

impl TryFrom<String> for HttpUrl {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_http = text.parse::<http::Uri>().is_ok_and(|uri| {
            uri.scheme_str() == Some("http") && uri.host().is_some() && uri.query().is_none()
        });
        match is_http {
            true => Ok(Self(text)),
            false => Err(format!(
                "{text:?} is no URL of this form: http://HOST:PORT, with a path if need be"
            )),
        }
    }
}

/// A finite number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Number(pub f64);

impl TryFrom<f64> for Number {
    type Error = String;

    fn try_from(value: f64) -> Result<Self, String> {
        match value.is_finite() {
            true => Ok(Self(value)),
            false => Err(format!("{value} cannot be compared with; give a number")),
        }
    }
}

/// The size of a wave, which is a number of guests, a percentage of all guests, or the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    Count(u32),
    Percent(u32),
    Rest,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum SizeText {
    Number(u32),
    Text(String),
}

impl TryFrom<SizeText> for Size {
    type Error = String;

    fn try_from(given: SizeText) -> Result<Self, String> {
        let text = match given {
            SizeText::Number(count) if count > 0 => return Ok(Self::Count(count)),
            SizeText::Number(count) => count.to_string(),
            SizeText::Text(text) => text,
        };
        let percent = text
            .strip_suffix('%')
            .and_then(|number| number.parse().ok());
        match percent {
            Some(percent @ 1..=100) => Ok(Self::Percent(percent)),
            None if text == "rest" => Ok(Self::Rest),
            _ => Err(format!(
                "{text:?} is no size of a wave; write 5, 10% or rest"
            )),
        }
    }
}
