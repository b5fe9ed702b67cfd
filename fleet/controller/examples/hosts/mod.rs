// SPDX-License-Identifier: Apache-2.0
//! Serves hosts of guests in memory, in this process.

use std::path::{Path, PathBuf};

use patchbay_fleet::hosts::{HostConfig, HostEndpoint};
use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServedGuest};

/// Distributes the guests over the sockets in turn and serves them. `boot` starts the guest with a
/// given index.
pub fn start(
    folder: &Path,
    guests: usize,
    hosts: usize,
    boot: impl Fn(usize) -> anyhow::Result<ServedGuest>,
) -> anyhow::Result<Vec<HostConfig>> {
    for host in 0..hosts {
        let served = Guests::default();
        for index in (host..guests).step_by(hosts) {
            served.add(boot(index)?)?;
        }
        let endpoint = Endpoint::new(ApiSocket::bind(&socket(folder, host))?, served);
        tokio::spawn(endpoint.serve(std::future::pending()));
    }
    configs(folder, hosts)
}

/// Returns the socket of a host.
pub fn socket(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("{host}.sock"))
}

/// Returns the hosts whose sockets are in this folder.
pub fn configs(folder: &Path, hosts: usize) -> anyhow::Result<Vec<HostConfig>> {
    let config = |host: usize| {
        let rack = char::from(b'a' + u8::try_from(host % 5)?);
        Ok(HostConfig {
            name: format!("host-{host:02}"),
            endpoint: HostEndpoint::Socket(socket(folder, host)),
            labels: [("rack".to_owned(), rack.to_string())].into(),
        })
    };
    (0..hosts).map(config).collect()
}
