// SPDX-License-Identifier: Apache-2.0
//! Tests that every error of the domain has its reason in errors.proto, with a status code that the
//! reason's comment names.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use prost::Message;
use prost_types::FileDescriptorSet;

use super::super::access::AccessError;
use super::*;
use crate::auth::{Principal, Role};
use crate::keys::{ClaimRefusal, ClosedGate, KeyRefusal, PlanUsage, RefusedKey};

/// Returns one error for each pattern. Does not compile if a variant is missing.
macro_rules! each {
    ($type:ty: $($pattern:pat => $sample:expr,)*) => {{
        let _exhaustive = |error: &$type| match error { $($pattern => {})* };
        let samples: Vec<$type> = vec![$($sample,)*];
        samples
    }};
}

fn text() -> String {
    "text".to_owned()
}

fn refusals() -> Vec<KeyRefusal> {
    use KeyRefusal::*;
    each! { KeyRefusal:
        WouldWarn => WouldWarn,
        Sealed => Sealed,
        Guarded => Guarded,
        Never => Never,
        Quarantined => Quarantined,
        Tracepoint => Tracepoint,
        NotHolder => NotHolder,
        TableRefused => TableRefused,
        ModuleRefused => ModuleRefused,
        TextChecked => TextChecked,
    }
}

fn claim_refusals() -> Vec<ClaimRefusal> {
    use ClaimRefusal::*;
    each! { ClaimRefusal:
        GenerationStale => GenerationStale,
        IntentMismatch => IntentMismatch,
        BootChanged => BootChanged,
        LedgerLost => LedgerLost,
        TooMany => TooMany,
        LedgerUnwritable => LedgerUnwritable,
    }
}

fn keys_errors() -> Vec<KeysError> {
    use KeysError::*;
    let key_refused = |reason| KeyRefused {
        key: RefusedKey::Named(text()),
        reason,
        message: text(),
    };
    let claims_refused = |reason| ClaimsRefused {
        reason,
        generation: Some(1),
        message: text(),
    };
    let mut errors = each! { KeysError:
        ClaimsRefused { .. } => claims_refused(ClaimRefusal::TooMany),
        NotRegistered { .. } => NotRegistered { why: text() },
        KeyNotFound { .. } => KeyNotFound { name: text(), near: vec![] },
        NothingSelected { .. } => NothingSelected { patterns: text() },
        NoDebugSite { .. } => NoDebugSite { queries: text() },
        InvalidArgument { .. } => InvalidArgument { field: "field", message: text() },
        NotPermitted { .. } => NotPermitted { principal: text(), why: text() },
        RequestIdReused { .. } => RequestIdReused { request_id: text() },
        RequestMadeInPart { .. } => RequestMadeInPart { request_id: text(), made: 1, unmade: 1 },
        EtagMismatch { .. } => EtagMismatch { key: text(), given: text(), current: text(), count: 0 },
        KeyRefused { .. } => key_refused(KeyRefusal::Sealed),
        Busy { .. } => Busy { kind: ClosedGate::TextMutex, gate: text(), attempts: 1, every_key: true },
        VcpusUnknown => VcpusUnknown,
        NotStopped { .. } => NotStopped { message: text() },
        ForeignBytes { .. } => ForeignBytes { key: text(), message: text(), way_out: text() },
        WriteFault { .. } => WriteFault { message: text() },
        AuditLogUnwritable { .. } => AuditLogUnwritable { path: text(), error: text() },
        Cancelled => Cancelled,
        QueueFull { .. } => QueueFull { waiting: 1 },
        Compacted { .. } => Compacted { wanted: 1, oldest: 2 },
        RevisionInFuture { .. } => RevisionInFuture { wanted: 2, next: 1 },
        WatchTooSlow { .. } => WatchTooSlow { missed: 1 },
        HoldNotFound { .. } => HoldNotFound { id: text() },
        PlanNotFound { .. } => PlanNotFound { plan_id: text() },
        PlanNotOwned { .. } => PlanNotOwned { plan_id: text() },
        PlanStale { .. } => PlanStale { plan_id: text(), why: text() },
        TooManyPlans { .. } => TooManyPlans {
            principal: None,
            used: PlanUsage { plans: 1, bytes: 1 },
            needed: 1,
            max: PlanUsage { plans: 1, bytes: 1 },
        },
        IncarnationChanged { .. } => IncarnationChanged { given: text(), current: text() },
        Internal { .. } => Internal { message: text() },
        GuestStopped => GuestStopped,
        GuestPaused => GuestPaused,
        NotPoweredOff { .. } => NotPoweredOff { waited: Duration::ZERO, seen: true },
        NotSaved { .. } => NotSaved { message: text() },
    };
    errors.extend(refusals().into_iter().map(key_refused));
    errors.extend(claim_refusals().into_iter().map(claims_refused));
    errors
}

fn trace_errors() -> Vec<TraceError> {
    use TraceError::*;
    let rejected = |what| Rejected {
        what,
        name: text(),
        message: text(),
    };
    let mut errors = each! { TraceError:
        Keys(_) => Keys(KeysError::GuestStopped),
        Agent(_) => Agent(AgentError::Confused),
        EventNotFound { .. } => EventNotFound { patterns: vec![] },
        EventVanished { .. } => EventVanished { name: text(), message: text() },
        Refused { .. } => Refused { name: text(), why: text() },
        NotArmed { .. } => NotArmed { patterns: vec![] },
        OthersTrace { .. } => OthersTrace { events: vec![] },
        Rejected { .. } => rejected("filter"),
        FilterConflict { .. } => FilterConflict { name: text(), filter: text(), owners: text() },
        ArmFailed { .. } => ArmFailed { name: text(), message: text() },
        Busy { .. } => Busy { name: text(), waited: Duration::ZERO },
        TooMuchArmed { .. } => TooMuchArmed { bytes: 2, max: 1 },
        TooManyStreams { .. } => TooManyStreams { max: 1 },
        TooManyStreamsOfOne { .. } => TooManyStreamsOfOne { principal: text(), max: 1 },
        InstanceNotFound(_) => InstanceNotFound(text()),
        Invalid { .. } => Invalid { field: "field", message: text() },
    };
    errors.push(rejected("trigger"));
    let agent = each! { AgentError:
        AgentError::Absent { .. } => AgentError::Absent { why: text() },
        AgentError::Silent { .. } => AgentError::Silent { waited: Duration::ZERO },
        AgentError::Refused(_) => AgentError::Refused(text()),
        AgentError::Confused => AgentError::Confused,
    };
    errors.extend(agent.into_iter().map(Agent));
    errors
}

fn access_errors() -> Vec<AccessError> {
    use AccessError::*;
    let principal = || Principal::peer(None);
    each! { AccessError:
        RoleMissing { .. } => RoleMissing {
            principal: principal(),
            method: "/service/Method",
            guest: text(),
            needed: Role::Admin,
            found: None,
        },
        PrincipalNotTrusted { .. } => PrincipalNotTrusted { peer: principal(), key: "key" },
        BadMetadata { .. } => BadMetadata { key: "key", message: text() },
        GuestNotFound { .. } => GuestNotFound { name: text(), served: vec![] },
        GuestNotNamed { .. } => GuestNotNamed { served: vec![] },
    }
}

/// Returns the reason and code of every status that can be sent.
fn sent() -> HashSet<(String, Code)> {
    let mut statuses: Vec<Status> = keys_errors().into_iter().map(Status::from).collect();
    statuses.extend(trace_errors().into_iter().map(Status::from));
    statuses.extend(access_errors().into_iter().map(Status::from));
    statuses
        .extend(["TOO_MANY_CONNECTIONS", "TOO_MANY_CALLS"].map(|reason| exhausted(reason, text())));
    statuses.push(ends());
    let pair = |status: Status| {
        let info = status
            .get_details_error_info()
            .expect("google.rpc.ErrorInfo");
        assert_eq!(info.domain, "patchbay");
        (info.reason, status.code())
    };
    statuses.into_iter().map(pair).collect()
}

/// Returns the codes at the beginning of each reason's comment: "NOT_FOUND. ..." or "UNAVAILABLE,
/// or INTERNAL for ...".
fn documented() -> BTreeMap<String, Vec<Code>> {
    const ENUM: i32 = 5;
    const VALUE: i32 = 2;
    let set = FileDescriptorSet::decode(patchbay_proto::FILE_DESCRIPTOR_SET).expect("encoded");
    let mut files = set.file.iter();
    let file = files
        .find(|file| file.name() == "patchbay/v1/errors.proto")
        .expect("compiled");
    let mut documented = BTreeMap::new();
    for location in &file.source_code_info.as_ref().expect("comments").location {
        let &[ENUM, of, VALUE, value] = location.path.as_slice() else {
            continue;
        };
        let of = &file.enum_type[usize::try_from(of).expect("an index")];
        let value = &of.value[usize::try_from(value).expect("an index")];
        if of.name() != "ErrorReason" || value.number() == 0 {
            continue;
        }
        let (head, _) = location
            .leading_comments()
            .split_once(". ")
            .expect("a sentence");
        let words = head.split(|c: char| !c.is_ascii_uppercase() && c != '_');
        let codes: Vec<Code> = words.filter_map(code_named).collect();
        let reason = value
            .name()
            .strip_prefix("ERROR_REASON_")
            .expect("the enum's prefix");
        assert!(
            !codes.is_empty(),
            "{reason}: its comment begins with no status code"
        );
        documented.insert(reason.to_owned(), codes);
    }
    documented
}

fn code_named(name: &str) -> Option<Code> {
    Some(match name {
        "CANCELLED" => Code::Cancelled,
        "INVALID_ARGUMENT" => Code::InvalidArgument,
        "DEADLINE_EXCEEDED" => Code::DeadlineExceeded,
        "NOT_FOUND" => Code::NotFound,
        "PERMISSION_DENIED" => Code::PermissionDenied,
        "RESOURCE_EXHAUSTED" => Code::ResourceExhausted,
        "FAILED_PRECONDITION" => Code::FailedPrecondition,
        "ABORTED" => Code::Aborted,
        "OUT_OF_RANGE" => Code::OutOfRange,
        "INTERNAL" => Code::Internal,
        "UNAVAILABLE" => Code::Unavailable,
        "DATA_LOSS" => Code::DataLoss,
        "UNAUTHENTICATED" => Code::Unauthenticated,
        "UNKNOWN" => Code::Unknown,
        _ => return None,
    })
}

/// Reasons that only the host's daemon sends, which is a proxy between clients and monitors.
const OF_THE_HOST: [&str; 4] = [
    "CERTIFICATE_REFUSED",
    "MONITOR_LOST",
    "MONITOR_UNREACHABLE",
    "STREAM_EXPIRED",
];

#[test]
fn reasons_and_codes_are_those_of_the_proto() {
    let documented = documented();
    let sent = sent();
    for (reason, code) in &sent {
        let codes = documented.get(reason);
        let codes = codes.unwrap_or_else(|| panic!("{reason} is missing in errors.proto"));
        assert!(
            codes.contains(code),
            "{reason}: {code:?}, found {codes:?} in errors.proto"
        );
    }
    let pairs = documented
        .iter()
        .flat_map(|(reason, codes)| codes.iter().map(move |code| (reason, code)));
    let unused = pairs.filter(|(reason, code)| !sent.contains(&((*reason).clone(), **code)));
    let mut unused: BTreeSet<&str> = unused.map(|(reason, _)| reason.as_str()).collect();
    for reason in OF_THE_HOST {
        assert!(unused.remove(reason), "{reason} is the host's to send");
    }
    assert!(unused.is_empty(), "documented, and never sent: {unused:?}");
}

/// Only errors that a retry can resolve carry `RetryInfo`.
#[test]
fn what_may_be_repeated_says_when() {
    for error in keys_errors() {
        let retry = error.retry_after().is_some();
        let reason = error.reason();
        let status = Status::from(error);
        assert_eq!(status.get_details_retry_info().is_some(), retry, "{reason}");
        assert_eq!(
            retry,
            ["GUEST_BUSY", "QUEUE_FULL"].contains(&reason),
            "{reason}"
        );
    }
}
