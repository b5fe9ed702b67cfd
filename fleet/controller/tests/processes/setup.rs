// SPDX-License-Identifier: Apache-2.0
//! Issues certificates to people, and makes their calls.

use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use patchbay_access::certs;
use patchbay_access::connect::TlsFiles;
use patchbay_proto::client;
use patchbay_proto::fleet::v1;
use patchbay_proto::fleet::v1::rollout_service_client::RolloutServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::processes::fleet::{PATIENCE, ProcessFleet, Replica};
use crate::processes::outages::issue;

pub const DAY: time::Duration = time::Duration::days(1);
pub type Client = RolloutServiceClient<Channel>;

/// The certificates of the replicas and of people, and the policy.
pub struct People<'f> {
    fleet: &'f ProcessFleet,
    pub folder: PathBuf,
}

impl<'f> People<'f> {
    /// Issues certificates to people, and writes the policy.
    pub fn new(fleet: &'f ProcessFleet, names: &[&str], policy: &str) -> Self {
        let folder = fleet.path("people");
        certs::init(&folder, "example.org").expect("a CA");
        let people = Self { fleet, folder };
        let usage = rcgen::ExtendedKeyUsagePurpose::ServerAuth;
        issue(&people.folder, "fleet", Some("127.0.0.1"), usage, DAY);
        for name in names {
            people.issue(name, DAY);
        }
        people.write_policy(policy);
        people
    }

    pub fn issue(&self, name: &str, valid: time::Duration) {
        let usage = rcgen::ExtendedKeyUsagePurpose::ClientAuth;
        issue(&self.folder, name, None, usage, valid);
    }

    fn file(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    pub fn write_policy(&self, policy: &str) {
        std::fs::write(self.folder.join("policy.yaml"), policy).expect("written");
    }

    /// Starts a replica that listens on this address.
    pub fn replica(&self, name: &str, address: &str, more: &[&str]) -> Replica {
        let options = [
            format!("--listen={address}"),
            format!("--cert={}", self.file("fleet.pem")),
            format!("--key={}", self.file("fleet.key")),
            format!("--client-ca=example.org={}", self.file("ca.pem")),
            format!("--policy={}", self.file("policy.yaml")),
        ];
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        self.fleet.replica(name, &[&options, more].concat())
    }

    /// Returns a client of this person.
    pub fn client(&self, name: &str, address: &str) -> Client {
        self.client_with(self.files(name), address)
    }

    pub fn files(&self, name: &str) -> TlsFiles {
        TlsFiles {
            certificate: self.folder.join(format!("{name}.pem")),
            key: self.folder.join(format!("{name}.key")),
            ca: self.folder.join("ca.pem"),
        }
    }

    pub fn client_with(&self, files: TlsFiles, address: &str) -> Client {
        let address = address.to_owned();
        let connector = tower::service_fn(move |_| {
            let (files, address) = (files.clone(), address.clone());
            async move { files.connect(&address).await.map(TokioIo::new) }
        });
        let channel = client::endpoint().connect_with_connector_lazy(connector);
        RolloutServiceClient::new(channel)
    }
}

pub fn id(name: &str) -> String {
    format!("spiffe://example.org/{name}")
}

/// Plans the rollout, repeatedly until the replica leads.
pub async fn plan(client: &mut Client, name: &str, spec: &str) -> Result<v1::Rollout, Status> {
    let planned = async {
        loop {
            let request = v1::PlanRequest {
                rollout: name.to_owned(),
                spec: spec.to_owned(),
            };
            match client.plan(request).await {
                Err(status) if status.code() == Code::Unavailable => {}
                answer => return answer,
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let planned = tokio::time::timeout(PATIENCE, planned).await;
    let answer = planned.expect("a replica leads")?.into_inner();
    Ok(answer.rollout.expect("a rollout"))
}

pub async fn approve(client: &mut Client, rollout: &v1::Rollout) -> Result<v1::Rollout, Status> {
    let request = v1::ApproveRequest {
        rollout: rollout.name.clone(),
        digest: rollout.digest.clone(),
    };
    let answer = client.approve(request).await?.into_inner();
    Ok(answer.rollout.expect("a rollout"))
}

pub async fn start(
    client: &mut Client,
    rollout: &v1::Rollout,
    break_glass: bool,
) -> Result<v1::Rollout, Status> {
    let request = v1::StartRequest {
        rollout: rollout.name.clone(),
        digest: rollout.digest.clone(),
        break_glass,
    };
    let answer = client.start(request).await?.into_inner();
    Ok(answer.rollout.expect("a rollout"))
}

pub async fn abort(client: &mut Client, name: &str) -> Result<(), Status> {
    let rollout = name.to_owned();
    client.abort(v1::AbortRequest { rollout }).await.map(drop)
}

pub fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, text: &str) -> Status {
    let status = answer.expect_err(text);
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(text), "{status}");
    status
}
