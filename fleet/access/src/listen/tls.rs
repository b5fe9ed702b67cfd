// SPDX-License-Identifier: Apache-2.0
//! Reads certificates from files, and again on SIGHUP.
//!
//! Only TLS 1.3 is accepted, and only clients with a certificate. New certificates are used for new
//! connections.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{CertificateError, Error, ServerConfig};
use tokio_rustls::server::TlsStream;

use super::client_cas::{ByName, ClientCas};
use crate::identity::{Identity, Proof};

/// The maximum number of certificates in a file.
const MAX_CERTIFICATES: usize = 1024;

/// The files of the certificates.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The host's certificate and its chain up to the CA, PEM.
    pub certificate: PathBuf,
    /// The certificate's private key, PEM.
    pub key: PathBuf,
    /// The CAs that must have issued clients' certificates.
    pub clients: ClientCas,
}

/// The reason why the certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or contains no PEM.
    #[error("{path}: {error}; give a PEM file")]
    File {
        /// The path of the file.
        path: String,
        /// The reason.
        error: String,
    },
    /// A file contains no certificate, or too many.
    #[error("{path} has {found} certificates; give 1 to {MAX_CERTIFICATES}")]
    Count {
        /// The path of the file.
        path: String,
        /// The number of certificates in the file.
        found: usize,
    },
    /// The host's certificate and the key do not belong together.
    #[error(
        "{certificate} and {key} cannot be used: {error}; give a certificate and its private key"
    )]
    Pair {
        /// The path of the certificate's file.
        certificate: String,
        /// The path of the key's file.
        key: String,
        /// The library's error.
        error: Error,
    },
    /// The TLS library refuses the CAs, the protocol version or another setting.
    #[error("the certificates cannot be used: {0}")]
    Unusable(String),
}

/// The configuration that new connections get.
#[derive(Clone)]
pub struct Tls {
    files: TlsFiles,
    current: watch::Sender<Arc<Current>>,
}

/// The certificates and CAs that were read last.
pub(super) struct Current {
    pub(super) acceptor: TlsAcceptor,
    clients: Arc<ByName>,
    /// The host's certificate.
    own: CertificateDer<'static>,
    /// The number of reloads of the files so far.
    generation: u64,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn read(files: TlsFiles) -> Result<Self, TlsError> {
        let current = watch::Sender::new(Arc::new(read(&files, 0)?));
        Ok(Self { files, current })
    }

    /// Reads the files again. On an error the old certificates stay in force.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn reload(&self) -> Result<(), TlsError> {
        let generation = self.current().generation + 1;
        self.current
            .send_replace(Arc::new(read(&self.files, generation)?));
        Ok(())
    }

    /// Returns the configuration for a new connection.
    pub(super) fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current.borrow())
    }

    /// Subscribes to the results of [`Tls::reload`].
    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<Current>> {
        self.current.subscribe()
    }

    /// Returns whether the host's certificate is valid for this name.
    #[must_use]
    pub fn is_for(&self, name: &str) -> bool {
        let current = self.current();
        let own = ParsedCertificate::try_from(&current.own);
        match (own, ServerName::try_from(name)) {
            (Ok(own), Ok(name)) => verify_server_name(&own, &name).is_ok(),
            _ => false,
        }
    }

    /// Returns whether a currently trusted CA has issued the certificate of an open connection's
    /// client.
    #[must_use]
    pub fn trusts(&self, proof: &Proof) -> bool {
        let current = self.current();
        // If the generation is unchanged, the handshake has verified the certificate against these
        // CAs.
        proof.generation == current.generation || current.clients.vouches_for(&proof.chain)
    }
}

fn read(files: &TlsFiles, generation: u64) -> Result<Current, TlsError> {
    let unusable = |error: String| TlsError::Unusable(error);
    let provider = Arc::new(ring::default_provider());
    let clients = Arc::new(ByName::read(&files.clients)?);
    let verifier: Arc<dyn ClientCertVerifier> = clients.clone();
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| TlsError::File {
        path: files.key.display().to_string(),
        error: error.to_string(),
    })?;
    let chain = certificates(&files.certificate)?;
    // The chain is never empty.
    let own = chain[0].clone();
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| unusable(error.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|error| TlsError::Pair {
            certificate: files.certificate.display().to_string(),
            key: files.key.display().to_string(),
            error,
        })?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A resumed session would be verified against the CAs of an earlier reload.
    config.session_storage = Arc::new(tokio_rustls::rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Current {
        acceptor: TlsAcceptor::from(Arc::new(config)),
        clients,
        own,
        generation,
    })
}

pub(super) fn certificates(path: &PathBuf) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |error: String| TlsError::File {
        path: path.display().to_string(),
        error,
    };
    let read = CertificateDer::pem_file_iter(path).map_err(|error| bad(error.to_string()))?;
    let found: Vec<_> = read
        .take(MAX_CERTIFICATES + 1)
        .collect::<Result<_, _>>()
        .map_err(|error| bad(error.to_string()))?;
    if found.is_empty() || found.len() > MAX_CERTIFICATES {
        let path = path.display().to_string();
        let found = found.len();
        return Err(TlsError::Count { path, found });
    }
    Ok(found)
}

/// The reason why a handshake failed.
pub(super) struct HandshakeError {
    pub(super) why: String,
    /// True if the client presented a certificate, which was not accepted.
    pub(super) is_refusal: bool,
}

impl HandshakeError {
    fn other(why: impl fmt::Display) -> Self {
        Self {
            why: why.to_string(),
            is_refusal: false,
        }
    }
}

/// Identifies a client after a successful handshake.
pub(super) async fn shake(
    stream: TcpStream,
    current: &Current,
) -> Result<(TlsStream<TcpStream>, Identity), HandshakeError> {
    stream.set_nodelay(true).map_err(HandshakeError::other)?;
    let stream = current.acceptor.accept(stream).await;
    let stream = stream.map_err(|error| HandshakeError {
        why: why(&error),
        is_refusal: matches!(cause(&error), Some(Error::InvalidCertificate(_))),
    })?;
    let (_, session) = stream.get_ref();
    let chain = session.peer_certificates().unwrap_or_default();
    let own = chain
        .first()
        .ok_or_else(|| HandshakeError::other("the client has no certificate"))?;
    let mut identity = Identity::of_certificate(own).map_err(HandshakeError::other)?;
    if let Some(proof) = &mut identity.certificate {
        proof.chain = chain.iter().map(|der| der.clone().into_owned()).collect();
        proof.generation = current.generation;
    }
    Ok((stream, identity))
}

/// Returns the error of TLS; `None` if the connection failed for another reason.
fn cause(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

/// Returns our own reason for refusing a certificate, or else the library's.
fn why(error: &io::Error) -> String {
    match cause(error) {
        Some(Error::InvalidCertificate(CertificateError::Other(why))) => why.0.to_string(),
        _ => match crate::connect::explain(error) {
            Some(words) => format!("{words} ({error})"),
            None => error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::{self, Request};

    #[test]
    fn a_key_of_another_certificate_is_named_with_it() {
        let folder = tempfile::tempdir().expect("a folder");
        certs::init(folder.path(), "example.org").expect("made");
        for name in ["host", "other"] {
            let request = Request {
                name: name.to_owned(),
                days: 1,
                ..Request::default()
            };
            certs::issue(folder.path(), &request).expect("issued");
        }
        let files = |key: &str| TlsFiles {
            certificate: folder.path().join("host.pem"),
            key: folder.path().join(key),
            clients: ClientCas::default(),
        };
        Tls::read(files("host.key")).expect("a pair");
        let refused = Tls::read(files("other.key")).err().expect("no pair");
        let text = refused.to_string();
        for name in ["host.pem", "other.key", "give a certificate and its"] {
            assert!(text.contains(name), "{text}");
        }
    }
}
