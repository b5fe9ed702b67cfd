// SPDX-License-Identifier: Apache-2.0
//! Tests the page over TCP, where a browser needs a certificate.

use std::path::Path;
use std::sync::Arc;

use patchbay_access::certs::{self, Request};
use patchbay_access::listen::client_cas::ClientCas;
use patchbay_access::listen::tls::{Tls, TlsFiles};
use patchbay_access::policy::LivePolicy;
use patchbay_fleet::page::{Config, Page};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::support::{Fleet, spec};

const DOMAIN: &str = "example.org";

/// Issues a certificate and returns the files.
fn issue(folder: &Path, name: &str, hosts: &[&str]) -> TlsFiles {
    let request = Request {
        name: name.to_owned(),
        hosts: hosts.iter().map(|&host| host.to_owned()).collect(),
        days: 1,
        ..Request::default()
    };
    let issued = certs::issue(folder, &request).expect("issued");
    TlsFiles {
        certificate: issued.certificate,
        key: issued.key,
        clients: ClientCas {
            domains: vec![(DOMAIN.to_owned(), folder.join("ca.pem"))],
            common_names: None,
        },
    }
}

/// Returns the answer to a request of a client with this certificate.
async fn ask(
    address: &str,
    ca: &Path,
    files: Option<&TlsFiles>,
    request: &str,
) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    let trusted = CertificateDer::from_pem_file(ca).expect("PEM");
    roots.add(trusted).expect("a CA");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("TLS 1.3")
        .with_root_certificates(roots);
    let config = match files {
        None => config.with_no_client_auth(),
        Some(files) => {
            let chain = CertificateDer::pem_file_iter(&files.certificate).expect("PEM");
            let chain = chain.map(|certificate| certificate.expect("PEM")).collect();
            let key = PrivateKeyDer::from_pem_file(&files.key).expect("PEM");
            config.with_client_auth_cert(chain, key).expect("they fit")
        }
    };
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("127.0.0.1").expect("an address");
    let mut stream = TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await?;
    let headers = "x-patchbay-request: 1\r\nconnection: close\r\n";
    let request = format!(
        "{request} HTTP/1.1\r\nhost: fleet.example\r\n{headers}content-length: 2\r\n\r\n{{}}"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_over_tcp_needs_a_certificate_and_a_role() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{size: rest}]");
    let leads = replica.lead().await;
    leads.plan("net", &text, "alice").await.expect("planned");
    let folder = tempfile::tempdir().expect("temporary folder");
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    let ca = certs::init(&ours, DOMAIN).expect("made").certificate;
    let other_ca = certs::init(&theirs, DOMAIN).expect("made").certificate;
    let host = issue(&ours, "fleet", &["127.0.0.1"]);
    let (alice, bob) = (issue(&ours, "alice", &[]), issue(&ours, "bob", &[]));
    let mallory = issue(&theirs, "alice", &[]);
    drop(other_ca);
    let policy = folder.path().join("policy.yaml");
    let rules = "rules:\n- {name: a, principals: ['spiffe://example.org/alice'], role: operator}\n- {name: b, principals: ['spiffe://example.org/bob'], role: viewer}\n";
    std::fs::write(&policy, rules).expect("written");
    let config = Config {
        address: "127.0.0.1:0".parse().expect("an address"),
        tls: Some(Tls::read(host).expect("good")),
        policy: LivePolicy::read(policy).expect("good"),
    };
    let page = Page::bind(config, Arc::clone(&replica.controller))
        .await
        .expect("free");
    let link = page.link().expect("bound");
    let address = link.trim_start_matches("https://").trim_end_matches('/');
    let mut serving = JoinSet::new();
    serving.spawn(page.run());

    for nobody in [None, Some(&mallory)] {
        let answer = ask(address, &ca, nobody, "GET /").await;
        assert!(answer.is_err(), "{answer:?}");
    }
    let abort = "POST /api/rollouts/net/abort";
    let seen = ask(address, &ca, Some(&bob), "GET /")
        .await
        .expect("answered");
    assert!(seen.starts_with("HTTP/1.1 200"), "{seen}");
    let refused = ask(address, &ca, Some(&bob), abort)
        .await
        .expect("answered");
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
    let done = ask(address, &ca, Some(&alice), abort)
        .await
        .expect("answered");
    assert!(done.starts_with("HTTP/1.1 200"), "{done}");
    let running = leads.rollout("net").expect("planned");
    let timeline = running.rollout().header().timeline.clone();
    assert!(
        timeline
            .iter()
            .any(|entry| entry.principal == "spiffe://example.org/alice" && entry.text == "aborted")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_certificates_no_other_host_reaches_the_page() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    for address in ["0.0.0.0:0", "[::]:0"] {
        let config = Config {
            address: address.parse().expect("an address"),
            tls: None,
            policy: LivePolicy::own_user_only(0),
        };
        let refused = Page::bind(config, Arc::clone(&replica.controller)).await;
        let error = refused.err().expect("refused").to_string();
        assert!(error.contains("--client-ca"), "{error}");
    }
}
