// SPDX-License-Identifier: Apache-2.0
//! Reads the file of the webhooks. It belongs to the controller, so a spec cannot choose where
//! events are sent.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::names::is_name;
use crate::spec::Duration;
use crate::trusted::{self, Forbidden};

/// The maximum size of the file, and of a file with a secret.
const MAX_FILE_BYTES: u64 = 1 << 16;
const MAX_WEBHOOKS: usize = 16;
/// The prefix of a secret in its file.
const PREFIX: &str = "whsec_";
/// The permitted lengths of a secret, in bytes.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;
const DEFAULT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
const MAX_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);
/// The file of CAs on Debian.
const DEFAULT_CA: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The reason why the webhooks cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {why}", path = .path.display())]
pub struct ConfigError {
    path: PathBuf,
    why: String,
}

impl ConfigError {
    fn of(path: &Path, why: impl Into<String>) -> Self {
        let (path, why) = (path.to_owned(), why.into());
        Self { path, why }
    }
}

/// A URL that gets the events of all rollouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Webhook {
    pub name: String,
    pub url: http::Uri,
    /// The file with the secret that signs deliveries. It is read for each delivery, so a new
    /// secret needs no restart.
    pub secret_file: PathBuf,
    /// The CAs that may have issued the certificate of an https:// server, in PEM.
    pub ca: PathBuf,
    /// The maximum time of one attempt, from the connection to the response.
    pub timeout: std::time::Duration,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    webhooks: Vec<Fields>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    name: String,
    url: String,
    secret_file: PathBuf,
    ca: Option<PathBuf>,
    timeout: Option<Duration>,
}

/// Reads the file, and checks every webhook's secret.
///
/// # Errors
/// [`ConfigError`].
pub fn read(path: &Path) -> Result<Vec<Webhook>, ConfigError> {
    let wrong = |why: String| ConfigError::of(path, why);
    let file: File = serde_yaml_ng::from_str(&text(path, Forbidden::Write)?)
        .map_err(|error| wrong(error.to_string()))?;
    if file.webhooks.len() > MAX_WEBHOOKS {
        let count = file.webhooks.len();
        return Err(wrong(format!(
            "{count} webhooks; at most {MAX_WEBHOOKS} are served"
        )));
    }
    let mut webhooks: Vec<Webhook> = Vec::new();
    for fields in file.webhooks {
        let webhook = check(fields).map_err(wrong)?;
        if webhooks.iter().any(|other| other.name == webhook.name) {
            return Err(wrong(format!(
                "two webhooks have the name {}",
                webhook.name
            )));
        }
        secret(&webhook.secret_file)?;
        webhooks.push(webhook);
    }
    Ok(webhooks)
}

fn check(fields: Fields) -> Result<Webhook, String> {
    let name = fields.name;
    if !is_name(&name, b"-") {
        return Err(format!(
            "{name:?} is not a name of a webhook; give 1 to 64 letters, digits and hyphens"
        ));
    }
    let url = fields.url;
    let uri = url.parse::<http::Uri>().ok().filter(|uri| {
        let has_user = uri
            .authority()
            .is_some_and(|host| host.as_str().contains('@'));
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some() && !has_user
    });
    let uri = uri.ok_or_else(|| {
        format!("webhook {name}: {url:?} is not a URL of the form https://HOST:PORT/PATH")
    })?;
    let timeout = fields.timeout.map_or(DEFAULT_TIMEOUT, |timeout| timeout.0);
    if timeout.is_zero() || timeout > MAX_TIMEOUT {
        return Err(format!(
            "webhook {name}: the timeout must be more than 0 s and up to 60 s"
        ));
    }
    Ok(Webhook {
        name,
        url: uri,
        secret_file: fields.secret_file,
        ca: fields.ca.unwrap_or_else(|| DEFAULT_CA.into()),
        timeout,
    })
}

/// Reads the secret of a webhook: `whsec_` and 24 to 64 bytes in base64.
pub(super) fn secret(path: &Path) -> Result<Vec<u8>, ConfigError> {
    let text = text(path, Forbidden::All)?;
    let secret = text.trim().strip_prefix(PREFIX);
    let secret = secret.and_then(|secret| STANDARD.decode(secret).ok());
    let secret = secret.filter(|secret| SECRET_BYTES.contains(&secret.len()));
    // The error must not contain the text.
    secret.ok_or_else(|| {
        let why = "it has no secret; write `whsec_` followed by 24 to 64 random bytes in base64";
        ConfigError::of(path, why)
    })
}

fn text(path: &Path, forbidden: Forbidden) -> Result<String, ConfigError> {
    let content = trusted::read(path, forbidden, MAX_FILE_BYTES);
    let content = content.map_err(|error| ConfigError::of(path, error.to_string()))?;
    String::from_utf8(content).map_err(|_| ConfigError::of(path, "it is not UTF-8"))
}
