// SPDX-License-Identifier: Apache-2.0
//! Serves the hosts of the measurement, and reports when their guests were changed last.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_proto::v1;
use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServedGuest};
use patchbay_service::keys::claims::{Want, intent_digest};
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::trace::Tracing;

use self::fake::Fake;
use super::hosts;

// The tests of the daemon use more of this module.
#[allow(dead_code)]
#[path = "../../../node/tests/node/fake.rs"]
mod fake;

/// Returns the wall-clock time in microseconds. Both processes read the same clock.
pub fn micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(0))
}

/// Returns the name of a key, which has a typical length.
pub fn key(number: usize) -> String {
    format!("key-of-a-subsystem-{number:05}")
}

/// The times at which the guests were changed last.
type Times = Arc<Vec<AtomicU64>>;

/// Serves the hosts. It prints a line when they are served, and a line with the times for each line
/// of its input.
pub async fn serve(
    folder: &Path,
    guests: usize,
    hosts: usize,
    keys: usize,
    light: bool,
) -> anyhow::Result<()> {
    let times: Times = Arc::new((0..guests).map(|_| AtomicU64::new(0)).collect());
    if light {
        for host in 0..hosts {
            serve_light(
                &hosts::socket(folder, host),
                host,
                guests,
                hosts,
                keys,
                &times,
            )
            .await;
        }
    } else {
        for host in 0..hosts {
            let served = Guests::default();
            for index in (host..guests).step_by(hosts) {
                served.add(boot(index, keys, &times)?)?;
            }
            let socket = ApiSocket::bind(&hosts::socket(folder, host))?;
            tokio::spawn(Endpoint::new(socket, served).serve(std::future::pending()));
        }
    }
    println!("served");
    tokio::task::spawn_blocking(move || {
        for line in std::io::stdin().lock().lines() {
            line?;
            let times = times.iter().map(|time| time.load(Ordering::Relaxed));
            let times: Vec<String> = times.map(|time| time.to_string()).collect();
            println!("{}", times.join(" "));
            std::io::stdout().flush()?;
        }
        Ok(())
    })
    .await?
}

fn name(index: usize) -> String {
    format!("guest-{index}")
}

fn boot(index: usize, keys: usize, times: &Times) -> anyhow::Result<ServedGuest> {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::named(Arc::clone(&registry), &name(index));
    let keys: Vec<TestKey> = (0..keys)
        .map(|number| TestKey::new(&key(number), 1))
        .collect();
    guest.run(&keys);
    let times = Arc::clone(times);
    guest.on_resume(move || times[index].store(micros(), Ordering::Relaxed));
    let (keys, _owner) = Keys::start(guest, registry, KeysConfig::default())?;
    Ok(ServedGuest::start(keys, Tracing::default())?)
}

/// Serves a host that answers as the service does. Every claim is made at once.
async fn serve_light(
    socket: &Path,
    host: usize,
    guests: usize,
    hosts: usize,
    keys: usize,
    times: &Times,
) {
    let indices = (host..guests).step_by(hosts);
    let names: Vec<String> = indices.clone().map(name).collect();
    let by_name: HashMap<String, usize> = names.iter().cloned().zip(indices).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let fake = Fake::start(socket, &names).await;
    fake.forget_calls();
    let claimed: HashMap<String, bool> = HashMap::new();
    let claimed = Arc::new(std::sync::Mutex::new(claimed));
    let all: Vec<(String, Want)> = (0..keys).map(|number| (key(number), Want::Held)).collect();
    let digest = intent_digest(&all);
    let result = |(key, _): &(String, Want)| v1::ClaimResult {
        key: key.clone(),
        want: v1::ClaimWant::Held.into(),
        state: v1::ClaimState::Made.into(),
        count_after: 1,
        ..v1::ClaimResult::default()
    };
    let made: Vec<v1::ClaimResult> = all.iter().map(result).collect();
    let ended = made.iter().map(|made| v1::ClaimResult {
        want: v1::ClaimWant::Unspecified.into(),
        count_before: 1,
        count_after: 0,
        ..made.clone()
    });
    let (ended, times, has): (Vec<_>, _, _) =
        (ended.collect(), Arc::clone(times), Arc::clone(&claimed));
    fake.answer("SetClaims", move |request: v1::SetClaimsRequest| {
        let claims = !request.claims.is_empty();
        if !request.validate_only {
            let mut claimed = has.lock().expect("no panic");
            claimed.insert(request.guest.clone(), claims);
            times[by_name[&request.guest]].store(micros(), Ordering::Relaxed);
        }
        Ok(v1::SetClaimsResponse {
            results: if claims { made.clone() } else { ended.clone() },
            generation: request.generation,
            boot: "boot".to_owned(),
            intent_digest: if claims {
                digest.clone()
            } else {
                String::new()
            },
            sites_patched: u32::try_from(made.len()).unwrap_or(0),
            ..v1::SetClaimsResponse::default()
        })
    });
    fake.answer("ListClaims", move |request: v1::ListClaimsRequest| {
        let claimed = claimed.lock().expect("no panic");
        let has = claimed.get(&request.guest).copied().unwrap_or_default();
        Ok(v1::ListClaimsResponse {
            claims: vec![v1::Claim::default(); usize::from(has)],
            boot: "boot".to_owned(),
            ..v1::ListClaimsResponse::default()
        })
    });
}
