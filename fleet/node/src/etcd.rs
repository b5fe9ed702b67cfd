// SPDX-License-Identifier: Apache-2.0
//! Options of the programs that connect to etcd with certificates.

use std::path::PathBuf;

use clap::Args;
use patchbay_store::tls::TlsFiles;

/// Mutual TLS to etcd; all three or none.
#[derive(Clone, Debug, Default, Args)]
pub struct EtcdTlsArgs {
    /// CAs that etcd's certificates must come from, PEM
    #[arg(long, value_name = "FILE", requires_all = ["etcd", "etcd_cert"])]
    etcd_ca: Option<PathBuf>,
    /// The certificate shown to etcd, PEM; its CN is the user if etcd has authentication
    #[arg(long, value_name = "FILE", requires_all = ["etcd_key", "etcd_ca"])]
    etcd_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "etcd_cert")]
    etcd_key: Option<PathBuf>,
}

impl EtcdTlsArgs {
    /// The files, if they are given.
    #[must_use]
    pub fn files(self) -> Option<TlsFiles> {
        Some(TlsFiles {
            ca: self.etcd_ca?,
            certificate: self.etcd_cert?,
            key: self.etcd_key?,
        })
    }
}
