// SPDX-License-Identifier: Apache-2.0
//! Makes connections with mutual TLS, to etcd and to hosts. The files are read for each connection,
//! so a renewed certificate is used without a restart.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, Error, RootCertStore,
};

/// The client's own certificate, and the CAs of servers. All files are PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The client's certificate and its chain up to the CA.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// The CAs that must have issued servers' certificates.
    pub ca: PathBuf,
}

impl TlsFiles {
    /// Reads the files and returns a connector that uses them.
    ///
    /// # Errors
    /// A file cannot be used; the error names it.
    pub fn connector(&self) -> io::Result<TlsConnector> {
        let wrong = |path: &PathBuf, error: &dyn std::fmt::Display| {
            io::Error::other(format!("{}: {error}; give a PEM file", path.display()))
        };
        let certificates = |path: &PathBuf| {
            let all = CertificateDer::pem_file_iter(path).map_err(|error| wrong(path, &error))?;
            let all: Result<Vec<_>, _> = all.collect();
            all.map_err(|error| wrong(path, &error))
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca)? {
            let added = roots.add(certificate);
            added.map_err(|error| wrong(&self.ca, &error))?;
        }
        let key =
            PrivateKeyDer::from_pem_file(&self.key).map_err(|error| wrong(&self.key, &error))?;
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .map_err(io::Error::other)?
            .with_root_certificates(roots)
            .with_client_auth_cert(certificates(&self.certificate)?, key);
        let mut config = config.map_err(|error| wrong(&self.certificate, &error))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(TlsConnector::from(Arc::new(config)))
    }

    /// Connects to ADDRESS:PORT. The server's certificate must be for ADDRESS.
    ///
    /// # Errors
    /// An error of the files, the network or TLS.
    pub async fn connect(&self, address: &str) -> io::Result<TlsStream<TcpStream>> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        self.connect_to(host.trim_matches(['[', ']']), address)
            .await
    }

    /// Connects to ADDRESS:PORT. The server's certificate must be for `name`, not for the address.
    ///
    /// # Errors
    /// An error of the files, the network or TLS.
    pub async fn connect_to(&self, name: &str, address: &str) -> io::Result<TlsStream<TcpStream>> {
        let connector = self.connector()?;
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let connected = connector.connect(name, stream).await;
        connected.map_err(|error| match explain(&error) {
            Some(words) => io::Error::new(error.kind(), format!("{words} ({error})")),
            None => error,
        })
    }
}

/// Explains a TLS error that concerns the choice of CAs; `None` for other errors.
#[must_use]
pub fn explain(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    match find(error)? {
        // A wrong signature means that the issuing CA has the name of a trusted CA, but another
        // key.
        Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => Some(
            "the peer's certificate comes from a CA that is not among those given here; give the \
             ca.pem of the CA that issued the certificate",
        ),
        Error::AlertReceived(AlertDescription::UnknownCA | AlertDescription::DecryptError) => Some(
            "the peer does not know the CA of the certificate that was presented to it; give the peer \
                 that CA's ca.pem, or present a certificate from a CA that the peer knows",
        ),
        _ => None,
    }
}

/// Finds the TLS error in a chain of errors.
fn find<'a>(mut error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Error> {
    loop {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        // `io::Error::source` returns the source of the inner error and skips the inner error
        // itself, so the inner error is examined here.
        let within = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        error = match within {
            Some(within) => within,
            None => error.source()?,
        };
    }
}

/// Returns whether the text has the form ADDRESS:PORT. The address may be a host name, and an IPv6
/// address must be in brackets.
#[must_use]
pub fn is_address(text: &str) -> bool {
    let is_of_host = |c: char| c.is_ascii_alphanumeric() || ".-_:[]".contains(c);
    let parts = text.rsplit_once(':');
    parts.is_some_and(|(host, port)| {
        !host.is_empty()
            && host.chars().all(is_of_host)
            && port.parse().is_ok_and(|port: u16| port > 0)
    })
}

#[cfg(test)]
mod tests {
    use super::is_address;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for good in [
            "fleet.example.org:7448",
            "192.0.2.1:1",
            "[2001:db8::1]:7448",
        ] {
            assert!(is_address(good), "{good}");
        }
        for bad in [
            "",
            ":7448",
            "fleet",
            "fleet:",
            "a:0",
            "a:65536",
            "a b:1",
            "\u{1b}[2J:1",
            "a/b:1",
        ] {
            assert!(!is_address(bad), "{bad:?}");
        }
    }
}
