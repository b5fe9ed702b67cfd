// SPDX-License-Identifier: Apache-2.0
//! Identifies the peer of a connection.
//!
//! A peer on a unix socket is "uid:N". A peer with a verified certificate is identified by its
//! SPIFFE id or, if the host accepts common names, by its common name. The kinds of identity cannot
//! be confused, because a common name that looks like a uid or a SPIFFE id, or has a slash, is
//! refused. The policy's globs are therefore unambiguous. [`crate::listen::client_cas`] decides
//! which CA may issue which names.

use std::time::{SystemTime, UNIX_EPOCH};

use patchbay_proto::text::hex;
use sha2::{Digest, Sha256};
use tokio_rustls::rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The maximum length of a principal. Monitors have the same limit.
const MAX_PRINCIPAL_BYTES: usize = 256;
/// The name that monitors use for themselves in watches and audit logs.
const RESERVED: &str = "monitor";

/// The identity of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The name in the policy's rules.
    pub principal: String,
    /// The certificate that proves the name; `None` on a unix socket.
    pub certificate: Option<Proof>,
}

/// The data of a client's certificate that its connection keeps. They are checked in every call,
/// because a connection may outlive the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The SHA-256 of its DER form, in hexadecimal.
    pub fingerprint: String,
    /// The end of its validity, in seconds since 1970.
    pub not_after: i64,
    /// The certificate and its chain up to the CA, as the client sent them.
    pub chain: Vec<CertificateDer<'static>>,
    /// The generation of the CAs that the certificate was verified against.
    pub generation: u64,
}

/// The reason why a certificate identifies no principal.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The data are not a certificate.
    #[error("the client certificate cannot be read: {0}")]
    Malformed(String),
    /// The certificate has several URIs, but the SPIFFE standard allows only one.
    #[error(
        "the client certificate has {0} URIs as alternative names; issue one with a single SPIFFE id"
    )]
    SeveralUris(usize),
    /// The URI is not a SPIFFE id.
    #[error(
        "the client certificate has the URI {0:?}, which is not a SPIFFE id; issue one with spiffe://DOMAIN/PATH: DOMAIN has lowercase letters, digits, '.', '-' and '_'; PATH may have capitals too, but no empty segment, '.' or '..'"
    )]
    NotSpiffe(String),
    /// The certificate has no URI and no common name.
    #[error(
        "the client certificate has neither a SPIFFE id nor a common name; issue one with either"
    )]
    Nameless,
    /// The common name looks like an identity of another kind.
    #[error(
        "the client certificate's common name {0:?} cannot be a principal: it is reserved; issue one with another name"
    )]
    Reserved(String),
    /// The name is too long or not printable.
    #[error(
        "the client certificate's name has {0} bytes or some that are not printable ASCII; issue one with 1 to {MAX_PRINCIPAL_BYTES} printable ASCII characters"
    )]
    Unprintable(usize),
}

impl Identity {
    /// Creates the identity of a unix socket's peer.
    #[must_use]
    pub fn of_uid(uid: u32) -> Self {
        Self {
            principal: format!("uid:{uid}"),
            certificate: None,
        }
    }

    /// Creates the identity of the subject of a certificate that TLS has verified.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn of_certificate(der: &[u8]) -> Result<Self, IdentityError> {
        let malformed = |error: String| IdentityError::Malformed(error);
        let (_, certificate) =
            X509Certificate::from_der(der).map_err(|error| malformed(error.to_string()))?;
        let uris = uris_of(&certificate)?;
        let principal = match uris.as_slice() {
            [] => common_name(&certificate)?,
            [uri] if is_spiffe_id(uri) => uri.clone(),
            [uri] => return Err(IdentityError::NotSpiffe(shown(uri))),
            several => return Err(IdentityError::SeveralUris(several.len())),
        };
        Ok(Self {
            principal: checked(principal)?,
            certificate: Some(Proof {
                fingerprint: fingerprint(der),
                not_after: certificate.validity().not_after.timestamp(),
                chain: vec![CertificateDer::from(der.to_vec())],
                generation: 0,
            }),
        })
    }

    /// Returns whether the certificate has expired since the connection was made.
    #[must_use]
    pub fn has_expired(&self, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        self.certificate
            .as_ref()
            .is_some_and(|proof| proof.not_after < now)
    }
}

/// Returns the URIs among the alternative names of a certificate in DER form.
///
/// # Errors
/// [`IdentityError::Malformed`].
pub fn uris(der: &[u8]) -> Result<Vec<String>, IdentityError> {
    let parsed = X509Certificate::from_der(der);
    let (_, certificate) = parsed.map_err(|error| IdentityError::Malformed(error.to_string()))?;
    uris_of(&certificate)
}

fn uris_of(certificate: &X509Certificate<'_>) -> Result<Vec<String>, IdentityError> {
    let names = certificate.subject_alternative_name();
    let names = names.map_err(|error| IdentityError::Malformed(error.to_string()))?;
    let names = names
        .iter()
        .flat_map(|extension| &extension.value.general_names);
    let uris = names.filter_map(|name| match name {
        GeneralName::URI(uri) => Some((*uri).to_owned()),
        _ => None,
    });
    Ok(uris.collect())
}

/// Returns the SHA-256 of a certificate in DER form, in hexadecimal.
#[must_use]
pub fn fingerprint(der: &[u8]) -> String {
    hex(&Sha256::digest(der))
}

fn common_name(certificate: &X509Certificate<'_>) -> Result<String, IdentityError> {
    let mut names = certificate.subject().iter_common_name();
    let (Some(name), None) = (names.next(), names.next()) else {
        return Err(IdentityError::Nameless);
    };
    let name = name.as_str().map_err(|_| IdentityError::Nameless)?;
    // These prefixes belong to peers of unix sockets and to SPIFFE ids.
    let foreign = ["uid:", "spiffe:"].iter().any(|prefix| {
        let start = name.get(..prefix.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(prefix))
    });
    // A slash occurs only in SPIFFE ids, and in the names that monitors give to the streams of a
    // principal.
    if foreign || is_reserved(name) || name.contains('/') {
        return Err(IdentityError::Reserved(shown(name)));
    }
    Ok(name.to_owned())
}

/// Returns whether the text is exactly a workload's SPIFFE id, without ambiguous parts.
fn is_spiffe_id(uri: &str) -> bool {
    let letters = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let segment =
        |text: &str| !text.is_empty() && text != "." && text != ".." && text.chars().all(letters);
    let path = trust_domain(uri).and_then(|domain| {
        let rest = uri.strip_prefix("spiffe://")?.strip_prefix(domain)?;
        rest.strip_prefix('/')
    });
    path.is_some_and(|path| path.split('/').all(segment))
}

/// Returns the trust domain of a SPIFFE id; `None` for any other name.
#[must_use]
pub fn trust_domain(id: &str) -> Option<&str> {
    let rest = id.strip_prefix("spiffe://")?;
    let domain = rest.split('/').next()?;
    is_trust_domain(domain).then_some(domain)
}

/// Returns whether the text is a trust domain as defined by SPIFFE.
#[must_use]
pub fn is_trust_domain(text: &str) -> bool {
    let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    !text.is_empty() && text.chars().all(letters)
}

fn checked(principal: String) -> Result<String, IdentityError> {
    let printable = principal.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    if principal.is_empty() || principal.len() > MAX_PRINCIPAL_BYTES || !printable {
        return Err(IdentityError::Unprintable(principal.len()));
    }
    // The monitors name one stream of a principal "PRINCIPAL/stream-N".
    let stream = principal.rsplit_once("/stream-");
    if stream.is_some_and(|(_, number)| number.bytes().all(|byte| byte.is_ascii_digit())) {
        return Err(IdentityError::Reserved(principal));
    }
    Ok(principal)
}

/// Returns whether a name that no connection proves is valid for a principal. Names that monitors
/// use for themselves are not.
#[must_use]
pub fn is_principal(name: &str) -> bool {
    !is_reserved(name) && checked(name.to_owned()).is_ok()
}

/// Returns whether monitors use the name for themselves.
fn is_reserved(name: &str) -> bool {
    name == RESERVED || name == "unknown"
}

fn shown(name: &str) -> String {
    name.chars().take(MAX_PRINCIPAL_BYTES).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::string::Ia5String;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn certificate(common_name: Option<&str>, uris: &[&str]) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        for uri in uris {
            let uri = Ia5String::try_from(*uri).expect("ASCII");
            params.subject_alt_names.push(SanType::URI(uri));
        }
        let key = KeyPair::generate().expect("a key");
        params.self_signed(&key).expect("signed").der().to_vec()
    }

    fn principal(common_name: Option<&str>, uris: &[&str]) -> Result<String, IdentityError> {
        Identity::of_certificate(&certificate(common_name, uris)).map(|found| found.principal)
    }

    #[test]
    fn a_spiffe_id_comes_before_the_common_name() {
        let id = "spiffe://example.org/net/alice";
        assert_eq!(principal(Some("bob"), &[id]).expect("named"), id);
        assert_eq!(principal(Some("bob"), &[]).expect("named"), "bob");
    }

    #[test]
    fn certificates_that_name_nobody_or_another_kind_of_principal_are_refused() {
        for name in [
            "uid:0",
            "UID:0",
            "spiffe://example.org/root",
            "monitor",
            "unknown",
            "alice/stream-7",
            "example.org/net/alice",
        ] {
            let error = principal(Some(name), &[]).expect_err(name);
            assert!(matches!(error, IdentityError::Reserved(_)), "{error}");
        }
        assert!(matches!(principal(None, &[]), Err(IdentityError::Nameless)));
        for uri in [
            "https://example.org/a",
            "spiffe://",
            "spiffe:///a",
            "spiffe://a/",
            "spiffe://A/b",
            "spiffe://a:1/b",
            "spiffe://u@a/b",
            "spiffe://a//b",
            "spiffe://a/b/",
            "spiffe://a/../b",
            "spiffe://a/b%2fc",
            "spiffe://a/b?c",
            "spiffe://a/b#c",
            "spiffe://a/*",
            "SPIFFE://a/b",
        ] {
            let error = principal(Some("bob"), &[uri]).expect_err(uri);
            assert!(matches!(error, IdentityError::NotSpiffe(_)), "{error}");
        }
        let two = ["spiffe://a/b", "spiffe://a/c"];
        let error = principal(None, &two).expect_err("two");
        assert!(matches!(error, IdentityError::SeveralUris(2)), "{error}");
        for name in ["né", "a\nb", &"x".repeat(257)] {
            let error = principal(Some(name), &[]).expect_err(name);
            assert!(matches!(error, IdentityError::Unprintable(_)), "{error}");
        }
        assert!(Identity::of_certificate(b"no certificate").is_err());
    }

    #[test]
    fn a_certificate_expires_while_its_connection_lives() {
        let mut identity = Identity::of_certificate(&certificate(Some("bob"), &[])).expect("named");
        let now = SystemTime::now();
        assert!(!identity.has_expired(now));
        if let Some(proof) = &mut identity.certificate {
            proof.not_after = 1_000;
        }
        assert!(!identity.has_expired(UNIX_EPOCH + Duration::from_secs(1_000)));
        assert!(identity.has_expired(UNIX_EPOCH + Duration::from_secs(1_001)));
        assert!(!Identity::of_uid(0).has_expired(now));
    }
}
