// SPDX-License-Identifier: Apache-2.0
//! Finds the replica of the controller that is the leader.

use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use patchbay_access::connect::{TlsFiles, is_address};
use patchbay_proto::ERROR_DOMAIN;
use tonic::Status;
use tonic::transport::Channel;
use tonic_types::StatusExt;

use crate::args::target::FleetTarget;
use crate::client::sockets::{CONTROLLER, CONTROLLER_VARIABLE, FLEET_VARIABLE, variable};
use crate::client::{self, Unreachable};
use crate::failure::Failure;

/// The maximum number of times that a command follows the address of a leader.
const MAX_HOPS: usize = 3;

/// The ways to reach the controller.
#[derive(Clone)]
pub enum Place {
    Socket(PathBuf),
    /// The addresses of replicas.
    Replicas(TlsFiles, Vec<String>),
}

/// The reason why a command failed at one replica.
pub enum Refused {
    /// The replica does not lead, and has not carried out the command. `leader` is the leader's
    /// address if it is known.
    NotLeader {
        leader: Option<String>,
        message: String,
    },
    Failed(Failure),
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl FleetTarget {
    /// Returns the place that the options and the environment determine.
    ///
    /// # Errors
    /// An address is malformed, or a certificate file is not given.
    pub fn place(self) -> Result<Place, Failure> {
        let addresses = match (self.fleet_socket, self.fleet) {
            (Some(socket), _) => return Ok(Place::Socket(socket)),
            (None, given) if !given.is_empty() => given,
            _ => {
                let named = variable(FLEET_VARIABLE).unwrap_or_default();
                let named = named.to_string_lossy().into_owned();
                let named = named.split(',').map(|address| address.trim().to_owned());
                named.filter(|address| !address.is_empty()).collect()
            }
        };
        if addresses.is_empty() {
            let socket = variable(CONTROLLER_VARIABLE).unwrap_or_else(|| CONTROLLER.into());
            return Ok(Place::Socket(socket));
        }
        if let Some(wrong) = addresses.iter().find(|address| !is_address(address)) {
            return Err(Failure::usage(format!(
                "{wrong:?} is not the address of a controller; give ADDRESS:PORT"
            )));
        }
        let (Some(certificate), Some(key), Some(ca)) =
            (self.fleet_cert, self.fleet_key, self.fleet_ca)
        else {
            return Err(Failure::usage(
                "over TCP the controller identifies you by a certificate; give --fleet-cert, \
                 --fleet-key and --fleet-ca, or set PATCHBAY_FLEET_CERT, PATCHBAY_FLEET_KEY and \
                 PATCHBAY_FLEET_CA",
            ));
        };
        let files = TlsFiles {
            certificate,
            key,
            ca,
        };
        Ok(Place::Replicas(files, addresses))
    }
}

/// Runs the command on the leader, whose address the other replicas return.
///
/// # Errors
/// The failure of the command, or the reason why no leader was found.
pub async fn at_leader<T>(
    place: &Place,
    mut command: impl AsyncFnMut(Channel) -> Result<T, Refused>,
) -> Result<T, Failure> {
    let (files, addresses) = match place {
        Place::Socket(socket) => {
            let channel = client::channel(socket).await;
            let channel = channel.map_err(|why| match why.is_denied {
                true => Failure::denied(socket),
                false => Failure::error(format!(
                    "no controller answers on {} ({}); start patchbay-fleet, or give --fleet or \
                     --fleet-socket",
                    socket.display(),
                    why.cause
                )),
            })?;
            return command(channel).await.map_err(|refused| match refused {
                Refused::Failed(failure) => failure,
                Refused::NotLeader { leader, message } => Failure::error(match leader {
                    Some(leader) => format!("{message}; give --fleet {leader}"),
                    None => message,
                }),
            });
        }
        Place::Replicas(files, addresses) => (files, addresses),
    };
    let mut given = addresses.iter().cloned();
    let (mut next, mut asked) = (given.next(), Vec::new());
    let (mut hops, mut failure) = (0, Failure::error("no controller is given"));
    while let Some(address) = next {
        asked.push(address.clone());
        let leader = match connect(files, &address).await {
            Err(why) => {
                let cause = why.cause;
                failure = Failure::error(format!(
                    "no controller answers at {address} ({cause}); check that it runs, and that its \
                     certificate is for this address and from a CA of --fleet-ca"
                ));
                None
            }
            Ok(channel) => match command(channel).await {
                Ok(done) => return Ok(done),
                Err(Refused::Failed(failure)) => return Err(failure),
                Err(Refused::NotLeader { leader, message }) => {
                    failure = Failure::error(format!("{address}: {message}"));
                    leader
                }
            },
        };
        next = match leader {
            None => given.find(|address| !asked.contains(address)),
            Some(leader) if hops == MAX_HOPS || asked.contains(&leader) => {
                asked.push(leader);
                return Err(Failure::error(format!(
                    "no replica leads yet, or they do not agree on the leader: {}; try again",
                    asked.join(" names ")
                )));
            }
            Some(leader) => {
                hops += 1;
                Some(leader)
            }
        };
    }
    Err(failure)
}

async fn connect(files: &TlsFiles, address: &str) -> Result<Channel, Unreachable> {
    let (files, address) = (files.clone(), address.to_owned());
    let connector = tower::service_fn(move |_| {
        let (files, address) = (files.clone(), address.clone());
        async move { files.connect(&address).await.map(TokioIo::new) }
    });
    client::connected(client::endpoint().connect_with_connector(connector).await)
}

/// Recognizes the error of a replica that does not lead; `None` for other errors.
pub fn not_leader(status: &Status) -> Option<Refused> {
    let info = status.get_details_error_info()?;
    if info.reason != "NOT_LEADER" || info.domain != ERROR_DOMAIN {
        return None;
    }
    let leader = info.metadata.get("leader").cloned();
    Some(Refused::NotLeader {
        leader: leader.filter(|address| is_address(address)),
        message: status.message().to_owned(),
    })
}
