// SPDX-License-Identifier: Apache-2.0
//! Claims: the state that each owner wants for keys of the guest.
//!
//! An [`Owner`] is a principal and a name that the principal chose. Its set of claims is replaced
//! as a whole, under a generation. A generation below the highest one that was seen is refused,
//! even after the last claim has ended, so a message that arrives late has no effect.
//!
//! The claims on one key stand in the order in which their owners first wanted them. After another
//! boot of the guest, owners make their claims again, and not in this order:
//!
//! | claim | effect |
//! |---|---|
//! | ON | the newest ON or OFF decides; the key has at least one reference |
//! | OFF | the newest ON or OFF decides; the guest's own references are taken away until the OFF ends |
//! | HELD | one more reference of the owner, whichever claim decides |
//!
//! When a claim ends, the next one below it decides. When the last one ends, the key returns to the
//! state before the first one, unless the guest has changed the key since. Then the claims are
//! void: they decide nothing until their owners make them again.
//!
//! The key of a tracepoint is on or off: its holds share one reference, and the last of them to end
//! turns it off. An ON therefore takes a hold on such a key if clients hold the key, and the
//! guest's reference that this hold hides counts as taken away. An OFF parks the tracepoint
//! without consent.
//!
//! References that claims take are holds whose holder is [`Owner::holder`], so the rules for holds
//! apply to them: another principal can drop them only by force.
//!
//! Nothing in `owners`, `key` and `made` does I/O. The executor applies a [`Target`] to the guest.
//! `file` keeps claims and holds for as long as the guest's boot lasts, with a [`Mark`] beside it.

mod digest;
pub(in crate::keys) mod file;
mod key;
mod list;
mod made;
mod mark;
mod owners;
mod request;

use std::ops::Deref;
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

pub use self::digest::intent_digest;
pub use self::file::{CopiedHolds, LedgerError, LedgerFile, MoveError, Moved};
pub use self::key::{Claim, GuestHolds, KeyClaims, Seen, Target, Want};
pub(super) use self::list::look;
pub use self::list::{ClaimPage, ClaimQuery, ClaimView};
pub(in crate::keys) use self::made::{MadeRequest, MadeRequests};
pub use self::mark::Mark;
pub use self::owners::{Claims, Fence, Fenced, MAX_CLAIMS, MAX_OWNERS, OwnerState, TooMany};
pub use self::request::{ClaimsOutcome, ClaimsRequest, Content, content};

/// The longest name that an owner may choose, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// The maker of a set of claims. Each claim has its owner, so copies share the names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "OwnerNames")]
pub struct Owner(Arc<OwnerNames>);

/// The names of an [`Owner`].
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OwnerNames {
    /// The principal: "uid:N", or a name that the host's daemon asserts.
    pub principal: String,
    /// The name that the principal chose, such as "rollout/net-canary".
    pub name: String,
    /// See [`Owner::holder`].
    #[serde(skip)]
    holder: Arc<str>,
}

impl Owner {
    /// Creates an owner.
    #[must_use]
    pub fn new(principal: impl Into<String>, name: impl Into<String>) -> Self {
        let (principal, name) = (principal.into(), name.into());
        let holder = format!("{principal} \u{b7} {name}").into();
        Self(Arc::new(OwnerNames {
            principal,
            name,
            holder,
        }))
    }

    /// Returns the holder of the references that the owner's claims take. The holder differs from
    /// every principal, because the names of principals are ASCII.
    #[must_use]
    pub fn holder(&self) -> &Arc<str> {
        &self.0.holder
    }
}

/// An owner has the fields of its [`OwnerNames`].
impl Deref for Owner {
    type Target = OwnerNames;

    fn deref(&self) -> &OwnerNames {
        &self.0
    }
}

/// The holder is computed from the names and is not stored.
impl From<OwnerNames> for Owner {
    fn from(names: OwnerNames) -> Self {
        Self::new(names.principal, names.name)
    }
}

/// The state of a claim, or the answer to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The key is as the claim wants it.
    Made,
    /// The claim exists, but another claim or a hold decides.
    HeldByOthers,
    /// The claim was not made.
    Refused,
    /// The kernel has no such key.
    Missing,
    /// The guest has changed the key since, so the claim decides nothing.
    Void,
}

/// The answer about one key of a set of claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyAnswer {
    /// "name" or "module:name".
    pub key: String,
    /// The state that the owner wants; `None` if its claim on the key has ended.
    pub want: Option<Want>,
    /// The outcome.
    pub verdict: Verdict,
    /// Name in `patchbay.v1.ErrorReason`; empty unless refused.
    pub reason: String,
    /// For people; empty if there is nothing to say.
    pub message: String,
    /// `static_key_count()` before.
    pub count_before: i32,
    /// `static_key_count()` after.
    pub count_after: i32,
}

/// The answer to a set of claims. It is kept with its generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// One per key: first the keys that are claimed, then those whose claims have ended.
    pub keys: Vec<KeyAnswer>,
    /// SHA-256 of the plan, in hexadecimal; empty if nothing was to be changed.
    pub plan_digest: String,
}

/// An expiry in its saved form: wall-clock time, because monotonic times end with the process.
mod expiry {
    use std::time::{Instant, SystemTime};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    type Expiry = Option<(Instant, SystemTime)>;

    pub fn serialize<S: Serializer>(expires: &Expiry, to: S) -> Result<S::Ok, S::Error> {
        expires.map(|(_, at)| at).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Expiry, D::Error> {
        let at: Option<SystemTime> = Option::deserialize(from)?;
        Ok(at.map(|at| (super::instant_of(at), at)))
    }
}

/// A shared answer in its saved form.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Answer;

    pub fn serialize<S: Serializer>(
        answer: &Option<Arc<Answer>>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        answer.as_deref().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Arc<Answer>>, D::Error> {
        let answer: Option<Answer> = Option::deserialize(from)?;
        Ok(answer.map(Arc::new))
    }
}

/// Converts a wall-clock time to a monotonic one. A time that has passed becomes the current time.
fn instant_of(at: SystemTime) -> std::time::Instant {
    let left = at.duration_since(SystemTime::now()).unwrap_or_default();
    let now = std::time::Instant::now();
    now.checked_add(left).unwrap_or(now)
}

#[cfg(test)]
mod tests;
