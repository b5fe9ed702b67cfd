// SPDX-License-Identifier: Apache-2.0
//! Tests several guests behind one endpoint: which guest a call reaches, who may make it, and the
//! content of lists and watches.

use std::collections::BTreeSet;
use std::sync::Arc;

use patchbay_guest::guest::Machine;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::{PRINCIPAL_METADATA, v1};
use patchbay_service::api::{AddError, ApiSocket, Endpoint, Guests, ServedGuest};
use patchbay_service::auth::{Authoriser, SocketAuthoriser};
use patchbay_service::keys::{Keys, KeysConfig, PauseState, Registry};
use patchbay_service::testing::ManualClock;
use patchbay_service::trace::{AgentSocket, Tracing};
use prost::Message;
use prost_types::FileDescriptorSet;
use tokio::sync::oneshot;
use tokio_stream::StreamExt;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::support::{PATIENCE, assert_refused, connect};
use super::watch_guest::{Agent, watch};

/// Guests named "web-1" and "web-2", and any others that a test adds.
pub struct Host {
    pub guests: Guests,
    pub channel: Channel,
    folder: tempfile::TempDir,
    _end: oneshot::Sender<()>,
}

/// A guest of a [`Host`].
pub struct Member {
    pub guest: Arc<InMemoryGuest>,
    pub clock: Arc<ManualClock>,
    pub keys: Keys,
}

impl Host {
    pub async fn start(authoriser: impl Authoriser + 'static) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("host.sock");
        let socket = ApiSocket::bind(&path).expect("free");
        let guests = Guests::default();
        let endpoint = Endpoint::new(socket, guests.clone()).with_authoriser(Arc::new(authoriser));
        let (end, ended) = oneshot::channel::<()>();
        tokio::spawn(endpoint.serve(async {
            let _ = ended.await;
        }));
        let channel = connect(&path).await;
        Self {
            guests,
            channel,
            folder,
            _end: end,
        }
    }

    pub async fn with_two(authoriser: impl Authoriser + 'static) -> Self {
        let host = Self::start(authoriser).await;
        for name in ["web-2", "web-1"] {
            host.boot(name);
        }
        host
    }

    /// Boots a guest that registers a key and a tracepoint, both with the guest's name in their
    /// names.
    fn boot(&self, name: &str) -> Member {
        let member = self.add(name);
        let (key, event) = (format!("key-{name}"), format!("event-{name}"));
        let keys = [TestKey::new(&key, 1), TestKey::tracepoint(&event, true)];
        member.guest.run(&keys);
        member.guest.print(name.as_bytes());
        member
    }

    pub fn add(&self, name: &str) -> Member {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::named(Arc::clone(&registry), name);
        let clock = ManualClock::new();
        let config = KeysConfig {
            clock: Arc::<ManualClock>::clone(&clock),
            ..KeysConfig::default()
        };
        let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
        let tracing = Tracing {
            agent: Some(AgentSocket::bind(&self.agent(name)).expect("free")),
            ..Tracing::default()
        };
        let served = ServedGuest::start(keys.clone(), tracing).expect("served");
        self.guests.add(served).expect("another name");
        Member { guest, clock, keys }
    }

    pub fn agent(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(format!("{name}.agent"))
    }

    pub fn guest(&self) -> GuestServiceClient<Channel> {
        GuestServiceClient::new(self.channel.clone())
    }

    pub fn keys(&self) -> StaticKeysServiceClient<Channel> {
        StaticKeysServiceClient::new(self.channel.clone())
    }

    pub fn tracepoints(&self) -> TracepointsServiceClient<Channel> {
        TracepointsServiceClient::new(self.channel.clone())
    }

    async fn list(&self, request: v1::ListGuestsRequest) -> v1::ListGuestsResponse {
        let response = self.guest().list_guests(request).await;
        response.expect("well-formed").into_inner()
    }
}

fn names(page: &v1::ListGuestsResponse) -> Vec<&str> {
    page.guests
        .iter()
        .map(|status| status.guest.as_str())
        .collect()
}

/// Calls every method except ListGuests with only the guest's name, and returns the answers.
pub async fn every_call(
    host: &Host,
    guest: &str,
    principal: &str,
) -> Vec<(&'static str, Result<(), Status>)> {
    let (mut guests, mut keys, mut tracepoints) = (host.guest(), host.keys(), host.tracepoints());
    let mut answers = vec![];
    macro_rules! call {
        ($($client:ident { $($method:ident($request:ident),)* })*) => {
            $($({
                let mut request = v1::$request::default();
                request.guest = guest.into();
                let result = $client.$method(by(principal, request)).await;
                answers.push((stringify!($method), result.map(drop)));
            })*)*
        };
    }
    call! {
        guests {
            describe_guest(DescribeGuestRequest),
            watch_guest(WatchGuestRequest),
            pause_guest(PauseGuestRequest),
            resume_guest(ResumeGuestRequest),
            snapshot_guest(SnapshotGuestRequest),
        } keys {
            list_static_keys(ListStaticKeysRequest),
            get_static_key(GetStaticKeyRequest),
            list_debug_sites(ListDebugSitesRequest),
            update_static_keys(UpdateStaticKeysRequest),
            list_update_results(ListUpdateResultsRequest),
            prepare_update(PrepareUpdateRequest),
            commit_update(CommitUpdateRequest),
            discard_update(DiscardUpdateRequest),
            watch_static_keys(WatchStaticKeysRequest),
            list_holds(ListHoldsRequest),
            release_holds(ReleaseHoldsRequest),
            renew_holds(RenewHoldsRequest),
            set_claims(SetClaimsRequest),
            list_claims(ListClaimsRequest),
            verify_static_keys(VerifyStaticKeysRequest),
            repair_static_key(RepairStaticKeyRequest),
        } tracepoints {
            list_tracepoints(ListTracepointsRequest),
            arm_tracepoints(ArmTracepointsRequest),
            fire_tracepoints(FireTracepointsRequest),
            park_tracepoints(ParkTracepointsRequest),
            disarm_tracepoints(DisarmTracepointsRequest),
            stream_tracepoint_events(StreamTracepointEventsRequest),
            get_tracepoint_stats(GetTracepointStatsRequest),
            describe_agent(DescribeAgentRequest),
            stream_kernel_log(StreamKernelLogRequest),
        }
    }
    let request = v1::ShutdownGuestRequest {
        guest: guest.into(),
        force: true,
        ..Default::default()
    };
    let result = guests.shutdown_guest(by(principal, request)).await;
    answers.push(("shutdown_guest", result.map(drop)));
    let result = console(host, guest, principal).await;
    answers.push(("stream_console", result.map(drop)));
    answers
}

/// Returns the request with the metadata with which a proxy asserts `principal`. If `principal` is
/// empty, adds no metadata, as for a call of the peer itself.
pub fn by<T>(principal: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if !principal.is_empty() {
        let value = principal.parse().expect("a metadata value");
        request.metadata_mut().insert(PRINCIPAL_METADATA, value);
    }
    request
}

/// Returns all output of the guest's console.
async fn console(host: &Host, guest: &str, principal: &str) -> Result<Vec<u8>, Status> {
    let first = v1::StreamConsoleRequest {
        guest: guest.to_owned(),
        no_follow: true,
        ..Default::default()
    };
    let request = by(principal, tokio_stream::once(first));
    let mut stream = host.guest().stream_console(request).await?.into_inner();
    let mut output = vec![];
    while let Some(message) = stream.next().await {
        output.extend(message?.output);
    }
    Ok(output)
}

/// Checks that [`every_call`] calls each method.
#[test]
fn every_method_is_called() {
    let mut methods = BTreeSet::new();
    let set = FileDescriptorSet::decode(patchbay_proto::FILE_DESCRIPTOR_SET).expect("encoded");
    for service in set.file.iter().flat_map(|file| &file.service) {
        methods.extend(
            service
                .method
                .iter()
                .map(|method| method.name().to_lowercase()),
        );
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let called: BTreeSet<String> = runtime.block_on(async {
        let host = Host::start(SocketAuthoriser).await;
        let calls = every_call(&host, "", "").await;
        let names = calls.iter().map(|(method, _)| method.replace('_', ""));
        names.chain(["listguests".to_owned()]).collect()
    });
    assert_eq!(called, methods);
}

#[tokio::test]
async fn a_guest_that_is_not_served_is_not_found() {
    let host = Host::start(SocketAuthoriser).await;
    for (method, answer) in every_call(&host, "", "").await {
        assert_refused(answer, Code::NotFound, "GUEST_NOT_FOUND");
        println!("{method}: refused, as there is no guest");
    }
    let first = host.boot("web-1");
    host.keys()
        .list_static_keys(v1::ListStaticKeysRequest::default())
        .await
        .expect("the only one needs no name");
    host.boot("web-2");
    for (method, answer) in every_call(&host, "", "").await {
        let (message, _) = assert_refused(answer, Code::InvalidArgument, "GUEST_NOT_NAMED");
        assert!(message.contains("web-1, web-2"), "{method}: {message}");
    }
    for (method, answer) in every_call(&host, "web", "").await {
        let (message, _) = assert_refused(answer, Code::NotFound, "GUEST_NOT_FOUND");
        assert!(
            message.contains(r#""web""#) && message.contains("web-2"),
            "{method}: {message}"
        );
    }
    assert_eq!(first.guest.pauses(), 0);
    for n in 3..30 {
        host.add(&format!("web-{n}"));
    }
    let long = v1::DescribeGuestRequest {
        guest: "x".repeat(100_000),
        ..v1::DescribeGuestRequest::default()
    };
    let refused = host.guest().describe_guest(long).await;
    let (message, _) = assert_refused(refused, Code::NotFound, "GUEST_NOT_FOUND");
    assert!(
        message.ends_with("and 19 more") && message.len() < 1000,
        "{message}"
    );
}

#[tokio::test]
async fn names_are_given_once() {
    let host = Host::with_two(SocketAuthoriser).await;
    let served = |name| {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::named(Arc::clone(&registry), name);
        let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
        ServedGuest::start(keys, Tracing::default()).expect("served")
    };
    let taken = AddError::NameTaken("web-1".to_owned());
    assert_eq!(host.guests.add(served("web-1")), Err(taken));
    assert_eq!(host.guests.add(served("")), Err(AddError::NoName));
    assert!(host.guests.remove("web-1"));
    assert!(!host.guests.remove("web-1"));
    assert_eq!(host.guests.add(served("web-1")), Ok(()));
}

/// Checks that each read returns the data of the named guest. A guest's key, tracepoint and console
/// output contain its name.
#[tokio::test]
async fn reads_reach_the_named_guest() {
    let host = Host::with_two(SocketAuthoriser).await;
    let _agent = Agent::connect(&host, "web-2").await;
    for name in ["web-1", "web-2"] {
        let guest = name.to_owned();
        let request = v1::DescribeGuestRequest {
            guest,
            ..v1::DescribeGuestRequest::default()
        };
        let described = host.guest().describe_guest(request).await;
        let status = described.expect("served").into_inner().guest_status();
        assert_eq!(status.guest, name);
        assert_eq!(watch(&host, name).await.next().await, status);

        let guest = name.to_owned();
        let request = v1::ListStaticKeysRequest {
            guest,
            ..Default::default()
        };
        let listed = host
            .keys()
            .list_static_keys(request)
            .await
            .expect("registered")
            .into_inner();
        assert_eq!(listed.incarnation, status.incarnation);
        let keys: Vec<_> = listed.keys.iter().map(|key| key.name.as_str()).collect();
        assert_eq!(keys, [format!("event-{name}"), format!("key-{name}")]);

        let guest = name.to_owned();
        let request = v1::ListTracepointsRequest {
            guest,
            ..Default::default()
        };
        let listed = host.tracepoints().list_tracepoints(request).await;
        let listed = listed.expect("registered").into_inner();
        assert_eq!(listed.tracepoints[0].key, format!("event-{name}"));

        let guest = name.to_owned();
        let request = v1::DescribeAgentRequest { guest };
        let agent = host.tracepoints().describe_agent(request).await;
        let agent = agent.expect("answered").into_inner();
        assert_eq!((agent.agent_version == "9.9.9", status.agent_connected), {
            let connected = name == "web-2";
            (connected, connected)
        });
        assert_eq!(
            console(&host, name, "").await.expect("output"),
            name.as_bytes()
        );
    }
}

#[tokio::test]
async fn changes_reach_the_named_guest() {
    let host = Host::start(SocketAuthoriser).await;
    let (first, second) = (host.boot("web-1"), host.boot("web-2"));
    let guest = || "web-2".to_owned();
    let update = v1::UpdateStaticKeysRequest {
        guest: guest(),
        ..super::support::request(&[("key-web-2", v1::KeyOp::Inc)])
    };
    let changed = host.keys().update_static_keys(update).await;
    assert_eq!(
        changed.expect("a ref key").into_inner().results[0].count_after,
        1
    );
    let mut client = host.keys();
    let holds = client.list_holds(v1::ListHoldsRequest {
        guest: guest(),
        ..Default::default()
    });
    assert_eq!(
        holds.await.expect("registered").into_inner().holds[0].key,
        "key-web-2"
    );
    let paused = v1::PauseGuestRequest {
        guest: guest(),
        ..Default::default()
    };
    host.guest().pause_guest(paused).await.expect("stops");
    assert_eq!((first.guest.pauses(), second.guest.pauses()), (0, 2));
    let resumed = v1::ResumeGuestRequest { guest: guest() };
    host.guest().resume_guest(resumed).await.expect("runs");
    assert_eq!(second.keys.pause_state(), PauseState::Running);
    let cut = v1::ShutdownGuestRequest {
        guest: guest(),
        force: true,
        ..Default::default()
    };
    host.guest().shutdown_guest(cut).await.expect("ends");
    assert_eq!(
        (first.guest.has_ended(), second.guest.has_ended()),
        (false, true)
    );
}

/// Checks that the streams of a removed guest end and those of the other guest continue.
#[tokio::test]
async fn a_removed_guest_is_no_longer_served() {
    let host = Host::with_two(SocketAuthoriser).await;
    let mut agent = Agent::connect(&host, "web-1").await;
    let (mut first, mut second) = (watch(&host, "web-1").await, watch(&host, "web-2").await);
    first.next().await;
    second.next().await;
    assert!(host.guests.remove("web-1"));
    let end = first.0.next().await.expect("a status");
    assert_refused(end, Code::Unavailable, "ENDPOINT_ENDING");
    let closed = tokio::time::timeout(PATIENCE, &mut agent.0).await;
    closed.expect("tracing ends as well").expect("no panic");
    let request = v1::DescribeGuestRequest {
        guest: "web-1".to_owned(),
        ..v1::DescribeGuestRequest::default()
    };
    let refused = host.guest().describe_guest(request).await;
    assert_refused(refused, Code::NotFound, "GUEST_NOT_FOUND");
    let pause = v1::PauseGuestRequest::default();
    host.guest()
        .pause_guest(pause)
        .await
        .expect("the only one now");
    assert_eq!(second.next().await.state(), v1::GuestState::Paused);
}

#[tokio::test]
async fn guests_are_listed_in_pages() {
    let host = Host::with_two(SocketAuthoriser).await;
    for name in ["db-1", "db-2", "web-3"] {
        host.add(name);
    }
    let page = host.list(v1::ListGuestsRequest::default()).await;
    assert_eq!(names(&page), ["db-1", "db-2", "web-1", "web-2", "web-3"]);
    assert_eq!(page.next_page_token, "");
    assert_eq!(
        page.guests[2].registration(),
        v1::RegistrationState::Registered
    );

    let mut request = v1::ListGuestsRequest {
        page_size: 2,
        patterns: vec!["web-*".to_owned(), "d*".to_owned(), "!db-2".to_owned()],
        ..Default::default()
    };
    let page = host.list(request.clone()).await;
    assert_eq!(
        (names(&page), page.next_page_token.as_str()),
        (vec!["db-1", "web-1"], "web-1")
    );
    // Guests that are added and removed between two pages do not move the others.
    host.guests.remove("web-1");
    request.page_token = page.next_page_token;
    let page = host.list(request.clone()).await;
    assert_eq!(
        (names(&page), page.next_page_token.as_str()),
        (vec!["web-2", "web-3"], "")
    );
    request.page_token = "zzz".to_owned();
    assert!(host.list(request.clone()).await.guests.is_empty());

    // A colon has no meaning in the name of a guest.
    host.add("db:1");
    request = v1::ListGuestsRequest {
        patterns: vec!["db:*".to_owned()],
        ..Default::default()
    };
    assert_eq!(names(&host.list(request.clone()).await), ["db:1"]);

    for (size, pattern) in [(-1, "*"), (0, "["), (0, "")] {
        request.page_size = size;
        request.patterns = vec![pattern.to_owned()];
        let refused = host.guest().list_guests(request.clone()).await;
        assert_refused(refused, Code::InvalidArgument, "INVALID_ARGUMENT");
    }
}
