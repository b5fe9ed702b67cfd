// SPDX-License-Identifier: Apache-2.0
//! The methods of `patchbay.v1`: the role that each needs, and what it changes. The facts are
//! options in the .proto files (`patchbay/options/v1/options.proto`). A method without them fails
//! the build.

use std::fmt;
use std::str::FromStr;

use crate::v1;

/// Characters of an unknown role that its error shows.
const MAX_SHOWN: usize = 64;

/// A set of permissions. Each role includes the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// May read.
    Viewer,
    /// May change what the principal owns, in ways that can be undone.
    Operator,
    /// May do everything.
    Admin,
}

impl Role {
    /// Spelling in policies, metadata and messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Unknown role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown role {0:?}; give viewer, operator or admin")]
pub struct UnknownRole(String);

impl FromStr for Role {
    type Err = UnknownRole;

    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        [Self::Viewer, Self::Operator, Self::Admin]
            .into_iter()
            .find(|role| role.as_str() == text)
            .ok_or_else(|| UnknownRole(text.chars().take(MAX_SHOWN).collect()))
    }
}

/// The effect of a method, which determines the checks of the policy and the content of the audit
/// log. options.proto describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "options.proto describes each")]
pub enum Effect {
    Read,
    Guest,
    Update,
    Prepare,
    Commit,
    Discard,
    Holds,
    Repair,
    Arm,
    Armed,
    Stream,
    Claims,
    Records,
}

/// The facts about a method.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    /// Name of the service, without the package.
    pub service: &'static str,
    /// Name within the service.
    pub name: &'static str,
    /// The HTTP/2 ":path".
    pub path: &'static str,
    /// The role that every call needs.
    pub role: Role,
    /// The kind of change that the method makes.
    pub effect: Effect,
    /// The method answers with a stream, which may be endless.
    pub streams: bool,
    /// Numbers of boolean request fields that need a role of their own when set.
    pub raised: &'static [(u32, Role)],
}

impl Method {
    /// Returns the method of an HTTP/2 ":path".
    #[must_use]
    pub fn of_path(path: &str) -> Option<&'static Self> {
        METHODS.iter().find(|method| method.path == path)
    }
}

/// The first message of a call. Each method has its own request type, so the type identifies the
/// method.
pub trait Call {
    /// The facts about the method.
    const METHOD: Method;

    /// Returns the name of the guest; empty if the request has none.
    fn guest(&self) -> &str;

    /// Returns the values of the fields in [`Method::raised`].
    fn sets(&self) -> Vec<bool>;

    /// Returns the role that the method needs with these field values.
    fn role(&self) -> Role {
        let fields = self.sets().into_iter().zip(Self::METHOD.raised);
        let raised = fields.filter_map(|(set, (_, role))| set.then_some(*role));
        raised.fold(Self::METHOD.role, Role::max)
    }
}

include!(concat!(env!("OUT_DIR"), "/methods.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_that_needs_more_than_a_viewer_changes_something() {
        for method in METHODS {
            let reads = matches!(
                method.effect,
                Effect::Read | Effect::Records | Effect::Stream
            );
            assert_eq!(reads, method.role == Role::Viewer, "{}", method.name);
        }
    }

    #[test]
    fn only_exact_paths_are_methods() {
        for method in METHODS {
            let found = Method::of_path(method.path).expect("in the table");
            assert_eq!(found.name, method.name);
        }
        for path in [
            "/patchbay.v1.GuestService/",
            "/patchbay.v1.GuestService/listguests",
            "/patchbay.v1.GuestService/UpdateStaticKeys",
            "/patchbay.v2.GuestService/ListGuests",
            "//patchbay.v1.GuestService/ListGuests",
        ] {
            assert!(Method::of_path(path).is_none(), "{path}");
        }
    }

    #[test]
    fn fields_raise_the_role() {
        let mut update = v1::UpdateStaticKeysRequest::default();
        assert_eq!(update.role(), Role::Operator);
        update.allow_guarded = true;
        assert_eq!(update.role(), Role::Admin);
        let stream = v1::StreamTracepointEventsRequest {
            arm_and_fire: true,
            ..Default::default()
        };
        assert_eq!(stream.role(), Role::Operator);
        assert_eq!(
            v1::StreamTracepointEventsRequest::default().role(),
            Role::Viewer
        );
    }
}
