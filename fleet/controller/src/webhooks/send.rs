// SPDX-License-Identifier: Apache-2.0
//! Sends one event according to Standard Webhooks, with the headers `webhook-id`,
//! `webhook-timestamp` and `webhook-signature`. The signature is the HMAC-SHA-256 of
//! "ID.TIMESTAMP.BODY" in base64.

use std::io;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper_util::rt::TokioIo;
use ring::hmac;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::config::{Webhook, secret};
use crate::rollout::{Millis, bounded};
use crate::trusted::{self, Forbidden};

/// The maximum size of a file with CAs.
const MAX_CA_BYTES: u64 = 4 << 20;

/// The files of a webhook, as they are read for an attempt.
pub type Files = OneAtATime<Result<(Vec<u8>, Option<TlsConnector>), String>>;

/// Runs blocking work on a thread, one piece at a time. Work that hangs keeps its thread after its
/// caller has given up, and further threads would keep the embedded store from getting any. So the
/// next work waits until the one before has ended.
pub struct OneAtATime<T>(Option<JoinHandle<T>>);

impl<T> Default for OneAtATime<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Send + 'static> OneAtATime<T> {
    /// Runs the work and returns its result. If the future is dropped, the work continues.
    ///
    /// # Errors
    /// The work panicked, or the runtime ends.
    pub async fn run(&mut self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
        if let Some(earlier) = &mut self.0 {
            // The files may have been replaced since it began.
            let _ = earlier.await;
        }
        let running = self.0.insert(tokio::task::spawn_blocking(work));
        let result = running.await;
        self.0 = None;
        result
    }
}

/// Sends the event once. Only a response with a status of 200 to 299 is a success. Redirects are
/// not followed.
///
/// # Errors
/// The reason why the webhook has not accepted the event.
pub async fn send(
    webhook: &Webhook,
    files: &mut Files,
    id: &str,
    body: &str,
    now: Millis,
) -> Result<(), String> {
    let attempt = attempt(webhook, files, id, body, now);
    let sent = match tokio::time::timeout(webhook.timeout, attempt).await {
        Ok(sent) => sent,
        Err(_) => Err(format!(
            "no answer within {} ms",
            webhook.timeout.as_millis()
        )),
    };
    sent.map_err(|why| bounded(&why))
}

async fn attempt(
    webhook: &Webhook,
    files: &mut Files,
    id: &str,
    body: &str,
    now: Millis,
) -> Result<(), String> {
    let (secret, connector) = prepare(webhook, files).await?;
    let seconds = now / 1000;
    let authority = webhook.url.authority().ok_or("the URL has no host")?;
    let path = webhook.url.path_and_query();
    let request = Request::post(path.map_or("/", |path| path.as_str()))
        .header(http::header::HOST, authority.as_str())
        .header(http::header::CONTENT_TYPE, "application/json")
        .header(
            http::header::USER_AGENT,
            concat!("patchbay-fleet/", env!("CARGO_PKG_VERSION")),
        )
        .header("webhook-id", id)
        .header("webhook-timestamp", seconds)
        .header("webhook-signature", signature(&secret, id, seconds, body))
        .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
        .map_err(|error| error.to_string())?;
    let default_port = if connector.is_some() { 443 } else { 80 };
    let port = authority.port_u16().unwrap_or(default_port);
    let address = format!("{}:{port}", authority.host());
    let unreachable = |error: io::Error| format!("cannot connect to {address}: {error}");
    let stream = TcpStream::connect(&address).await.map_err(unreachable)?;
    let Some(connector) = connector else {
        return post(stream, request).await;
    };
    let host = authority.host().trim_matches(['[', ']']).to_owned();
    let name = ServerName::try_from(host).map_err(|error| error.to_string())?;
    let stream = connector.connect(name, stream).await;
    post(stream.map_err(unreachable)?, request).await
}

/// Returns the secret, and what makes TLS connections if the URL needs them. The files are not read
/// by the leader's task, because it also renews the lease.
async fn prepare(
    webhook: &Webhook,
    files: &mut Files,
) -> Result<(Vec<u8>, Option<TlsConnector>), String> {
    let webhook = webhook.clone();
    let prepared = files.run(move || {
        let secret = secret(&webhook.secret_file).map_err(|error| error.to_string())?;
        let is_tls = webhook.url.scheme_str() == Some("https");
        let connector = is_tls.then(|| connector(&webhook)).transpose()?;
        Ok((secret, connector))
    });
    prepared.await.map_err(|error| error.to_string())?
}

/// Returns the value of `webhook-signature`.
pub(super) fn signature(secret: &[u8], id: &str, seconds: u64, body: &str) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    let tag = hmac::sign(&key, format!("{id}.{seconds}.{body}").as_bytes());
    format!("v1,{}", STANDARD.encode(tag))
}

async fn post(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<(), String> {
    let broken = |error: hyper::Error| format!("the connection broke: {error}");
    let io = TokioIo::new(stream);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io)
        .await
        .map_err(broken)?;
    // Dropping this future ends the task of the connection.
    let mut tasks = JoinSet::new();
    tasks.spawn(connection);
    let response = sender.send_request(request).await.map_err(broken)?;
    match response.status() {
        status if status.is_success() => Ok(()),
        status if status.is_redirection() => Err(format!(
            "the status is {status}; a redirect is not followed"
        )),
        status => Err(format!("the status is {status}")),
    }
}

fn connector(webhook: &Webhook) -> Result<TlsConnector, String> {
    let path = &webhook.ca;
    let wrong =
        |error: &dyn std::fmt::Display| format!("{}: {error}; give a PEM file", path.display());
    let mut roots = RootCertStore::empty();
    let text =
        trusted::read(path, Forbidden::Write, MAX_CA_BYTES).map_err(|error| wrong(&error))?;
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let certificate = certificate.map_err(|error| wrong(&error))?;
        // The system's file may contain certificates that this library does not accept.
        let _ = roots.add(certificate);
    }
    if roots.is_empty() {
        return Err(wrong(&"it contains no CA"));
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}
