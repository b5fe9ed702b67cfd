// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay keys wait`.

use std::time::Duration;

use patchbay_proto::v1;
use tokio_stream::StreamExt;
use v1::key_event::Kind;

use super::watch::must_list_anew;
use crate::args::keys::AwaitedKey;
use crate::client::Client;
use crate::failure::{Failure, TIMEOUT};
use crate::print::Answer;
use crate::view;

/// Waits until the key has the awaited state, for at most `limit`.
///
/// # Errors
/// The key does not exist, is removed, or is quarantined, or `limit` has passed.
pub async fn wait(
    client: &Client,
    name: &str,
    awaited: AwaitedKey,
    limit: Option<Duration>,
) -> Result<Answer<view::KeyState>, Failure> {
    let Some(limit) = limit else {
        return Ok(reach(client, name, awaited).await?.into());
    };
    let reached = tokio::time::timeout(limit, reach(client, name, awaited)).await;
    let reached = reached.unwrap_or_else(|_| {
        let wanted = match awaited {
            AwaitedKey::On => "is not on",
            AwaitedKey::Off => "is not off",
            AwaitedKey::Changed => "has not changed",
        };
        Err(Failure::new(
            TIMEOUT,
            format!("key {name} {wanted} after {limit:?}; wait longer with --timeout"),
        ))
    });
    Ok(reached?.into())
}

async fn reach(
    client: &Client,
    name: &str,
    awaited: AwaitedKey,
) -> Result<view::KeyState, Failure> {
    let (first, mut revision, mut incarnation) = get(client, name).await?;
    let mut key = first.clone();
    loop {
        let reached = match awaited {
            AwaitedKey::On => key.enabled,
            AwaitedKey::Off => !key.enabled,
            AwaitedKey::Changed => key.etag != first.etag,
        };
        if reached {
            return Ok(view::KeyState {
                name: key.name,
                enabled: key.enabled,
                count: key.count,
                revision,
                incarnation,
            });
        }
        if let Some(why) = key.quarantine {
            return Err(Failure::error(format!(
                "key {} is quarantined: {}; it stays as it is",
                key.name, why.message
            )));
        }
        let state = if key.enabled { "on" } else { "off" };
        let shown = format!("{} is {state}, count {}", key.name, key.count);
        client.progress().set(shown);
        let start = revision + 1;
        if let Some(state) = follow(client, &key.name, awaited, start, incarnation).await? {
            return Ok(state);
        }
        (key, revision, incarnation) = get(client, name).await?;
    }
}

async fn get(client: &Client, name: &str) -> Result<(v1::StaticKey, u64, String), Failure> {
    let request = v1::GetStaticKeyRequest {
        name: name.to_owned(),
        page_size: 1,
        ..Default::default()
    };
    let answer = client
        .keys()
        .get_static_key(client.request(request))
        .await?
        .into_inner();
    let key = answer.key.ok_or_else(|| {
        Failure::error(format!(
            "the answer has no key for {name:?}; report this as a bug"
        ))
    })?;
    Ok((key, answer.revision, answer.incarnation))
}

/// Follows the key's changes until it has the awaited state; `None` if the key must be read again.
async fn follow(
    client: &Client,
    name: &str,
    awaited: AwaitedKey,
    start_revision: u64,
    incarnation: String,
) -> Result<Option<view::KeyState>, Failure> {
    let request = client.stream(v1::WatchStaticKeysRequest {
        start_revision,
        incarnation,
        patterns: vec![name.to_owned()],
        ..Default::default()
    });
    let mut stream = match client.keys().watch_static_keys(request).await {
        Ok(stream) => stream.into_inner(),
        Err(status) if must_list_anew(&status) => return Ok(None),
        Err(status) => return Err(status.into()),
    };
    while let Some(message) = stream.next().await {
        let message = match message {
            Ok(message) => message,
            Err(status) if must_list_anew(&status) => return Ok(None),
            Err(status) => return Err(status.into()),
        };
        for event in message.events {
            let of_key = event.name == name;
            match event.kind() {
                Kind::Changed if of_key => {
                    let enabled = event.count > 0;
                    if awaited == AwaitedKey::Changed || (awaited == AwaitedKey::On) == enabled {
                        return Ok(Some(view::KeyState {
                            name: event.name,
                            enabled,
                            count: event.count,
                            revision: message.revision,
                            incarnation: message.incarnation,
                        }));
                    }
                }
                Kind::Quarantined if of_key => return Ok(None),
                // The key may no longer exist, or another module's key may now have its name.
                Kind::Added | Kind::Removed => return Ok(None),
                _ => {}
            }
        }
    }
    Err(Failure::ended("watch"))
}
