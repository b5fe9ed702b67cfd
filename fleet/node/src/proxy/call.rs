// SPDX-License-Identifier: Apache-2.0
//! Represents a call as it was received and as it is forwarded to a monitor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method as HttpMethod, Request, Version};
use patchbay_access::identity::Identity;
use patchbay_access::policy::Role;
use patchbay_proto::scope::{MAX_SCOPE_BYTES, SCOPE_METADATA, SCOPED, SCOPED_BY_PERSON};
use patchbay_proto::text::hex;
use patchbay_proto::{
    ASSERTION_METADATA, PERSON_METADATA, PRINCIPAL_METADATA, ROLE_METADATA, TRACEPARENT_METADATA,
    TraceParent,
};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};
use sha2::{Digest, Sha256};
use tonic::Status;
use tonic::body::Body;
use tonic::metadata::{MetadataMap, MetadataValue};

use super::allowed::Allowed;
use super::answer::Caller;
use super::{console, fields, status};
use patchbay_proto::methods::{Effect, Method};

/// The maximum size in bytes of a request in the audit log. A longer request is cut, and its length
/// and digest are appended.
const MAX_TEXT_BYTES: usize = 4096;
/// The maximum size in bytes of a request that is converted to text.
const MAX_SHOWN_MESSAGE: usize = 64 << 10;
/// The prefix of metadata that only programs of Patchbay exchange.
const OWN_METADATA: &str = "patchbay-";
/// The headers that belong to the client's connection to this daemon. The daemon sets its own
/// headers on its connection to the monitor.
const NOT_FORWARDED: [&str; 10] = [
    "connection",
    "content-length",
    "content-type",
    "grpc-accept-encoding",
    "grpc-encoding",
    "grpc-timeout",
    "host",
    "te",
    "transfer-encoding",
    "user-agent",
];

/// A call whose first message has been read.
pub struct Call {
    pub method: &'static Method,
    pub identity: Arc<Identity>,
    /// The guest's name in the request; may be empty.
    pub guest: String,
    pub message: Bytes,
    /// The role that the call needs, given the flags that are set.
    pub role: Role,
    /// The principal of the person for whom the caller makes the call, once it is identified.
    pub person: Option<String>,
    /// The headers that assert the person, as they were received.
    pub assertions: MetadataMap,
    /// The time at which the client gives up.
    deadline: Option<Instant>,
    headers: HeaderMap,
}

impl Call {
    pub fn new(
        method: &'static Method,
        identity: Arc<Identity>,
        headers: &HeaderMap,
        message: Bytes,
    ) -> Result<Self, Status> {
        // Field 1 of a ListGuestsRequest is not a guest, because the request concerns no single
        // guest.
        let guest = if method.name == "ListGuests" {
            ""
        } else {
            fields::guest(&message)?
        };
        let mut call = Self {
            method,
            identity,
            guest: guest.to_owned(),
            role: method.role,
            person: None,
            assertions: assertions(headers),
            deadline: deadline(headers)?,
            headers: forwarded(headers),
            message,
        };
        for (field, role) in method.raised {
            if fields::is_set(&call.message, *field)? {
                call.role = call.role.max(*role);
            }
        }
        Ok(call)
    }

    /// Returns whether the call changes a guest.
    pub fn changes(&self) -> bool {
        match self.method.effect {
            Effect::Read | Effect::Records | Effect::Prepare | Effect::Discard => false,
            Effect::Stream => self.role > self.method.role,
            Effect::Guest
            | Effect::Update
            | Effect::Commit
            | Effect::Holds
            | Effect::Claims
            | Effect::Repair
            | Effect::Arm
            | Effect::Armed => true,
        }
    }

    /// Returns whether the answer is a stream of the guest's log or events.
    pub fn streams_records(&self) -> bool {
        matches!(self.method.effect, Effect::Records | Effect::Stream)
    }

    /// Returns whether the call only reads what the guest's kernel records: its log or events.
    pub fn reads_records(&self) -> bool {
        self.streams_records() && !self.changes()
    }

    /// Returns whether the call may change keys or prepare a change of them.
    pub fn uses_keys(&self) -> bool {
        match self.method.effect {
            Effect::Read | Effect::Records | Effect::Guest | Effect::Discard => false,
            Effect::Stream => self.changes(),
            Effect::Update
            | Effect::Prepare
            | Effect::Commit
            | Effect::Holds
            | Effect::Claims
            | Effect::Repair
            | Effect::Arm
            | Effect::Armed => true,
        }
    }

    /// Returns the caller's trace, and the span that made the call.
    pub fn trace_parent(&self) -> Option<TraceParent> {
        TraceParent::of(&self.headers)
    }

    /// Returns the trace id; empty if the caller gave none.
    pub fn trace_id(&self) -> String {
        let parent = self.trace_parent();
        parent.map_or_else(String::new, |parent| format!("{:032x}", parent.trace_id))
    }

    pub fn caller(&self) -> Caller {
        Caller {
            principal: self.principal().to_owned(),
            person: self.person.clone().unwrap_or_default(),
            guest: self.guest.clone(),
            trace_id: self.trace_id(),
            trace_parent: self.trace_parent(),
            changes: self.changes(),
        }
    }

    pub fn principal(&self) -> &str {
        &self.identity.principal
    }

    /// Returns the time until the client's deadline; `None` if the client has set none.
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Returns the request to the monitor for this call, with `body` and in the name of the call's
    /// principal.
    pub fn request(&self, body: Body, allowed: &Allowed) -> Result<Request<Body>, Status> {
        let mut headers = self.headers.clone();
        self.assert_principal(&mut headers, allowed)?;
        headers.insert("te", HeaderValue::from_static("trailers"));
        let grpc = HeaderValue::from_static("application/grpc");
        headers.insert("content-type", grpc);
        if let Some(left) = self.time_left() {
            headers.insert("grpc-timeout", timeout(left));
        }
        let mut request = Request::new(body);
        *request.method_mut() = HttpMethod::POST;
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = (self.method.path.parse())
            .map_err(|_| Status::internal("the method's path is no URI"))?;
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// Returns a request that the host itself makes for the call, in the name of the call's
    /// principal.
    pub fn ask<T>(&self, message: T, allowed: &Allowed) -> Result<tonic::Request<T>, Status> {
        let mut headers = self.headers.clone();
        self.assert_principal(&mut headers, allowed)?;
        let metadata = MetadataMap::from_headers(headers);
        let mut request =
            tonic::Request::from_parts(metadata, tonic::Extensions::default(), message);
        if let Some(left) = self.time_left() {
            request.set_timeout(left);
        }
        Ok(request)
    }

    fn assert_principal(&self, headers: &mut HeaderMap, allowed: &Allowed) -> Result<(), Status> {
        let name = HeaderValue::from_str(self.principal());
        let name = name.map_err(|_| Status::internal("the principal is not printable"))?;
        headers.insert(HeaderName::from_static(PRINCIPAL_METADATA), name);
        if let Some(person) = &self.person {
            let person = HeaderValue::from_str(person);
            let person = person.map_err(|_| Status::internal("the person is not printable"))?;
            headers.insert(HeaderName::from_static(PERSON_METADATA), person);
        }
        // The role limits the call to the rights of the rule, in case the monitor parses fields of
        // the call that this program does not parse.
        let role = allowed.role.as_str();
        let Some(scope) = allowed.scope(&self.identity) else {
            let role = HeaderValue::from_static(role);
            headers.insert(HeaderName::from_static(ROLE_METADATA), role);
            return Ok(());
        };
        let scoped = match scope.person {
            Some(_) => SCOPED_BY_PERSON,
            None => SCOPED,
        };
        let scope = scope.encode_to_vec();
        if scope.len() > MAX_SCOPE_BYTES {
            let message = format!(
                "the rules that may allow the call have more than {} KiB of globs; shorten them",
                MAX_SCOPE_BYTES >> 10
            );
            return Err(status::exhausted("TOO_MANY_RULES", &message));
        }
        let mut metadata = MetadataMap::new();
        metadata.insert_bin(SCOPE_METADATA, MetadataValue::from_bytes(&scope));
        headers.extend(metadata.into_headers());
        let role = HeaderValue::try_from(format!("{role}{scoped}"));
        let role = role.map_err(|_| Status::internal("the role is not printable"))?;
        headers.insert(HeaderName::from_static(ROLE_METADATA), role);
        Ok(())
    }

    /// Returns the request for the audit log, as JSON. If the request cannot be converted or the
    /// JSON is too long, the text contains the beginning and a digest of the request.
    pub fn text(&self, descriptors: &DescriptorPool) -> String {
        let typed = match self.method.name {
            "StreamConsole" => console::without_input(&self.message),
            _ => None,
        };
        let message = typed.as_ref().map_or(&self.message, |(message, _)| message);
        let shown = (message.len() <= MAX_SHOWN_MESSAGE)
            .then(|| self.json(descriptors, message))
            .flatten();
        let mut text = shown.unwrap_or_default();
        if let Some((_, typed)) = &typed {
            text = format!("{text} {typed}");
        }
        if text.is_empty() || text.len() > MAX_TEXT_BYTES {
            let mut end = text.len().min(MAX_TEXT_BYTES);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            let digest = hex(&Sha256::digest(&self.message));
            let bytes = self.message.len();
            text = format!("{}… ({bytes} bytes, sha256 {digest})", &text[..end]);
        }
        text
    }

    fn json(&self, descriptors: &DescriptorPool, message: &Bytes) -> Option<String> {
        let service = format!("patchbay.v1.{}", self.method.service);
        let service = descriptors.get_service_by_name(&service)?;
        let mut methods = service.methods();
        let method = methods.find(|method| method.name() == self.method.name)?;
        let message = DynamicMessage::decode(method.input(), message.clone()).ok()?;
        serde_json::to_string(&message).ok()
    }
}

fn assertions(headers: &HeaderMap) -> MetadataMap {
    let name = HeaderName::from_static(ASSERTION_METADATA);
    let values = headers.get_all(&name).iter();
    MetadataMap::from_headers(values.map(|value| (name.clone(), value.clone())).collect())
}

fn forwarded(headers: &HeaderMap) -> HeaderMap {
    let mut kept = HeaderMap::new();
    for (name, value) in headers {
        let text = name.as_str();
        if !NOT_FORWARDED.contains(&text) && !text.starts_with(OWN_METADATA) {
            kept.append(name.clone(), value.clone());
        }
    }
    if TraceParent::of(headers).is_none() {
        kept.remove(TRACEPARENT_METADATA);
    }
    kept
}

fn deadline(headers: &HeaderMap) -> Result<Option<Instant>, Status> {
    let Some(value) = headers.get("grpc-timeout") else {
        return Ok(None);
    };
    let malformed = || {
        status::invalid(
            "grpc-timeout",
            "grpc-timeout is malformed; give up to 8 digits and one of H, M, S, m, u, n",
        )
    };
    let text = value.to_str().map_err(|_| malformed())?;
    let (digits, unit) = text
        .len()
        .checked_sub(1)
        .and_then(|at| text.split_at_checked(at))
        .ok_or_else(malformed)?;
    let all_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
    if digits.is_empty() || digits.len() > 8 || !all_digits {
        return Err(malformed());
    }
    let amount: u64 = digits.parse().map_err(|_| malformed())?;
    let timeout = match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return Err(malformed()),
    };
    Ok(Instant::now().checked_add(timeout))
}

/// Formats a time for gRPC, with at most 8 digits.
fn timeout(left: Duration) -> HeaderValue {
    let text = match (left.as_micros(), left.as_millis(), left.as_secs()) {
        (micros, _, _) if micros < 100_000_000 => format!("{micros}u"),
        (_, millis, _) if millis < 100_000_000 => format!("{millis}m"),
        (_, _, seconds) => format!("{}S", seconds.min(99_999_999)),
    };
    // Digits and a letter are always a valid header value.
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static("0n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use patchbay_proto::methods::METHODS;

    #[test]
    fn the_first_field_names_the_guest() {
        let pool = DescriptorPool::decode(patchbay_proto::FILE_DESCRIPTOR_SET).expect("encoded");
        for method in METHODS.iter().filter(|method| method.name != "ListGuests") {
            let service = pool.get_service_by_name(&format!("patchbay.v1.{}", method.service));
            let service = service.expect("described");
            let mut methods = service.methods();
            let described = methods.find(|found| found.name() == method.name);
            let input = described.expect("described").input();
            assert_eq!(input.get_field(1).expect("field 1").name(), "guest");
        }
    }

    #[test]
    fn deadlines_are_read_and_written_as_grpc_does() {
        let read = |text: &'static str| {
            let mut headers = HeaderMap::new();
            let value = HeaderValue::from_bytes(text.as_bytes()).expect("a value");
            headers.insert("grpc-timeout", value);
            deadline(&headers)
        };
        for good in ["1S", "0n", "99999999H", "5m", "7u", "1M"] {
            assert!(read(good).is_ok(), "{good}");
        }
        for bad in ["", "S", "1", "-1S", "+1S", "123456789S", "1s", "1 S", "1é"] {
            assert!(read(bad).is_err(), "{bad}");
        }
        for (left, text) in [
            (Duration::ZERO, "0u"),
            (Duration::from_micros(99_999_999), "99999999u"),
            (Duration::from_secs(100), "100000m"),
            (Duration::from_secs(200_000), "200000S"),
            (Duration::MAX, "99999999S"),
        ] {
            assert_eq!(timeout(left), text);
        }
    }

    #[test]
    fn clients_cannot_assert_a_principal_or_break_the_trace() {
        const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let headers = |pairs: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.append(*name, HeaderValue::from_static(value));
            }
            forwarded(&headers)
        };
        let kept = headers(&[
            ("patchbay-principal", "uid:0"),
            ("patchbay-role", "admin"),
            ("patchbay-person", "bob"),
            ("patchbay-assertion-bin", "AAAA"),
            ("patchbay-anything", "x"),
            ("x-request", "1"),
            (TRACEPARENT_METADATA, PARENT),
        ]);
        assert_eq!(kept.len(), 2, "{kept:?}");
        assert_eq!(kept[TRACEPARENT_METADATA], PARENT);
        assert!(
            headers(&[
                (TRACEPARENT_METADATA, PARENT),
                (TRACEPARENT_METADATA, PARENT)
            ])
            .is_empty()
        );
        assert!(headers(&[(TRACEPARENT_METADATA, "00-0-0-0")]).is_empty());
    }
}
