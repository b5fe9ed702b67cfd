// SPDX-License-Identifier: Apache-2.0
//! Tests that a watch of a guest sends its status after each change.

use std::time::Duration;

use patchbay_guest::abi;
use patchbay_guest::guest::Machine;
use patchbay_guest::testing::TestKey;
use patchbay_proto::agent::v1::{AgentHello, FromAgent, ToAgent, from_agent};
use patchbay_proto::v1;
use patchbay_service::auth::SocketAuthoriser;
use patchbay_service::trace::socket_path;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_stream::StreamExt;
use tonic::Streaming;
use zerocopy::IntoBytes;

use super::several::{Host, Member};
use super::support::PATIENCE;

/// An agent that sends its hello, and answers each request with a failure. It ends on drop.
pub struct Agent(pub tokio::task::JoinHandle<()>);

impl Agent {
    /// Connects, and returns when the agent is accepted.
    pub async fn connect(host: &Host, guest: &str) -> Self {
        let path = socket_path(&host.agent(guest));
        let mut stream = UnixStream::connect(path).await.expect("listening");
        let hello = from_agent::Message::Hello(AgentHello {
            oldest_version: 1,
            newest_version: 1,
            agent_version: "9.9.9".to_owned(),
            ..Default::default()
        });
        Self::say(&mut stream, 0, hello).await.expect("sent");
        Self::hear(&mut stream).await.expect("welcome");
        Self(tokio::spawn(async move {
            while let Ok(question) = Self::hear(&mut stream).await {
                let answer = from_agent::Message::Error("it is made up".to_owned());
                if Self::say(&mut stream, question.id, answer).await.is_err() {
                    return;
                }
            }
        }))
    }

    async fn say(
        stream: &mut UnixStream,
        id: u64,
        message: from_agent::Message,
    ) -> std::io::Result<()> {
        let message = Some(message);
        let bytes = FromAgent { id, message }.encode_to_vec();
        let length = u32::try_from(bytes.len()).expect("short").to_le_bytes();
        stream.write_all(&[&length[..], &bytes].concat()).await
    }

    async fn hear(stream: &mut UnixStream) -> std::io::Result<ToAgent> {
        let length = stream.read_u32_le().await?;
        let mut bytes = vec![0; usize::try_from(length).expect("64 bits")];
        stream.read_exact(&mut bytes).await?;
        Ok(ToAgent::decode(bytes.as_slice()).expect("a message"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A watch of a guest.
pub struct Statuses(pub Streaming<v1::WatchGuestResponse>);

pub async fn watch(host: &Host, guest: &str) -> Statuses {
    let request = v1::WatchGuestRequest {
        guest: guest.to_owned(),
    };
    let stream = host.guest().watch_guest(request).await;
    Statuses(stream.expect("served").into_inner())
}

impl Statuses {
    pub async fn next(&mut self) -> v1::GuestStatus {
        let message = tokio::time::timeout(PATIENCE, self.0.next())
            .await
            .expect("in time");
        let message = message.expect("goes on").expect("no error");
        message.status.expect("always set")
    }

    /// Returns the next status, which must differ from `unexpected`, because a status is sent only
    /// after a change.
    pub async fn next_but(&mut self, unexpected: &v1::GuestStatus) -> v1::GuestStatus {
        let status = self.next().await;
        assert_ne!(&status, unexpected, "told twice");
        status
    }
}

#[tokio::test]
async fn a_watch_of_a_guest_tells_each_change() {
    use v1::RegistrationState::{Absent, Refused, Registered, Withdrawn};

    let host = Host::start(SocketAuthoriser).await;
    let Member { guest, clock, keys } = host.add("web-1");
    let mut statuses = watch(&host, "web-1").await;
    let status = statuses.next().await;
    assert_eq!(
        (status.registration(), status.state()),
        (Absent, v1::GuestState::Running)
    );

    assert_eq!(guest.request(77, &[0; 24]), -22);
    let status = statuses.next_but(&status).await;
    assert_eq!(status.registration(), Absent);
    assert!(status.registration_error.contains("77"), "{status:?}");
    guest.run(&[TestKey::new("alpha", 1)]);
    let status = statuses.next_but(&status).await;
    assert_eq!(
        (status.registration(), status.registration_error.as_str()),
        (Registered, "")
    );

    let agent = Agent::connect(&host, "web-1").await;
    let status = statuses.next_but(&status).await;
    assert!(status.agent_connected);
    drop(agent);
    let status = statuses.next_but(&status).await;
    assert!(!status.agent_connected);

    let pause = v1::PauseGuestRequest::default();
    let pause = host
        .guest()
        .pause_guest(pause)
        .await
        .expect("stops")
        .into_inner();
    let status = statuses.next_but(&status).await;
    assert_eq!(status.state(), v1::GuestState::Paused);
    assert_eq!(status.paused_until, pause.expires_at);
    host.guest()
        .resume_guest(v1::ResumeGuestRequest::default())
        .await
        .expect("runs");
    let status = statuses.next_but(&status).await;
    assert_eq!(
        (status.state(), status.paused_until),
        (v1::GuestState::Running, None)
    );
    host.guest()
        .pause_guest(v1::PauseGuestRequest::default())
        .await
        .expect("stops");
    let status = statuses.next_but(&status).await;
    assert_eq!(status.state(), v1::GuestState::Paused);
    clock.advance(Duration::from_secs(30));
    keys.tick().await.expect("the executor runs");
    let status = statuses.next_but(&status).await;
    assert_eq!(
        status.state(),
        v1::GuestState::Running,
        "the pause has expired"
    );

    assert_eq!(guest.unregister(), 0);
    let status = statuses.next_but(&status).await;
    assert_eq!(status.registration(), Withdrawn);
    let mut descriptor = guest.descriptor(&[TestKey::new("alpha", 1)]);
    descriptor.entry_format = 99;
    assert_eq!(guest.request(abi::OP_REGISTER, descriptor.as_bytes()), -22);
    let status = statuses.next_but(&status).await;
    assert_eq!(status.registration(), Refused);

    // Output alone does not change the status.
    guest.print(b"Power down.");
    guest.shut_down();
    let status = statuses.next_but(&status).await;
    assert_eq!(status.state(), v1::GuestState::Stopped);
}
