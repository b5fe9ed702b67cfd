// SPDX-License-Identifier: Apache-2.0
//! Connects to a host, and signs the assertions of the calls over a connection.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use hyper_util::rt::TokioIo;
use patchbay_access::assertion::{self, Signer};
use patchbay_proto::fleet::v1::Assertion;
use patchbay_proto::{client, v1};
use tonic::Status;
use tonic::transport::Channel;

use super::{HostConfig, HostEndpoint, TlsFiles};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval between pings. A host that does not answer a ping within `KEEPALIVE_TIMEOUT` is
/// considered unreachable.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// A channel, and the key that signs the assertions of its calls.
pub struct Link {
    pub channel: Channel,
    /// The key of the controller's certificate. It is read by the first call that needs it.
    signer: OnceLock<Signer>,
}

impl Link {
    pub fn new(config: &HostConfig) -> Arc<Self> {
        Arc::new(Self {
            channel: channel(config),
            signer: OnceLock::new(),
        })
    }

    fn signer(&self, tls: &TlsFiles) -> std::io::Result<&Signer> {
        match self.signer.get() {
            Some(signer) => Ok(signer),
            None => {
                let signer = tls.signer()?;
                Ok(self.signer.get_or_init(|| signer))
            }
        }
    }

    /// Returns the assertion that the call is made for the person. It is unsigned over a unix
    /// socket, where the uid of this process proves who asserts.
    pub fn assertion(
        &self,
        config: &HostConfig,
        request: &v1::SetClaimsRequest,
        person: &str,
    ) -> Result<Vec<u8>, Status> {
        let assertion = Assertion {
            person: person.to_owned(),
            owner: request.owner.clone(),
            generation: request.generation,
            host: config.name.clone(),
            guest: request.guest.clone(),
            intent_digest: request.intent_digest.clone(),
            validate_only: request.validate_only,
            issued_at_ms: assertion::millis(SystemTime::now()),
        };
        match &config.endpoint {
            HostEndpoint::Socket(_) => Ok(assertion::unsigned(&assertion)),
            HostEndpoint::Address(_, tls) => {
                let signed = self.signer(tls).and_then(|signer| signer.sign(&assertion));
                signed.map_err(|error| {
                    Status::unavailable(format!("the assertion cannot be signed: {error}"))
                })
            }
        }
    }
}

/// Creates a channel that connects on the first call.
fn channel(config: &HostConfig) -> Channel {
    let channel = client::endpoint().connect_timeout(CONNECT_TIMEOUT);
    match config.endpoint.clone() {
        HostEndpoint::Socket(path) => {
            channel.connect_with_connector_lazy(client::unix_socket(path))
        }
        HostEndpoint::Address(address, tls) => {
            let channel = channel
                .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
                .keep_alive_timeout(KEEPALIVE_TIMEOUT);
            let name = config.name.clone();
            channel.connect_with_connector_lazy(tower::service_fn(move |_| {
                let (name, address, tls) = (name.clone(), address.clone(), tls.clone());
                async move {
                    let connected = tls.connect_to(&name, &address).await;
                    connected.map(TokioIo::new).map_err(|error| {
                        std::io::Error::other(format!(
                            "host {name} at {address}: {error}; its certificate must be for the name {name:?}, from a CA \
                             of --host-ca"
                        ))
                    })
                }
            }))
        }
    }
}
