// SPDX-License-Identifier: Apache-2.0
//! Routes requests and builds the responses.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::TryStreamExt;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited, StreamBody};
use hyper::body::Incoming;
use patchbay_access::addresses::hide_in_text;
use patchbay_access::identity::Identity;
use serde::{Deserialize, Serialize};

use super::sight::Sight;
use super::{Shared, access, events, heat, holders, rows};
use crate::authority::Refused as NotGiven;
use crate::controller::Leadership;
use crate::rollout::Verb;
use crate::runner::{Command, Running, now};

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Answer = Response<Body>;

/// Forbids content of other origins, inline scripts and styles, and frames that contain the page.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const MAX_BODY_BYTES: usize = 4096;

/// The name, type and content of each file.
const FILES: [(&str, &str, &str); 9] = [
    ("/", "text/html", include_str!("assets/index.html")),
    (
        "/assets/style.css",
        "text/css",
        include_str!("assets/style.css"),
    ),
    (
        "/assets/icon.svg",
        "image/svg+xml",
        include_str!("assets/icon.svg"),
    ),
    (
        "/assets/app.js",
        "text/javascript",
        include_str!("assets/app.js"),
    ),
    (
        "/assets/dom.js",
        "text/javascript",
        include_str!("assets/dom.js"),
    ),
    (
        "/assets/rollout.js",
        "text/javascript",
        include_str!("assets/rollout.js"),
    ),
    (
        "/assets/commands.js",
        "text/javascript",
        include_str!("assets/commands.js"),
    ),
    (
        "/assets/heat.js",
        "text/javascript",
        include_str!("assets/heat.js"),
    ),
    (
        "/assets/tables.js",
        "text/javascript",
        include_str!("assets/tables.js"),
    ),
];

/// A refusal with its HTTP status.
struct Refused(StatusCode, String);

impl Refused {
    fn new(status: StatusCode, why: impl Into<String>) -> Self {
        Self(status, why.into())
    }
}

pub async fn answer(shared: &Arc<Shared>, by: &Identity, request: Request<Incoming>) -> Answer {
    let answer = match respond(shared, by, request).await {
        Ok(answer) => answer,
        Err(Refused(status, error)) => {
            let mut answer = json(&serde_json::json!({ "error": error }));
            *answer.status_mut() = status;
            answer
        }
    };
    secured(answer)
}

fn secured(mut answer: Answer) -> Answer {
    let headers = answer.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let same_origin = HeaderValue::from_static("same-origin");
    headers.insert("cross-origin-resource-policy", same_origin.clone());
    headers.insert("cross-origin-opener-policy", same_origin);
    answer
}

async fn respond(
    shared: &Arc<Shared>,
    by: &Identity,
    request: Request<Incoming>,
) -> Result<Answer, Refused> {
    let forbidden = |why: String| Refused::new(StatusCode::FORBIDDEN, why);
    if let Some(why) = access::refusal(shared, by, &request) {
        return Err(forbidden(why));
    }
    let policy = shared.admission.policy().current();
    let principal = by.principal.as_str();
    access::may_view(&policy, principal, None).map_err(forbidden)?;
    let path = request.uri().path().to_owned();
    if *request.method() == Method::POST {
        return command(shared, principal, &path, request).await;
    }
    if *request.method() != Method::GET {
        let status = StatusCode::METHOD_NOT_ALLOWED;
        return Err(Refused::new(status, "the page answers GET and POST"));
    }
    if let Some((_, kind, text)) = FILES.iter().find(|(name, ..)| *name == path) {
        return Ok(content(kind, Bytes::from_static(text.as_bytes())));
    }
    let query = request.uri().query().unwrap_or_default();
    let query: HashMap<_, _> = form_urlencoded::parse(query.as_bytes())
        .into_owned()
        .collect();
    let field = |name: &str| query.get(name).map_or("", String::as_str);
    let from = field("from").parse().unwrap_or(0);
    match path.as_str() {
        "/api/events" => {
            let last_id = request.headers().get("last-event-id");
            let last_id = last_id.and_then(|id| id.to_str().ok());
            let rollout = query.get("rollout").cloned();
            let stream = events::stream(Arc::clone(shared), by, rollout, last_id);
            let body = StreamBody::new(stream.map_err(|error| match error {}));
            Ok(typed("text/event-stream", BodyExt::boxed_unsync(body)))
        }
        "/api/guests" => {
            let running = find_rollout(shared, field("rollout"))?;
            let wanted = rows::Wanted {
                find: field("find"),
                state: field("state"),
                from,
            };
            let rollout = running.rollout();
            if !Sight::new(&policy, principal).sees_rollout(&rollout) {
                return Err(no_rollout(field("rollout")));
            }
            Ok(json(&rows::guests(&rollout, &wanted, &policy, principal)))
        }
        "/api/explain" => {
            let running = find_rollout(shared, field("rollout"))?;
            let (host, guest) = (field("host"), field("guest"));
            access::may_view(&policy, principal, Some(guest)).map_err(forbidden)?;
            let rollout = running.rollout();
            let sight = Sight::new(&policy, principal);
            let hidden = sight.hidden(&rollout);
            let reasons = rows::explain(&rollout, host, guest, now(), &policy);
            let reasons = reasons.map(|reasons| {
                let shown = reasons.iter().map(|reason| hidden.shown(reason));
                shown.collect::<Vec<_>>()
            });
            let none = || Refused::new(StatusCode::NOT_FOUND, "the rollout has no such guest");
            Ok(json(&reasons.ok_or_else(none)?))
        }
        "/api/heat" => {
            let observed = Arc::clone(&shared.heat.borrow());
            let sight = Sight::new(&policy, principal);
            let leads = leads(shared)?;
            Ok(json(&heat::heat(
                &leads,
                &observed,
                field("find"),
                from,
                &sight,
            )))
        }
        "/api/holders" => {
            let leads = leads(shared)?;
            let (host, key) = (field("host"), field("key"));
            Ok(json(
                &holders::holders(leads.hosts(), host, key, &policy, principal).await,
            ))
        }
        "/api/trail" => {
            let sight = Sight::new(&policy, principal);
            Ok(json(&rows::trail(&*leads(shared)?, field("find"), &sight)))
        }
        _ => Err(Refused::new(
            StatusCode::NOT_FOUND,
            format!("there is no {path}"),
        )),
    }
}

fn leads(shared: &Shared) -> Result<Arc<Leadership>, Refused> {
    shared.controller.leadership().ok_or_else(|| {
        let (why, _) = shared.controller.why_not_leading();
        Refused::new(StatusCode::SERVICE_UNAVAILABLE, why)
    })
}

fn find_rollout(shared: &Shared, name: &str) -> Result<Arc<Running>, Refused> {
    let found = leads(shared)?.rollout(name);
    found.ok_or_else(|| no_rollout(name))
}

fn no_rollout(name: &str) -> Refused {
    let why = format!("there is no rollout {name:?}");
    Refused::new(StatusCode::NOT_FOUND, why)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CommandBody {
    /// The digest of the plan that was shown. `approve` and `start` require it.
    #[serde(default)]
    digest: String,
}

/// Handles `POST /api/rollouts/NAME/VERB`.
async fn command(
    shared: &Shared,
    principal: &str,
    path: &str,
    request: Request<Incoming>,
) -> Result<Answer, Refused> {
    let bad = |why: String| Refused::new(StatusCode::BAD_REQUEST, why);
    let named = path
        .strip_prefix("/api/rollouts/")
        .and_then(|rest| rest.split_once('/'));
    let verb = |name: &str| Verb::ALL.into_iter().find(|verb| verb.name() == name);
    let Some((name, verb)) = named.and_then(|(name, word)| Some((name, verb(word)?))) else {
        return Err(Refused::new(
            StatusCode::NOT_FOUND,
            format!("there is no command {path}"),
        ));
    };
    let running = find_rollout(shared, name)?;
    let current = shared.admission.policy().current();
    let sight = Sight::new(&current, principal);
    if !sight.sees_rollout(&running.rollout()) {
        return Err(no_rollout(name));
    }
    let body = Limited::new(request.into_body(), MAX_BODY_BYTES)
        .collect()
        .await;
    let body = body.map_err(|error| bad(format!("the request cannot be read: {error}")))?;
    let body: CommandBody = serde_json::from_slice(&body.to_bytes())
        .map_err(|error| bad(format!("the request is malformed: {error}")))?;
    let command = match verb {
        Verb::Approve => Command::Approve {
            digest: body.digest,
        },
        Verb::Start => Command::Start {
            digest: body.digest,
        },
        Verb::Pause => Command::Pause,
        Verb::Resume => Command::Resume,
        Verb::Promote => Command::Promote,
        Verb::Abort => Command::Abort,
        Verb::Undo => Command::Undo,
    };
    let given = shared.authority.give(principal, &running, command).await;
    given.map_err(|refused| {
        let why = sight.hidden(&running.rollout()).shown(&refused.to_string());
        let status = match refused {
            NotGiven::Denied(_) => StatusCode::FORBIDDEN,
            NotGiven::Unapproved(_) | NotGiven::NotLegal(_) => StatusCode::CONFLICT,
            NotGiven::Audit(_) | NotGiven::NoAnswer(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        Refused::new(status, why)
    })?;
    Ok(json(&serde_json::json!({})))
}

/// Serializes a value for a viewer. Hosts treat the controller as an operator, so their errors may
/// contain addresses of the guest's kernel, which are hidden here.
pub fn shown(value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(value)?;
    hide_in_text(&mut text);
    Ok(text)
}

fn json(value: &impl Serialize) -> Answer {
    match shown(value) {
        Ok(text) => content("application/json", Bytes::from(text)),
        Err(error) => {
            let mut answer = content("text/plain", Bytes::from(error.to_string()));
            *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            answer
        }
    }
}

fn content(kind: &'static str, bytes: Bytes) -> Answer {
    typed(kind, BodyExt::boxed_unsync(Full::new(bytes)))
}

fn typed(kind: &'static str, body: Body) -> Answer {
    let mut answer = Response::new(body);
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that addresses in the errors of hosts are hidden. Hosts reveal them to the
    /// controller, which they treat as an operator.
    #[test]
    fn errors_of_hosts_are_shown_without_addresses() {
        let error = "FailedPrecondition: the site 0xffffffff81234567 holds \"other\" bytes";
        let text = shown(&serde_json::json!({ "error": error })).expect("JSON");
        let shown: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        let wanted = error.replace("ffffffff81234567", "xxxxxxxxxxxxxxxx");
        assert_eq!(shown["error"], wanted);
    }
}
