// SPDX-License-Identifier: Apache-2.0
//! Changes the guest's static keys over the monitor's API.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use patchbay_proto::client;
use patchbay_proto::pages::Pages;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    DescribeGuestRequest, KeyClass, KeyOp, KeyUpdate, ListStaticKeysRequest, RegistrationState,
    StaticKey, UpdateStaticKeysRequest,
};
use tonic::transport::Channel;
use tonic::{Code, Request};

use crate::place;

/// The time limit for the monitor to find the kernel's keys. It is long, because the monitor has to
/// search the memory of a kernel that does not register them.
const REGISTRATION_TIME: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);
/// Deadline of a change.
const CHANGE_TIME: Duration = Duration::from_secs(40);

/// A side of a key's branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    On,
    Off,
}

impl Side {
    pub fn of(key: &StaticKey) -> Self {
        if key.enabled { Self::On } else { Self::Off }
    }

    pub fn other(self) -> Self {
        match self {
            Self::On => Self::Off,
            Self::Off => Self::On,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
        }
    }

    fn op(self) -> KeyOp {
        match self {
            Self::On => KeyOp::Enable,
            Self::Off => KeyOp::Disable,
        }
    }
}

/// A key, and the side to put it on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub key: String,
    pub side: Side,
}

impl Setting {
    /// Parses NAME=on or NAME=off.
    ///
    /// # Errors
    /// A sentence with an example.
    pub fn parse(text: &str) -> Result<Self, String> {
        let side = match text.rsplit_once('=') {
            Some((key, "on")) if !key.is_empty() => (key, Side::On),
            Some((key, "off")) if !key.is_empty() => (key, Side::Off),
            _ => {
                return Err(format!(
                    "{text:?} is not a setting; use NAME=on or NAME=off"
                ));
            }
        };
        Ok(Self {
            key: side.0.to_owned(),
            side: side.1,
        })
    }

    /// Returns the same key on the other side.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            key: self.key.clone(),
            side: self.side.other(),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.side.name())
    }
}

/// A selected key, and the reason why it is not flipped, if there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// The key with the side that it does not have now.
    pub setting: Setting,
    pub obstacle: Option<String>,
}

/// A client of the monitor.
#[derive(Debug)]
pub struct Keys {
    client: StaticKeysServiceClient<Channel>,
}

impl Keys {
    /// Connects, and waits until the kernel's keys are known.
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        let channel = channel(socket).await?;
        let mut guest = GuestServiceClient::new(channel.clone());
        let mut client = StaticKeysServiceClient::new(channel);
        let registered = async {
            loop {
                let request = DescribeGuestRequest::default();
                let guest = guest.describe_guest(request).await.map_err(sentence)?;
                let status = guest.into_inner().status.unwrap_or_default();
                if status.registration() == RegistrationState::Registered {
                    return Ok(());
                }
                // If the kernel does not register its keys, this request starts the search for
                // them.
                let request = ListStaticKeysRequest {
                    page_size: 1,
                    ..Default::default()
                };
                if let Ok(listed) = client.list_static_keys(request).await
                    && !listed.into_inner().panicked
                {
                    return Ok(());
                }
                ensure!(
                    status.registration_error.is_empty(),
                    "the guest's keys are not known: {}",
                    status.registration_error
                );
                tokio::time::sleep(POLL).await;
            }
        };
        match tokio::time::timeout(REGISTRATION_TIME, registered).await {
            Ok(registered) => registered?,
            Err(_) => bail!(
                "the guest's kernel has not registered its keys within {} s; see docs/kernels.md for \
                 the kernels whose keys are known",
                REGISTRATION_TIME.as_secs()
            ),
        }
        Ok(Self { client })
    }

    /// Returns the keys that the globs select, except those of tracepoints.
    ///
    /// # Errors
    /// A named key does not exist or cannot be flipped, or nothing matches.
    pub async fn select(
        &mut self,
        patterns: &[String],
        allow_guarded: bool,
    ) -> Result<Vec<Selected>> {
        let (mut found, mut pages) = (vec![], Pages::of("keys"));
        let mut request = ListStaticKeysRequest {
            patterns: patterns.to_vec(),
            classes: vec![KeyClass::Ref.into(), KeyClass::Guarded.into()],
            ..Default::default()
        };
        loop {
            let page = self.client.list_static_keys(request.clone()).await;
            let page = page.map_err(sentence)?.into_inner();
            let next = pages.next(&page, &page.next_page_token);
            let next = next.map_err(sentence)?;
            found.extend(page.keys);
            match next {
                Some(token) => request.page_token = token,
                None => break,
            }
        }
        for pattern in patterns.iter().filter(|pattern| is_name(pattern)) {
            let key = found.iter().find(|key| key.name == **pattern);
            let key = key.with_context(|| {
                format!("the guest has no key {pattern}, or it is the key of a tracepoint")
            })?;
            if let Some(obstacle) = obstacle(key, allow_guarded) {
                bail!("the key {pattern} cannot be flipped: {obstacle}");
            }
        }
        ensure!(
            !found.is_empty(),
            "no key of the guest matches {}; see `patchbay inspect KERNEL`",
            patterns.join(" ")
        );
        let select = |key: &StaticKey| Selected {
            setting: Setting {
                key: key.name.clone(),
                side: Side::of(key).other(),
            },
            obstacle: obstacle(key, allow_guarded),
        };
        Ok(found.iter().map(select).collect())
    }

    /// Sets each key to its side, in one transaction.
    ///
    /// # Errors
    /// The monitor's status; [`is_refusal`] returns whether the guest is unchanged.
    pub async fn set(
        &mut self,
        settings: &[Setting],
        allow_guarded: bool,
    ) -> Result<(), tonic::Status> {
        let update = |setting: &Setting| KeyUpdate {
            name: setting.key.clone(),
            op: setting.side.op().into(),
            ..Default::default()
        };
        let mut request = Request::new(UpdateStaticKeysRequest {
            updates: settings.iter().map(update).collect(),
            allow_guarded,
            // The guest itself may hold references, so `force` is needed.
            force: true,
            reason: "patchbay ci".to_owned(),
            ..Default::default()
        });
        request.set_timeout(place::patience(CHANGE_TIME));
        self.client.update_static_keys(request).await.map(drop)
    }
}

/// Connects to a monitor.
pub(crate) async fn channel(socket: &Path) -> Result<Channel> {
    client::endpoint()
        .connect_with_connector(client::unix_socket(socket))
        .await
        .with_context(|| format!("no monitor answers on {}", socket.display()))
}

/// Returns the reason why a key is not flipped.
fn obstacle(key: &StaticKey, allow_guarded: bool) -> Option<String> {
    if let Some(quarantine) = &key.quarantine {
        return Some(format!("quarantined: {}", quarantine.message));
    }
    if key.sealed {
        return Some("sealed: its branches are fixed".to_owned());
    }
    if key.key_class() == KeyClass::Guarded && !allow_guarded {
        return Some("guarded: give --allow-guarded".to_owned());
    }
    // The guest's own static_key_disable() would warn about such a count.
    (key.count > 1).then(|| format!("it has {} users", key.count))
}

/// Returns whether a pattern is the name of one key.
pub fn is_name(pattern: &str) -> bool {
    !pattern.starts_with('!') && !pattern.contains(['*', '?', '['])
}

/// Returns whether the monitor refused a change and the guest is unchanged. After any other error
/// the monitor may be gone, or the change may still be made.
pub fn is_refusal(status: &tonic::Status) -> bool {
    matches!(
        status.code(),
        Code::FailedPrecondition | Code::InvalidArgument | Code::NotFound | Code::PermissionDenied
    )
}

pub fn sentence(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("the monitor refused: {}", status.message())
}

#[cfg(test)]
mod tests {
    use patchbay_proto::v1::Quarantine;

    use super::*;

    #[test]
    fn settings_are_parsed_or_refused() {
        let setting = |key: &str, side| Setting {
            key: key.to_owned(),
            side,
        };
        assert_eq!(Setting::parse("a=on"), Ok(setting("a", Side::On)));
        assert_eq!(Setting::parse("m:a=off"), Ok(setting("m:a", Side::Off)));
        for bad in ["", "a", "a=", "=on", "a=ON", "a=1", "a:on"] {
            assert!(Setting::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn obstacles_are_named() {
        let key = |class: KeyClass| StaticKey {
            key_class: class.into(),
            count: 1,
            ..Default::default()
        };
        assert_eq!(obstacle(&key(KeyClass::Ref), false), None);
        assert_eq!(obstacle(&key(KeyClass::Guarded), true), None);
        let guarded = obstacle(&key(KeyClass::Guarded), false).unwrap();
        assert!(guarded.contains("--allow-guarded"), "{guarded}");
        let sealed = StaticKey {
            sealed: true,
            ..key(KeyClass::Ref)
        };
        assert!(obstacle(&sealed, true).unwrap().contains("sealed"));
        let shared = StaticKey {
            count: 2,
            ..key(KeyClass::Ref)
        };
        assert!(obstacle(&shared, true).unwrap().contains("2 users"));
        let quarantine = Some(Quarantine::default());
        let quarantined = StaticKey {
            quarantine,
            ..key(KeyClass::Ref)
        };
        assert!(obstacle(&quarantined, true).is_some());
    }

    #[test]
    fn an_error_of_the_transport_is_no_refusal() {
        for (code, expected) in [
            (Code::FailedPrecondition, true),
            (Code::InvalidArgument, true),
            (Code::NotFound, true),
            (Code::PermissionDenied, true),
            (Code::Unavailable, false),
            (Code::DeadlineExceeded, false),
            (Code::Cancelled, false),
            (Code::DataLoss, false),
            (Code::Unknown, false),
        ] {
            let status = tonic::Status::new(code, "");
            assert_eq!(is_refusal(&status), expected, "{code:?}");
        }
    }

    #[test]
    fn names_are_told_from_globs() {
        assert!(is_name("net_x") && is_name("m:x"));
        for glob in ["!net_x", "net_*", "ne?", "[ab]"] {
            assert!(!is_name(glob), "{glob}");
        }
    }
}
