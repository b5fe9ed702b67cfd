// SPDX-License-Identifier: Apache-2.0
//! Tests requests that the page must refuse, and headers that every answer must have.

use patchbay_access::policy::LivePolicy;
use patchbay_fleet::runner::Command;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::serve;
use crate::support::{Fleet, Replica, spec, tell};

const OURS: &str = "x-patchbay-request: 1\r\ncontent-type: application/json\r\n";

/// Returns the whole answer to one request.
async fn ask(url: &str, line: &str, headers: &str, body: &str) -> String {
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = TcpStream::connect(address).await.expect("listens");
    let host = match headers.contains("host:") {
        true => String::new(),
        false => format!("host: {address}\r\n"),
    };
    let length = body.len();
    let request = format!(
        "{line} HTTP/1.1\r\n{host}{headers}content-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("text");
    answer
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or_default()
}

async fn planned() -> (Fleet, Replica) {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{size: 1, bake: 1h}, {size: rest}]");
    replica
        .lead()
        .await
        .plan("net", &text, "alice")
        .await
        .expect("planned");
    (fleet, replica)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_must_come_from_the_page() {
    let (_fleet, replica) = planned().await;
    let (url, _serving) = serve(&replica.controller, None).await;
    let abort = "POST /api/rollouts/net/abort";
    for headers in [
        "content-type: application/json\r\n".to_owned(),
        format!("{OURS}origin: http://evil.example\r\n"),
        format!("{OURS}sec-fetch-site: cross-site\r\n"),
        format!("{OURS}host: evil.example:80\r\n"),
    ] {
        let answer = ask(&url, abort, &headers, "{}").await;
        assert_eq!(status(&answer), "403", "{headers}: {answer}");
    }
    // A request for a foreign host name is refused even if it only reads, because an attacker can
    // make such a name resolve to this computer.
    let answer = ask(&url, "GET /", "host: evil.example\r\n", "").await;
    assert_eq!(status(&answer), "403", "{answer}");
    let running = replica.lead().await.rollout("net").expect("planned");
    assert_eq!(running.rollout().header().phase.name(), "planned");
    let own = url.trim_end_matches('/');
    let headers = format!("{OURS}origin: {own}\r\nsec-fetch-site: same-origin\r\n");
    let answer = ask(&url, abort, &headers, "{}").await;
    assert_eq!(status(&answer), "200", "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_legal_or_malformed_is_refused_with_its_reason() {
    let (_fleet, replica) = planned().await;
    let (url, _serving) = serve(&replica.controller, None).await;
    let long = format!("{{\"digest\": \"{}\"}}", "x".repeat(10_000));
    for (path, body, wanted, why) in [
        ("net/pause", "{}", "409", "legal while it is running"),
        ("net/start", "{\"digest\": \"0\"}", "409", "review the plan"),
        (
            "net/approve",
            "{\"digest\": \"0\"}",
            "409",
            "review the plan",
        ),
        ("net/start", "{\"digset\": \"0\"}", "400", "unknown field"),
        ("net/start", "nonsense", "400", "malformed"),
        ("net/start", &long, "400", "cannot be read"),
        ("net/explode", "{}", "404", "no command"),
        ("other/abort", "{}", "404", "no rollout"),
    ] {
        let line = format!("POST /api/rollouts/{path}");
        let answer = ask(&url, &line, OURS, body).await;
        assert_eq!(status(&answer), wanted, "{path}: {answer}");
        assert!(answer.contains(why), "{path}: {answer}");
    }
    let answer = ask(&url, "GET /api/guests?rollout=net&from=x&find=%ff", "", "").await;
    assert_eq!(status(&answer), "200", "{answer}");
    let answer = ask(&url, "GET /assets/../Cargo.toml", "", "").await;
    assert_eq!(status(&answer), "404", "{answer}");
    let answer = ask(&url, "DELETE /", OURS, "").await;
    assert_eq!(status(&answer), "405", "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_but_the_page_itself_is_allowed_by_the_content_security_policy() {
    let (_fleet, replica) = planned().await;
    let (url, _serving) = serve(&replica.controller, None).await;
    for path in ["/", "/assets/app.js", "/api/trail", "/nothing"] {
        let answer = ask(&url, &format!("GET {path}"), "", "").await;
        assert!(
            answer.contains("content-security-policy: default-src 'none'; script-src 'self'"),
            "{answer}"
        );
        assert!(
            answer.contains("x-content-type-options: nosniff"),
            "{answer}"
        );
    }
    let page = ask(&url, "GET /", "", "").await;
    assert!(
        !page.contains("http://") && !page.contains("https://"),
        "external: {page}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_policy_decides_who_looks_and_who_commands() {
    let (_fleet, replica) = planned().await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("policy.yaml");
    let own = rustix::process::geteuid().as_raw();
    let write = |rule: &str| std::fs::write(&file, format!("rules: [{rule}]\n")).expect("written");
    write(&format!(
        "{{name: looks, principals: ['uid:{own}'], role: viewer}}"
    ));
    let policy = LivePolicy::read(file.clone()).expect("good");
    let (url, _serving) = serve(&replica.controller, Some(policy.clone())).await;
    let abort = "POST /api/rollouts/net/abort";
    assert_eq!(status(&ask(&url, "GET /", "", "").await), "200");
    let answer = ask(&url, abort, OURS, "{}").await;
    assert_eq!(status(&answer), "403", "{answer}");
    assert!(answer.contains("operator is needed"), "{answer}");

    let capped = format!("{{name: one, principals: ['uid:{own}'], role: operator, max_guests: 1}}");
    write(&capped);
    policy.reload().expect("good");
    let answer = ask(&url, "POST /api/rollouts/net/start", OURS, "{}").await;
    assert!(
        answer.contains("allows 1 guests in an hour, and this change would make it 2"),
        "{answer}"
    );

    write("{name: other, principals: ['uid:4000000000'], role: admin}");
    policy.reload().expect("good");
    assert_eq!(status(&ask(&url, "GET /", "", "").await), "403");
    let running = replica.lead().await.rollout("net").expect("planned");
    assert_eq!(running.rollout().header().phase.name(), "planned");

    // A cap limits changes. It must not prevent a user from stopping or undoing a change.
    write(&capped);
    policy.reload().expect("good");
    let answer = ask(&url, abort, OURS, "{}").await;
    assert_eq!(status(&answer), "200", "{answer}");
    assert_ne!(running.rollout().header().phase.name(), "planned");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_starts_without_the_approvals_that_the_policy_demands() {
    let (_fleet, replica) = planned().await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("policy.yaml");
    let own = rustix::process::geteuid().as_raw();
    let rules = format!(
        "rules: [{{name: own, principals: ['uid:{own}', bob], role: admin}}]\n\
         approvals: [{{keys: [alpha], min: 2}}]\n"
    );
    std::fs::write(&file, rules).expect("written");
    let policy = LivePolicy::read(file).expect("good");
    let (url, _serving) = serve(&replica.controller, Some(policy)).await;
    let running = replica.lead().await.rollout("net").expect("planned");
    let digest = running.rollout().header().digest.clone();
    let body = format!("{{\"digest\": \"{digest}\"}}");
    let start = "POST /api/rollouts/net/start";
    let answer = ask(&url, start, OURS, &body).await;
    assert_eq!(status(&answer), "409", "{answer}");
    assert!(answer.contains("1 of 2 people"), "{answer}");
    let body_of_glass = format!("{{\"digest\": \"{digest}\", \"break_glass\": true}}");
    let answer = ask(&url, start, OURS, &body_of_glass).await;
    assert_eq!(status(&answer), "400", "the page breaks no glass: {answer}");
    let approve = Command::Approve { digest };
    let approved = running.command(approve, "bob").await.expect("it runs");
    approved.expect("planned");
    let answer = ask(&url, start, OURS, &body).await;
    assert_eq!(status(&answer), "200", "{answer}");
    let answer = ask(&url, "POST /api/rollouts/net/promote", OURS, "{}").await;
    assert_eq!(status(&answer), "409", "{answer}");
    assert!(answer.contains("gates that were approved"), "{answer}");
    tell(&running, Command::Abort).await;
}

/// Returns what the page shows of a rollout to a user who may see `guests`: the heat, the trail and
/// the first event.
async fn shown(replica: &Replica, guests: &str) -> [String; 3] {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("policy.yaml");
    let own = rustix::process::geteuid().as_raw();
    let rule =
        format!("{{name: some, principals: ['uid:{own}'], role: viewer, guests: ['{guests}']}}");
    std::fs::write(&file, format!("rules: [{rule}]\n")).expect("written");
    let policy = LivePolicy::read(file.clone()).expect("good");
    let (url, _serving) = serve(&replica.controller, Some(policy)).await;
    // Guests are queried for the heat only while there is a stream of events.
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = TcpStream::connect(address).await.expect("listens");
    let request = format!("GET /api/events?rollout=net HTTP/1.1\r\nhost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let event = event_with(&mut stream, "\"rollouts\":").await;
    let observed = async {
        loop {
            let heat = ask(&url, "GET /api/heat?find=&from=0", "", "").await;
            if !heat.contains("\"at\":0") && !heat.contains("\"cells\":[]") {
                return heat;
            }
            tokio::task::yield_now().await;
        }
    };
    let heat = tokio::time::timeout(crate::support::PATIENCE, observed).await;
    let trail = ask(&url, "GET /api/trail?find=", "", "").await;
    [heat.expect("observed"), trail, event]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_viewer_learns_nothing_of_other_guests() {
    let (_fleet, replica) = planned().await;
    let running = replica.lead().await.rollout("net").expect("planned");
    let guest = running.rollout().members()[0].guest.clone();
    let digest = running.rollout().header().digest.clone();
    tell(&running, Command::Start { digest }).await;
    let [heat, trail, event] = shown(&replica, "none-*").await;
    assert!(
        heat.contains("\"guests\":0") && !heat.contains("\"guests\":2"),
        "{heat}"
    );
    assert!(trail.contains("\"total\":0"), "{trail}");
    assert!(
        event.contains("\"rollouts\":[]") && event.contains("\"rollout\":null"),
        "{event}"
    );
    let [heat, trail, event] = shown(&replica, &guest).await;
    assert!(
        heat.contains("\"guests\":1") && !heat.contains("\"guests\":2"),
        "{heat}"
    );
    assert!(!trail.contains("\"total\":0"), "{trail}");
    assert!(event.contains("\"name\":\"net\""), "{event}");
    let [heat, ..] = shown(&replica, "*").await;
    assert!(heat.contains("\"guests\":2"), "{heat}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_command_names_no_guest_that_is_hidden() {
    let (_fleet, replica) = planned().await;
    let running = replica.lead().await.rollout("net").expect("planned");
    let guests: Vec<_> = running
        .rollout()
        .members()
        .iter()
        .map(|member| member.guest.clone())
        .collect();
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("policy.yaml");
    let own = rustix::process::geteuid().as_raw();
    let write = |guests: &str| {
        let rule = format!(
            "{{name: some, principals: ['uid:{own}'], role: operator, guests: ['{guests}']}}"
        );
        std::fs::write(&file, format!("rules: [{rule}]\n")).expect("written");
    };
    write(&guests[0]);
    let policy = LivePolicy::read(file.clone()).expect("good");
    let (url, _serving) = serve(&replica.controller, Some(policy.clone())).await;
    for verb in ["abort", "start"] {
        let line = format!("POST /api/rollouts/net/{verb}");
        let answer = ask(&url, &line, OURS, "{}").await;
        assert_eq!(status(&answer), "403", "{answer}");
        assert!(!answer.contains(&guests[1]), "{answer}");
    }
    // A rollout without a visible guest looks as if it did not exist.
    write("none-*");
    policy.reload().expect("good");
    for (line, name) in [
        ("POST /api/rollouts/net/abort", "net"),
        ("POST /api/rollouts/other/abort", "other"),
        ("GET /api/guests?rollout=net", "net"),
    ] {
        let answer = ask(&url, line, OURS, "{}").await;
        assert_eq!(status(&answer), "404", "{answer}");
        let why = format!("there is no rollout \\\"{name}\\\"");
        assert!(answer.contains(&why), "{answer}");
    }
}

/// Reads events until one has the text.
async fn event_with(stream: &mut TcpStream, text: &str) -> String {
    let mut all = String::new();
    let read = async {
        while !all.contains(text) {
            let mut some = [0; 4096];
            let length = stream.read(&mut some).await.expect("readable");
            assert!(length > 0, "the stream has ended: {all}");
            all += &String::from_utf8_lossy(&some[..length]);
        }
    };
    let read = tokio::time::timeout(crate::support::PATIENCE, read).await;
    read.unwrap_or_else(|_| panic!("no event has {text}"));
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_events_goes_on_where_it_was() {
    let (_fleet, replica) = planned().await;
    let (url, _serving) = serve(&replica.controller, None).await;
    let address = url
        .trim_start_matches("http://")
        .trim_end_matches('/')
        .to_owned();
    let open = async |headers: &str| {
        let mut stream = TcpStream::connect(&address).await.expect("listens");
        let request =
            format!("GET /api/events?rollout=net HTTP/1.1\r\nhost: {address}\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        stream
    };
    let mut stream = open("").await;
    let first = event_with(&mut stream, "\"phase\":\"planned\"").await;
    assert!(first.contains("text/event-stream"), "{first}");
    let running = replica.lead().await.rollout("net").expect("planned");
    let digest = running.rollout().header().digest.clone();
    tell(&running, Command::Start { digest }).await;
    event_with(&mut stream, "\"phase\":\"baking\"").await;
    drop(stream);
    // The first event includes the changes that happened meanwhile.
    tell(&running, Command::Pause).await;
    let mut stream = open("last-event-id: 0-0-0\r\n").await;
    event_with(&mut stream, "\"phase\":\"paused\"").await;
    // A client with another state gets the state at once, even if nothing changes.
    let mut last = String::new();
    let at_once = async {
        loop {
            let mut stream = open("last-event-id: 0-0-0\r\n").await;
            let id = id_of(&event_with(&mut stream, "\n\n").await);
            if std::mem::replace(&mut last, id.clone()) == id {
                return;
            }
        }
    };
    let at_once = tokio::time::timeout(crate::support::PATIENCE, at_once).await;
    at_once.expect("the state is sent before it changes");
    // A client that has the current state does not get it again.
    let mut stream = open(&format!("last-event-id: {last}\r\n")).await;
    tell(&running, Command::Resume).await;
    let next = event_with(&mut stream, "\n\n").await;
    assert_ne!(id_of(&next), last);
}

fn id_of(events: &str) -> String {
    let id = events.lines().find_map(|line| line.strip_prefix("id: "));
    id.unwrap_or_else(|| panic!("no id: {events}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_end_when_the_policy_allows_them_no_more() {
    let (_fleet, replica) = planned().await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("policy.yaml");
    let own = rustix::process::geteuid().as_raw();
    let write = |uid: u32| {
        let rule = format!("rules: [{{name: one, principals: ['uid:{uid}'], role: viewer}}]");
        std::fs::write(&file, rule).expect("written");
    };
    write(own);
    let policy = LivePolicy::read(file.clone()).expect("good");
    let (url, _serving) = serve(&replica.controller, Some(policy.clone())).await;
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = TcpStream::connect(address).await.expect("listens");
    let request = format!("GET /api/events HTTP/1.1\r\nhost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut text = String::new();
    let mut buffer = [0; 4096];
    while !text.contains("data: {") {
        let count = stream.read(&mut buffer).await.expect("events");
        assert_ne!(count, 0, "{text}");
        text += &String::from_utf8_lossy(&buffer[..count]);
    }
    // The rights are unchanged, so the stream continues.
    policy.reload().expect("good");
    write(own + 1);
    policy.reload().expect("good");
    let mut rest = String::new();
    while !rest.contains("\r\n0\r\n") {
        let count = stream.read(&mut buffer).await.expect("events");
        assert_ne!(count, 0, "{rest}");
        rest += &String::from_utf8_lossy(&buffer[..count]);
    }
    assert!(rest.contains("event: refused"), "{rest}");
    assert!(rest.contains("no rule of the policy names"), "{rest}");
    let answer = ask(&url, "GET /api/events", "", "").await;
    assert_eq!(status(&answer), "403", "{answer}");
}
