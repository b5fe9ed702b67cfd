// SPDX-License-Identifier: Apache-2.0
//! Defines the options of the programs that connect to etcd with certificates.

use std::path::PathBuf;

use clap::Args;
use patchbay_access::connect::TlsFiles;

/// The files for mutual TLS to etcd: all three or none.
#[derive(Clone, Debug, Default, Args)]
pub struct EtcdTlsArgs {
    /// CAs that must have issued etcd's certificates, PEM
    #[arg(long, value_name = "FILE", requires_all = ["etcd", "etcd_cert"])]
    etcd_ca: Option<PathBuf>,
    /// The certificate shown to etcd, PEM; its CN is the user if etcd has authentication
    #[arg(long, value_name = "FILE", requires_all = ["etcd_key", "etcd_ca"])]
    etcd_cert: Option<PathBuf>,
    /// Private key of --etcd-cert, PEM
    #[arg(long, value_name = "FILE", requires = "etcd_cert")]
    etcd_key: Option<PathBuf>,
}

impl EtcdTlsArgs {
    /// Returns the files; `None` if they are not given.
    #[must_use]
    pub fn files(self) -> Option<TlsFiles> {
        Some(TlsFiles {
            ca: self.etcd_ca?,
            certificate: self.etcd_cert?,
            key: self.etcd_key?,
        })
    }
}
