// SPDX-License-Identifier: Apache-2.0
//! Binds the CAs of clients to the names that each may issue.
//!
//! A CA can put any name into a certificate, so each CA is bound to the names that are accepted
//! from it: either the SPIFFE ids of one trust domain, or common names. A certificate is verified
//! only against the CAs for the name that it claims.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError,
    PeerIncompatible, RootCertStore, SignatureScheme,
};

use super::tls::{TlsError, certificates};
use crate::identity::{Identity, is_trust_domain, trust_domain};

/// Options for the CAs of clients.
#[derive(Args, Clone, Debug, Default)]
pub struct ClientCas {
    /// Accept clients that have a SPIFFE id of this trust domain from the CAs in FILE, PEM; may be
    /// given several times.
    #[arg(long = "client-ca", value_name = "DOMAIN=FILE", value_parser = domain)]
    pub domains: Vec<(String, PathBuf)>,
    /// Accept clients without a SPIFFE id, by their common name, from the CAs in FILE, PEM.
    #[arg(long = "common-name-ca", value_name = "FILE")]
    pub common_names: Option<PathBuf>,
}

fn domain(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((domain, file)) if is_trust_domain(domain) && !file.is_empty() => {
            Ok((domain.to_owned(), file.into()))
        }
        Some((domain, _)) => Err(format!(
            "{domain:?} is not a trust domain; give lowercase letters, digits, '.', '-' and '_', as in example.org=ca.pem"
        )),
        None => Err(format!(
            "a CA is trusted for one trust domain only; write --client-ca DOMAIN={text} for clients with SPIFFE ids of \
             DOMAIN, or --common-name-ca {text} for clients that are identified by their common name"
        )),
    }
}

impl ClientCas {
    /// Returns whether no CA is given, so that no client can be accepted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.domains.is_empty() && self.common_names.is_none()
    }
}

/// Verifies each certificate against the CAs for the name that it claims.
#[derive(Debug)]
pub struct ByName {
    domains: BTreeMap<String, Arc<dyn ClientCertVerifier>>,
    common_names: Option<Arc<dyn ClientCertVerifier>>,
    hints: Vec<DistinguishedName>,
    algorithms: WebPkiSupportedAlgorithms,
}

/// The reason why no CA can verify a certificate.
#[derive(Debug, thiserror::Error)]
pub enum NotVouchedFor {
    /// No `--client-ca` is given for the trust domain.
    #[error(
        "no --client-ca is given for the trust domain {domain:?} of {id}; give --client-ca {domain}=FILE"
    )]
    Domain {
        /// The domain.
        domain: String,
        /// The SPIFFE id.
        id: String,
    },
    /// No `--common-name-ca` is given.
    #[error(
        "the client certificate has no SPIFFE id, and the common name {0:?} is accepted only with --common-name-ca FILE; \
         issue a certificate with a SPIFFE id, or give the option"
    )]
    CommonName(String),
}

impl ByName {
    /// Reads the CAs.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn read(cas: &ClientCas) -> Result<Self, TlsError> {
        let mut files: BTreeMap<&str, Vec<&PathBuf>> = BTreeMap::new();
        for (domain, file) in &cas.domains {
            files.entry(domain).or_default().push(file);
        }
        let mut hints = vec![];
        let mut domains = BTreeMap::new();
        for (domain, files) in files {
            domains.insert(domain.to_owned(), verifier(&files, &mut hints)?);
        }
        let common_names = match &cas.common_names {
            Some(file) => Some(verifier(&[file], &mut hints)?),
            None => None,
        };
        Ok(Self {
            domains,
            common_names,
            hints,
            algorithms: ring::default_provider().signature_verification_algorithms,
        })
    }

    fn of(&self, identity: &Identity) -> Result<&Arc<dyn ClientCertVerifier>, NotVouchedFor> {
        let name = &identity.principal;
        match trust_domain(name) {
            Some(domain) => self
                .domains
                .get(domain)
                .ok_or_else(|| NotVouchedFor::Domain {
                    domain: domain.to_owned(),
                    id: name.clone(),
                }),
            None => self
                .common_names
                .as_ref()
                .ok_or_else(|| NotVouchedFor::CommonName(name.clone())),
        }
    }

    /// Returns whether the CAs have issued this chain of certificates, which begins with the
    /// client's.
    #[must_use]
    pub fn vouches_for(&self, chain: &[CertificateDer<'_>]) -> bool {
        let Some((own, issuers)) = chain.split_first() else {
            return false;
        };
        self.verify_client_cert(own, issuers, UnixTime::now())
            .is_ok()
    }
}

fn verifier(
    files: &[&PathBuf],
    hints: &mut Vec<DistinguishedName>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    for file in files {
        for certificate in certificates(file)? {
            roots.add(certificate).map_err(|error| TlsError::File {
                path: file.display().to_string(),
                error: error.to_string(),
            })?;
        }
    }
    hints.extend(roots.subjects());
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
    verifier.map_err(|error| TlsError::Unusable(error.to_string()))
}

fn refused(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
}

impl ClientCertVerifier for ByName {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let identity = Identity::of_certificate(own).map_err(refused)?;
        let verifier = self.of(&identity).map_err(refused)?;
        verifier.verify_client_cert(own, issuers, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::PeerIncompatible(
            PeerIncompatible::Tls12NotOfferedOrEnabled,
        ))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        cas: ClientCas,
    }

    #[test]
    fn a_ca_without_a_trust_domain_is_refused_with_what_to_write() {
        let parse = |words: &[&str]| {
            let parsed = Program::try_parse_from([&["program"], words].concat());
            parsed.map(|program| program.cas)
        };
        let cas = parse(&[
            "--client-ca",
            "example.org=a=b.pem",
            "--common-name-ca",
            "c.pem",
        ]);
        let cas = cas.expect("good");
        assert_eq!(cas.domains, [("example.org".to_owned(), "a=b.pem".into())]);
        assert!(!cas.is_empty() && ClientCas::default().is_empty());
        for bad in ["ca.pem", "/etc/patchbay/ca.pem"] {
            let error = parse(&["--client-ca", bad]).expect_err(bad).to_string();
            for word in [
                "--client-ca",
                &format!("DOMAIN={bad}"),
                &format!("--common-name-ca {bad}"),
            ] {
                assert!(error.contains(word), "{error}");
            }
        }
        for bad in ["Example.org=a", "=a", "example.org=", "a/b=c", "é=c"] {
            let error = parse(&["--client-ca", bad]).expect_err(bad).to_string();
            assert!(error.contains("trust domain"), "{error}");
        }
    }
}
