// SPDX-License-Identifier: Apache-2.0
//! Manages a development CA in one folder, which contains `ca.pem`, `ca.key`, and a pair of files
//! for each name.
//!
//! The CA makes a first remote call possible without further software. Sites that have their own CA
//! or SPIRE use that instead. The CA's certificate names its trust domain as SPIFFE requires, and
//! each certificate gets a SPIFFE id of that domain.

use std::fs::File;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use patchbay_proto::text::hex;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use sha2::{Digest, Sha256};
use time::{Duration, OffsetDateTime};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, DnsName};

use crate::identity::{Identity, IdentityError, is_trust_domain, trust_domain, uris};

/// The trust domain of a CA that is created without one.
pub const DEFAULT_TRUST_DOMAIN: &str = "patchbay.internal";

const CA_DAYS: i64 = 3650;
/// The time by which certificates are backdated, so that a new one is valid on a machine whose
/// clock is a little slow.
const BACKDATED: Duration = Duration::minutes(5);

/// The reason why a certificate or a CA cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CertsError {
    /// A file cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// The path of the file.
        path: String,
        /// The operating system's error.
        error: io::Error,
    },
    /// The file exists already. Keys are never overwritten.
    #[error("{0} exists; give another name or folder, or move it away")]
    Exists(String),
    /// The CA's folder can be read by others.
    #[error("{0} can be read by other users, and so can the CA's key; chmod 600 {0}")]
    TooOpen(String),
    /// The name cannot be a file name.
    #[error(
        "{0:?} cannot be a name; use up to 64 letters, digits, '-', '_' and '.', with no '.' at the start"
    )]
    Name(String),
    /// The folder has no CA to issue from.
    #[error(
        "{0}/ca.key does not exist; make a CA with `patchbay certs init --folder {0}`, or give the folder of one"
    )]
    NoCa(String),
    /// No client could connect to a host of this name.
    #[error(
        "{0:?} is neither a host's name nor an address; give for example web-1.example.org or 192.0.2.1, without a port"
    )]
    Host(String),
    /// The certificate would identify no principal.
    #[error("the certificate would be of no use: {0}")]
    Identity(IdentityError),
    /// The trust domain is malformed.
    #[error(
        "{0:?} is not a trust domain; give lowercase letters, digits, '.', '-' and '_', as in example.org"
    )]
    TrustDomain(String),
    /// The CA is for another trust domain, so no host would accept the certificate.
    #[error(
        "{id} is not in the CA's trust domain; give spiffe://{domain}/PATH, or make another CA with --trust-domain"
    )]
    OtherDomain {
        /// The SPIFFE id.
        id: String,
        /// The CA's trust domain.
        domain: String,
    },
    /// The CA names no trust domain.
    #[error(
        "{0} names no trust domain; give --common-name or --spiffe ID, or make another CA with `patchbay certs init`"
    )]
    NoDomain(String),
    /// The number of days is out of range.
    #[error("{0} days are out of range; give 1 to 3650")]
    Days(u32),
    /// An error of the library.
    #[error("the certificate cannot be made: {0}")]
    Make(rcgen::Error),
}

// The text of these errors is part of the message. They are not the source too, because a report of
// the chain of errors would print them twice.
impl From<IdentityError> for CertsError {
    fn from(error: IdentityError) -> Self {
        Self::Identity(error)
    }
}

impl From<rcgen::Error> for CertsError {
    fn from(error: rcgen::Error) -> Self {
        Self::Make(error)
    }
}

/// A certificate to issue.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The name of the files, the common name, and the path of the SPIFFE id.
    pub name: String,
    /// A SPIFFE id that replaces the default one.
    pub spiffe: Option<String>,
    /// True to omit the SPIFFE id. Hosts accept the certificate only with --common-name-ca.
    pub common_name: bool,
    /// The names and addresses at which a host is reached; empty for a client.
    pub hosts: Vec<String>,
    /// The validity in days.
    pub days: u32,
}

/// The files that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// Path of the certificate.
    pub certificate: PathBuf,
    /// Path of the private key, mode 0600.
    pub key: PathBuf,
    /// The principal, which is the name by which a policy refers to the client that presents the
    /// certificate.
    pub principal: String,
}

/// Creates a CA for SPIFFE ids of `domain` in `folder`, which is created with mode 0700.
///
/// # Errors
/// [`CertsError`].
pub fn init(folder: &Path, domain: &str) -> Result<Issued, CertsError> {
    if !is_trust_domain(domain) {
        return Err(CertsError::TrustDomain(domain.to_owned()));
    }
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| file_error(folder, error))?;
    let key = KeyPair::generate()?;
    let name = name_of(&key);
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, name.as_str());
    let id = format!("spiffe://{domain}");
    params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(id)?)];
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid(&mut params, CA_DAYS);
    let certificate = params.self_signed(&key)?;
    write(folder, "ca", &certificate.pem(), &key, &name)
}

/// Returns the name of a CA with this key. The name depends on the key. If two CAs had the same
/// name, a certificate of the first would be checked with the key of the second, and the error
/// would report a bad signature instead of an unknown CA.
fn name_of(key: &KeyPair) -> String {
    /// The maximum length of the host's name, because X.509 allows 64 characters for the whole
    /// name.
    const MOST_OF_HOST: usize = 30;
    let machine = rustix::system::uname();
    let machine = machine.nodename().to_string_lossy();
    let letters = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
    let machine: String = machine.chars().filter(letters).take(MOST_OF_HOST).collect();
    let digest = Sha256::digest(key.public_key_raw());
    let digest = hex(&digest[..4]);
    format!("Patchbay development CA {machine} {digest}")
}

/// Issues a certificate from the CA in `folder`, for a host if the request has hosts, otherwise for
/// a client.
///
/// # Errors
/// [`CertsError`].
pub fn issue(folder: &Path, request: &Request) -> Result<Issued, CertsError> {
    let name = &request.name;
    let letters = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(letters) {
        return Err(CertsError::Name(name.clone()));
    }
    if !(1..=3650).contains(&request.days) {
        return Err(CertsError::Days(request.days));
    }
    let key_path = folder.join("ca.key");
    let mode = std::fs::metadata(&key_path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => CertsError::NoCa(folder.display().to_string()),
        _ => file_error(&key_path, error),
    })?;
    if mode.permissions().mode() & 0o077 != 0 {
        return Err(CertsError::TooOpen(key_path.display().to_string()));
    }
    let ca_key = KeyPair::from_pem(&read(&key_path)?)?;
    let ca_path = folder.join("ca.pem");
    let ca = read(&ca_path)?;
    let issuer = Issuer::from_ca_cert_pem(&ca, ca_key)?;
    let id = spiffe_id(request, &ca, &ca_path)?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if !request.hosts.is_empty() {
        params
            .extended_key_usages
            .push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    for host in &request.hosts {
        params.subject_alt_names.push(host_name(host)?);
    }
    if let Some(id) = id {
        let uri = SanType::URI(Ia5String::try_from(id)?);
        params.subject_alt_names.push(uri);
    }
    valid(&mut params, i64::from(request.days));
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    // This is the name that the host will read from the certificate.
    let principal = Identity::of_certificate(certificate.der())?.principal;
    write(folder, name, &certificate.pem(), &key, &principal)
}

/// Parses a name or an address by which clients connect to a host. A wildcard may stand for the
/// first label of a name.
fn host_name(host: &str) -> Result<SanType, CertsError> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    match DnsName::try_from(host.strip_prefix("*.").unwrap_or(host)) {
        Ok(_) => Ok(SanType::DnsName(Ia5String::try_from(host)?)),
        Err(_) => Err(CertsError::Host(host.to_owned())),
    }
}

/// Returns the SPIFFE id for the request; `None` if the certificate gets only a common name.
fn spiffe_id(request: &Request, ca: &str, path: &Path) -> Result<Option<String>, CertsError> {
    if request.common_name {
        return Ok(None);
    }
    let ca = CertificateDer::from_pem_slice(ca.as_bytes());
    let names = ca.ok().and_then(|ca| uris(&ca).ok()).unwrap_or_default();
    let own = names.iter().find_map(|name| trust_domain(name));
    match (&request.spiffe, own) {
        (None, None) => Err(CertsError::NoDomain(path.display().to_string())),
        (None, Some(domain)) => Ok(Some(format!("spiffe://{domain}/{}", request.name))),
        (Some(id), Some(domain)) if trust_domain(id).is_some_and(|of| of != domain) => {
            let (id, domain) = (id.clone(), domain.to_owned());
            Err(CertsError::OtherDomain { id, domain })
        }
        (Some(id), _) => Ok(Some(id.clone())),
    }
}

fn valid(params: &mut CertificateParams, days: i64) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - BACKDATED;
    params.not_after = now + Duration::days(days);
}

fn read(path: &Path) -> Result<String, CertsError> {
    std::fs::read_to_string(path).map_err(|error| file_error(path, error))
}

fn write(
    folder: &Path,
    name: &str,
    certificate: &str,
    key: &KeyPair,
    principal: &str,
) -> Result<Issued, CertsError> {
    let issued = Issued {
        certificate: folder.join(format!("{name}.pem")),
        key: folder.join(format!("{name}.key")),
        principal: principal.to_owned(),
    };
    // The key is written first, and removed if the certificate cannot be written, so that no half
    // of a pair blocks the next attempt.
    create(&issued.key, 0o600, &key.serialize_pem())?;
    if let Err(error) = create(&issued.certificate, 0o644, certificate) {
        let _ = std::fs::remove_file(&issued.key);
        return Err(error);
    }
    Ok(issued)
}

fn create(path: &Path, mode: u32, text: &str) -> Result<(), CertsError> {
    let new = File::options()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path);
    let mut file = match new {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(CertsError::Exists(path.display().to_string()));
        }
        new => new.map_err(|error| file_error(path, error))?,
    };
    let written = file.write_all(text.as_bytes());
    written.map_err(|error| file_error(path, error))
}

fn file_error(path: &Path, error: io::Error) -> CertsError {
    let path = path.display().to_string();
    CertsError::File { path, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(name: &str) -> Request {
        Request {
            name: name.to_owned(),
            days: 30,
            ..Request::default()
        }
    }

    #[test]
    fn keys_are_private_and_never_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let ca = folder.path().join("ca");
        let made = init(&ca, "example.org").expect("made");
        let alice = issue(&ca, &request("alice")).expect("issued");
        assert_eq!(alice.principal, "spiffe://example.org/alice");
        for key in [&made.key, &alice.key] {
            let mode = std::fs::metadata(key)
                .expect("written")
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o600, "{}", key.display());
        }
        let mode = std::fs::metadata(&ca).expect("made").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let before = std::fs::read(&made.key).expect("kept");
        assert!(matches!(
            init(&ca, "example.org"),
            Err(CertsError::Exists(_))
        ));
        assert!(matches!(
            issue(&ca, &request("ca")),
            Err(CertsError::Exists(_))
        ));
        assert!(matches!(
            issue(&ca, &request("alice")),
            Err(CertsError::Exists(_))
        ));
        assert_eq!(std::fs::read(&made.key).expect("kept"), before);
        // If the certificate exists already, no key is left behind.
        std::fs::write(ca.join("bob.pem"), "precious").expect("written");
        assert!(matches!(
            issue(&ca, &request("bob")),
            Err(CertsError::Exists(_))
        ));
        assert!(!ca.join("bob.key").exists());
    }

    #[test]
    fn a_host_is_a_name_or_an_address() {
        let folder = tempfile::tempdir().expect("a folder");
        init(folder.path(), "example.org").expect("made");
        let of = |name: &str, hosts: &[&str]| Request {
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            ..request(name)
        };
        for bad in [
            "",
            "web 1",
            "web-1:7447",
            "https://web-1",
            "a..b",
            "w*b",
            "*.",
        ] {
            let refused = issue(folder.path(), &of("bad", &["web-1", bad]));
            assert!(
                matches!(&refused, Err(CertsError::Host(host)) if host == bad),
                "{bad:?}: {refused:?}"
            );
            assert!(!folder.path().join("bad.key").exists(), "{bad:?}");
        }
        let good = [
            "web-1",
            "web-1.example.org",
            "*.example.org",
            "192.0.2.1",
            "::1",
        ];
        issue(folder.path(), &of("good", &good)).expect("issued");
    }

    #[test]
    fn a_folder_without_a_ca_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = issue(folder.path(), &request("alice")).expect_err("no CA");
        assert!(matches!(refused, CertsError::NoCa(_)), "{refused}");
        let text = refused.to_string();
        assert!(text.contains("`patchbay certs init --folder "), "{text}");
    }

    #[test]
    fn a_name_is_a_spiffe_id_of_the_cas_domain_unless_it_is_to_be_a_common_name() {
        let folder = tempfile::tempdir().expect("a folder");
        init(folder.path(), "example.org").expect("made");
        let issue = |request: &Request| issue(folder.path(), request).expect("issued");
        let deeper = Request {
            spiffe: Some("spiffe://example.org/net/bob".to_owned()),
            ..request("bob")
        };
        assert_eq!(issue(&deeper).principal, "spiffe://example.org/net/bob");
        let common_name = Request {
            common_name: true,
            ..request("carol")
        };
        assert_eq!(issue(&common_name).principal, "carol");
        // This is a CA of an earlier version, or of another program.
        let params = CertificateParams::default();
        let key = KeyPair::from_pem(&read(&folder.path().join("ca.key")).expect("a key"));
        let ca = params.self_signed(&key.expect("a key")).expect("signed");
        std::fs::write(folder.path().join("ca.pem"), ca.pem()).expect("written");
        let error = super::issue(folder.path(), &request("dave")).expect_err("no domain");
        assert!(error.to_string().contains("--common-name"), "{error}");
    }

    #[test]
    fn each_ca_has_a_name_of_its_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let name = |ca: &str| {
            init(&folder.path().join(ca), "example.org")
                .expect("made")
                .principal
        };
        let (one, other) = (name("one"), name("other"));
        assert_ne!(one, other);
        for name in [one, other] {
            assert!(name.starts_with("Patchbay development CA "), "{name}");
            assert!(name.len() <= 64, "{name}");
        }
    }

    #[test]
    fn a_request_that_is_of_no_use_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = issue(folder.path(), &request("alice")).expect_err("no CA");
        assert!(error.to_string().contains("ca.key"), "{error}");
        init(folder.path(), "example.org").expect("made");
        for name in ["", "../x", ".x", "a b", "a/b", &"x".repeat(65)] {
            let error = issue(folder.path(), &request(name)).expect_err(name);
            assert!(matches!(error, CertsError::Name(_)), "{error}");
        }
        for days in [0, 3651] {
            let request = Request {
                days,
                ..request("alice")
            };
            assert!(matches!(
                issue(folder.path(), &request),
                Err(CertsError::Days(_))
            ));
        }
        for (name, spiffe) in [
            ("alice", Some("https://example.org/alice")),
            ("monitor", None),
        ] {
            let request = Request {
                spiffe: spiffe.map(str::to_owned),
                common_name: spiffe.is_none(),
                ..request(name)
            };
            let error = issue(folder.path(), &request).expect_err(name);
            assert!(matches!(error, CertsError::Identity(_)), "{error}");
            assert!(std::error::Error::source(&error).is_none(), "printed twice");
            assert!(!folder.path().join(format!("{name}.key")).exists());
        }
        let other = Request {
            spiffe: Some("spiffe://example.com/alice".to_owned()),
            ..request("alice")
        };
        let error = issue(folder.path(), &other).expect_err("another domain");
        assert!(
            error.to_string().contains("spiffe://example.org/PATH"),
            "{error}"
        );
        let error = init(&folder.path().join("x"), "Example Org").expect_err("no domain");
        assert!(matches!(error, CertsError::TrustDomain(_)), "{error}");
        let open = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(folder.path().join("ca.key"), open).expect("set");
        let error = issue(folder.path(), &request("alice")).expect_err("open");
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }
}
