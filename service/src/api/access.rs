// SPDX-License-Identifier: Apache-2.0
//! Admission of every call: identifies the caller, finds the guest, checks the role.
//!
//! [`Access::admit`] is the only way from a request to a guest, so no method can skip it.

use std::sync::Arc;

use patchbay_proto::methods::Call;
use patchbay_proto::{PRINCIPAL_METADATA, ROLE_METADATA};
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};
use tonic_types::ErrorDetails;

use super::guests::{Guests, ServedGuest};
use super::limits::Peer;
use super::status::{Metadata, status};
use crate::auth::{Authoriser, Denied, Principal, Role};

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
struct Caller {
    principal: Principal,
    /// The role to which the caller limits itself.
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
    ) -> Result<(Arc<ServedGuest>, Principal, Request<T>), AccessError> {
        let caller = self.caller(&request)?;
        let guest = self.authorise(&caller, request.get_ref())?;
        Ok((guest, caller.principal, request))
    }

    /// Like [`Self::admit`], for a stream of requests: the caller is checked at once, the guest and
    /// the role with the first message.
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
        caller: &Caller,
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

    fn may(&self, caller: &Caller, needed: Role, method: &str, guest: &str) -> Result<(), Denied> {
        if caller.limit < needed {
            let found = Some(caller.limit);
            return Err(Denied { found });
        }
        self.authoriser
            .may(&caller.principal, needed, method, guest)
    }

    fn visible(&self, caller: &Caller, method: &str, needed: Role) -> Vec<Arc<ServedGuest>> {
        let mut guests = self.guests.all();
        guests.retain(|guest| self.may(caller, needed, method, guest.name()).is_ok());
        guests
    }

    fn caller<T>(&self, request: &Request<T>) -> Result<Caller, AccessError> {
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
        let limit = match asserted(ROLE_METADATA)? {
            None => Role::Admin,
            Some(name) => String::from_utf8_lossy(name).parse().map_err(
                |error: crate::auth::UnknownRole| bad(ROLE_METADATA, format!("names an {error}")),
            )?,
        };
        Ok(Caller { principal, limit })
    }
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
    use patchbay_proto::v1::DescribeGuestRequest;

    use super::*;
    use crate::auth::SocketAuthoriser;

    const OWNER: u32 = 1000;

    fn caller(uid: Option<u32>, metadata: &[(&'static str, &str)]) -> Result<Caller, AccessError> {
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

    /// Root is rejected too: it could act as the service's user instead.
    #[test]
    fn only_the_owner_is_believed() {
        let asserted = [(PRINCIPAL_METADATA, "alice"), (ROLE_METADATA, "viewer")];
        let alice = caller(Some(OWNER), &asserted).expect("trusted");
        assert_eq!(
            (alice.principal.as_str(), alice.limit),
            ("alice", Role::Viewer)
        );
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
