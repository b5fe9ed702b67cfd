// SPDX-License-Identifier: Apache-2.0
//! The methods of `patchbay.v1` and the role that each needs.

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
    /// May make changes that can be undone, to what the principal owns.
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

/// A method as the table has it.
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
    /// Boolean request fields that need a role of their own when set.
    pub raised: &'static [(&'static str, Role)],
}

/// The first message of a call. Each method has its own request type, so the type identifies the
/// method.
pub trait Call {
    /// Its method.
    const METHOD: Method;

    /// Name of the guest; empty if the request has none.
    fn guest(&self) -> &str;

    /// The role that the method needs with these field values.
    fn role(&self) -> Role;
}

macro_rules! methods {
    ($($service:ident {
        $($method:ident($request:ident $(.$guest:ident)?): $role:ident
            $(, $raised:ident for $($field:ident)|+)?;)*
    })*) => {
        $($(impl Call for v1::$request {
            const METHOD: Method = Method {
                service: stringify!($service),
                name: stringify!($method),
                path: concat!("/patchbay.v1.", stringify!($service), "/", stringify!($method)),
                role: Role::$role,
                raised: &[$($((stringify!($field), Role::$raised),)+)?],
            };

            fn guest(&self) -> &str {
                [$(self.$guest.as_str(),)? ""][0]
            }

            fn role(&self) -> Role {
                let set: &[bool] = &[$($(self.$field,)+)?];
                let fields = set.iter().zip(Self::METHOD.raised);
                let raised = fields.filter_map(|(set, (_, role))| set.then_some(*role));
                raised.fold(Self::METHOD.role, Role::max)
            }
        })*)*

        /// All methods.
        pub const METHODS: &[Method] = &[$($(<v1::$request as Call>::METHOD,)*)*];
    };
}

methods! {
    GuestService {
        ListGuests(ListGuestsRequest): Viewer;
        DescribeGuest(DescribeGuestRequest.guest): Viewer;
        WatchGuest(WatchGuestRequest.guest): Viewer;
        PauseGuest(PauseGuestRequest.guest): Operator;
        ResumeGuest(ResumeGuestRequest.guest): Operator;
        ShutdownGuest(ShutdownGuestRequest.guest): Admin;
        StreamConsole(StreamConsoleRequest.guest): Admin;
    }
    StaticKeysService {
        ListStaticKeys(ListStaticKeysRequest.guest): Viewer;
        GetStaticKey(GetStaticKeyRequest.guest): Viewer;
        ListDebugSites(ListDebugSitesRequest.guest): Viewer;
        UpdateStaticKeys(UpdateStaticKeysRequest.guest): Operator, Admin for force | allow_guarded;
        ListUpdateResults(ListUpdateResultsRequest.guest): Viewer;
        PrepareUpdate(PrepareUpdateRequest.guest): Operator, Admin for force | allow_guarded;
        CommitUpdate(CommitUpdateRequest.guest): Operator;
        DiscardUpdate(DiscardUpdateRequest.guest): Operator;
        WatchStaticKeys(WatchStaticKeysRequest.guest): Viewer;
        ListHolds(ListHoldsRequest.guest): Viewer;
        ReleaseHolds(ReleaseHoldsRequest.guest): Operator, Admin for force;
        RenewHolds(RenewHoldsRequest.guest): Operator;
        VerifyStaticKeys(VerifyStaticKeysRequest.guest): Viewer;
        RepairStaticKey(RepairStaticKeyRequest.guest): Admin;
    }
    TracepointsService {
        ListTracepoints(ListTracepointsRequest.guest): Viewer;
        ArmTracepoints(ArmTracepointsRequest.guest): Operator;
        FireTracepoints(FireTracepointsRequest.guest): Operator;
        ParkTracepoints(ParkTracepointsRequest.guest): Operator, Admin for force;
        DisarmTracepoints(DisarmTracepointsRequest.guest): Operator, Admin for force;
        StreamTracepointEvents(StreamTracepointEventsRequest.guest): Viewer, Operator for arm_and_fire;
        GetTracepointStats(GetTracepointStatsRequest.guest): Viewer;
        DescribeAgent(DescribeAgentRequest.guest): Viewer;
        StreamKernelLog(StreamKernelLogRequest.guest): Viewer;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    /// Extracts "Role: operator; admin for `force` and `allow_guarded`." from the end of a method's
    /// comment.
    fn role_in_comment(comment: &str) -> String {
        let text = comment.split_whitespace().collect::<Vec<_>>().join(" ");
        let (_, role) = text.rsplit_once("Role: ").expect(comment);
        role.trim_end_matches('.').to_owned()
    }

    fn role_in_table(method: &Method) -> String {
        let Some((_, raised)) = method.raised.first() else {
            return method.role.to_string();
        };
        assert!(method.raised.iter().all(|(_, role)| role == raised));
        let fields: Vec<_> = method
            .raised
            .iter()
            .map(|(field, _)| format!("`{field}`"))
            .collect();
        format!("{}; {raised} for {}", method.role, fields.join(" and "))
    }

    /// The table, the descriptors and the comments agree.
    #[test]
    fn every_method_has_the_role_of_its_comment() {
        const SERVICE: i32 = 6;
        const METHOD: i32 = 2;
        let set = FileDescriptorSet::decode(crate::FILE_DESCRIPTOR_SET).expect("encoded");
        let mut documented = BTreeMap::new();
        for file in set
            .file
            .iter()
            .filter(|file| file.package() == "patchbay.v1")
        {
            for location in &file.source_code_info.as_ref().expect("comments").location {
                let &[SERVICE, service, METHOD, method] = location.path.as_slice() else {
                    continue;
                };
                let service = &file.service[usize::try_from(service).expect("an index")];
                let method = &service.method[usize::try_from(method).expect("an index")];
                let path = format!("/patchbay.v1.{}/{}", service.name(), method.name());
                documented.insert(path, role_in_comment(location.leading_comments()));
            }
        }
        let table = METHODS
            .iter()
            .map(|method| (method.path.to_owned(), role_in_table(method)));
        assert_eq!(table.collect::<BTreeMap<_, _>>(), documented);
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
