// SPDX-License-Identifier: Apache-2.0
//! Describes each method of `patchbay.v1` for the policy.

pub use patchbay_proto::methods::{METHODS, Method};

/// The effect of a method, which determines the checks of the policy and the content of the audit
/// log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Changes nothing.
    Read,
    /// Changes the guest as a whole, but no key.
    Guest,
    /// Changes the keys of `updates`.
    Update,
    /// Changes nothing yet: prepares a plan of `updates`.
    Prepare,
    /// Changes the keys of a plan.
    Commit,
    /// Changes nothing: discards a plan.
    Discard,
    /// Changes the keys of the holds in `ids`.
    Holds,
    /// Writes the sites of the key `name` anew.
    Repair,
    /// Changes tracepoints that `patterns` select, armed or not.
    Arm,
    /// Changes armed tracepoints that `patterns` select.
    Armed,
    /// Is like `Arm` with `arm_and_fire`, otherwise like `Read`.
    Stream,
}

/// Returns the method of an HTTP/2 ":path".
#[must_use]
pub fn of_path(path: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.path == path)
}

/// Returns whether a method answers with a stream, which may be endless.
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

/// Returns the effect of a method.
#[must_use]
pub fn effect(method: &Method) -> Effect {
    match method.name {
        "PauseGuest" | "ResumeGuest" | "ShutdownGuest" | "StreamConsole" => Effect::Guest,
        "UpdateStaticKeys" => Effect::Update,
        "PrepareUpdate" => Effect::Prepare,
        "CommitUpdate" => Effect::Commit,
        "DiscardUpdate" => Effect::Discard,
        "ReleaseHolds" | "RenewHolds" => Effect::Holds,
        "RepairStaticKey" => Effect::Repair,
        "ArmTracepoints" => Effect::Arm,
        "FireTracepoints" | "ParkTracepoints" | "DisarmTracepoints" => Effect::Armed,
        "StreamTracepointEvents" => Effect::Stream,
        _ => Effect::Read,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use patchbay_access::policy::Role;

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
