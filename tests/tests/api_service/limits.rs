// SPDX-License-Identifier: Apache-2.0
//! Tests clients that open too many calls or connections at once.

use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::support::{PATIENCE, Served, assert_refused, connect};

const CONNECTIONS: usize = 64;
const CALLS: usize = 128;

async fn describe(channel: &Channel) -> Result<(), Status> {
    let mut client = GuestServiceClient::new(channel.clone());
    let request = v1::DescribeGuestRequest::default();
    client.describe_guest(request).await.map(drop)
}

/// Retries until the call is served, because the monitor notices with a delay that earlier calls
/// have ended.
async fn until_served(mut call: impl AsyncFnMut() -> Result<(), Status>) {
    let served = async {
        while call().await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, served)
        .await
        .expect("what has ended makes room");
}

#[tokio::test]
async fn a_connection_too_many_is_told_so() {
    let served = Served::start().await;
    let mut channels = vec![served.channel()];
    while channels.len() < CONNECTIONS {
        channels.push(connect(&served.socket()).await);
    }
    for channel in &channels {
        describe(channel).await.expect("within the limit");
    }
    let late = connect(&served.socket()).await;
    let refused = describe(&late).await;
    let (message, _) = assert_refused(refused, Code::ResourceExhausted, "TOO_MANY_CONNECTIONS");
    assert!(message.contains("64"), "{message}");
    // Connections far beyond the limit are closed. Connections that are already served are not
    // affected.
    let mut flood = vec![];
    for _ in 0..CONNECTIONS {
        flood.push(tokio::net::UnixStream::connect(served.socket()).await);
    }
    for channel in &channels {
        describe(channel).await.expect("still served");
    }
    drop((flood, late));
    channels.pop();
    let path = served.socket();
    until_served(async || describe(&connect(&path).await).await).await;
}

#[tokio::test]
async fn a_call_too_many_is_told_so() {
    let served = Served::start().await;
    let channel = served.channel();
    let mut watches = vec![];
    for _ in 0..CALLS {
        let mut client = StaticKeysServiceClient::new(channel.clone());
        let request = v1::WatchStaticKeysRequest::default();
        let watch = client.watch_static_keys(request).await;
        let mut watch = watch.expect("within the limit").into_inner();
        watch.message().await.expect("it begins");
        watches.push(watch);
    }
    let refused = describe(&channel).await;
    let (message, _) = assert_refused(refused, Code::ResourceExhausted, "TOO_MANY_CALLS");
    assert!(message.contains("128"), "{message}");
    // Another client is not affected.
    let other = connect(&served.socket()).await;
    describe(&other).await.expect("has calls of its own");
    watches.pop();
    until_served(async || describe(&channel).await).await;
}

/// Checks that a client that leaves many small messages unread keeps its connection.
#[tokio::test]
async fn an_unread_console_of_many_small_messages_waits_for_its_reader() {
    const MESSAGES: usize = 20_000;
    let served = Served::start().await;
    let channel = connect(&served.socket()).await;
    let other = connect(&served.socket()).await;
    let follow = async |channel: &Channel| {
        let request = tokio_stream::once(v1::StreamConsoleRequest::default());
        let mut client = GuestServiceClient::new(channel.clone());
        let stream = client.stream_console(request).await;
        stream.expect("starts").into_inner()
    };
    let mut unread = follow(&channel).await;
    let mut read = follow(&other).await;
    for _ in 0..MESSAGES {
        served.guest.print(b"x");
        read.message().await.expect("no error").expect("output");
    }
    describe(&channel).await.expect("the connection lives");
    let mut bytes = 0;
    while bytes < MESSAGES {
        let message = unread.message().await.expect("no error");
        bytes += message.expect("output").output.len();
    }
}
