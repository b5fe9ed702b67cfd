// SPDX-License-Identifier: Apache-2.0
//! How the tables of a guest were found.

use patchbay_proto::v1;
use serde::Serialize;

pub fn discovered_by(found: &v1::Discovery) -> &'static str {
    match found.way() {
        v1::DiscoveryWay::Unspecified => "unknown",
        v1::DiscoveryWay::Image => "image",
        v1::DiscoveryWay::Note => "note",
    }
}

pub fn discovery_ms(found: &v1::Discovery) -> f64 {
    (super::micros(found.time) / 100.0).round() / 10.0
}

/// Names of gates that `which` selects; none of a kernel that registers itself.
pub fn gates(
    guest: &v1::DescribeGuestResponse,
    which: impl Fn(&v1::Discovery) -> &[String],
) -> Vec<String> {
    guest
        .discovery
        .as_ref()
        .map_or_else(Vec::new, |found| which(found).to_vec())
}

/// The file of the guest's host that provides what the kernel does not reveal.
#[derive(Debug, Serialize)]
pub struct DebugFile {
    pub path: String,
    pub symbols: bool,
    pub types: bool,
    pub same_build_id: bool,
}

impl DebugFile {
    pub fn used(guest: &v1::DescribeGuestResponse) -> Option<Self> {
        let file = guest.discovery.as_ref()?.debug_file.as_ref()?;
        Some(Self {
            path: file.path.clone(),
            symbols: file.symbols,
            types: file.types,
            same_build_id: file.same_build_id,
        })
    }
}
