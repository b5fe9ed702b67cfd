// SPDX-License-Identifier: Apache-2.0
//! What the policy must see of each method of `patchbay.v1`.

pub use patchbay_proto::methods::{METHODS, Method};

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
    /// `Arm` with `arm_and_fire`, else `Read`.
    Stream,
}

/// The method of an HTTP/2 ":path".
#[must_use]
pub fn of_path(path: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.path == path)
}

/// Returns whether a method answers with a stream, which may have no end.
#[must_use]
pub fn streams(method: &Method) -> bool {
    matches!(
        method.name,
        "WatchGuest"
            | "StreamConsole"
            | "WatchStaticKeys"
            | "StreamTracepointEvents"
            | "StreamKernelLog"
    )
}

/// What a method changes.
#[must_use]
pub fn effect(method: &Method) -> Effect {
    match method.name {
        "PauseGuest" | "ResumeGuest" | "ShutdownGuest" | "StreamConsole" | "RepairStaticKey" => {
            Effect::Guest
        }
        "UpdateStaticKeys" => Effect::Update,
        "PrepareUpdate" => Effect::Prepare,
        "CommitUpdate" => Effect::Commit,
        "DiscardUpdate" => Effect::Discard,
        "ReleaseHolds" | "RenewHolds" => Effect::Holds,
        "ArmTracepoints" => Effect::Arm,
        "FireTracepoints" | "ParkTracepoints" | "DisarmTracepoints" => Effect::Armed,
        "StreamTracepointEvents" => Effect::Stream,
        _ => Effect::Read,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Role;

    #[test]
    fn a_method_that_needs_more_than_a_viewer_changes_something() {
        for method in METHODS {
            let reads = effect(method) == Effect::Read;
            assert_eq!(
                reads || effect(method) == Effect::Stream,
                method.role == Role::Viewer,
                "{}",
                method.name
            );
        }
    }

    #[test]
    fn only_exact_paths_are_methods() {
        for method in METHODS {
            let found = of_path(method.path).expect("in the table");
            assert_eq!(found.name, method.name);
        }
        for path in [
            "/patchbay.v1.GuestService/",
            "/patchbay.v1.GuestService/listguests",
            "/patchbay.v1.GuestService/UpdateStaticKeys",
            "/patchbay.v2.GuestService/ListGuests",
            "//patchbay.v1.GuestService/ListGuests",
        ] {
            assert!(of_path(path).is_none(), "{path}");
        }
    }
}
