// SPDX-License-Identifier: Apache-2.0
//! Names the hosts of guests in memory, which the examples serve in their own processes.

use std::path::{Path, PathBuf};

use patchbay_fleet::hosts::{HostConfig, HostEndpoint};

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
