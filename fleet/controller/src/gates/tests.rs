// SPDX-License-Identifier: Apache-2.0
//! Tests gates against small servers that give correct answers, wrong answers or no answers.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::*;

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    (listener, format!("http://{address}"))
}

async fn asked(kind: &WaveGateKind) -> GateAnswer {
    let hosts = Hosts::new(&[]).expect("none");
    let asking = Asking {
        hosts: &hosts,
        commands: &Commands::default(),
        rollout: "net",
        wave: "canary",
    };
    ask(kind, &asking, vec![]).await
}

fn failed(answer: GateAnswer) -> String {
    match answer {
        GateAnswer::Failed(why) => why,
        other => panic!("{other:?}"),
    }
}

fn inconclusive(answer: GateAnswer) -> String {
    match answer {
        GateAnswer::Inconclusive(why) => why,
        other => panic!("{other:?}"),
    }
}

fn grpc_gate(url: &str, service: &str, timeout_ms: u64) -> WaveGateKind {
    WaveGateKind::Grpc {
        url: url.to_owned(),
        service: service.to_owned(),
        timeout_ms,
    }
}

/// Returns a gate whose values must be above 0 and below 5.
fn query(url: &str, timeout_ms: u64) -> WaveGateKind {
    WaveGateKind::Prometheus {
        url: url.to_owned(),
        query: "sum(rate(errors{job=\"web\"}[1m]))".to_owned(),
        above: Some(0.0),
        below: Some(5.0),
        timeout_ms,
    }
}

const PATIENCE_MS: u64 = 60_000;

/// Starts a server that gives every query this answer.
async fn prometheus(status: StatusCode, body: &'static str, tasks: &mut JoinSet<()>) -> String {
    let (listener, url) = listen().await;
    tasks.spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("accepts");
            let answer = service_fn(move |request: Request<Incoming>| async move {
                let uri = request.uri();
                assert_eq!(uri.path(), "/base/api/v1/query");
                let query = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
                let query: Vec<_> = query.into_owned().collect();
                let expected = "sum(rate(errors{job=\"web\"}[1m]))";
                assert_eq!(query, [("query".to_owned(), expected.to_owned())]);
                let mut answer = Response::new(Full::new(Bytes::from_static(body.as_bytes())));
                *answer.status_mut() = status;
                Ok::<_, Infallible>(answer)
            });
            let http = hyper::server::conn::http1::Builder::new();
            // The client may have disconnected.
            let _ = http.serve_connection(TokioIo::new(stream), answer).await;
        }
    });
    format!("{url}/base/")
}

#[tokio::test]
async fn samples_between_the_bounds_open_the_gate_and_nothing_else_does() {
    const VECTOR: &str = r#"{"status":"success","data":{"resultType":"vector","result":[
        {"metric":{"rack":"a"},"value":[1.5,"0.5"]},{"metric":{"rack":"b"},"value":[1.5,"4.9"]}]}}"#;
    const OVER: &str = r#"{"status":"success","data":{"resultType":"vector","result":[
        {"metric":{"rack":"a"},"value":[1.5,"0.5"]},{"metric":{"rack":"b"},"value":[1.5,"5"]}]}}"#;
    const UNDER: &str =
        r#"{"status":"success","data":{"resultType":"scalar","result":[1.5,"-1"]}}"#;
    const NAN: &str = r#"{"status":"success","data":{"resultType":"scalar","result":[1.5,"NaN"]}}"#;
    const TEXT: &str = r#"{"status":"success","data":{"resultType":"scalar","result":[1.5,"x"]}}"#;
    const SCALAR: &str =
        r#"{"status":"success","data":{"resultType":"scalar","result":[1,"1e0"]}}"#;
    const EMPTY: &str = r#"{"status":"success","data":{"resultType":"vector","result":[]}}"#;
    const MATRIX: &str = r#"{"status":"success","data":{"resultType":"matrix","result":[]}}"#;
    const ERROR: &str =
        r#"{"status":"error","errorType":"bad_data","error":"parse error: unexpected )"}"#;
    let (ok, bad) = (StatusCode::OK, StatusCode::UNPROCESSABLE_ENTITY);
    let cases = [
        (ok, VECTOR, ""),
        (ok, SCALAR, ""),
        (ok, OVER, r#"{"rack":"b"} is 5, which is not below 5"#),
        (ok, UNDER, "the scalar is -1, which is not above 0"),
        (ok, NAN, "the scalar is NaN, which is not above 0"),
        (ok, TEXT, r#""x" is no value"#),
        (ok, EMPTY, "the answer has no sample"),
        (ok, MATRIX, "the result is a matrix"),
        (bad, ERROR, "error: parse error: unexpected )"),
        (ok, r#"{"status":"success"}"#, "the answer has no data"),
        (ok, "{\"status\":", "the answer is not Prometheus's: "),
        (ok, "<html>", "the answer is not Prometheus's: "),
        (
            StatusCode::NOT_FOUND,
            "<html>",
            "the status is 404 Not Found",
        ),
    ];
    for (status, body, expected) in cases {
        let mut tasks = JoinSet::new();
        let url = prometheus(status, body, &mut tasks).await;
        let found = asked(&query(&url, PATIENCE_MS)).await;
        match expected {
            "" => assert_eq!(found, GateAnswer::Passed, "{body}"),
            _ => {
                let is_value = expected.contains("which is not");
                let why = match is_value {
                    true => failed(found),
                    false => inconclusive(found),
                };
                let what = format!("prometheus {url}, query \"sum(");
                assert!(why.starts_with(&what) && why.contains(expected), "{why}");
            }
        }
    }
}

#[tokio::test]
async fn a_large_answer_of_prometheus_is_refused() {
    let body = format!("{{\"status\":\"{}\"}}", "x".repeat(2 << 20));
    let mut tasks = JoinSet::new();
    let url = prometheus(StatusCode::OK, body.leak(), &mut tasks).await;
    let why = asked(&query(&url, PATIENCE_MS)).await;
    let why = inconclusive(why);
    assert!(why.contains("the answer cannot be read"), "{why}");
}

#[tokio::test]
async fn a_server_that_is_silent_or_absent_is_inconclusive() {
    let (listener, url) = listen().await;
    for gate in [query(&url, 20), grpc_gate(&url, "web", 20)] {
        let why = inconclusive(asked(&gate).await);
        assert!(why.contains("no answer within 20 ms"), "{why}");
        assert!(why.contains(&url), "{why}");
    }
    drop(listener);
    for gate in [
        query(&url, PATIENCE_MS),
        grpc_gate(&url, "web", PATIENCE_MS),
    ] {
        let why = inconclusive(asked(&gate).await);
        assert!(why.contains("Connection refused"), "{why}");
    }
}

#[tokio::test]
async fn a_service_that_serves_opens_the_gate() {
    let (listener, url) = listen().await;
    let (health, service) = tonic_health::server::health_reporter();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let server = tonic::transport::Server::builder().add_service(service);
        server.serve_with_incoming(incoming).await.expect("serves");
    });
    health
        .set_service_status("web", tonic_health::ServingStatus::Serving)
        .await;
    assert_eq!(
        asked(&grpc_gate(&url, "web", PATIENCE_MS)).await,
        GateAnswer::Passed
    );
    assert_eq!(
        asked(&grpc_gate(&url, "", PATIENCE_MS)).await,
        GateAnswer::Passed
    );
    health
        .set_service_status("web", tonic_health::ServingStatus::NotServing)
        .await;
    let why = asked(&grpc_gate(&url, "web", PATIENCE_MS)).await;
    let expected = format!("grpc {url}, service web: it is NOT_SERVING");
    assert_eq!(failed(why), expected);
    let why = asked(&grpc_gate(&url, "db", PATIENCE_MS)).await;
    let why = inconclusive(why);
    assert!(why.contains("service db: NotFound"), "{why}");
}

#[tokio::test]
async fn a_server_without_grpc_is_inconclusive() {
    let mut tasks = JoinSet::new();
    let url = prometheus(StatusCode::OK, "", &mut tasks).await;
    let url = url.trim_end_matches("/base/");
    let why = asked(&grpc_gate(url, "", PATIENCE_MS)).await;
    let why = inconclusive(why);
    assert!(why.starts_with(&format!("grpc {url}: ")), "{why}");
}
