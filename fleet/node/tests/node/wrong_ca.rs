// SPDX-License-Identifier: Apache-2.0
//! Tests a host and a client whose certificates come from different development CAs.

use std::path::Path;

use patchbay_access::certs::{self, Request};
use patchbay_access::connect::{TlsFiles, explain};
use tokio::io::AsyncReadExt;

use super::support::Host;

fn issue(ca: &Path, name: &str, hosts: &[&str]) {
    let request = Request {
        name: name.to_owned(),
        hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        days: 1,
        ..Request::default()
    };
    certs::issue(ca, &request).expect("issued");
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_said_in_words() {
    let mut host = Host::new("rules: [{name: a, principals: ['*'], role: viewer}]");
    let (ours, other) = (host.path("ours"), host.path("other"));
    for ca in [&ours, &other] {
        certs::init(ca, "example.org").expect("made");
        issue(ca, "host", &["localhost"]);
        issue(ca, "alice", &[]);
    }
    let file = |name: &str| ours.join(name).display().to_string();
    let (certificate, key) = (file("host.pem"), file("host.key"));
    let ca = format!("example.org={}", file("ca.pem"));
    let args = [
        "--listen",
        "127.0.0.1:0",
        "--cert",
        &certificate,
        "--key",
        &key,
        "--client-ca",
        &ca,
    ];
    host.start_daemon(&args).await;
    let address = format!("localhost:{}", host.tcp().await.port());
    let files = |own: &Path, peers: &Path| TlsFiles {
        certificate: own.join("alice.pem"),
        key: own.join("alice.key"),
        ca: peers.join("ca.pem"),
    };
    files(&ours, &ours).connect(&address).await.expect("ours");

    let error = files(&ours, &other).connect(&address).await;
    let error = error.expect_err("the host's certificate is another CA's");
    assert!(
        error.to_string().contains("not among those given here"),
        "{error}"
    );

    // The host's refusal arrives after the client's part of the handshake.
    let stream = files(&other, &ours).connect(&address).await;
    let mut stream = stream.expect("the host's certificate is right");
    let error = stream.read_u8().await.expect_err("refused");
    let words = explain(&error).unwrap_or_else(|| panic!("{error}"));
    assert!(words.contains("the peer does not know the CA"), "{words}");
    // The lines are in the order of the connections.
    for words in [
        "the peer does not know the CA",
        "not among those given here",
    ] {
        let line = host.logged("TLS handshake refused").await;
        let why = line["error"].as_str().unwrap_or_default();
        assert!(why.contains(words), "{line}");
    }
}
