// SPDX-License-Identifier: Apache-2.0
//! Identifies callers and decides what they may do.
//!
//! A *principal* is the name of a caller. It has a *role* on each guest, and each method requires a
//! role. An [`Authoriser`] holds the policy; the API asks it before a call has any effect.

use std::fmt;

pub use patchbay_proto::methods::{Role, UnknownRole};

const MAX_PRINCIPAL_BYTES: usize = 256;
/// The principal that ends holds and claims, for example at their expiry.
pub(crate) const MONITOR: &str = "monitor";
/// The principal that keeps events firing for other users in the guest.
pub(crate) const OTHERS: &str = "others in the guest";
/// The client that keeps the events of the guest's command line armed.
pub(crate) const COMMAND_LINE: &str = "--trace-events";
/// Principals of the changes that the service makes without a call.
const RESERVED: [&str; 3] = [MONITOR, OTHERS, COMMAND_LINE];

/// The name of a caller: "uid:1000" for a peer on a unix socket, or a name that a trusted proxy
/// asserts. Printable ASCII, 1 to 256 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Principal(String);

/// The reason why a name is not valid for a principal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPrincipal {
    /// The name is empty or too long.
    #[error("has {0} bytes; give 1 to {MAX_PRINCIPAL_BYTES}")]
    Length(usize),
    /// The name contains bytes outside printable ASCII.
    #[error("has bytes other than printable ASCII; leave them out")]
    NotPrintable,
    /// The name is reserved for the service.
    #[error("is a name of the service itself (\"{}\"); give another name", RESERVED.join("\", \""))]
    Reserved,
}

impl Principal {
    /// Validates a name that a proxy asserts.
    ///
    /// # Errors
    /// [`BadPrincipal`].
    pub fn asserted(name: &[u8]) -> Result<Self, BadPrincipal> {
        if name.is_empty() || name.len() > MAX_PRINCIPAL_BYTES {
            return Err(BadPrincipal::Length(name.len()));
        }
        if !name.iter().all(|byte| matches!(byte, b' '..=b'~')) {
            return Err(BadPrincipal::NotPrintable);
        }
        let name = String::from_utf8_lossy(name);
        if RESERVED.contains(&&*name) {
            return Err(BadPrincipal::Reserved);
        }
        Ok(Self(name.into_owned()))
    }

    /// Returns the principal of a peer on a unix socket. `uid` is `None` if the kernel does not
    /// report the peer's uid.
    #[must_use]
    pub fn peer(uid: Option<u32>) -> Self {
        Self(match uid {
            Some(uid) => format!("uid:{uid}"),
            None => "unknown".to_owned(),
        })
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Principal> for String {
    fn from(principal: Principal) -> Self {
        principal.0
    }
}

/// The policy refuses the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied {
    /// The principal's role on the guest; `None` if it has none.
    pub found: Option<Role>,
}

/// A policy: which principal may call which method on which guest.
pub trait Authoriser: Send + Sync {
    /// Decides about one call. `needed` is the role that the method needs with the fields of this
    /// request. `method` is its ":path" ("/patchbay.v1.GuestService/PauseGuest"). `guest` is the
    /// name of a guest that the endpoint serves. This runs on the async runtime for each call, so
    /// it must not block.
    ///
    /// # Errors
    /// [`Denied`] refuses the call with ROLE_MISSING.
    fn may(
        &self,
        principal: &Principal,
        needed: Role,
        method: &str,
        guest: &str,
    ) -> Result<(), Denied>;
}

/// The policy of a plain unix socket: every caller that can open it is an admin.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketAuthoriser;

impl Authoriser for SocketAuthoriser {
    fn may(&self, _: &Principal, _: Role, _: &str, _: &str) -> Result<(), Denied> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asserted_names_are_checked() {
        for good in ["a", "uid:0", "spiffe://host/sa/web 1", &"x".repeat(256)] {
            let principal = Principal::asserted(good.as_bytes()).expect(good);
            assert_eq!(principal.as_str(), good);
        }
        let bad = [
            (&b""[..], BadPrincipal::Length(0)),
            (&[b'x'; 257], BadPrincipal::Length(257)),
            (b"a\nb", BadPrincipal::NotPrintable),
            (b"\x7f", BadPrincipal::NotPrintable),
            ("né".as_bytes(), BadPrincipal::NotPrintable),
            (b"monitor", BadPrincipal::Reserved),
            (b"others in the guest", BadPrincipal::Reserved),
            (b"--trace-events", BadPrincipal::Reserved),
        ];
        for (name, why) in bad {
            assert_eq!(Principal::asserted(name), Err(why));
        }
    }

    #[test]
    fn roles_are_ordered_and_read_back() {
        assert!(Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
        for role in [Role::Viewer, Role::Operator, Role::Admin] {
            assert_eq!(role.as_str().parse(), Ok(role));
        }
        for bad in ["", "Admin", "root"] {
            bad.parse::<Role>().expect_err(bad);
        }
    }
}
