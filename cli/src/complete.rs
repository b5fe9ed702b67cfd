// SPDX-License-Identifier: Apache-2.0
//! Completes arguments with the names of guests, keys, holds, owners, events and rollouts, and the
//! arguments of other programs by asking these programs.
//!
//! The shell runs this program with the words of the command line so far, and this program prints
//! only names. An endpoint that is absent, refuses the call or is slow contributes no names.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::future::Future;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use patchbay_proto::fleet::v1 as fleet;
use patchbay_proto::fleet::v1::rollout_service_client::RolloutServiceClient;
use patchbay_proto::v1;

use crate::args::target::{FleetTarget, Target};
use crate::client::selected::{Heard, Selected, endpoints, sockets_of};
use crate::client::sockets::{CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, SOCKET_VARIABLE, variable};
use crate::client::{Client, lists};
use crate::guest::run::program;
use crate::names::is_glob;
use crate::rollout::{self, replicas};

/// Timeout for the names. It is short, because a user is waiting for the shell.
const PATIENCE: Duration = Duration::from_secs(1);

/// The states that a claim can want.
const WANTS: [&str; 3] = ["on", "off", "held"];
/// The environment variable in which a shell passes the position of the word that it completes. A
/// shell that does not pass it completes the last word.
const INDEX: &str = "_CLAP_COMPLETE_INDEX";

/// Completes names of guests.
pub fn guests() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        complete(current, async |_| {
            let target = Words::of_this_process().target();
            let mut names = vec![];
            for endpoint in endpoints(sockets_of(&target).ok()?, &[]).await {
                if let Heard::Guests(guests) = endpoint.guests {
                    names.extend(guests.into_iter().map(|(status, _)| status.guest));
                }
            }
            Some(names)
        })
    })
}

/// Completes names of the guest's keys.
pub fn keys() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        complete(current, async |start| {
            let request = v1::ListStaticKeysRequest {
                patterns: vec![format!("{start}*")],
                ..Default::default()
            };
            let listed = lists::keys(&client().await?, request).await.ok()?;
            Some(listed.keys.into_iter().map(|key| key.name).collect())
        })
    })
}

/// Completes ids of holds.
pub fn holds() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        complete(current, async |_| {
            let request = v1::ListHoldsRequest::default();
            let holds = lists::holds(&client().await?, request).await.ok()?;
            Some(holds.into_iter().map(|hold| hold.id).collect())
        })
    })
}

/// Completes names of the owners of claims.
pub fn owners() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        complete(current, async |_| {
            let request = v1::ListClaimsRequest::default();
            let claims = lists::claims(&client().await?, request).await.ok()?;
            let owners: BTreeSet<String> = claims.into_iter().map(|claim| claim.owner).collect();
            Some(owners.into_iter().collect())
        })
    })
}

/// Completes claims: names of the guest's keys, and after `=` the states that can be wanted.
pub fn claims() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        complete(current, async |start| {
            let wants = |key: &str| Some(WANTS.map(|want| format!("{key}{want}")).to_vec());
            if let Some((key, _)) = start.split_once('=') {
                return wants(&format!("{key}="));
            }
            // Bash takes `=` for a word of its own.
            if Words::of_this_process().before_current() == Some("=") {
                return wants("");
            }
            let request = v1::ListStaticKeysRequest {
                patterns: vec![format!("{start}*")],
                ..Default::default()
            };
            let keys = lists::keys(&client().await?, request).await.ok()?.keys;
            Some(keys.into_iter().map(|key| key.name + "=").collect())
        })
    })
}

/// Completes the arguments of the program that `command` becomes. The program completes them, and
/// gets the words after `command`; with `keep`, also `command` itself.
pub fn arguments(name: &'static str, command: &'static str, keep: bool) -> ArgValueCompleter {
    ArgValueCompleter::new(move |_: &OsStr| {
        let words = Words::of_this_process();
        let Some(words) = words.from(command) else {
            return vec![];
        };
        let words = if keep { words } else { &words[1..] };
        let output = Command::new(program(name))
            .env(patchbay_manual::COMPLETE, "bash")
            .env(INDEX, words.len().to_string())
            .env("_CLAP_IFS", "\n")
            .args(["--", name])
            .args(words)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let text = text.unwrap_or_default();
        let candidates = text.lines().filter(|line| !line.contains(char::is_control));
        candidates.map(CompletionCandidate::new).collect()
    })
}

/// Completes names of the guest's tracepoints.
pub fn events() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        complete(current, async |start| {
            let request = v1::ListTracepointsRequest {
                patterns: vec![format!("{start}*")],
                ..Default::default()
            };
            let (found, _) = lists::tracepoints(&client().await?, request).await.ok()?;
            Some(
                found
                    .into_iter()
                    .map(|tracepoint| tracepoint.name)
                    .collect(),
            )
        })
    })
}

/// Completes names of rollouts.
pub fn rollouts() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        complete(current, async |_| {
            let words = Words::of_this_process();
            let path = |option: &str| words.value(option).map(PathBuf::from);
            let file = |option, name| path(option).or_else(|| variable(name));
            let target = FleetTarget {
                fleet: words.value("--fleet").into_iter().collect(),
                fleet_socket: path("--fleet-socket"),
                fleet_cert: file("--fleet-cert", CERT_VARIABLE),
                fleet_key: file("--fleet-key", KEY_VARIABLE),
                fleet_ca: file("--fleet-ca", CA_VARIABLE),
            };
            let place = target.place().ok()?;
            let listed = replicas::at_leader(&place, async |channel| {
                let mut controller = RolloutServiceClient::new(channel);
                let answer = controller.list(fleet::ListRequest {}).await;
                Ok(answer.map_err(rollout::failed)?.into_inner().rollouts)
            });
            let rollouts = listed.await.ok()?.into_iter();
            Some(rollouts.map(|rollout| rollout.name).collect())
        })
    })
}

/// Requests names and returns those that begin with the current word. A leading `!` is kept and is
/// not part of the name.
fn complete<F: Future<Output = Option<Vec<String>>>>(
    current: &OsStr,
    ask: impl FnOnce(String) -> F,
) -> Vec<CompletionCandidate> {
    let current = current.to_string_lossy();
    let (mark, start) = match current.strip_prefix('!') {
        Some(start) => ("!", start),
        None => ("", &*current),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let (Ok(runtime), false) = (runtime, is_glob(start)) else {
        return vec![];
    };
    let asked = async { tokio::time::timeout(PATIENCE, ask(start.to_owned())).await };
    let names = runtime.block_on(asked).ok().flatten().unwrap_or_default();
    let names = names.into_iter().filter(|name| name.starts_with(start));
    // Text from guests must not control the terminal.
    let names = names.filter(|name| !name.contains(char::is_control));
    names
        .map(|name| CompletionCandidate::new(format!("{mark}{name}")))
        .collect()
}

/// Returns a client of the guest that the words of the command line choose.
async fn client() -> Option<Client> {
    let target = Words::of_this_process().target();
    match Selected::select(&target, Some(PATIENCE)).await.ok()? {
        Selected::One(client) => Some(client),
        // The candidates come from the first guest that answers.
        Selected::Many(members) => members.into_iter().find_map(|member| member.client.ok()),
    }
}

/// The words that the shell completes.
struct Words {
    words: Vec<String>,
    /// The position of the word that is to be completed.
    current: usize,
}

impl Words {
    fn of_this_process() -> Self {
        let words = std::env::args_os().skip_while(|word| word != "--").skip(1);
        let words = words.map(|word| word.to_string_lossy().into_owned());
        let index = std::env::var(INDEX).ok().and_then(|at| at.parse().ok());
        Self::new(words.collect(), index)
    }

    fn new(words: Vec<String>, index: Option<usize>) -> Self {
        let current = index.unwrap_or(words.len().saturating_sub(1));
        Self { words, current }
    }

    /// Returns the word before the one that is to be completed.
    fn before_current(&self) -> Option<&str> {
        let at = self.current.checked_sub(1)?;
        self.words.get(at).map(String::as_str)
    }

    /// Returns the words from `command` to the one that is to be completed.
    fn from(&self, command: &str) -> Option<&[String]> {
        let words = self.words.get(..=self.current)?;
        let at = words.iter().position(|word| word == command)?;
        Some(&words[at..])
    }

    /// Returns the value of an option, written `--option value` or `--option=value`.
    fn value(&self, option: &str) -> Option<String> {
        let at = |(at, word): (usize, &String)| match word.strip_prefix(option)? {
            "" => self.words.get(at + 1).cloned(),
            rest => rest.strip_prefix('=').map(str::to_owned),
        };
        let value = self.words.iter().enumerate().find_map(at);
        value.filter(|value| !value.is_empty())
    }

    fn target(&self) -> Target {
        let named = || std::env::var(SOCKET_VARIABLE).ok();
        let socket = self.value("--socket").or_else(named);
        Target {
            socket: socket.filter(|path| !path.is_empty()).map(PathBuf::from),
            guest: self.value("--guest").into_iter().collect(),
            all: self.words.iter().any(|word| word == "--all"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_choose_the_guest() {
        let words = |line: &str| Words::new(line.split(' ').map(str::to_owned).collect(), None);
        let target = words("patchbay --guest web-1 --socket=s keys get a").target();
        assert_eq!(target.guest, ["web-1"]);
        assert_eq!(target.socket, Some(PathBuf::from("s")));
        let line = words("patchbay keys get --guest= --all --guest");
        assert!(line.target().guest.is_empty() && line.target().all);
        assert_eq!(line.value("--fleet-socket"), None);
    }

    #[test]
    fn words_after_the_current_one_are_left_out() {
        let line = ["patchbay", "attach", "process", "--na", "x"].map(str::to_owned);
        let words = |index| Words::new(line.to_vec(), index);
        assert_eq!(words(Some(3)).from("attach"), Some(&line[1..4]));
        assert_eq!(words(None).from("attach").map(<[String]>::len), Some(4));
        assert_eq!(words(Some(0)).from("attach"), None);
        assert_eq!(words(Some(7)).from("attach"), None);
        assert_eq!(words(None).before_current(), Some("--na"));
    }
}
