// SPDX-License-Identifier: Apache-2.0
//! The options with which a command selects guests.

use std::path::PathBuf;

use clap::Args;

use crate::client::sockets::{CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE};
use crate::complete;

/// The options by which `patchbay rollout` finds the controller.
#[derive(Debug, Args)]
pub struct FleetTarget {
    /// Address of a replica of the controller, for mutual TLS over TCP; may be repeated. A replica
    /// that does not lead names the leader. Default: $PATCHBAY_FLEET, a list separated by commas.
    #[arg(long, global = true, value_name = "ADDRESS:PORT", value_delimiter = ',', conflicts_with = "fleet_socket", help_heading = FLEET)]
    pub fleet: Vec<String>,
    /// Socket of the controller, used if neither --fleet nor $PATCHBAY_FLEET is given. Default:
    /// $PATCHBAY_FLEET_SOCKET, or else /run/patchbay-fleet/fleet.sock.
    #[arg(long, global = true, value_name = "PATH", help_heading = FLEET)]
    pub fleet_socket: Option<PathBuf>,
    /// Your certificate for --fleet, in PEM.
    #[arg(long, global = true, value_name = "FILE", env = CERT_VARIABLE, help_heading = FLEET)]
    pub fleet_cert: Option<PathBuf>,
    /// Private key of --fleet-cert, in PEM.
    #[arg(long, global = true, value_name = "FILE", env = KEY_VARIABLE, help_heading = FLEET)]
    pub fleet_key: Option<PathBuf>,
    /// CAs that may have issued the controller's certificate, in PEM.
    #[arg(long, global = true, value_name = "FILE", env = CA_VARIABLE, help_heading = FLEET)]
    pub fleet_ca: Option<PathBuf>,
}

/// The heading of the options of `patchbay rollout`.
const FLEET: &str = "Options of `patchbay rollout`";
/// The heading in the help that separates these options from those of the subcommand.
pub(super) const GLOBAL: &str = "Options of every command";

#[derive(Debug, Args)]
pub struct Target {
    /// API socket of a guest or of `patchbayd`; default: $PATCHBAY_SOCKET, else all sockets of this
    /// machine.
    #[arg(long, global = true, value_name = "PATH", help_heading = GLOBAL)]
    pub socket: Option<PathBuf>,
    /// Name of the guest; not needed if only one runs. Several guests: a glob ('web-*'), or the
    /// option repeated.
    #[arg(long, global = true, value_name = "NAME", conflicts_with = "all", help_heading = GLOBAL, add = complete::guests())]
    pub guest: Vec<String>,
    /// Every guest that runs on this machine, or behind --socket.
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub all: bool,
}
