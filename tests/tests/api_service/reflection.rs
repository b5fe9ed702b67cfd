// SPDX-License-Identifier: Apache-2.0
//! Tests services that stock clients use: reflection and health.

use std::collections::BTreeSet;

use prost::Message;
use tokio_stream::StreamExt;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

use super::support::Served;

async fn ask(served: &Served, message: MessageRequest) -> MessageResponse {
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message),
    };
    let mut client = ServerReflectionClient::new(served.channel());
    let mut answers = client
        .server_reflection_info(tokio_stream::once(request))
        .await
        .expect("served")
        .into_inner();
    let answer: ServerReflectionResponse =
        answers.next().await.expect("an answer").expect("no error");
    answer.message_response.expect("not empty")
}

#[tokio::test]
async fn reflection_lists_services_and_describes_their_methods() {
    let served = Served::start().await;
    let MessageResponse::ListServicesResponse(list) =
        ask(&served, MessageRequest::ListServices(String::new())).await
    else {
        panic!("another answer");
    };
    let names: BTreeSet<String> = list
        .service
        .into_iter()
        .map(|service| service.name)
        .collect();
    for name in [
        "patchbay.v1.GuestService",
        "patchbay.v1.StaticKeysService",
        "grpc.health.v1.Health",
    ] {
        assert!(names.contains(name), "{names:?}");
    }
    let symbol = MessageRequest::FileContainingSymbol("patchbay.v1.StaticKeysService".into());
    let MessageResponse::FileDescriptorResponse(files) = ask(&served, symbol).await else {
        panic!("another answer");
    };
    let files: Vec<prost_types::FileDescriptorProto> = files
        .file_descriptor_proto
        .iter()
        .map(|file| {
            prost_types::FileDescriptorProto::decode(file.as_slice()).expect("a descriptor")
        })
        .collect();
    let methods: Vec<&str> = files
        .iter()
        .flat_map(|file| &file.service)
        .flat_map(|service| &service.method)
        .map(|m| m.name())
        .collect();
    for method in [
        "ListStaticKeys",
        "GetStaticKey",
        "UpdateStaticKeys",
        "WatchStaticKeys",
        "ListHolds",
    ] {
        assert!(methods.contains(&method), "{methods:?}");
    }
}

/// Checks that a client can look up the types of error details, which are `google.protobuf.Any`.
#[tokio::test]
async fn the_types_of_error_details_are_described() {
    let served = Served::start().await;
    for name in [
        "google.rpc.ErrorInfo",
        "google.rpc.PreconditionFailure",
        "google.rpc.BadRequest",
    ] {
        let answer = ask(&served, MessageRequest::FileContainingSymbol(name.into())).await;
        assert!(
            matches!(answer, MessageResponse::FileDescriptorResponse(_)),
            "{name}: {answer:?}"
        );
    }
}

#[tokio::test]
async fn health_says_serving() {
    let served = Served::start().await;
    for service in [
        "",
        "patchbay.v1.GuestService",
        "patchbay.v1.StaticKeysService",
    ] {
        let request = HealthCheckRequest {
            service: service.into(),
        };
        let answer = HealthClient::new(served.channel())
            .check(request)
            .await
            .expect(service)
            .into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service}");
    }
}
