// SPDX-License-Identifier: Apache-2.0
//! Binds the controller's page, and asks it for the rows that a browser shows.

use std::sync::Arc;

use anyhow::Context;
use patchbay_access::policy::LivePolicy;
use patchbay_fleet::controller::Controller;
use patchbay_fleet::page::{Config, Page};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The address that is tried first, so that the link is the same each time.
const ADDRESS: &str = "127.0.0.1:8480";

pub fn own_user() -> LivePolicy {
    LivePolicy::own_user_only(rustix::process::geteuid().as_raw())
}

/// Binds the page to the usual address, or to any free port if that address is in use.
pub async fn bind(controller: &Arc<Controller>) -> anyhow::Result<Page> {
    let config = |address: &str| -> anyhow::Result<Config> {
        Ok(Config {
            address: address.parse()?,
            tls: None,
            policy: own_user(),
        })
    };
    match Page::bind(config(ADDRESS)?, Arc::clone(controller)).await {
        Ok(page) => Ok(page),
        Err(_) => Page::bind(config("127.0.0.1:0")?, Arc::clone(controller)).await,
    }
}

/// Returns the page's answer to a question with these fields.
pub async fn ask(link: &str, path: &str, fields: &[(&str, &str)]) -> anyhow::Result<Value> {
    let address = link.trim_start_matches("http://").trim_end_matches('/');
    let mut query = form_urlencoded::Serializer::new(String::new());
    let query = query.extend_pairs(fields).finish();
    let mut stream = TcpStream::connect(address).await?;
    let request =
        format!("GET {path}?{query} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    anyhow::ensure!(head.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    serde_json::from_str(body).with_context(|| answer.clone())
}
