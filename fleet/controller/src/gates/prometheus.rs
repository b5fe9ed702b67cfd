// SPDX-License-Identifier: Apache-2.0
//! Sends an instant query to Prometheus (`GET /api/v1/query`).

use bytes::Bytes;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::{Obstacle, bounded};

/// The maximum size of an answer. A longer one is refused.
const MAX_ANSWER_BYTES: usize = 1 << 20;
const HTTP_PORT: u16 = 80;

#[derive(Deserialize)]
struct Answer {
    status: String,
    #[serde(default)]
    error: String,
    data: Option<Data>,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "resultType")]
    result_type: String,
    result: Value,
}

#[derive(Deserialize)]
struct Series {
    #[serde(default)]
    metric: Value,
    value: Sample,
}

/// A sample with its time and its value as text.
#[derive(Deserialize)]
struct Sample(
    #[allow(dead_code, reason = "the timestamp precedes the value")] IgnoredAny,
    String,
);

/// Checks that there is at least one sample, and that every sample lies between the bounds.
pub async fn ask(
    url: &str,
    query: &str,
    above: Option<f64>,
    below: Option<f64>,
) -> Result<(), Obstacle> {
    let body = get(url, query).await?;
    let samples = samples(&body)?;
    if samples.is_empty() {
        return Err("the answer has no sample".into());
    }
    for (labels, value) in samples {
        // NaN does not lie between the bounds.
        let is_above = above.is_none_or(|bound| value > bound);
        let is_below = below.is_none_or(|bound| value < bound);
        let (word, bound) = match (is_above, is_below) {
            (true, true) => continue,
            (false, _) => ("above", above),
            (true, false) => ("below", below),
        };
        let bound = bound.unwrap_or_default();
        let labels = bounded(&labels);
        let why = format!("{labels} is {value}, which is not {word} {bound}");
        return Err(Obstacle::Failed(why));
    }
    Ok(())
}

/// Returns the body of the answer, even if its status is an error, because Prometheus describes the
/// error in the body.
async fn get(url: &str, query: &str) -> Result<Bytes, String> {
    let uri: Uri = url
        .parse()
        .map_err(|error| format!("the URL is wrong: {error}"))?;
    let authority = uri.authority().ok_or("the URL has no host")?;
    let port = authority.port_u16().unwrap_or(HTTP_PORT);
    let address = format!("{}:{port}", authority.host());
    let stream = TcpStream::connect(&address).await;
    let stream = stream.map_err(|error| format!("cannot connect to {address}: {error}"))?;
    let broken = |error: hyper::Error| format!("the connection broke: {}", super::chain(&error));
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(broken)?;
    // The task of the connection ends when this future is dropped.
    let mut tasks = JoinSet::new();
    tasks.spawn(connection);
    let query: String = form_urlencoded::byte_serialize(query.as_bytes()).collect();
    let base = uri.path().trim_end_matches('/');
    let request = Request::get(format!("{base}/api/v1/query?query={query}"))
        .header(http::header::HOST, authority.as_str())
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let response = sender.send_request(request).await.map_err(broken)?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES);
    let body = body.collect().await;
    let body = body.map_err(|error| format!("the answer cannot be read: {error}"))?;
    let body = body.to_bytes();
    let is_answer = serde_json::from_slice::<Answer>(&body).is_ok();
    if status != StatusCode::OK && !is_answer {
        return Err(format!("the status is {status}"));
    }
    Ok(body)
}

/// Returns the labels and the value of each sample.
fn samples(body: &[u8]) -> Result<Vec<(String, f64)>, String> {
    let wrong = |error: serde_json::Error| format!("the answer is not Prometheus's: {error}");
    let answer: Answer = serde_json::from_slice(body).map_err(wrong)?;
    if answer.status != "success" {
        return Err(format!("{}: {}", answer.status, bounded(&answer.error)));
    }
    let data = answer.data.ok_or("the answer has no data")?;
    let series = match data.result_type.as_str() {
        "vector" => serde_json::from_value::<Vec<Series>>(data.result).map_err(wrong)?,
        "scalar" => {
            let value = serde_json::from_value(data.result).map_err(wrong)?;
            let metric = Value::String("the scalar".to_owned());
            vec![Series { metric, value }]
        }
        other => {
            return Err(format!(
                "the result is a {}; write a query whose result is a vector or a scalar",
                bounded(other)
            ));
        }
    };
    let samples = series.into_iter().map(|series| {
        let Sample(_, text) = series.value;
        let value = text.parse::<f64>();
        let value = value.map_err(|_| format!("{:?} is no value", bounded(&text)))?;
        let labels = match series.metric {
            Value::String(name) => name,
            labels => labels.to_string(),
        };
        Ok((labels, value))
    });
    samples.collect()
}
