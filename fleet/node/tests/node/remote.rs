// SPDX-License-Identifier: Apache-2.0
//! Tests TCP with mutual TLS.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use patchbay_access::certs::{self, Request};
use patchbay_access::listen::{MAX_HANDSHAKES, MAX_PRINCIPAL_CONNECTIONS, MAX_TCP_CONNECTIONS};
use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use rcgen::string::Ia5String;
use rcgen::{CertificateParams, DnType, Issuer, KeyPair, SanType};
use rustix::process::Signal;
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::support::{Host, Monitor, assert_refused, update};

const DOMAIN: &str = "example.org";
pub const ALICE: &str = "spiffe://example.org/net/alice";

/// A host with a CA, a guest, and a TCP listener.
pub struct Remote {
    pub host: Host,
    _guest: Monitor,
    address: SocketAddr,
}

pub fn issue(ca: &Path, name: &str, spiffe: Option<&str>, hosts: &[&str]) -> PathBuf {
    let request = Request {
        name: name.to_owned(),
        spiffe: spiffe.map(str::to_owned),
        common_name: spiffe.is_none(),
        hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        days: 1,
    };
    certs::issue(ca, &request).expect("issued").certificate
}

/// Issues a certificate with this SPIFFE id and validity.
pub fn issue_for(ca: &Path, spiffe: &str, valid: time::Duration) -> PathBuf {
    forge(ca, "short", "short", Some(spiffe), valid)
}

/// Issues a certificate that the command would not issue.
fn forge(ca: &Path, file: &str, name: &str, uri: Option<&str>, valid: time::Duration) -> PathBuf {
    let pem = |name: &str| std::fs::read_to_string(ca.join(name)).expect("PEM");
    let ca_key = KeyPair::from_pem(&pem("ca.key")).expect("a key");
    let issuer = Issuer::from_ca_cert_pem(&pem("ca.pem"), ca_key).expect("a CA");
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(uri) = uri {
        let uri = Ia5String::try_from(uri).expect("ASCII");
        params.subject_alt_names.push(SanType::URI(uri));
    }
    let now = time::OffsetDateTime::now_utc();
    params.not_before = now - time::Duration::days(1);
    params.not_after = now + valid;
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, &issuer).expect("signed");
    let path = ca.join(format!("{file}-{}.pem", name.replace(':', "-")));
    std::fs::write(&path, certificate.pem()).expect("written");
    std::fs::write(path.with_extension("key"), key.serialize_pem()).expect("written");
    path
}

pub fn fingerprint(certificate: &Path) -> String {
    let der = CertificateDer::from_pem_file(certificate).expect("PEM");
    patchbay_access::identity::fingerprint(&der)
}

impl Remote {
    /// Starts a host that accepts all names from one CA.
    pub async fn start(policy: &str) -> Self {
        Self::start_with(policy, |ca| {
            let ca = ca.join("ca.pem").display().to_string();
            let domain = format!("{DOMAIN}={ca}");
            [
                "--client-ca".to_owned(),
                domain,
                "--common-name-ca".to_owned(),
                ca,
            ]
            .to_vec()
        })
        .await
    }

    /// Starts a host. `clients` returns the options for clients, given the folder of the CA.
    async fn start_with(policy: &str, clients: impl Fn(&Path) -> Vec<String>) -> Self {
        let mut host = Host::new(policy);
        let ca = host.path("ca");
        certs::init(&ca, DOMAIN).expect("made");
        let certificate = issue(&ca, "host", None, &["localhost"]);
        let key = certificate.with_extension("key");
        let text = |path: &Path| path.display().to_string();
        let clients = clients(&ca);
        let (certificate, key) = (text(&certificate), text(&key));
        let mut args = vec![
            "--listen",
            "127.0.0.1:0",
            "--cert",
            &certificate,
            "--key",
            &key,
        ];
        args.extend(clients.iter().map(String::as_str));
        let guest = host.monitor("web-1");
        host.start_daemon(&args).await;
        let address = host.tcp().await;
        host.logged("guest found").await;
        Self {
            host,
            _guest: guest,
            address,
        }
    }

    /// Makes a call with this certificate.
    async fn call(&self, certificate: Option<&Path>) -> Result<v1::ListGuestsResponse, Status> {
        let channel = self.connect(certificate).await?;
        let mut client = GuestServiceClient::new(channel);
        let answer = client.list_guests(v1::ListGuestsRequest::default()).await?;
        Ok(answer.into_inner())
    }

    pub async fn keys(&self, certificate: &Path) -> StaticKeysServiceClient<Channel> {
        let channel = self.connect(Some(certificate)).await.expect("connected");
        StaticKeysServiceClient::new(channel)
    }

    async fn connect(&self, certificate: Option<&Path>) -> Result<Channel, Status> {
        self.connect_from(Ipv4Addr::LOCALHOST, certificate).await
    }

    /// Connects from this address of the loopback interface.
    async fn connect_from(
        &self,
        from: Ipv4Addr,
        certificate: Option<&Path>,
    ) -> Result<Channel, Status> {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_file(self.host.path("ca/ca.pem")).expect("a CA");
        roots.add(ca).expect("a CA");
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("TLS 1.3")
            .with_root_certificates(roots);
        let mut config = match certificate {
            None => config.with_no_client_auth(),
            Some(path) => {
                let chain = vec![CertificateDer::from_pem_file(path).expect("PEM")];
                let key = PrivateKeyDer::from_pem_file(path.with_extension("key")).expect("PEM");
                config.with_client_auth_cert(chain, key).expect("they fit")
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let (connector, address) = (TlsConnector::from(Arc::new(config)), self.address);
        let endpoint = Endpoint::from_static("http://localhost");
        let connect = endpoint.connect_with_connector(tower::service_fn(move |_| {
            let connector = connector.clone();
            async move {
                let stream = tcp_from(from, address).await?;
                let name = ServerName::try_from("localhost").expect("a name");
                connector.connect(name, stream).await.map(TokioIo::new)
            }
        }));
        connect
            .await
            .map_err(|error| Status::unavailable(format!("{error:?}")))
    }
}

async fn tcp_from(from: Ipv4Addr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((from, 0).into())?;
    socket.connect(to).await
}

pub fn policy(revoked: &str) -> String {
    format!(
        "{{rules: [{{name: net, principals: ['{ALICE}', 'bob'], role: operator}}], revoked_certificates: [{revoked}]}}"
    )
}

#[tokio::test]
async fn a_verified_certificate_names_the_principal() {
    let remote = Remote::start(&policy("")).await;
    let ca = remote.host.path("ca");
    for (name, spiffe) in [("alice", Some(ALICE)), ("bob", None)] {
        let certificate = issue(&ca, name, spiffe, &[]);
        let answer = remote.call(Some(&certificate)).await.expect(name);
        assert_eq!(answer.guests[0].guest, "web-1");
    }
    // The monitor gets the principal of the certificate, not the daemon's user.
    let channel = remote.connect(Some(&ca.join("alice.pem"))).await;
    let mut keys = StaticKeysServiceClient::new(channel.expect("connected"));
    let request = update("web-1", &["net_a"], v1::KeyOp::Inc);
    keys.update_static_keys(request).await.expect("allowed");
    let list = v1::ListHoldsRequest {
        guest: "web-1".to_owned(),
        ..Default::default()
    };
    let holds = keys
        .list_holds(list)
        .await
        .expect("listed")
        .into_inner()
        .holds;
    assert_eq!(holds[0].holder, ALICE);
    // The policy does not name this principal. The principal is identified and gets an answer.
    let carol = issue(&ca, "carol", None, &[]);
    let refused = remote.call(Some(&carol)).await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("no rule of the policy names"), "{message}");
    let channel = remote.connect(Some(&carol)).await.expect("connected");
    let request = v1::DescribeGuestRequest {
        guest: "web-1".to_owned(),
        ..v1::DescribeGuestRequest::default()
    };
    let refused = GuestServiceClient::new(channel)
        .describe_guest(request)
        .await;
    let (message, _) = assert_refused(refused, Code::PermissionDenied, "ROLE_MISSING");
    assert!(message.contains("carol"), "{message}");
}

#[tokio::test]
async fn certificates_that_prove_nothing_are_refused() {
    let mut remote = Remote::start(&policy("")).await;
    let ca = remote.host.path("ca");
    let refused = async |remote: &mut Remote, certificate: Option<&Path>, why: &str| {
        let status = remote.call(certificate).await.expect_err(why);
        assert_ne!(status.code(), Code::PermissionDenied, "{status}");
        // A client tries several times.
        loop {
            let line = remote.host.logged("TLS handshake refused").await;
            if line["error"].as_str().expect("why").contains(why) {
                return;
            }
        }
    };
    refused(&mut remote, None, "no certificates").await;
    let other = remote.host.path("other");
    certs::init(&other, DOMAIN).expect("made");
    let stranger = issue(&other, "alice", Some(ALICE), &[]);
    refused(&mut remote, Some(&stranger), "UnknownIssuer").await;
    let hour = time::Duration::hours(1);
    let forged = |name, uri, valid| forge(&ca, "forged", name, uri, valid);
    for (certificate, why) in [
        (forged("bob", None, -hour), "certificate expired"),
        (forged("uid:0", None, hour), "reserved"),
    ] {
        refused(&mut remote, Some(&certificate), why).await;
    }
    // The client with a valid certificate is served nevertheless.
    let alice = issue(&ca, "alice", Some(ALICE), &[]);
    remote.call(Some(&alice)).await.expect("served");
    // Each certificate leaves a line in the audit log, and a client without one leaves none.
    remote.host.signal(Signal::TERM);
    assert!(remote.host.ended().await.success());
    let log = remote.host.audit();
    let whys: Vec<_> = log.iter().map(|line| line["why"].as_str()).collect();
    for why in ["UnknownIssuer", "certificate expired", "reserved"] {
        let is_it = |found: &Option<&str>| found.is_some_and(|found| found.contains(why));
        assert!(whys.iter().any(is_it), "{why}: {log:?}");
    }
    for line in &log {
        assert_eq!(line["event"], "refused", "{line}");
        assert!(
            line["address"]
                .as_str()
                .expect("a text")
                .starts_with("127.0.0.1:"),
            "{line}"
        );
    }
    assert!(
        !whys
            .iter()
            .flatten()
            .any(|why| why.contains("no certificates"))
    );
}

#[tokio::test]
async fn a_ca_vouches_for_its_own_trust_domain_alone() {
    let everybody = "rules: [{name: all, principals: ['**'], role: viewer}]";
    let mut remote = Remote::start_with(everybody, |ca| {
        let other = ca.with_file_name("other");
        certs::init(&other, "other.org").expect("made");
        let option = |domain: &str, folder: &Path| {
            let ca = folder.join("ca.pem");
            [
                "--client-ca".to_owned(),
                format!("{domain}={}", ca.display()),
            ]
        };
        [option(DOMAIN, ca), option("other.org", &other)].concat()
    })
    .await;
    let (own, other) = (remote.host.path("ca"), remote.host.path("other"));
    let hour = time::Duration::hours(1);
    for (ca, id) in [(&own, ALICE), (&other, "spiffe://other.org/alice")] {
        let certificate = forge(ca, "good", "alice", Some(id), hour);
        remote.call(Some(&certificate)).await.expect(id);
    }
    for (ca, uri, why) in [
        (&other, Some(ALICE), "invalid peer certificate"),
        (
            &own,
            Some("spiffe://other.org/alice"),
            "invalid peer certificate",
        ),
        (
            &own,
            Some("spiffe://third.org/alice"),
            "--client-ca third.org=FILE",
        ),
        (&own, None, "--common-name-ca"),
    ] {
        let certificate = forge(ca, "bad", "alice", uri, hour);
        remote.call(Some(&certificate)).await.expect_err(why);
        loop {
            let line = remote.host.logged("TLS handshake refused").await;
            let error = line["error"].as_str().expect("why");
            if error.contains(why) {
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_revoked_certificate_is_refused_on_open_connections() {
    let mut remote = Remote::start(&policy("")).await;
    let alice = issue(&remote.host.path("ca"), "alice", Some(ALICE), &[]);
    let channel = remote.connect(Some(&alice)).await.expect("connected");
    let mut client = GuestServiceClient::new(channel);
    let request = v1::ListGuestsRequest::default;
    client.list_guests(request()).await.expect("served");
    let fingerprint = fingerprint(&alice);
    remote
        .host
        .write_policy(&policy(&format!("'{fingerprint}'")));
    remote.host.signal(Signal::HUP);
    remote.host.logged("policy read again").await;
    let refused = client.list_guests(request()).await;
    assert_refused(refused, Code::Unauthenticated, "CERTIFICATE_REFUSED");
    let line = remote.host.logged("an open connection is closed").await;
    assert_eq!(line["principal"], ALICE);
    // No call is possible any more, not even one that needs no permission.
    let refused = client.list_guests(request()).await.expect_err("closed");
    assert_ne!(refused.code(), Code::Unauthenticated, "{refused}");
    remote.call(Some(&alice)).await.expect_err("revoked");
    remote.host.logged("TLS handshake refused").await;
    remote.host.signal(Signal::TERM);
    assert!(remote.host.ended().await.success());
    let log = remote.host.audit();
    let denied = &log[0];
    assert_eq!(
        (&denied["event"], &denied["principal"]),
        (&"denied".into(), &ALICE.into()),
        "{log:?}"
    );
    assert!(
        denied["why"].as_str().expect("why").contains("revoked"),
        "{denied}"
    );
    assert_eq!(denied["method"], "/patchbay.v1.GuestService/ListGuests");
    let refused = &log[1];
    assert_eq!(
        (&refused["event"], &refused["principal"]),
        (&"refused".into(), &ALICE.into()),
        "{log:?}"
    );
}

#[tokio::test]
async fn clients_that_do_not_finish_their_handshake_keep_nobody_out() {
    let mut remote = Remote::start(&policy("")).await;
    let alice = issue(&remote.host.path("ca"), "alice", Some(ALICE), &[]);
    let mut idle = vec![];
    for _ in 0..MAX_HANDSHAKES + MAX_TCP_CONNECTIONS {
        idle.push(TcpStream::connect(remote.address).await.expect("accepted"));
    }
    // This connection is accepted after the others.
    let other = remote.connect_from(Ipv4Addr::new(127, 0, 0, 2), Some(&alice));
    let mut client = GuestServiceClient::new(other.await.expect("another address"));
    let list = v1::ListGuestsRequest::default;
    client.list_guests(list()).await.expect("served");
    let mut own = remote.host.guests().await;
    // A user of this host whom the policy does not name gets an answer.
    let answer = own.list_guests(list()).await;
    assert_refused(answer, Code::PermissionDenied, "ROLE_MISSING");
    remote.host.logged("closed before its TLS handshake").await;
    drop(idle);
}

#[tokio::test]
async fn a_principal_keeps_no_other_out() {
    let remote = Remote::start(&policy("")).await;
    let ca = remote.host.path("ca");
    let [alice, bob] = [
        issue(&ca, "alice", Some(ALICE), &[]),
        issue(&ca, "bob", None, &[]),
    ];
    let list = v1::ListGuestsRequest::default;
    let mut open = vec![];
    for number in 0..MAX_PRINCIPAL_CONNECTIONS {
        let channel = remote.connect(Some(&alice)).await.expect("connected");
        let mut client = GuestServiceClient::new(channel);
        let answer = client.list_guests(list()).await;
        answer.unwrap_or_else(|error| panic!("connection {number}: {error}"));
        open.push(client);
    }
    remote.call(Some(&alice)).await.expect_err("one too many");
    remote.call(Some(&bob)).await.expect("another principal");
    open.pop();
    // The daemon notices the change with a delay.
    while remote.call(Some(&alice)).await.is_err() {}
}

#[tokio::test]
async fn a_revoked_certificate_opens_no_connection() {
    let mut remote = Remote::start(&policy("")).await;
    let alice = issue(&remote.host.path("ca"), "alice", Some(ALICE), &[]);
    let fingerprint = fingerprint(&alice);
    remote
        .host
        .write_policy(&policy(&format!("'{fingerprint}'")));
    remote.host.signal(Signal::HUP);
    remote.host.logged("policy read again").await;
    let refused = remote.call(Some(&alice)).await.expect_err("revoked");
    assert_ne!(refused.code(), Code::Unauthenticated, "{refused}");
    let line = remote.host.logged("TLS handshake refused").await;
    let error = line["error"].as_str().expect("why");
    assert!(error.contains("revoked"), "{line}");
    assert_eq!(line["principal"], ALICE);
}

#[tokio::test]
async fn certificates_are_read_again_and_broken_ones_refused() {
    let mut remote = Remote::start(&policy("")).await;
    let ca = remote.host.path("ca");
    let alice = issue(&ca, "alice", Some(ALICE), &[]);
    let host = ca.join("host.pem");
    let good = std::fs::read(&host).expect("PEM");
    std::fs::write(&host, "no certificate").expect("written");
    remote.host.signal(Signal::HUP);
    let line = remote.host.logged("the new certificates are refused").await;
    assert!(
        line["error"].as_str().expect("why").contains("host.pem"),
        "{line}"
    );
    remote
        .call(Some(&alice))
        .await
        .expect("the old certificate");
    // The old clients' certificates were not issued by the new client CA. So they are refused, even
    // on open connections.
    let channel = remote.connect(Some(&alice)).await.expect("connected");
    let mut open = GuestServiceClient::new(channel);
    open.list_guests(v1::ListGuestsRequest::default())
        .await
        .expect("served");
    let trusted = std::fs::read(ca.join("ca.pem")).expect("PEM");
    let other = remote.host.path("other");
    certs::init(&other, DOMAIN).expect("made");
    std::fs::write(&host, good).expect("written");
    std::fs::copy(other.join("ca.pem"), ca.join("ca.pem")).expect("replaced");
    remote.host.signal(Signal::HUP);
    remote.host.logged("certificates read again").await;
    let refused = open.list_guests(v1::ListGuestsRequest::default()).await;
    let (message, _) = assert_refused(refused, Code::Unauthenticated, "CERTIFICATE_REFUSED");
    assert!(message.contains("no CA"), "{message}");
    // The client still trusts the CA that issued the host's certificate.
    std::fs::write(ca.join("ca.pem"), trusted).expect("written");
    remote
        .call(Some(&alice))
        .await
        .expect_err("not from the new CA");
    remote.host.logged("TLS handshake refused").await;
}

#[tokio::test]
async fn a_plain_tcp_client_is_not_answered() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut remote = Remote::start(&policy("")).await;
    let mut stream = TcpStream::connect(remote.address).await.expect("accepted");
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .expect("sent");
    let mut bytes = vec![];
    let _ = stream.read_to_end(&mut bytes).await;
    // The answer is at most a TLS alert. It contains no HTTP/2 frame.
    assert!(bytes.len() <= 7, "{bytes:?}");
    remote.host.logged("TLS handshake refused").await;
}
