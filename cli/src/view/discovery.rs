// SPDX-License-Identifier: Apache-2.0
//! Describes how the tables of a guest were found.

use patchbay_proto::v1;
use serde::Serialize;

/// The discovery of a kernel that does not register itself.
#[derive(Debug, Serialize)]
pub struct Discovery {
    pub discovered_by: &'static str,
    pub discovery_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub debug_file: Option<DebugFile>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_gates: Vec<String>,
    /// Modules that were left out, with their states.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out_modules: Vec<String>,
}

/// A file on the host that provides symbols or types that the discovered kernel does not contain.
#[derive(Debug, Serialize)]
pub struct DebugFile {
    pub path: String,
    pub symbols: bool,
    pub types: bool,
    pub same_build_id: bool,
}

impl From<v1::Discovery> for Discovery {
    fn from(found: v1::Discovery) -> Self {
        Self {
            discovered_by: match found.way() {
                v1::DiscoveryWay::Unspecified => "unknown",
                v1::DiscoveryWay::Image => "image",
                v1::DiscoveryWay::Note => "note",
            },
            discovery_ms: (super::micros(found.time) / 100.0).round() / 10.0,
            debug_file: found.debug_file.map(|file| DebugFile {
                path: file.path,
                symbols: file.symbols,
                types: file.types,
                same_build_id: file.same_build_id,
            }),
            gates: found.gates,
            missing_gates: found.missing_gates,
            left_out_modules: found
                .left_out_modules
                .into_iter()
                .map(|module| format!("{} ({})", module.name, module.state))
                .collect(),
        }
    }
}
