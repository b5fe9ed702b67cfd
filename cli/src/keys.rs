// SPDX-License-Identifier: Apache-2.0
//! `patchbay keys`.

use std::io::{IsTerminal, Read};
use std::path::Path;
use std::time::Duration;

use patchbay_proto::v1;
use serde::Deserialize;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tonic::Status;
use tonic_types::StatusExt;

use crate::args::{ChangeArgs, Class, KeysCommand, ListArgs, Output, Terms};
use crate::client::{Monitor, result_view};
use crate::failure::Failure;
use crate::print::{Detailed, print, print_streamed};
use crate::view;

/// A file of changes larger than this is refused.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Runs one verb.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(monitor: &Monitor, command: KeysCommand, output: Output) -> Result<(), Failure> {
    match command {
        KeysCommand::List(arguments) => {
            let keys = list(monitor, list_request(arguments)).await?;
            print(
                output,
                &keys.into_iter().map(view::Key::from).collect::<Vec<_>>(),
            )
        }
        KeysCommand::Get { keys } => get(monitor, keys, output).await,
        KeysCommand::Enable(arguments) => {
            change(monitor, arguments, v1::KeyOp::Enable, output).await
        }
        KeysCommand::Disable(arguments) => {
            change(monitor, arguments, v1::KeyOp::Disable, output).await
        }
        KeysCommand::Inc(arguments) => change(monitor, arguments, v1::KeyOp::Inc, output).await,
        KeysCommand::Dec(arguments) => change(monitor, arguments, v1::KeyOp::Dec, output).await,
        KeysCommand::Apply { file, terms } => {
            let updates = read_changes(&file)?;
            update(monitor, updates, terms, output).await
        }
        KeysCommand::Watch {
            patterns,
            from_revision,
            incarnation,
        } => {
            let request = v1::WatchStaticKeysRequest {
                start_revision: from_revision,
                incarnation,
                patterns,
                ..Default::default()
            };
            watch(monitor, request, output).await
        }
        KeysCommand::Holds { patterns } => {
            let request = monitor.request(v1::ListHoldsRequest {
                patterns,
                ..Default::default()
            });
            let holds = monitor.keys().list_holds(request).await?.into_inner().holds;
            print(
                output,
                &holds.into_iter().map(view::Hold::from).collect::<Vec<_>>(),
            )
        }
    }
}

fn list_request(arguments: ListArgs) -> v1::ListStaticKeysRequest {
    let class = |class: &Class| match class {
        Class::Guarded => v1::KeyClass::Guarded as i32,
        Class::Ref => v1::KeyClass::Ref as i32,
        Class::Tracepoint => v1::KeyClass::Tracepoint as i32,
    };
    v1::ListStaticKeysRequest {
        classes: arguments.class.iter().map(class).collect(),
        enabled: match (arguments.enabled, arguments.disabled) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        },
        patterns: arguments.patterns,
        ..Default::default()
    }
}

/// All pages.
async fn list(
    monitor: &Monitor,
    mut request: v1::ListStaticKeysRequest,
) -> Result<Vec<v1::StaticKey>, Failure> {
    let mut keys = vec![];
    loop {
        let page = monitor
            .keys()
            .list_static_keys(monitor.request(request.clone()))
            .await?
            .into_inner();
        keys.extend(page.keys);
        if page.next_page_token.is_empty() {
            return Ok(keys);
        }
        request.page_token = page.next_page_token;
    }
}

async fn get(monitor: &Monitor, names: Vec<String>, output: Output) -> Result<(), Failure> {
    let mut keys = vec![];
    for name in expand(monitor, names).await? {
        let request = monitor.request(v1::GetStaticKeyRequest {
            name,
            ..Default::default()
        });
        let response = monitor.keys().get_static_key(request).await?.into_inner();
        keys.extend(response.key.map(view::Key::from));
    }
    print(output, &Detailed(keys))
}

fn is_glob(name: &str) -> bool {
    name.starts_with('!') || name.contains(['*', '?', '['])
}

/// Globs become the names they match; plain names stay, so that the monitor can say what is near a
/// misspelt one.
async fn expand(monitor: &Monitor, names: Vec<String>) -> Result<Vec<String>, Failure> {
    if !names.iter().any(|name| is_glob(name)) {
        return Ok(names);
    }
    let request = v1::ListStaticKeysRequest {
        patterns: names.clone(),
        ..Default::default()
    };
    let matched: Vec<String> = list(monitor, request)
        .await?
        .iter()
        .map(|key| key.name.clone())
        .collect();
    if matched.is_empty() {
        return Err(Failure::error(format!(
            "no key matches {}; see `patchbay keys list`",
            names.join(" ")
        )));
    }
    // A plain name among globs that exists nowhere would otherwise be passed over.
    let missing = names
        .into_iter()
        .filter(|name| !is_glob(name))
        .filter(|name| {
            !matched.iter().any(|full| {
                full == name || full.rsplit_once(':').is_some_and(|(_, bare)| bare == name)
            })
        });
    Ok(missing.chain(matched.clone()).collect())
}

async fn change(
    monitor: &Monitor,
    arguments: ChangeArgs,
    op: v1::KeyOp,
    output: Output,
) -> Result<(), Failure> {
    let names = arguments.keys;
    let etag = arguments.etag.unwrap_or_default();
    let globs = names.iter().any(|name| is_glob(name));
    if !etag.is_empty() && (globs || names.len() != 1) {
        return Err(Failure::usage(
            "--etag belongs to one key, given by its name; use keys apply for several",
        ));
    }
    let updates = if globs {
        // The monitor finds the keys itself: none comes or goes in between.
        vec![v1::KeyUpdate {
            op: op.into(),
            patterns: names,
            ..Default::default()
        }]
    } else {
        let update = |name| v1::KeyUpdate {
            name,
            op: op.into(),
            etag: etag.clone(),
            ..Default::default()
        };
        names.into_iter().map(update).collect()
    };
    update(monitor, updates, arguments.terms, output).await
}

async fn update(
    monitor: &Monitor,
    updates: Vec<v1::KeyUpdate>,
    terms: Terms,
    output: Output,
) -> Result<(), Failure> {
    let mut request = v1::UpdateStaticKeysRequest {
        updates,
        request_id: terms.request_id,
        validate_only: terms.dry_run,
        allow_guarded: terms.allow_guarded,
        force: terms.force,
        reason: terms.reason,
        ttl: terms.ttl.and_then(|ttl| ttl.try_into().ok()),
        stop_timeout: terms
            .stop_timeout
            .and_then(|timeout| timeout.try_into().ok()),
        retry_timeout: None,
        result_view: result_view(terms.summary),
        ..Default::default()
    };
    // Whoever watches is told what is waited for; a program gets one answer.
    let patience = Patience {
        whole: monitor.retry_timeout(),
        slice: match std::io::stderr().is_terminal() {
            true => SLICE,
            false => monitor.retry_timeout(),
        },
    };
    let mut keys = monitor.keys();
    let attempt = async |time: Duration| {
        request.retry_timeout = time.try_into().ok();
        keys.update_static_keys(monitor.change(request.clone()))
            .await
    };
    let say = |status: &Status| eprintln!("patchbay: waiting: {}", status.message());
    let response = patience.spend(attempt, say).await?.into_inner();
    print(output, &view::Update::new(response, terms.dry_run))
}

/// How long one call tries while somebody watches.
const SLICE: Duration = Duration::from_secs(2);

/// How long a change is tried while a gate of the guest is closed: in slices, between which the user
/// is told which gate that is. A call that found the guest busy has changed nothing.
struct Patience {
    whole: Duration,
    slice: Duration,
}

impl Patience {
    async fn spend<T>(
        self,
        mut attempt: impl AsyncFnMut(Duration) -> Result<T, Status>,
        mut say: impl FnMut(&Status),
    ) -> Result<T, Status> {
        let deadline = Instant::now() + self.whole;
        let mut told = String::new();
        let mut left = self.whole;
        loop {
            let time = left.min(self.slice);
            let answer = attempt(time).await;
            // Whoever was given all that was left has had it, even if it gave up a little earlier.
            let last = time == left;
            left = deadline.saturating_duration_since(Instant::now());
            match answer {
                Err(status) if is_busy(&status) && !last && !left.is_zero() => {
                    let gate = gate(&status);
                    if told != gate {
                        say(&status);
                        told = gate;
                    }
                }
                answer => return answer,
            }
        }
    }
}

fn is_busy(status: &Status) -> bool {
    let info = status.get_details_error_info();
    info.is_some_and(|info| info.reason == "GUEST_BUSY")
}

fn gate(status: &Status) -> String {
    let info = status.get_details_error_info();
    let gate = info.and_then(|mut info| info.metadata.remove("gate_message"));
    gate.unwrap_or_default()
}

/// One change in a file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileChange {
    key: String,
    op: FileOp,
    #[serde(default)]
    etag: String,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FileOp {
    Inc,
    Dec,
    Enable,
    Disable,
}

fn read_changes(path: &Path) -> Result<Vec<v1::KeyUpdate>, Failure> {
    let name = path.display();
    let unreadable = |error: std::io::Error| {
        Failure::usage(format!(
            "{name} cannot be read: {error}; give a file of changes"
        ))
    };
    let mut text = String::new();
    let input: Box<dyn Read> = if path.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        Box::new(std::fs::File::open(path).map_err(unreadable)?)
    };
    input
        .take(MAX_FILE_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(Failure::usage(format!(
            "{name} has more than 64 MiB; split it"
        )));
    }
    // JSON is YAML as well.
    let changes: Vec<FileChange> = serde_yaml_ng::from_str(&text).map_err(|error| {
        Failure::usage(format!(
            "{name} is not a list of changes: {error}; write for example [{{\"key\": \"getppid_key\", \"op\": \"inc\"}}] with inc, dec, enable or disable"
        ))
    })?;
    if changes.is_empty() {
        return Err(Failure::usage(format!(
            "{name} has no changes; write at least one {{key, op}}"
        )));
    }
    let to_update = |change: FileChange| {
        let op = match change.op {
            FileOp::Inc => v1::KeyOp::Inc,
            FileOp::Dec => v1::KeyOp::Dec,
            FileOp::Enable => v1::KeyOp::Enable,
            FileOp::Disable => v1::KeyOp::Disable,
        };
        v1::KeyUpdate {
            name: change.key,
            op: op.into(),
            etag: change.etag,
            ..Default::default()
        }
    };
    Ok(changes.into_iter().map(to_update).collect())
}

async fn watch(
    monitor: &Monitor,
    request: v1::WatchStaticKeysRequest,
    output: Output,
) -> Result<(), Failure> {
    // No deadline: a watch has no end.
    let mut stream = monitor
        .keys()
        .watch_static_keys(request)
        .await?
        .into_inner();
    while let Some(message) = stream.next().await {
        for event in view::events(message?) {
            print_streamed(output, &event)?;
        }
    }
    Err(Failure::error(
        "the monitor ended the watch; see `patchbay guests`",
    ))
}

#[cfg(test)]
mod tests {
    use tonic::Code;
    use tonic_types::ErrorDetails;

    use super::*;

    fn busy(gate: &str) -> Status {
        let metadata = [("gate_message".to_owned(), gate.to_owned())];
        let details = ErrorDetails::with_error_info("GUEST_BUSY", "patchbay", metadata);
        Status::with_error_details(Code::Unavailable, format!("busy: {gate}"), details)
    }

    /// What is tried, for how many seconds each, and what is said meanwhile.
    async fn spend(
        slice: u64,
        answers: Vec<Result<(), Status>>,
    ) -> (Result<(), Status>, Vec<u64>, Vec<String>) {
        let (mut tried, mut said) = (vec![], vec![]);
        let mut answers = answers.into_iter();
        let patience = Patience {
            whole: Duration::from_secs(5),
            slice: Duration::from_secs(slice),
        };
        let attempt = async |time: Duration| {
            tried.push(time.as_secs());
            let answer = answers.next().expect("no more attempts");
            if answer.is_err() {
                tokio::time::sleep(time).await;
            }
            answer
        };
        let result = patience
            .spend(attempt, |status| said.push(status.message().to_owned()))
            .await;
        (result, tried, said)
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_told_once_for_which_gate() {
        let gates = ["text_mutex", "text_mutex", "system_state"];
        let answers = gates.map(|gate| Err(busy(gate))).to_vec();
        let (result, tried, said) = spend(2, answers).await;
        assert_eq!(
            result.expect_err("time is up").message(),
            "busy: system_state"
        );
        assert_eq!(
            (tried, said),
            (vec![2, 2, 1], vec!["busy: text_mutex".to_owned()])
        );
        let (result, tried, said) = spend(2, vec![Err(busy("text_mutex")), Ok(())]).await;
        assert!(result.is_ok());
        assert_eq!((tried, said.len()), (vec![2, 2], 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_gets_one_answer_and_other_errors_end_it() {
        let (result, tried, said) = spend(5, vec![Err(busy("text_mutex"))]).await;
        assert!(result.is_err());
        assert_eq!((tried, said), (vec![5], vec![]));
        let other = Status::unavailable("the monitor is gone");
        let (result, tried, _) = spend(2, vec![Err(other)]).await;
        assert!(result.is_err());
        assert_eq!(tried, [2]);
    }
}
