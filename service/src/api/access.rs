// SPDX-License-Identifier: Apache-2.0
//! Admits calls: identifies the caller, finds the guest, and checks the role.
//!
//! Methods obtain a guest only through [`Access`], so no method can skip these checks.

use std::sync::Arc;

use patchbay_proto::methods::Call;
use patchbay_proto::scope::{MAX_SCOPE_BYTES, SCOPE_METADATA, SCOPED, SCOPED_BY_PERSON, Scope};
use patchbay_proto::{PERSON_METADATA, PRINCIPAL_METADATA, ROLE_METADATA};
use prost::Message;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};
use tonic_types::ErrorDetails;

use super::guests::{Guests, ServedGuest};
use super::limits::Peer;
use super::status::{Metadata, status};
use crate::auth::{Authoriser, Denied, Principal, Role};
use crate::keys::{Caller, KeyScope};

/// Maximum number of names that an error lists.
const MAX_LISTED: usize = 10;

/// The reason why a call is rejected before it reaches its method.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AccessError {
    #[error(
        "{principal} may not call {method} on guest {guest:?}: it needs the role {needed}, found {}; ask an admin for that role",
        found.map_or("none", Role::as_str)
    )]
    RoleMissing {
        principal: Principal,
        method: &'static str,
        guest: String,
        needed: Role,
        found: Option<Role>,
    },
    #[error(
        "{peer} may not act for another principal: only the user that the service runs as may send {key}; leave it out"
    )]
    PrincipalNotTrusted { peer: Principal, key: &'static str },
    #[error("metadata {key} {message}")]
    BadMetadata { key: &'static str, message: String },
    #[error("no guest {name:?} is served here; {}", listed(.served))]
    GuestNotFound { name: String, served: Vec<String> },
    #[error("the request names no guest, and several are served here; {}", listed(.served))]
    GuestNotNamed { served: Vec<String> },
}

fn listed(served: &[String]) -> String {
    match served.split_at_checked(MAX_LISTED) {
        _ if served.is_empty() => "there is none that you may see".to_owned(),
        Some((shown, more)) if !more.is_empty() => {
            format!("give one of {} and {} more", shown.join(", "), more.len())
        }
        _ => format!("give one of {}", served.join(", ")),
    }
}

/// The principal and role of a call.
struct Identified {
    principal: Principal,
    /// The person for whom the principal makes the call.
    person: Option<Principal>,
    /// The keys that the call may change; `None` for all.
    scope: Option<Arc<KeyScope>>,
    /// The role to which the caller limits the call.
    limit: Role,
}

/// Checks callers and finds the guest of a request.
#[derive(Clone)]
pub struct Access {
    guests: Guests,
    authoriser: Arc<dyn Authoriser>,
    /// The uid that may assert principals.
    owner: u32,
}

impl Access {
    /// Creates the access check. `owner` is the uid that the service runs as.
    pub fn new(guests: Guests, authoriser: Arc<dyn Authoriser>, owner: u32) -> Self {
        Self {
            guests,
            authoriser,
            owner,
        }
    }

    /// Checks the caller and returns it with the request's guest.
    pub(super) fn admit<T: Call>(
        &self,
        request: Request<T>,
    ) -> Result<(Arc<ServedGuest>, Caller, Request<T>), AccessError> {
        let caller = self.caller(&request)?;
        let guest = self.authorise(&caller, request.get_ref())?;
        let Identified {
            principal,
            person,
            scope,
            ..
        } = caller;
        let caller = Caller {
            name: principal.into(),
            person: person.map(|person| person.as_str().into()),
            scope,
        };
        Ok((guest, caller, request))
    }

    /// Does the same as [`Self::admit`] for a stream of requests. Identifies the caller
    /// immediately, and finds the guest and checks the role when the first message arrives.
    pub(super) fn admit_stream<T, M: Call>(
        &self,
        request: &Request<T>,
    ) -> Result<impl FnOnce(&M) -> Result<Arc<ServedGuest>, AccessError> + use<T, M>, AccessError>
    {
        let caller = self.caller(request)?;
        let access = self.clone();
        Ok(move |first: &M| access.authorise(&caller, first))
    }

    /// Returns the guests on which the caller may call the method, ordered by name.
    pub(super) fn admit_to_all<T: Call>(
        &self,
        request: Request<T>,
    ) -> Result<(Vec<Arc<ServedGuest>>, T), AccessError> {
        let caller = self.caller(&request)?;
        let request = request.into_inner();
        Ok((
            self.visible(&caller, T::METHOD.path, request.role()),
            request,
        ))
    }

    fn authorise<T: Call>(
        &self,
        caller: &Identified,
        request: &T,
    ) -> Result<Arc<ServedGuest>, AccessError> {
        let (method, needed) = (T::METHOD.path, request.role());
        let Some(guest) = self.guests.find(request.guest()) else {
            let visible = self.visible(caller, method, Role::Viewer);
            let served: Vec<_> = visible
                .iter()
                .map(|guest| guest.name().to_owned())
                .collect();
            return Err(match request.guest() {
                "" if !self.guests.all().is_empty() => AccessError::GuestNotNamed { served },
                name => AccessError::GuestNotFound {
                    name: name.chars().take(256).collect(),
                    served,
                },
            });
        };
        match self.may(caller, needed, method, guest.name()) {
            Ok(()) => Ok(guest),
            Err(Denied { found }) => Err(AccessError::RoleMissing {
                principal: caller.principal.clone(),
                method,
                guest: guest.name().to_owned(),
                needed,
                found,
            }),
        }
    }

    fn may(
        &self,
        caller: &Identified,
        needed: Role,
        method: &str,
        guest: &str,
    ) -> Result<(), Denied> {
        if caller.limit < needed {
            let found = Some(caller.limit);
            return Err(Denied { found });
        }
        self.authoriser
            .may(&caller.principal, needed, method, guest)
    }

    fn visible(&self, caller: &Identified, method: &str, needed: Role) -> Vec<Arc<ServedGuest>> {
        let mut guests = self.guests.all();
        guests.retain(|guest| self.may(caller, needed, method, guest.name()).is_ok());
        guests
    }

    fn caller<T>(&self, request: &Request<T>) -> Result<Identified, AccessError> {
        let peer = request.extensions().get::<Peer>().and_then(|peer| peer.uid);
        let asserted = |key| match metadata(request.metadata(), key) {
            Ok(Some(_)) if peer != Some(self.owner) => Err(AccessError::PrincipalNotTrusted {
                peer: Principal::peer(peer),
                key,
            }),
            found => found,
        };
        let bad = |key, message| AccessError::BadMetadata { key, message };
        let principal = match asserted(PRINCIPAL_METADATA)? {
            None => Principal::peer(peer),
            Some(name) => Principal::asserted(name)
                .map_err(|error| bad(PRINCIPAL_METADATA, error.to_string()))?,
        };
        let person = asserted(PERSON_METADATA)?
            .map(Principal::asserted)
            .transpose();
        let person = person.map_err(|error| bad(PERSON_METADATA, error.to_string()))?;
        let role = asserted(ROLE_METADATA)?.map(String::from_utf8_lossy);
        let role = role.as_deref().unwrap_or(Role::Admin.as_str());
        let by_person = role.strip_suffix(SCOPED_BY_PERSON);
        let scoped = by_person.or_else(|| role.strip_suffix(SCOPED));
        let limit = scoped.unwrap_or(role).parse();
        let limit = limit.map_err(|error: crate::auth::UnknownRole| {
            bad(ROLE_METADATA, format!("names an {error}"))
        })?;
        let sent = request.metadata().contains_key(SCOPE_METADATA);
        let scope = match (scoped, sent) {
            (Some(_), _) => {
                let scope = scope(request.metadata(), by_person.is_some())?;
                Some(Arc::new(scope))
            }
            (None, false) => None,
            (None, true) if peer != Some(self.owner) => {
                return Err(AccessError::PrincipalNotTrusted {
                    peer: Principal::peer(peer),
                    key: SCOPE_METADATA,
                });
            }
            (None, true) => {
                let message = "comes without a scoped role; send both, or neither".to_owned();
                return Err(bad(SCOPE_METADATA, message));
            }
        };
        Ok(Identified {
            principal,
            person,
            scope,
            limit,
        })
    }
}

/// Reads the scope that a scoped role requires in the metadata. The role determines whether the
/// scope must have rules for a person.
fn scope(metadata: &MetadataMap, by_person: bool) -> Result<KeyScope, AccessError> {
    let bad = |message: &str| AccessError::BadMetadata {
        key: SCOPE_METADATA,
        message: message.to_owned(),
    };
    let mut values = metadata.get_all_bin(SCOPE_METADATA).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(bad("comes once with a scoped role; send it once"));
    };
    let bytes = value.to_bytes().map_err(|_| bad("is not base64"))?;
    if bytes.len() > MAX_SCOPE_BYTES {
        return Err(bad("is too long"));
    }
    let scope = Scope::decode(bytes).map_err(|_| bad("is no encoded scope"))?;
    if scope.person.is_some() != by_person {
        return Err(bad(
            "and the role disagree on whether there are rules for a person",
        ));
    }
    KeyScope::new(scope).map_err(|error| bad(&format!("has a malformed glob: {error}")))
}

/// Returns the only value of the header. A header with two values is refused, because it would be
/// unclear which value a proxy has checked.
fn metadata<'m>(
    metadata: &'m MetadataMap,
    key: &'static str,
) -> Result<Option<&'m [u8]>, AccessError> {
    let mut values = metadata.get_all(key).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => Ok(Some(value.as_encoded_bytes())),
        (Some(_), Some(_)) => Err(AccessError::BadMetadata {
            key,
            message: "comes more than once; send it once".to_owned(),
        }),
    }
}

impl From<AccessError> for Status {
    fn from(error: AccessError) -> Self {
        let message = error.to_string();
        let mut details = ErrorDetails::new();
        let mut metadata = Metadata::new();
        let (code, reason) = match error {
            AccessError::RoleMissing {
                method,
                needed,
                found,
                ..
            } => {
                metadata.insert("method".to_owned(), method.to_owned());
                metadata.insert("role".to_owned(), needed.to_string());
                if let Some(found) = found {
                    metadata.insert("found".to_owned(), found.to_string());
                }
                (Code::PermissionDenied, "ROLE_MISSING")
            }
            AccessError::PrincipalNotTrusted { .. } => {
                (Code::PermissionDenied, "PRINCIPAL_NOT_TRUSTED")
            }
            AccessError::BadMetadata { key, .. } => {
                details.add_bad_request_violation(key, &message);
                (Code::InvalidArgument, "INVALID_ARGUMENT")
            }
            AccessError::GuestNotFound { name, .. } => {
                details.set_resource_info("Guest", name, "", "no such guest");
                (Code::NotFound, "GUEST_NOT_FOUND")
            }
            AccessError::GuestNotNamed { .. } => {
                details.add_bad_request_violation("guest", &message);
                (Code::InvalidArgument, "GUEST_NOT_NAMED")
            }
        };
        status(code, reason, message, metadata, details)
    }
}

#[cfg(test)]
mod tests {
    use patchbay_proto::scope::{PersonScope, ScopeRule};
    use patchbay_proto::v1::DescribeGuestRequest;
    use tonic::metadata::MetadataValue;

    use super::*;
    use crate::auth::SocketAuthoriser;

    const OWNER: u32 = 1000;

    fn caller(
        uid: Option<u32>,
        metadata: &[(&'static str, &str)],
    ) -> Result<Identified, AccessError> {
        let access = Access::new(Guests::default(), Arc::new(SocketAuthoriser), OWNER);
        let mut request = Request::new(DescribeGuestRequest::default());
        request.extensions_mut().insert(Peer::with_uid(uid));
        for (key, value) in metadata {
            let value = value.parse().expect("a header's value");
            request.metadata_mut().insert(*key, value);
        }
        access.caller(&request)
    }

    #[test]
    fn a_peer_is_its_uid() {
        for (uid, name) in [
            (Some(OWNER), "uid:1000"),
            (Some(7), "uid:7"),
            (None, "unknown"),
        ] {
            let caller = caller(uid, &[]).expect("asserts nothing");
            assert_eq!(
                (caller.principal.as_str(), caller.limit),
                (name, Role::Admin)
            );
        }
    }

    fn scoped(uid: u32, role: Option<&str>, scopes: &[&[u8]]) -> Result<Identified, AccessError> {
        let access = Access::new(Guests::default(), Arc::new(SocketAuthoriser), OWNER);
        let mut request = Request::new(DescribeGuestRequest::default());
        request.extensions_mut().insert(Peer::with_uid(Some(uid)));
        let metadata = request.metadata_mut();
        if let Some(role) = role {
            metadata.insert(ROLE_METADATA, role.parse().expect("ASCII"));
        }
        for scope in scopes {
            metadata.append_bin(SCOPE_METADATA, MetadataValue::from_bytes(scope));
        }
        access.caller(&request)
    }

    #[test]
    fn a_scope_and_a_scoped_role_belong_together() {
        let globs = |glob: &str| {
            let rule = ScopeRule {
                keys: vec![glob.to_owned()],
                ..ScopeRule::default()
            };
            let rules = vec![rule];
            Scope {
                rules,
                ..Scope::default()
            }
            .encode_to_vec()
        };
        let good = globs("net_*");
        let both = scoped(OWNER, Some("operator/scoped"), &[&good]).expect("both");
        assert_eq!(both.limit, Role::Operator);
        assert!(both.scope.is_some());
        let for_alice = Scope {
            person: Some(PersonScope::default()),
            ..Scope::default()
        }
        .encode_to_vec();
        let bounded = scoped(OWNER, Some("operator/scoped-by-person"), &[&for_alice]);
        assert_eq!(bounded.expect("both").limit, Role::Operator);
        let neither = scoped(OWNER, Some("operator"), &[]).expect("neither");
        assert!(neither.scope.is_none());
        let long = vec![0; MAX_SCOPE_BYTES + 1];
        for (role, scopes) in [
            (Some("operator/scoped"), &[][..]),
            (Some("operator/scoped"), &[&for_alice[..]]),
            (Some("operator/scoped-by-person"), &[&good[..]]),
            (Some("operator"), &[&good[..]]),
            (None, &[&good[..]]),
            (Some("operator/scoped"), &[&good[..], &good[..]]),
            (Some("king/scoped"), &[&good[..]]),
            (Some("operator/scoped/scoped"), &[&good[..]]),
            (Some("operator/scoped"), &[&b"\xff"[..]]),
            (Some("operator/scoped"), &[&globs("net_[")[..]]),
            (Some("operator/scoped"), &[&long[..]]),
        ] {
            let refused = scoped(OWNER, role, scopes).err();
            let refused = refused.unwrap_or_else(|| panic!("{role:?} {}", scopes.len()));
            assert!(
                matches!(refused, AccessError::BadMetadata { .. }),
                "{refused}"
            );
        }
        for role in [None, Some("operator/scoped")] {
            let refused = scoped(OWNER + 1, role, &[&good])
                .err()
                .expect("not trusted");
            assert!(
                matches!(refused, AccessError::PrincipalNotTrusted { .. }),
                "{refused}"
            );
        }
    }

    /// Root is rejected too. Root could act as the service's user instead.
    #[test]
    fn only_the_owner_is_believed() {
        let asserted = [
            (PRINCIPAL_METADATA, "fleet"),
            (PERSON_METADATA, "alice"),
            (ROLE_METADATA, "viewer"),
        ];
        let fleet = caller(Some(OWNER), &asserted).expect("trusted");
        assert_eq!(
            (fleet.principal.as_str(), fleet.limit),
            ("fleet", Role::Viewer)
        );
        assert_eq!(
            fleet.person,
            Some(Principal::asserted(b"alice").expect("good"))
        );
        let odd = caller(Some(OWNER), &[(PERSON_METADATA, "monitor")]).err();
        assert!(matches!(odd, Some(AccessError::BadMetadata { .. })));
        for uid in [Some(0), Some(OWNER + 1), None] {
            for asserted in asserted {
                let refused = caller(uid, &[asserted]).err().expect("not trusted");
                let AccessError::PrincipalNotTrusted { peer, key } = refused else {
                    panic!("{refused:?}");
                };
                assert_eq!((peer, key), (Principal::peer(uid), asserted.0));
            }
        }
    }
}
