// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay debug`.

pub mod args;
mod formats;

use std::time::Duration;

use patchbay_proto::pages::Pages;
use patchbay_proto::v1;
use serde::Serialize;
use tokio_stream::StreamExt;
use tonic::Streaming;

use self::args::{DebugArgs, DebugCommand};
use self::formats::{Formats, Site};
use crate::args::output::Output;
use crate::client::Client;
use crate::client::selected::{Selected, only_one};
use crate::failure::Failure;
use crate::guest::log;
use crate::keys::change;
use crate::print::{Printable, Rows, write};
use crate::text::harmless;

/// A line that dynamic debug can print. The service has already escaped its text.
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

impl Line {
    fn site(&self) -> Site<'_> {
        Site {
            module: &self.module,
            function: &self.function,
            file: &self.file,
            line: self.line,
            format: &self.format,
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

    fn nouns(&self) -> Option<&'static str> {
        Some("lines")
    }

    /// Returns the names in the form that `patchbay keys` takes.
    fn names(&self) -> Vec<&str> {
        self.iter().map(|line| line.key.as_str()).collect()
    }
}

/// Runs one subcommand.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(
    selected: Selected,
    command: DebugCommand,
    timeout: Option<Duration>,
    output: Output,
) -> Result<(), Failure> {
    match command {
        DebugCommand::List { queries, on, off } => {
            let request = &v1::ListDebugSitesRequest {
                queries,
                enabled: (on || off).then_some(on),
                ..Default::default()
            };
            let verb = async |client: Client| Ok(list(&client, request.clone()).await?.into());
            selected.run(output, "listing lines", verb).await
        }
        DebugCommand::On {
            change,
            follow: false,
            ..
        } => switch(selected, &change, v1::KeyOp::Enable, output).await,
        DebugCommand::On {
            change, whole_log, ..
        } => {
            let Selected::One(client) = selected else {
                return Err(only_one("debug on --follow"));
            };
            if output != Output::Table {
                return Err(Failure::usage(
                    "`debug on --follow` prints lines of text; leave --output out, or run \
                     `patchbay guest log --follow -o json` beside `debug on`",
                ));
            }
            let formats = match whole_log {
                true => None,
                false => {
                    let request = v1::ListDebugSitesRequest {
                        queries: change.queries.clone(),
                        ..Default::default()
                    };
                    let chosen = list(&client, request).await?;
                    Some(Formats::new(chosen.iter().map(Line::site)))
                }
            };
            // The log is opened before the change, so that no line is missed.
            let lines = Lines::begin(&client).await?;
            let selected = Selected::One(client.clone());
            switch(selected, &change, v1::KeyOp::Enable, output).await?;
            Failure::after(timeout, lines.print(&client, formats)).await
        }
        DebugCommand::Off { change } => switch(selected, &change, v1::KeyOp::Disable, output).await,
    }
}

async fn list(
    client: &Client,
    mut request: v1::ListDebugSitesRequest,
) -> Result<Vec<Line>, Failure> {
    let (mut lines, mut pages) = (vec![], Pages::of("lines"));
    loop {
        let page = client
            .keys()
            .list_debug_sites(client.request(request.clone()))
            .await?
            .into_inner();
        let next = pages.next(&page, &page.next_page_token)?;
        lines.extend(page.sites.into_iter().map(Line::from));
        match next {
            Some(token) => request.page_token = token,
            None => return Ok(lines),
        }
    }
}

async fn switch(
    selected: Selected,
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
    selected.run(output, "changing keys", verb).await
}

async fn console(
    client: &Client,
    offset: u64,
    no_follow: bool,
) -> Result<Streaming<v1::StreamConsoleResponse>, Failure> {
    let first = v1::StreamConsoleRequest {
        guest: client.guest_name().to_owned(),
        offset,
        no_follow,
        ..Default::default()
    };
    // The request stream stays open while the output is read.
    let requests = tokio_stream::once(first).chain(tokio_stream::pending());
    let stream = client.guest().stream_console(requests).await?;
    Ok(stream.into_inner())
}

/// Returns the offset of the end of the console's output so far.
async fn console_end(client: &Client) -> Result<u64, Failure> {
    let mut output = console(client, 0, true).await?;
    let mut end = 0;
    while let Some(chunk) = output.next().await {
        let chunk = chunk?;
        end = chunk.offset.saturating_add(chunk.output.len() as u64);
    }
    Ok(end)
}

/// A source of the lines that the guest's kernel prints.
enum Lines {
    KernelLog(Box<Streaming<v1::StreamKernelLogResponse>>),
    /// The console from this offset on. It is used only if the log can be read neither from the
    /// guest's memory nor by an agent, because a console shows debug lines only if its log level is
    /// raised.
    Console(u64),
}

impl Lines {
    /// Starts to follow the lines that the kernel prints after this call.
    async fn begin(client: &Client) -> Result<Self, Failure> {
        let request = client.stream(v1::StreamKernelLogRequest::default());
        let stream = client.tracepoints().stream_kernel_log(request).await;
        let mut stream = match stream.map_err(Failure::from) {
            Ok(stream) => stream.into_inner(),
            Err(failure) if failure.reason == "NO_AGENT" => {
                return Ok(Self::Console(console_end(client).await?));
            }
            Err(failure) => return Err(failure),
        };
        // The first message confirms that the position in the log is known.
        stream
            .next()
            .await
            .ok_or_else(|| Failure::ended("stream"))??;
        Ok(Self::KernelLog(Box::new(stream)))
    }

    /// Prints records until the stream ends. With `formats`, prints only the records that a line
    /// with one of these formats may have printed.
    async fn print(self, client: &Client, formats: Option<Formats>) -> Result<(), Failure> {
        let mut stream = match self {
            Self::Console(offset) => return follow_console(client, offset).await,
            Self::KernelLog(stream) => stream,
        };
        while let Some(message) = stream.next().await {
            let message = message?;
            log::tell_losses(&message);
            let chosen = |record: &&v1::KernelLogRecord| {
                let formats = formats.as_ref();
                formats.is_none_or(|formats| formats.print(record.level, &record.text))
            };
            for record in message.records.iter().filter(chosen) {
                write(log::text(record))?;
            }
        }
        Err(Failure::ended("stream"))
    }
}

/// Prints the console from `offset` on.
async fn follow_console(client: &Client, offset: u64) -> Result<(), Failure> {
    let mut output = console(client, offset, false).await?;
    while let Some(chunk) = output.next().await {
        let text = String::from_utf8_lossy(&chunk?.output)
            .replace('\r', "")
            .replace('\t', "        ");
        write(harmless(&text))?;
    }
    Err(Failure::ended("stream"))
}
