// SPDX-License-Identifier: Apache-2.0
//! Certificates: read from files, read again on SIGHUP.
//!
//! TLS 1.3 alone, and no client without a certificate. New certificates count for new connections.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

use crate::identity::Identity;

/// A file of certificates may have this many.
const MAX_CERTIFICATES: usize = 1024;

/// The files of the certificates.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The host's certificate and those up to the CA, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// CAs that clients' certificates must come from, PEM.
    pub client_ca: PathBuf,
}

/// Why the certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or has no PEM.
    #[error("{path}: {error}; give a PEM file")]
    File {
        /// The file.
        path: String,
        /// What is wrong.
        error: String,
    },
    /// A file has nothing that could be used.
    #[error("{path} has {found} certificates; give 1 to {MAX_CERTIFICATES}")]
    Count {
        /// The file.
        path: String,
        /// Certificates in it.
        found: usize,
    },
    /// The parts do not fit together.
    #[error("the certificates cannot be used: {0}")]
    Unusable(String),
}

/// The configuration that new connections get.
#[derive(Clone)]
pub struct Tls {
    files: TlsFiles,
    current: watch::Sender<TlsAcceptor>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn read(files: TlsFiles) -> Result<Self, TlsError> {
        let current = watch::Sender::new(acceptor(&files)?);
        Ok(Self { files, current })
    }

    /// Reads the files again. On an error the old certificates stay.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn reload(&self) -> Result<(), TlsError> {
        self.current.send_replace(acceptor(&self.files)?);
        Ok(())
    }

    /// For one more connection.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        self.current.borrow().clone()
    }

    /// Follows what [`Tls::reload`] reads.
    pub(super) fn subscribe(&self) -> watch::Receiver<TlsAcceptor> {
        self.current.subscribe()
    }
}

fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
    let unusable = |error: String| TlsError::Unusable(error);
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&files.client_ca)? {
        roots.add(certificate).map_err(|error| TlsError::File {
            path: files.client_ca.display().to_string(),
            error: error.to_string(),
        })?;
    }
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .map_err(|error| unusable(error.to_string()))?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| TlsError::File {
        path: files.key.display().to_string(),
        error: error.to_string(),
    })?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| unusable(error.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates(&files.certificate)?, key)
        .map_err(|error| unusable(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A resumed session would be verified against the CAs of an earlier reload.
    config.session_storage = Arc::new(tokio_rustls::rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(path: &PathBuf) -> Result<Vec<CertificateDer<'static>>, TlsError> {
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

/// The name of the client in the certificate that the handshake has verified.
pub(super) fn identity(stream: &TlsStream<TcpStream>) -> Result<Identity, String> {
    let (_, session) = stream.get_ref();
    let certificate = session
        .peer_certificates()
        .and_then(|certificates| certificates.first())
        .ok_or("the client has no certificate")?;
    Identity::of_certificate(certificate).map_err(|error| error.to_string())
}
