// SPDX-License-Identifier: Apache-2.0
//! Encodes records with the version of their form.
//!
//! A header, a set of keys and a member are JSON objects with the field `version`. A spec is the
//! text as it was given, after a line with the version. Records of version 1 have no version.
//!
//! A change of the form gets a new version here and a fixture beside this file, which
//! `storage/tests.rs` loads. This program then still reads the earlier versions.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::rollout::{Health, InverseOp, KeySet, KeySets, Member, PreparedPlan, State, Tracepoint};

/// The version that this program writes, and the latest that it reads.
pub const VERSION: u32 = 2;
/// The beginning of the first line of a spec.
const SPEC: &str = "# patchbay-spec version ";

/// The reason why a record cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    #[error(
        "has version {0}, and this program reads up to {VERSION}; start the program that wrote it"
    )]
    Newer(u32),
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

/// Decodes a record of any version.
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

/// A member as it is stored.
#[derive(Serialize, Deserialize)]
struct StoredMember {
    host: String,
    guest: String,
    domain: String,
    plan: StoredPlan,
    health: Option<Health>,
    state: State,
}

#[derive(Serialize, Deserialize)]
struct StoredPlan {
    #[serde(flatten)]
    plan: PreparedPlan,
    /// The digest of the set of keys. In version 1 the plan itself has the set.
    set: Option<String>,
    #[serde(default, skip_serializing)]
    tracepoints: Vec<Tracepoint>,
    #[serde(default, skip_serializing)]
    inverse: Vec<InverseOp>,
}

/// A set of keys as it is stored.
#[derive(Serialize, Deserialize)]
struct StoredSet {
    tracepoints: Vec<Tracepoint>,
    inverse: Vec<InverseOp>,
}

pub fn encode_member(member: &Member) -> Vec<u8> {
    let plan = &member.plan;
    encode(&StoredMember {
        host: member.host.clone(),
        guest: member.guest.clone(),
        domain: member.domain.clone(),
        plan: StoredPlan {
            plan: plan.clone(),
            set: Some(plan.set.digest().to_owned()),
            tracepoints: vec![],
            inverse: vec![],
        },
        health: member.health.clone(),
        state: member.state.clone(),
    })
}

/// Decodes a member whose set of keys is one of `sets`. A set that it has itself is added to them.
///
/// # Errors
/// [`Unreadable`].
pub fn decode_member(value: &[u8], sets: &mut KeySets) -> Result<Member, Unreadable> {
    let member: StoredMember = decode(value)?;
    let plan = member.plan;
    let set = match plan.set {
        Some(digest) => sets.get(&digest).ok_or(Unreadable::Set(digest))?,
        None => sets.shared(Arc::new(KeySet::new(plan.tracepoints, plan.inverse))),
    };
    Ok(Member {
        host: member.host,
        guest: member.guest,
        domain: member.domain,
        plan: PreparedPlan { set, ..plan.plan },
        health: member.health,
        state: member.state,
    })
}

pub fn encode_set(set: &KeySet) -> Vec<u8> {
    encode(&StoredSet {
        tracepoints: set.tracepoints().to_vec(),
        inverse: set.inverse().to_vec(),
    })
}

/// Decodes the set of keys with this digest.
///
/// # Errors
/// [`Unreadable`].
pub fn decode_set(value: &[u8], digest: &str) -> Result<KeySet, Unreadable> {
    let set: StoredSet = decode(value)?;
    let set = KeySet::new(set.tracepoints, set.inverse);
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
        return Ok(text);
    };
    let (version, text) = versioned.split_once('\n').unwrap_or((versioned, ""));
    let version = version.parse::<u32>().map_err(|error| malformed(&error))?;
    check(version)?;
    Ok(text)
}

fn check(version: u32) -> Result<(), Unreadable> {
    match version <= VERSION {
        true => Ok(()),
        false => Err(Unreadable::Newer(version)),
    }
}
