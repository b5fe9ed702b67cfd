// SPDX-License-Identifier: Apache-2.0
//! Signs and checks assertions. In an assertion, a controller names the person for whom it makes a
//! call to a host.
//!
//! The message is documented in `patchbay/fleet/v1/assertion.proto`. An assertion over TLS is
//! signed with the key of the client certificate of the connection, so another client cannot use
//! it. Over a unix socket the uid of the peer replaces the signature. The policy decides who may
//! assert, and the daemon compares the assertion with the call.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use patchbay_proto::MAX_ASSERTION_BYTES;
use patchbay_proto::fleet::v1::{Assertion, SignedAssertion};
use prost::Message;
use tokio_rustls::rustls::SignatureScheme;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::sign;

use crate::connect::TlsFiles;
use crate::identity::{Identity, is_principal};

/// The time for which an assertion is valid.
pub const VALIDITY: Duration = Duration::from_secs(300);
/// The maximum time by which the clock of the controller may be ahead of the host's.
pub const MAX_SKEW: Duration = Duration::from_secs(60);

/// The text between [`SPACES`] and the signed bytes. The form is that of a CertificateVerify in
/// TLS 1.3, whose context string distinguishes the uses of a key.
const CONTEXT: &[u8] = b"patchbay assertion, version 1\0";
const SPACES: [u8; 64] = [b' '; 64];
/// The schemes of TLS 1.3, the preferred ones first.
const SCHEMES: [SignatureScheme; 6] = [
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
];

/// The reason why an assertion is not accepted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssertionError {
    /// The assertion is too long.
    #[error("has {0} bytes; at most {MAX_ASSERTION_BYTES} are read")]
    TooLong(usize),
    /// The data are not an assertion.
    #[error("cannot be read: {0}")]
    Malformed(String),
    /// The peer has a certificate, and the assertion has no signature.
    #[error("is not signed; sign it with the key of the certificate of this connection")]
    Unsigned,
    /// The peer has no certificate, and the assertion has a signature.
    #[error("is signed, but a peer on a unix socket has no certificate; send it unsigned")]
    Signed,
    /// The signature was not made with the key of the peer's certificate.
    #[error(
        "was not signed with the key of the certificate of this connection, or was changed \
         afterwards; sign it with that key"
    )]
    Signature,
    /// The assertion is too old.
    #[error(
        "expired {ago} s ago, {} s after it was issued; compare the clocks of the controller and this \
         host",
        VALIDITY.as_secs()
    )]
    Expired {
        /// The time since its expiry, in seconds.
        ago: u64,
    },
    /// The time of the assertion is too far ahead.
    #[error(
        "was issued {ahead} s in the future, and at most {} s are accepted; correct the clocks of the \
         controller and this host",
        MAX_SKEW.as_secs()
    )]
    Future {
        /// The time by which it is ahead, in seconds.
        ahead: u64,
    },
    /// The person's name is not valid for a principal.
    #[error("names a person with an invalid name; give 1 to 256 printable ASCII characters")]
    Person,
}

/// The key of a certificate, which signs assertions.
#[derive(Debug)]
pub struct Signer(Box<dyn sign::Signer>);

impl TlsFiles {
    /// Reads the private key for signing assertions.
    ///
    /// # Errors
    /// The file cannot be used; the error names it.
    pub fn signer(&self) -> io::Result<Signer> {
        let wrong = |error: &dyn std::fmt::Display| {
            io::Error::other(format!("{}: {error}; give a PEM file", self.key.display()))
        };
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| wrong(&error))?;
        let key = ring::default_provider().key_provider.load_private_key(key);
        let key = key.map_err(|error| wrong(&error))?;
        let signer = key.choose_scheme(&SCHEMES);
        signer
            .map(Signer)
            .ok_or_else(|| wrong(&"TLS 1.3 has no signature scheme for this kind of key"))
    }
}

impl Signer {
    /// Returns the encoded assertion with its signature.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn sign(&self, assertion: &Assertion) -> io::Result<Vec<u8>> {
        let assertion = assertion.encode_to_vec();
        let signature = self.0.sign(&signed_text(&assertion));
        Ok(SignedAssertion {
            scheme: u16::from(self.0.scheme()).into(),
            signature: signature.map_err(io::Error::other)?,
            assertion,
        }
        .encode_to_vec())
    }
}

/// Returns the encoded assertion for a peer on a unix socket.
#[must_use]
pub fn unsigned(assertion: &Assertion) -> Vec<u8> {
    let assertion = assertion.encode_to_vec();
    SignedAssertion {
        assertion,
        ..SignedAssertion::default()
    }
    .encode_to_vec()
}

/// Returns the number of milliseconds since 1970.
#[must_use]
pub fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Reads and verifies an assertion from this peer. The assertion is not compared with the call.
///
/// # Errors
/// [`AssertionError`].
pub fn read(encoded: &[u8], peer: &Identity, now: SystemTime) -> Result<Assertion, AssertionError> {
    if encoded.len() > MAX_ASSERTION_BYTES {
        return Err(AssertionError::TooLong(encoded.len()));
    }
    let malformed = |error: prost::DecodeError| AssertionError::Malformed(error.to_string());
    let signed = SignedAssertion::decode(encoded).map_err(malformed)?;
    match &peer.certificate {
        Some(_) if signed.signature.is_empty() => return Err(AssertionError::Unsigned),
        Some(proof) => {
            // The signature is checked before the assertion is parsed.
            let own = proof.chain.first();
            if !own.is_some_and(|own| has_signed(own, &signed)) {
                return Err(AssertionError::Signature);
            }
        }
        None if signed.signature.is_empty() => {}
        None => return Err(AssertionError::Signed),
    }
    let assertion = Assertion::decode(&*signed.assertion).map_err(malformed)?;
    // A peer on a unix socket can issue a new assertion at any time, and has the same clock.
    if peer.certificate.is_some() {
        check_time(assertion.issued_at_ms, millis(now))?;
    }
    match is_principal(&assertion.person) {
        true => Ok(assertion),
        false => Err(AssertionError::Person),
    }
}

fn check_time(issued_at: i64, now: i64) -> Result<(), AssertionError> {
    let seconds = |millis: i64| u64::try_from(millis / 1000).unwrap_or(0);
    let limit = |limit: Duration| i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
    let (age, ahead) = (now.saturating_sub(issued_at), issued_at.saturating_sub(now));
    if age > limit(VALIDITY) {
        let ago = seconds(age - limit(VALIDITY));
        return Err(AssertionError::Expired { ago });
    }
    match ahead > limit(MAX_SKEW) {
        true => Err(AssertionError::Future {
            ahead: seconds(ahead),
        }),
        false => Ok(()),
    }
}

/// Returns whether the signature was made with the key of the certificate.
fn has_signed(certificate: &CertificateDer<'_>, signed: &SignedAssertion) -> bool {
    let is_named = |scheme: &&SignatureScheme| u32::from(u16::from(**scheme)) == signed.scheme;
    let Some(scheme) = SCHEMES.iter().find(is_named) else {
        return false;
    };
    let known = ring::default_provider().signature_verification_algorithms;
    let mut known = known.mapping.iter();
    let Some((_, algorithms)) = known.find(|(known, _)| known == scheme) else {
        return false;
    };
    let Ok(certificate) = webpki::EndEntityCert::try_from(certificate) else {
        return false;
    };
    let text = signed_text(&signed.assertion);
    // In TLS 1.3 the first algorithm is the only one of its scheme.
    let verified = algorithms
        .first()
        .map(|algorithm| certificate.verify_signature(*algorithm, &text, &signed.signature));
    matches!(verified, Some(Ok(())))
}

fn signed_text(assertion: &[u8]) -> Vec<u8> {
    [&SPACES, CONTEXT, assertion].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::{self, Request};

    fn assertion(now: SystemTime) -> Assertion {
        Assertion {
            person: "spiffe://example.org/net/alice".to_owned(),
            owner: "rollout/net/1".to_owned(),
            generation: 7,
            host: "host-1".to_owned(),
            guest: "web-1".to_owned(),
            intent_digest: "ab".repeat(32),
            validate_only: false,
            issued_at_ms: millis(now),
        }
    }

    /// Returns the files of a certificate and the identity that it proves.
    fn client(ca: &std::path::Path, name: &str) -> (TlsFiles, Identity) {
        let request = Request {
            name: name.to_owned(),
            days: 1,
            ..Request::default()
        };
        let certificate = certs::issue(ca, &request).expect("issued").certificate;
        let der = CertificateDer::from_pem_file(&certificate).expect("PEM");
        let files = TlsFiles {
            key: certificate.with_extension("key"),
            ca: ca.join("ca.pem"),
            certificate,
        };
        (files, Identity::of_certificate(&der).expect("named"))
    }

    #[test]
    fn a_signature_is_that_of_the_connection_and_covers_every_byte() {
        let folder = tempfile::tempdir().expect("a folder");
        certs::init(folder.path(), "example.org").expect("made");
        let (files, fleet) = client(folder.path(), "fleet");
        let (others, other) = client(folder.path(), "other");
        let now = SystemTime::now();
        let (wanted, signer) = (assertion(now), files.signer().expect("a key"));
        let signed = signer.sign(&wanted).expect("signed");
        assert_eq!(read(&signed, &fleet, now), Ok(wanted.clone()));
        assert_eq!(read(&signed, &other, now), Err(AssertionError::Signature));
        let forged = others.signer().expect("a key").sign(&wanted);
        let forged = forged.expect("signed");
        assert_eq!(read(&forged, &fleet, now), Err(AssertionError::Signature));
        // A change of any byte makes the assertion unreadable, unsigned or different from the
        // signed one.
        for at in 0..signed.len() {
            let mut changed = signed.clone();
            changed[at] ^= 1;
            assert!(read(&changed, &fleet, now).is_err(), "byte {at}");
        }
        let mut message = SignedAssertion::decode(&*signed).expect("encoded");
        // The key also signs handshakes, whose signatures must not be valid for an assertion.
        let bare = files.signer().expect("a key").0.sign(&message.assertion);
        message.signature = bare.expect("signed");
        let bare = message.encode_to_vec();
        assert_eq!(read(&bare, &fleet, now), Err(AssertionError::Signature));
        let unsigned = unsigned(&wanted);
        assert_eq!(read(&unsigned, &fleet, now), Err(AssertionError::Unsigned));
    }

    #[test]
    fn a_uid_stands_for_the_signature_on_a_unix_socket() {
        let folder = tempfile::tempdir().expect("a folder");
        certs::init(folder.path(), "example.org").expect("made");
        let (files, _) = client(folder.path(), "fleet");
        let (peer, now) = (Identity::of_uid(7), SystemTime::now());
        let wanted = assertion(now);
        assert_eq!(read(&unsigned(&wanted), &peer, now), Ok(wanted.clone()));
        let signed = files.signer().expect("a key").sign(&wanted);
        let signed = signed.expect("signed");
        assert_eq!(read(&signed, &peer, now), Err(AssertionError::Signed));
    }

    #[test]
    fn an_assertion_is_valid_for_a_while() {
        let folder = tempfile::tempdir().expect("a folder");
        certs::init(folder.path(), "example.org").expect("made");
        let (files, peer) = client(folder.path(), "fleet");
        let (signer, now) = (files.signer().expect("a key"), SystemTime::now());
        let signed = |assertion: &Assertion| signer.sign(assertion).expect("signed");
        let at = |time: SystemTime| read(&signed(&assertion(time)), &peer, now).err();
        let second = Duration::from_secs(1);
        assert_eq!(at(now - VALIDITY), None);
        assert_eq!(
            at(now - VALIDITY - 2 * second),
            Some(AssertionError::Expired { ago: 2 })
        );
        assert_eq!(at(now + MAX_SKEW), None);
        assert_eq!(
            at(now + MAX_SKEW + second),
            Some(AssertionError::Future { ahead: 61 })
        );
        for issued_at_ms in [i64::MIN, i64::MAX] {
            let odd = Assertion {
                issued_at_ms,
                ..assertion(now)
            };
            read(&signed(&odd), &peer, now).expect_err("no time");
            // The machine of a unix socket has one clock.
            read(&unsigned(&odd), &Identity::of_uid(7), now).expect("not compared");
        }
    }

    #[test]
    fn an_assertion_is_short_and_names_a_person() {
        let (peer, now) = (Identity::of_uid(7), SystemTime::now());
        for person in ["", "monitor", "unknown", "a\nb", "né", &"x".repeat(257)] {
            let odd = Assertion {
                person: person.to_owned(),
                ..assertion(now)
            };
            let refused = read(&unsigned(&odd), &peer, now);
            assert_eq!(refused, Err(AssertionError::Person), "{person}");
        }
        let long = Assertion {
            owner: "x".repeat(MAX_ASSERTION_BYTES),
            ..assertion(now)
        };
        let refused = read(&unsigned(&long), &peer, now);
        assert!(matches!(refused, Err(AssertionError::TooLong(_))));
        let refused = read(b"\xff", &peer, now);
        assert!(matches!(refused, Err(AssertionError::Malformed(_))));
    }
}
