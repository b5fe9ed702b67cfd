// SPDX-License-Identifier: Apache-2.0
//! Serves hosts of guests in memory, in this process.

use std::path::Path;

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
    let mut configs = Vec::new();
    for host in 0..hosts {
        let socket = folder.join(format!("{host}.sock"));
        let served = Guests::default();
        for index in (host..guests).step_by(hosts) {
            served.add(boot(index)?)?;
        }
        let endpoint = Endpoint::new(ApiSocket::bind(&socket)?, served);
        tokio::spawn(endpoint.serve(std::future::pending()));
        let rack = char::from(b'a' + u8::try_from(host % 5)?);
        configs.push(HostConfig {
            name: format!("host-{host:02}"),
            endpoint: HostEndpoint::Socket(socket),
            labels: [("rack".to_owned(), rack.to_string())].into(),
        });
    }
    Ok(configs)
}
