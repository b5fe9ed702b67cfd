// SPDX-License-Identifier: Apache-2.0
//! Encodes records with the version of their form.
//!
//! A header, a set of keys and a member are JSON objects with the field `version`. A spec is the
//! text as it was given, after a line with the version. Records of version 1 have no version.
//!
//! A change of the form gets a new version here and a fixture beside this file, which
//! `storage/tests.rs` loads. Version 4 adds two reasons for which a guest is not yet as wanted.
//! Rollouts of versions 1 and 2 changed keys without claims. This program cannot continue them, and
//! reads only whether they are over.

use serde::{Deserialize, Serialize};

use crate::rollout::{
    Claim, Guarded, Health, KeySet, KeySets, Member, Millis, Phase, Plan, Record, State, Tracepoint,
};

/// The version that this program writes, and the latest that it reads.
pub const VERSION: u32 = 4;
/// The earliest version that this program reads.
const EARLIEST: u32 = 3;
/// The beginning of the first line of a spec.
const SPEC: &str = "# patchbay-spec version ";

/// The reason why a record cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    #[error(
        "has version {0}, and this program reads up to {VERSION}; start the program that wrote it"
    )]
    Newer(u32),
    #[error(
        "has version {0}, which does not use claims; undo the rollout with the program that wrote \
         it, and then delete it with `rollout delete NAME --unreadable`"
    )]
    Older(u32),
    #[error("is malformed: {0}")]
    Malformed(String),
    #[error("names the set of keys {0}, which is missing in the store")]
    Set(String),
}

#[derive(Serialize)]
struct Written<'r, T> {
    version: u32,
    #[serde(flatten)]
    record: &'r T,
}

#[derive(Deserialize)]
struct Version {
    #[serde(default = "first")]
    version: u32,
}

fn first() -> u32 {
    1
}

pub fn encode(record: &impl Serialize) -> Vec<u8> {
    let version = VERSION;
    // This fails only for maps whose keys are no texts, and for types that refuse to be encoded.
    serde_json::to_vec(&Written { version, record }).expect("records have neither")
}

/// Decodes a record of a version that this program reads.
///
/// # Errors
/// [`Unreadable`].
pub fn decode<'v, T: Deserialize<'v>>(value: &'v [u8]) -> Result<T, Unreadable> {
    let malformed = |error: serde_json::Error| Unreadable::Malformed(error.to_string());
    // The form of a newer version is not known, so that nothing else of it is read.
    let Version { version } = serde_json::from_slice(value).map_err(malformed)?;
    check(version)?;
    serde_json::from_slice(value).map_err(malformed)
}

/// The parts of a header that are read in any version.
#[derive(Deserialize)]
struct Beginning {
    name: String,
    phase: Phase,
}

/// Returns whether a header of any version says that the rollout is over.
pub fn is_over(header: &[u8], name: &str) -> bool {
    let beginning = serde_json::from_slice::<Beginning>(header).ok();
    beginning.is_some_and(|header| header.name == name && !header.phase.is_active())
}

/// A member as it is stored.
#[derive(Serialize, Deserialize)]
struct StoredMember {
    host: String,
    guest: String,
    domain: String,
    plan: Plan,
    /// The digest of the set of keys.
    set: String,
    health: Option<Health>,
    generation: u64,
    boot: String,
    is_confirmed: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    record: Option<Record>,
    expires: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pause_us: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    since: Option<Millis>,
    state: State,
}

/// A set of keys as it is stored.
#[derive(Serialize, Deserialize)]
struct StoredSet {
    claims: Vec<Claim>,
    tracepoints: Vec<Tracepoint>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    guarded: Vec<Guarded>,
}

pub fn encode_member(member: &Member) -> Vec<u8> {
    encode(&StoredMember {
        host: member.host.clone(),
        guest: member.guest.clone(),
        domain: member.domain.clone(),
        plan: member.plan.clone(),
        set: member.plan.set.digest().to_owned(),
        health: member.health.clone(),
        generation: member.generation,
        boot: member.boot.clone(),
        is_confirmed: member.is_confirmed,
        record: member.record.clone(),
        expires: member.expires,
        pause_us: member.pause_us,
        since: member.since,
        state: member.state.clone(),
    })
}

/// Decodes a member whose set of keys is one of `sets`.
///
/// # Errors
/// [`Unreadable`].
pub fn decode_member(value: &[u8], sets: &KeySets) -> Result<Member, Unreadable> {
    let member: StoredMember = decode(value)?;
    let set = sets.get(&member.set).ok_or(Unreadable::Set(member.set))?;
    Ok(Member {
        host: member.host,
        guest: member.guest,
        domain: member.domain,
        plan: Plan { set, ..member.plan },
        health: member.health,
        generation: member.generation,
        boot: member.boot,
        is_confirmed: member.is_confirmed,
        record: member.record,
        expires: member.expires,
        pause_us: member.pause_us,
        since: member.since,
        state: member.state,
    })
}

pub fn encode_set(set: &KeySet) -> Vec<u8> {
    encode(&StoredSet {
        claims: set.claims().to_vec(),
        tracepoints: set.tracepoints().to_vec(),
        guarded: set.guarded().to_vec(),
    })
}

/// Decodes the set of keys with this digest.
///
/// # Errors
/// [`Unreadable`].
pub fn decode_set(value: &[u8], digest: &str) -> Result<KeySet, Unreadable> {
    let set: StoredSet = decode(value)?;
    let set = KeySet::new(set.claims, set.tracepoints).with_guarded(set.guarded);
    match set.digest() == digest {
        true => Ok(set),
        false => Err(Unreadable::Malformed(format!(
            "its digest is {}",
            set.digest()
        ))),
    }
}

pub fn encode_spec(text: &str) -> Vec<u8> {
    format!("{SPEC}{VERSION}\n{text}").into_bytes()
}

/// Returns the text of a spec as it was given.
///
/// # Errors
/// [`Unreadable`].
pub fn decode_spec(value: &[u8]) -> Result<&str, Unreadable> {
    let malformed = |why: &dyn std::fmt::Display| Unreadable::Malformed(why.to_string());
    let text = std::str::from_utf8(value).map_err(|error| malformed(&error))?;
    let Some(versioned) = text.strip_prefix(SPEC) else {
        return Err(Unreadable::Older(first()));
    };
    let (version, text) = versioned.split_once('\n').unwrap_or((versioned, ""));
    let version = version.parse::<u32>().map_err(|error| malformed(&error))?;
    check(version)?;
    Ok(text)
}

fn check(version: u32) -> Result<(), Unreadable> {
    match version {
        ..EARLIEST => Err(Unreadable::Older(version)),
        EARLIEST..=VERSION => Ok(()),
        _ => Err(Unreadable::Newer(version)),
    }
}
