// SPDX-License-Identifier: Apache-2.0
//! `patchbay debug`.

pub mod args;

use patchbay_proto::v1;
use serde::Serialize;
use tokio_stream::StreamExt;

use self::args::{DebugArgs, DebugCommand};
use crate::args::Output;
use crate::client::Client;
use crate::client::fleet::{Fleet, only_one};
use crate::failure::Failure;
use crate::keys::change;
use crate::print::{Printable, Rows, harmless, write};

/// A line that dynamic debug can print. The service has escaped its texts.
#[derive(Debug, Serialize)]
struct Line {
    key: String,
    module: String,
    file: String,
    line: u32,
    function: String,
    format: String,
    enabled: bool,
    holds: u32,
}

impl From<v1::DebugSite> for Line {
    fn from(site: v1::DebugSite) -> Self {
        Self {
            key: site.key,
            module: site.module,
            file: site.file,
            line: site.line,
            function: site.function,
            format: site.format,
            enabled: site.enabled,
            holds: site.held_references,
        }
    }
}

impl Printable for Vec<Line> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["LINE", "MODULE", "FUNCTION", "STATE", "HOLDS", "FORMAT"]);
        for line in self {
            let format = line.format.strip_suffix("\\n").unwrap_or(&line.format);
            rows.push([
                format!("{}:{}", line.file, line.line),
                line.module.clone(),
                line.function.clone(),
                if line.enabled { "on" } else { "off" }.to_owned(),
                line.holds.to_string(),
                format!("\"{format}\""),
            ]);
        }
        rows
    }

    /// What the verbs of `keys` take.
    fn names(&self) -> Vec<&str> {
        self.iter().map(|line| line.key.as_str()).collect()
    }
}

/// Runs one verb.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(fleet: Fleet, command: DebugCommand, output: Output) -> Result<(), Failure> {
    match command {
        DebugCommand::List { queries, on, off } => {
            let request = &v1::ListDebugSitesRequest {
                queries,
                enabled: (on || off).then_some(on),
                ..Default::default()
            };
            let verb = async |client: Client| Ok(list(&client, request.clone()).await?.into());
            fleet.run(output, "listing lines", verb).await
        }
        DebugCommand::On {
            change,
            follow: false,
        } => switch(fleet, &change, v1::KeyOp::Enable, output).await,
        DebugCommand::On { change, .. } => {
            let Fleet::One(client) = fleet else {
                return Err(only_one("debug on --follow"));
            };
            // Found before the change, so that no line is missed.
            let end = console_end(&client).await?;
            let fleet = Fleet::One(client.clone());
            switch(fleet, &change, v1::KeyOp::Enable, output).await?;
            follow(&client, end).await
        }
        DebugCommand::Off { change } => switch(fleet, &change, v1::KeyOp::Disable, output).await,
    }
}

async fn list(
    client: &Client,
    mut request: v1::ListDebugSitesRequest,
) -> Result<Vec<Line>, Failure> {
    let mut lines = vec![];
    loop {
        let page = client
            .keys()
            .list_debug_sites(client.request(request.clone()))
            .await?
            .into_inner();
        lines.extend(page.sites.into_iter().map(Line::from));
        if page.next_page_token.is_empty() {
            return Ok(lines);
        }
        request.page_token = page.next_page_token;
    }
}

async fn switch(
    fleet: Fleet,
    arguments: &DebugArgs,
    op: v1::KeyOp,
    output: Output,
) -> Result<(), Failure> {
    let update = v1::KeyUpdate {
        op: op.into(),
        debug_queries: arguments.queries.clone(),
        ..Default::default()
    };
    let verb = async |client: Client| {
        change::make(&client, vec![update.clone()], &arguments.options).await
    };
    fleet.run(output, "changing keys", verb).await
}

async fn console(
    client: &Client,
    offset: u64,
    no_follow: bool,
) -> Result<tonic::Streaming<v1::StreamConsoleResponse>, Failure> {
    let first = v1::StreamConsoleRequest {
        guest: client.guest_name().to_owned(),
        offset,
        no_follow,
        ..Default::default()
    };
    // The end of the input would end the stream.
    let requests = tokio_stream::once(first).chain(tokio_stream::pending());
    let stream = client.guest().stream_console(requests).await?;
    Ok(stream.into_inner())
}

/// The position after the console's output so far.
async fn console_end(client: &Client) -> Result<u64, Failure> {
    let mut output = console(client, 0, true).await?;
    let mut end = 0;
    while let Some(chunk) = output.next().await {
        let chunk = chunk?;
        end = chunk.offset.saturating_add(chunk.output.len() as u64);
    }
    Ok(end)
}

/// Prints the console from `offset` on.
async fn follow(client: &Client, offset: u64) -> Result<(), Failure> {
    let mut output = console(client, offset, false).await?;
    while let Some(chunk) = output.next().await {
        let text = String::from_utf8_lossy(&chunk?.output)
            .replace('\r', "")
            .replace('\t', "        ");
        write(&harmless(&text))?;
    }
    Ok(())
}
