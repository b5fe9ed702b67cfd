// SPDX-License-Identifier: Apache-2.0
//! Lists the running domains of a libvirt on this host.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::target::Target;

/// The interval at which libvirt is asked for its domains.
pub(crate) const LIST_INTERVAL: Duration = Duration::from_secs(5);
/// The minimum time between two lists if the first one succeeded. Processes of any user can cause
/// lists.
pub(crate) const LIST_REST: Duration = Duration::from_secs(1);
/// Timeout for an answer of libvirt.
const LIST_PATIENCE: Duration = Duration::from_secs(10);

/// A task that asks libvirt for its domains.
type Listing = JoinHandle<Result<BTreeSet<Target>, String>>;

/// The domains of a libvirt daemon.
pub(crate) struct Libvirt {
    uri: String,
    pub(crate) domains: BTreeSet<Target>,
    /// The start of the last list that succeeded.
    listed: Option<Instant>,
    /// The list in progress, with its start.
    listing: Option<(Instant, Listing)>,
    /// The time at which the domains are listed again, and the earliest time at which they may be
    /// listed.
    pub(crate) due: Instant,
    rested: Instant,
    /// The reason why the last list failed.
    failure: Option<String>,
}

impl Libvirt {
    pub(crate) fn new(uri: String) -> Self {
        let now = Instant::now();
        Self {
            uri,
            domains: BTreeSet::new(),
            listed: None,
            listing: None,
            due: now,
            rested: now,
            failure: None,
        }
    }

    /// Returns whether no list that began after `since` has succeeded.
    pub(crate) fn is_older_than(&self, since: Instant) -> bool {
        self.listed.is_none_or(|listed| listed < since)
    }

    /// Makes the next list due soon.
    pub(crate) fn hurry(&mut self) {
        self.due = self.rested;
    }

    /// Waits until the domains have been listed. Dropping the call loses nothing: the next call
    /// continues.
    pub(crate) async fn changed(&mut self) {
        if self.listing.is_none() {
            tokio::time::sleep_until(self.due).await;
        }
        let (started, listing) = self.listing.get_or_insert_with(|| {
            let uri = self.uri.clone();
            let listing = tokio::spawn(async move { list(&uri).await });
            (Instant::now(), listing)
        });
        let (started, listed) = (*started, listing.await);
        self.listing = None;
        self.ended(
            started,
            listed.unwrap_or_else(|error| Err(error.to_string())),
        );
    }

    /// Takes a list that was started at the time `started`.
    pub(crate) fn ended(&mut self, started: Instant, listed: Result<BTreeSet<Target>, String>) {
        let now = Instant::now();
        self.due = now + LIST_INTERVAL;
        match listed {
            Ok(domains) => {
                self.rested = now + LIST_REST;
                (self.domains, self.listed, self.failure) = (domains, Some(started), None);
            }
            Err(why) => {
                self.rested = self.due;
                if self.failure.as_ref() != Some(&why) {
                    tracing::warn!(
                        uri = self.uri,
                        why,
                        "libvirt's domains are not known; no new QEMU is attached to by its process until they are"
                    );
                }
                self.failure = Some(why);
            }
        }
    }
}

/// Returns the running domains.
async fn list(uri: &str) -> Result<BTreeSet<Target>, String> {
    let output = Command::new("virsh")
        .args(["--connect", uri, "list", "--name"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match tokio::time::timeout(LIST_PATIENCE, output).await {
        Err(_) => return Err(format!("virsh does not answer within {LIST_PATIENCE:?}")),
        Ok(Err(error)) => {
            return Err(format!(
                "virsh cannot be started ({error}); install libvirt-clients"
            ));
        }
        Ok(Ok(output)) => output,
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("virsh says {:?}", said.trim()));
    }
    Ok(domains(uri, &String::from_utf8_lossy(&output.stdout)))
}

fn domains(uri: &str, text: &str) -> BTreeSet<Target> {
    let names = text.lines().map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| Target::Domain {
            uri: uri.to_owned(),
            name: name.to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_are_named_by_lines() {
        let names = |text| {
            let found = domains("u", text).into_iter();
            found.map(|target| target.name()).collect::<Vec<_>>()
        };
        assert_eq!(names("web-1\n  db 2 \n\n"), ["db 2", "web-1"]);
        assert!(names("\n\n").is_empty());
    }
}
