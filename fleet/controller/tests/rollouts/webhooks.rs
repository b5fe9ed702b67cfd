// SPDX-License-Identifier: Apache-2.0
//! Tests webhooks against a real HTTP server, whose responses each test determines.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use patchbay_fleet::drift::{self, Action};
use patchbay_fleet::rollout::Phase;
use patchbay_fleet::runner::Command;
use patchbay_fleet::scrape;
use patchbay_fleet::webhooks::{Webhook, read};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use super::support::{Fleet, PATIENCE, Replica, is_over, spec, tell, wait_for};

/// 24 bytes in base64.
const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3";

const URL: &str = "http://127.0.0.1:PORT/hook?a=b";

/// A request that a server has received.
#[derive(Debug)]
struct Got {
    headers: HeaderMap,
    body: String,
}

impl Got {
    fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).expect("the header");
        value.to_str().expect("text")
    }

    fn id(&self) -> &str {
        self.header("webhook-id")
    }

    fn data(&self, field: &str) -> String {
        let body: Value = serde_json::from_str(&self.body).expect("JSON");
        let value = &body["data"][field];
        value.as_str().map_or(value.to_string(), str::to_owned)
    }

    fn kind(&self) -> String {
        let body: Value = serde_json::from_str(&self.body).expect("JSON");
        body["type"].as_str().expect("text").to_owned()
    }
}

/// The statuses of the next answers, and 200 after them. 0 stands for no answer.
type Script = Arc<Mutex<VecDeque<u16>>>;

struct Server {
    folder: tempfile::TempDir,
    port: u16,
    /// The socket before it is served.
    listener: Option<TcpListener>,
    script: Script,
    sender: mpsc::UnboundedSender<Got>,
    got: mpsc::UnboundedReceiver<Got>,
    tasks: JoinSet<()>,
}

impl Server {
    async fn start(statuses: &[u16]) -> Self {
        Self::start_with(statuses, None).await
    }

    async fn start_with(statuses: &[u16], tls: Option<TlsAcceptor>) -> Self {
        let mut server = Self::unserved().await;
        server.script.lock().expect("no panic").extend(statuses);
        server.serve(tls);
        server
    }

    /// Listens, and answers nothing.
    async fn unserved() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let (sender, got) = mpsc::unbounded_channel();
        Self {
            folder: tempfile::tempdir().expect("temporary folder"),
            port: listener.local_addr().expect("an address").port(),
            listener: Some(listener),
            script: Script::default(),
            sender,
            got,
            tasks: JoinSet::new(),
        }
    }

    /// Waits for a connection, and returns it.
    async fn accept(&self) -> TcpStream {
        let listener = self.listener.as_ref().expect("it is not served");
        let accepted = tokio::time::timeout(PATIENCE, listener.accept()).await;
        accepted.expect("in time").expect("it listens").0
    }

    /// Answers from now on.
    fn serve(&mut self, tls: Option<TlsAcceptor>) {
        let listener = self.listener.take().expect("it is not served");
        let (answers, sender) = (Arc::clone(&self.script), self.sender.clone());
        self.tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.expect("it listens");
                let (answers, sender, tls) = (Arc::clone(&answers), sender.clone(), tls.clone());
                connections.spawn(async move {
                    match tls {
                        // A client that refuses the certificate is answered nothing.
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                answer(stream, answers, sender).await;
                            }
                        }
                        None => answer(stream, answers, sender).await,
                    }
                });
            }
        });
    }

    /// Returns the webhook, as the controller's file names it.
    fn webhook(&self, url: &str, more: &str) -> Vec<Webhook> {
        let secret = self.folder.path().join("secret");
        std::fs::write(&secret, format!("whsec_{SECRET}\n")).expect("written");
        let own = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&secret, own).expect("permitted");
        let url = url.replace("PORT", &self.port.to_string());
        let secret = secret.display();
        let text =
            format!("webhooks: [{{name: pager, url: \"{url}\", secret_file: {secret}, {more}}}]\n");
        let path = self.folder.path().join("webhooks.yaml");
        std::fs::write(&path, text).expect("written");
        read(&path).expect("right")
    }

    fn plain(&self) -> Vec<Webhook> {
        self.webhook(URL, "timeout: 2s")
    }

    async fn next(&mut self) -> Got {
        let got = tokio::time::timeout(PATIENCE, self.got.recv());
        got.await.expect("in time").expect("it serves")
    }
}

async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    answers: Script,
    sender: mpsc::UnboundedSender<Got>,
) {
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let status = answers.lock().expect("no panic").pop_front();
        let sender = sender.clone();
        async move {
            assert_eq!(
                (request.method().as_str(), request.uri().to_string()),
                ("POST", "/hook?a=b".to_owned())
            );
            let headers = request.headers().clone();
            let body = request.into_body().collect().await.expect("a body");
            let body = String::from_utf8(body.to_bytes().to_vec()).expect("text");
            let _ = sender.send(Got { headers, body });
            if status == Some(0) {
                std::future::pending::<()>().await;
            }
            let mut response = Response::new(Full::new(Bytes::new()));
            *response.status_mut() = status.unwrap_or(200).try_into().expect("a status");
            let location = "http://127.0.0.1:1/elsewhere".parse().expect("a header");
            response.headers_mut().insert("location", location);
            Ok::<_, Infallible>(response)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new();
    // The client closes the connection without a shutdown.
    let _ = connection
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

fn metric(replica: &Replica, name: &str) -> u64 {
    let text = scrape::text(&replica.controller).expect("encoded");
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("{name} in {text}"));
    line.trim().parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_signed_and_arrive_in_order() {
    let fleet = Fleet::start(1, 2).await;
    let mut server = Server::start(&[]).await;
    let replica = fleet.start_delivering(fleet.config("one"), server.plain());
    let text = spec(
        "title: Receive path\nwaves: [{size: rest}]\ngates: [{grpc: {url: \"http://127.0.0.1:1\"}, \
         interval: 10ms, patience: 30ms, on_failure: pause}]",
    );
    let running = replica.start("net", &text).await;
    let phases = ["planned", "running", "paused"];
    let mut ids = Vec::new();
    for (index, phase) in phases.into_iter().enumerate() {
        let got = server.next().await;
        assert_eq!(got.data("phase"), phase, "{got:?}");
        assert_eq!(got.data("rollout"), "net");
        assert_eq!(got.data("title"), "Receive path");
        let kind = if index == 2 {
            "rollout.gate_closed"
        } else {
            "rollout.phase"
        };
        assert_eq!(got.kind(), kind, "{got:?}");
        assert_eq!(got.header("content-type"), "application/json");
        // An independent implementation checks the signature.
        let signed = format!(
            "{}.{}.{}",
            got.id(),
            got.header("webhook-timestamp"),
            got.body
        );
        assert_eq!(
            got.header("webhook-signature"),
            openssl_signature(&server, &signed)
        );
        ids.push(got.id().to_owned());
    }
    let run = running.rollout().header().run.clone();
    let numbers = ids.iter().map(|id| {
        let number = id
            .strip_prefix(&run)
            .and_then(|rest| rest.strip_prefix('-'));
        number.and_then(|number| number.parse::<u64>().ok())
    });
    let numbers: Option<Vec<u64>> = numbers.collect();
    // Not every entry of the timeline is an event.
    assert!(
        numbers.is_some_and(|numbers| numbers.is_sorted_by(|a, b| a < b)),
        "{ids:?}"
    );
    tell(&running, Command::Undo).await;
    let ends: Vec<String> = [server.next().await, server.next().await]
        .iter()
        .map(|got| got.data("phase"))
        .collect();
    assert_eq!(ends, ["reverting", "undone"]);
}

/// Returns the signature that `openssl` makes.
fn openssl_signature(server: &Server, signed: &str) -> String {
    let file = server.folder.path().join("signed");
    std::fs::write(&file, signed).expect("written");
    let script = format!(
        "openssl dgst -sha256 -mac HMAC -macopt hexkey:$(echo {SECRET} | base64 -d | od -An -v -tx1 | tr -d ' \\n') \
         -binary {} | base64",
        file.display()
    );
    let output = std::process::Command::new("sh")
        .args(["-c", &script])
        .output();
    let output = output.expect("sh starts");
    assert!(output.status.success(), "{output:?}");
    format!(
        "v1,{}",
        String::from_utf8(output.stdout).expect("text").trim()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_repeated_with_the_same_id_until_it_is_accepted() {
    let fleet = Fleet::start(1, 1).await;
    // An error, a redirect that is not followed, and no answer at all.
    let mut server = Server::start(&[503, 302, 0]).await;
    let replica = fleet.start_delivering(fleet.config("one"), server.plain());
    let leads = replica.lead().await;
    leads
        .plan("net", &spec("waves: [{size: rest}]"), "alice")
        .await
        .expect("planned");
    let first = server.next().await;
    let running = leads.rollout("net").expect("planned");
    let delivered = || running.rollout().header().delivered.get("pager").copied();
    for is_accepted in [false, false, true] {
        let again = server.next().await;
        assert_eq!((again.id(), &again.body), (first.id(), &first.body));
        // What the timeline drops from now on is counted as lost.
        assert!(
            is_accepted || delivered() == Some(0),
            "the attempt is stored"
        );
    }
    let mut version = running.version();
    while delivered() != Some(1) {
        version.changed().await.expect("it runs");
    }
    assert_eq!(metric(&replica, "patchbay_fleet_webhook_failures_total"), 3);
    assert_eq!(
        metric(&replica, "patchbay_fleet_webhook_lost_events_total"),
        0
    );
}

/// Checks that the events of other rollouts are delivered while a runner writes its rollout to a
/// file system that hangs.
#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_whose_archive_hangs_does_not_delay_the_events_of_others() {
    let fleet = Fleet::start(1, 1).await;
    let first = fleet.start_replica(fleet.config("one"));
    let text = spec("waves: [{size: rest}]");
    let running = first.start("net", &text).await;
    tell(&running, Command::Undo).await;
    wait_for(&running, is_over).await;
    drop((running, first));

    let mut server = Server::unserved().await;
    let replica = fleet.start_delivering(fleet.config("two"), server.webhook(URL, "timeout: 60s"));
    // While the first attempt has no answer, nothing is stored.
    let unanswered = server.accept().await;
    let leads = replica.lead().await;
    let running = leads.rollout("net").expect("loaded");
    let entries = fleet.store.range("rollouts/net/").await.expect("read");
    let newest = entries.entries.iter().map(|entry| entry.modified).max();
    let archive = fleet.config("two").archive.folder;
    std::fs::create_dir_all(&archive).expect("room");
    // The runner opens this file, which blocks until somebody reads it.
    let pipe = archive.join(format!("net-{}.partial", newest.expect("stored")));
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo starts").success());
    let mut deleting = std::pin::pin!(running.delete("alice"));
    let deleted = deleting.as_mut().now_or_never();
    assert!(deleted.is_none(), "the runner has the request");
    leads.plan("other", &text, "alice").await.expect("planned");

    // The failure is to be stored in both rollouts.
    drop(unanswered);
    server.serve(None);
    let next = tokio::time::timeout(PATIENCE, server.got.recv()).await;
    // The runner goes on, so that the test can end.
    let mut options = std::fs::OpenOptions::new();
    let reader = options.read(true).write(true).open(&pipe);
    let deleted = deleting.await.expect("it runs");
    deleted.expect_err("a pipe is not an archive");
    drop(reader);
    let next = next.expect("in time").expect("it serves");
    assert_eq!(next.data("rollout"), "other");
    assert_eq!(server.next().await.data("rollout"), "net");
}

/// Checks that a new leader delivers the events that the earlier one could not deliver, and does
/// not repeat those that were accepted.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_leader_goes_on_after_the_last_accepted_event() {
    let fleet = Fleet::start(1, 1).await;
    let mut server = Server::start(&[200]).await;
    // After the first event, the server is down for as long as the first leader lives.
    server.script.lock().expect("no panic").extend([503; 100]);
    let first = fleet.start_delivering(fleet.config("one"), server.plain());
    let running = first.start("net", &spec("waves: [{size: rest}]")).await;
    assert_eq!(server.next().await.data("phase"), "planned");
    let refused = server.next().await;
    assert_eq!(refused.data("text"), "started");
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    drop(first);
    server.script.lock().expect("no panic").clear();
    while server.got.try_recv().is_ok() {}
    let second = fleet.start_delivering(fleet.config("two"), server.plain());
    second.lead().await;
    let again = server.next().await;
    assert_eq!((again.id(), &again.body), (refused.id(), &refused.body));
    assert_eq!(server.next().await.data("phase"), "completed");
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_is_an_event_once() {
    let fleet = Fleet::start(1, 1).await;
    let mut server = Server::start(&[]).await;
    let replica = fleet.start_delivering(fleet.config("one"), server.plain());
    let running = replica.start("net", &spec("waves: [{size: rest}]")).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    fleet.guests[0].set_count("alpha", 0);
    let leads = replica.lead().await;
    for _ in 0..2 {
        let authority = replica.controller.authority();
        let report =
            drift::drift(leads.hosts(), authority, &running, Action::Report, "alice").await;
        assert_eq!(report.expect("compared").drifts.len(), 1);
    }
    tell(&running, Command::Undo).await;
    let mut kinds = Vec::new();
    while kinds.last().is_none_or(|(_, phase)| phase != "undone") {
        let got = server.next().await;
        if got.kind() == "rollout.drift" {
            assert!(
                got.data("text")
                    .contains("guest web-0 on host-0: key alpha"),
                "{got:?}"
            );
            assert_eq!(got.data("principal"), "alice");
        }
        kinds.push((got.kind(), got.data("phase")));
    }
    let drifts = kinds.iter().filter(|(kind, _)| kind == "rollout.drift");
    assert_eq!(drifts.count(), 1, "{kinds:?}");
}

/// Returns a server's TLS, and the file of the CA that issued its certificate for "localhost".
fn tls(folder: &tempfile::TempDir) -> (TlsAcceptor, PathBuf) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, made.cert.pem()).expect("written");
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key);
    (TlsAcceptor::from(Arc::new(config.expect("a pair"))), ca)
}

/// Checks that a file that nobody ends to write holds up no delivery for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_is_no_file_of_cas() {
    let fleet = Fleet::start(1, 1).await;
    let mut server = Server::start(&[]).await;
    let pipe = server.folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo starts").success());
    let url = "https://localhost:PORT/hook?a=b";
    let webhook = server.webhook(url, &format!("ca: {}", pipe.display()));
    let replica = fleet.start_delivering(fleet.config("one"), webhook);
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    leads.plan("net", &text, "alice").await.expect("planned");
    let failed = async {
        while metric(&replica, "patchbay_fleet_webhook_failures_total") == 0 {
            tokio::task::yield_now().await;
        }
    };
    let failed = tokio::time::timeout(PATIENCE, failed).await;
    // A reader that waits for a writer goes on, so that the test can end.
    drop(
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&pipe),
    );
    failed.expect("in time");
    assert!(server.got.try_recv().is_err(), "nothing was sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_ca_gets_no_event() {
    let fleet = Fleet::start(1, 1).await;
    let folder = tempfile::tempdir().expect("temporary folder");
    let (acceptor, ca) = tls(&folder);
    let other = tempfile::tempdir().expect("temporary folder");
    let (_, other_ca) = tls(&other);
    let mut server = Server::start_with(&[], Some(acceptor)).await;
    let url = "https://localhost:PORT/hook?a=b";
    let distrusts = server.webhook(url, &format!("ca: {}", other_ca.display()));
    let first = fleet.start_delivering(fleet.config("one"), distrusts);
    let leads = first.lead().await;
    leads
        .plan("net", &spec("waves: [{size: rest}]"), "alice")
        .await
        .expect("planned");
    let failed = async {
        while metric(&first, "patchbay_fleet_webhook_failures_total") == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, failed)
        .await
        .expect("in time");
    assert!(server.got.try_recv().is_err(), "nothing was sent");
    drop(first);
    let trusts = server.webhook(url, &format!("ca: {}", ca.display()));
    let second = fleet.start_delivering(fleet.config("two"), trusts);
    second.lead().await;
    assert_eq!(server.next().await.data("phase"), "planned");
}
