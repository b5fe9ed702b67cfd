// SPDX-License-Identifier: Apache-2.0
//! Every method of `patchbay.v1`: the role that it needs, and what about it the policy must see.

use crate::policy::Role::{self, Admin, Operator, Viewer};

/// A method that is forwarded.
#[derive(Debug)]
pub struct Method {
    /// The name of its service, without the package.
    pub service: &'static str,
    /// Its name within the service.
    pub name: &'static str,
    /// The role that it needs in any case.
    pub role: Role,
    /// Boolean fields of the request that need another role when they are set.
    pub raised: &'static [(&'static str, Role)],
    /// What it changes.
    pub effect: Effect,
}

/// What a method changes, and so what the policy and the audit log must see of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    Read,
    /// The guest as a whole, no key.
    Guest,
    /// The keys of `updates`.
    Update,
    /// Nothing yet: it keeps a plan of `updates`.
    Prepare,
    /// The keys of a plan.
    Commit,
    /// Nothing: it forgets a plan.
    Discard,
    /// The keys of the holds in `ids`.
    Holds,
    /// Tracepoints of `patterns`, armed or not.
    Arm,
    /// Armed tracepoints of `patterns`.
    Armed,
    /// As `Arm` with `arm_and_fire`, else as `Read`.
    Stream,
}

const fn method(
    service: &'static str,
    name: &'static str,
    role: Role,
    raised: &'static [(&'static str, Role)],
    effect: Effect,
) -> Method {
    Method {
        service,
        name,
        role,
        raised,
        effect,
    }
}

const GUEST: &str = "GuestService";
const KEYS: &str = "StaticKeysService";
const TRACE: &str = "TracepointsService";
const NONE: &[(&str, Role)] = &[];
const FORCE: &[(&str, Role)] = &[("force", Admin)];
const FORCE_OR_GUARDED: &[(&str, Role)] = &[("force", Admin), ("allow_guarded", Admin)];

/// The whole table.
pub const METHODS: &[Method] = &[
    method(GUEST, "ListGuests", Viewer, NONE, Effect::Read),
    method(GUEST, "DescribeGuest", Viewer, NONE, Effect::Read),
    method(GUEST, "WatchGuest", Viewer, NONE, Effect::Read),
    method(GUEST, "PauseGuest", Operator, NONE, Effect::Guest),
    method(GUEST, "ResumeGuest", Operator, NONE, Effect::Guest),
    method(GUEST, "ShutdownGuest", Admin, NONE, Effect::Guest),
    method(GUEST, "StreamConsole", Admin, NONE, Effect::Guest),
    method(KEYS, "ListStaticKeys", Viewer, NONE, Effect::Read),
    method(KEYS, "GetStaticKey", Viewer, NONE, Effect::Read),
    method(KEYS, "ListDebugSites", Viewer, NONE, Effect::Read),
    method(
        KEYS,
        "UpdateStaticKeys",
        Operator,
        FORCE_OR_GUARDED,
        Effect::Update,
    ),
    method(KEYS, "ListUpdateResults", Viewer, NONE, Effect::Read),
    method(
        KEYS,
        "PrepareUpdate",
        Operator,
        FORCE_OR_GUARDED,
        Effect::Prepare,
    ),
    method(KEYS, "CommitUpdate", Operator, NONE, Effect::Commit),
    method(KEYS, "DiscardUpdate", Operator, NONE, Effect::Discard),
    method(KEYS, "WatchStaticKeys", Viewer, NONE, Effect::Read),
    method(KEYS, "ListHolds", Viewer, NONE, Effect::Read),
    method(KEYS, "ReleaseHolds", Operator, FORCE, Effect::Holds),
    method(KEYS, "RenewHolds", Operator, NONE, Effect::Holds),
    method(TRACE, "ListTracepoints", Viewer, NONE, Effect::Read),
    method(TRACE, "ArmTracepoints", Operator, NONE, Effect::Arm),
    method(TRACE, "FireTracepoints", Operator, NONE, Effect::Armed),
    method(TRACE, "ParkTracepoints", Operator, FORCE, Effect::Armed),
    method(TRACE, "DisarmTracepoints", Operator, FORCE, Effect::Armed),
    method(
        TRACE,
        "StreamTracepointEvents",
        Viewer,
        &[("arm_and_fire", Operator)],
        Effect::Stream,
    ),
    method(TRACE, "GetTracepointStats", Viewer, NONE, Effect::Read),
    method(TRACE, "DescribeAgent", Viewer, NONE, Effect::Read),
];

impl Method {
    /// The method of an HTTP/2 ":path".
    #[must_use]
    pub fn of_path(path: &str) -> Option<&'static Self> {
        let (service, name) = path.strip_prefix("/patchbay.v1.")?.split_once('/')?;
        let is = |method: &&Self| method.service == service && method.name == name;
        METHODS.iter().find(is)
    }

    /// As HTTP/2 has it in ":path".
    #[must_use]
    pub fn path(&self) -> String {
        format!("/patchbay.v1.{}/{}", self.service, self.name)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    fn role_in_comment(comment: &str) -> String {
        let text = comment.split_whitespace().collect::<Vec<_>>().join(" ");
        let (_, role) = text.rsplit_once("Role: ").expect(comment);
        role.trim_end_matches('.').to_owned()
    }

    fn role_in_table(method: &Method) -> String {
        let Some((_, raised)) = method.raised.first() else {
            return method.role.to_string();
        };
        let fields = method.raised.iter().map(|(field, _)| format!("`{field}`"));
        let fields = fields.collect::<Vec<_>>().join(" and ");
        format!("{}; {raised} for {fields}", method.role)
    }

    #[test]
    fn every_method_has_the_role_of_its_comment() {
        const SERVICE: i32 = 6;
        const METHOD: i32 = 2;
        let set = FileDescriptorSet::decode(patchbay_proto::FILE_DESCRIPTOR_SET).expect("encoded");
        let mut documented = BTreeMap::new();
        let ours = set.file.iter().filter(|f| f.package() == "patchbay.v1");
        for file in ours {
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
            .map(|method| (method.path(), role_in_table(method)));
        assert_eq!(table.collect::<BTreeMap<_, _>>(), documented);
        // A method that needs more than a viewer changes something.
        let silent = |m: &&Method| m.role > Role::Viewer && m.effect == Effect::Read;
        assert!(!METHODS.iter().any(|method| silent(&method)));
    }

    #[test]
    fn only_exact_paths_are_methods() {
        for method in METHODS {
            let found = Method::of_path(&method.path()).expect("in the table");
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
}
