// SPDX-License-Identifier: Apache-2.0
//! Selects the guests of a command: one, or several at once.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use patchbay_kernel_image::Patterns;
use patchbay_proto::pages::Pages;
use patchbay_proto::v1;

use super::sockets::{self, Socket};
use super::{Client, DEFAULT_TIMEOUT, traced};
use crate::args::output::Output;
use crate::args::target::Target;
use crate::failure::{self, Failure, PARTLY};
use crate::names::is_glob;
use crate::print::{Answer, Printable, by_guest, complain, counted, print, remark};
use crate::progress::Progress;

/// Timeout for an endpoint's list of guests, so that one slow endpoint does not delay the others.
pub const LIST_TIMEOUT: Duration = Duration::from_secs(3);
/// The maximum number of guests that are called at the same time.
const PARALLEL: usize = 16;

/// One of several selected guests.
#[derive(Clone, Debug)]
pub struct Member {
    pub name: String,
    pub client: Result<Client, Failure>,
}

#[derive(Debug)]
pub enum Selected {
    One(Client),
    /// The guests, ordered by name. A command line that can select several guests gets a list even
    /// if only one guest matches.
    Many(Vec<Member>),
}

impl Selected {
    /// Connects to the guests of the command line.
    ///
    /// # Errors
    /// No guest runs or has the name, the guest is ambiguous, or the only guest does not answer.
    pub async fn select(target: &Target, timeout: Option<Duration>) -> Result<Self, Failure> {
        let timeout = timeout.unwrap_or(DEFAULT_TIMEOUT);
        let many =
            target.all || target.guest.len() > 1 || target.guest.iter().any(|name| is_glob(name));
        if many {
            let members = many_of(target).await?;
            let members = members.into_iter().map(|member| Member {
                client: member.client.map(|client| {
                    let by_socket = target.socket.is_some();
                    client.with_timeout(timeout).by_socket(by_socket)
                }),
                ..member
            });
            return Ok(Self::Many(members.collect()));
        }
        let client = match (&target.socket, target.guest.first()) {
            (Some(socket), name) => {
                let name = name.cloned().unwrap_or_default();
                let client = Client::open(socket, timeout).await?;
                client.with_guest(name).by_socket(true)
            }
            (None, Some(name)) => find(name).await?,
            (None, None) => the_only_one().await?,
        };
        Ok(Self::One(client.with_timeout(timeout)))
    }

    /// Returns the client of the only guest, for a subcommand that does not apply to several
    /// guests.
    ///
    /// # Errors
    /// Several guests were requested.
    pub fn one(self, verb: &str) -> Result<Client, Failure> {
        match self {
            Self::One(client) => Ok(client),
            Self::Many(_) => Err(only_one(verb)),
        }
    }

    /// Runs a subcommand on each guest and prints the answers.
    ///
    /// # Errors
    /// For one guest, its failure. For several guests, a failure with exit code 3 if only some of
    /// them failed. If all failed, the failure has the exit code that they have in common, or else
    /// 1.
    pub async fn run<T: Printable>(
        self,
        output: Output,
        what: &str,
        verb: impl AsyncFn(Client) -> Result<Answer<T>, Failure>,
    ) -> Result<(), Failure> {
        let progress = Progress::default();
        let members = match self {
            Self::One(client) => {
                let client = client.with_progress(&progress);
                let answer = progress.during(what, verb(client)).await?;
                remark("", &answer.remarks);
                print(output, &answer.value)?;
                return answer.undone.map_or(Ok(()), Err);
            }
            Self::Many(members) => members,
        };
        let total = members.len();
        let verb = &verb;
        let (progress, finished) = (&progress, std::cell::Cell::new(0_usize));
        let finished = &finished;
        progress.set(format!("0 of {total} guests answered"));
        let answers = stream::iter(members)
            .map(|member| async move {
                let answer = match member.client {
                    Ok(client) => verb(client).await,
                    Err(failure) => Err(failure),
                };
                finished.set(finished.get() + 1);
                progress.set(format!("{} of {total} guests answered", finished.get()));
                (member.name, answer)
            })
            .buffered(PARALLEL)
            .collect::<Vec<_>>();
        let answers = progress.during(what, answers).await;
        by_guest(output, &answers)?;
        sum_up(&answers)
    }
}

/// Returns the usage error of a subcommand that was given several guests but takes one.
pub fn only_one(verb: &str) -> Failure {
    Failure::usage(format!(
        "`patchbay {verb}` works on one guest; choose it with --guest NAME"
    ))
}

fn sum_up<T>(answers: &[(String, Result<Answer<T>, Failure>)]) -> Result<(), Failure> {
    let mut codes = vec![];
    for (guest, answer) in answers {
        let failure = match answer {
            Ok(answer) => {
                remark(guest, &answer.remarks);
                answer.undone.as_ref()
            }
            Err(failure) => Some(failure),
        };
        if let Some(failure) = failure {
            remark(guest, &vec![failure.message.clone()]);
            codes.push(failure.exit_code);
        }
    }
    let (failed, total) = (codes.len(), answers.len());
    match codes.first() {
        None => Ok(()),
        Some(_) if failed < total => Err(Failure::new(
            PARTLY,
            format!("{failed} of {total} guests failed"),
        )),
        Some(&first) => {
            let common = codes.iter().all(|&code| code == first);
            let code = if common { first } else { failure::ERROR };
            let message = match total {
                1 => "the guest failed".to_owned(),
                _ => format!("all {total} guests failed"),
            };
            Err(Failure::new(code, message))
        }
    }
}

/// Returns all guests of an endpoint that match.
///
/// # Errors
/// The endpoint does not answer.
pub async fn guests_of(
    endpoint: &Client,
    patterns: &[String],
) -> Result<Vec<v1::GuestStatus>, Failure> {
    let (mut guests, mut pages) = (vec![], Pages::of("guests"));
    let mut message = v1::ListGuestsRequest {
        patterns: patterns.to_vec(),
        ..Default::default()
    };
    loop {
        let mut request = traced(message.clone());
        request.set_timeout(LIST_TIMEOUT);
        let page = endpoint.guest().list_guests(request).await?.into_inner();
        let next = pages.next(&page, &page.next_page_token)?;
        guests.extend(page.guests);
        match next {
            Some(token) => message.page_token = token,
            None => return Ok(guests),
        }
    }
}

/// An endpoint and its answer about its guests.
#[derive(Debug)]
pub struct Endpoint {
    pub socket: Socket,
    pub guests: Heard,
}

/// An endpoint's response to a request for its guests.
#[derive(Debug)]
pub enum Heard {
    Guests(Vec<(v1::GuestStatus, Client)>),
    /// The endpoint answers with an error instead of a list.
    Failed(Failure),
    /// This user may not connect.
    Denied(Failure),
    /// No process listens. A killed monitor leaves its socket behind.
    Dead,
}

/// Queries the sockets, up to [`PARALLEL`] at the same time.
pub async fn endpoints(sockets: Vec<Socket>, patterns: &[String]) -> Vec<Endpoint> {
    stream::iter(sockets)
        .map(|socket| async move {
            let guests = match Client::connect(&socket.path, LIST_TIMEOUT).await {
                Err(why) if why.is_denied => Heard::Denied(why.failure(&socket.path)),
                Err(_) => Heard::Dead,
                Ok(client) => match guests_of(&client, patterns).await {
                    Err(failure) => Heard::Failed(failure),
                    Ok(guests) => {
                        let named = |status: v1::GuestStatus| {
                            let client = client.clone().with_guest(&status.guest);
                            (status, client)
                        };
                        Heard::Guests(guests.into_iter().map(named).collect())
                    }
                },
            };
            Endpoint { socket, guests }
        })
        .buffered(PARALLEL)
        .collect()
        .await
}

/// Returns the sockets that a command for several guests queries.
///
/// # Errors
/// A folder cannot be read.
pub fn sockets_of(target: &Target) -> Result<Vec<Socket>, Failure> {
    match &target.socket {
        Some(path) => Ok(vec![Socket {
            name: path.display().to_string(),
            path: path.clone(),
        }]),
        None => sockets::all(),
    }
}

async fn many_of(target: &Target) -> Result<Vec<Member>, Failure> {
    let patterns = &target.guest;
    if let Some(socket) = &target.socket {
        // If no process answers on the socket, that is an error, not an empty list.
        Client::open(socket, LIST_TIMEOUT).await?;
    }
    let matching = Patterns::parse(patterns).map_err(|error| Failure::usage(error.to_string()))?;
    let mut members: BTreeMap<String, Vec<Result<Client, Failure>>> = BTreeMap::new();
    let mut denied = vec![];
    let mut unknown = 0;
    for endpoint in endpoints(sockets_of(target)?, patterns).await {
        unknown += u64::from(matches!(endpoint.guests, Heard::Denied(_)));
        match endpoint.guests {
            Heard::Dead => {}
            Heard::Guests(guests) => {
                for (status, client) in guests {
                    members.entry(status.guest).or_default().push(Ok(client));
                }
            }
            // With --all, guests that this user may not use are skipped.
            Heard::Denied(failure) if patterns.is_empty() => denied.push(failure),
            Heard::Failed(failure) | Heard::Denied(failure) => {
                if matching.select_whole(&endpoint.socket.name) {
                    let name = endpoint.socket.name;
                    members.entry(name).or_default().push(Err(failure));
                }
            }
        }
    }
    if members.is_empty() && !denied.is_empty() {
        return Err(denied.swap_remove(0));
    }
    for failure in denied {
        complain(&format!("left out: {}", failure.message));
    }
    for name in patterns.iter().filter(|name| !is_glob(name)) {
        if !members.contains_key(name) {
            members.insert(name.clone(), vec![Err(not_found(name, &[], unknown))]);
        }
    }
    if members.is_empty() {
        let which = match patterns.as_slice() {
            [] => "no guest runs".to_owned(),
            patterns => format!("no guest matches {}", patterns.join(" ")),
        };
        return Err(Failure::error(format!(
            "{which}; see `patchbay guest list`"
        )));
    }
    let globs = patterns
        .iter()
        .filter(|name| is_glob(name) && !name.starts_with('!'));
    for glob in globs {
        let own = Patterns::parse(std::slice::from_ref(glob));
        let own = own.map_err(|error| Failure::usage(error.to_string()))?;
        if !members.keys().any(|name| own.select_whole(name)) {
            let failure = Failure::error("no guest matches; see `patchbay guest list`");
            members.insert(glob.clone(), vec![Err(failure)]);
        }
    }
    let members = members.into_iter().map(|(name, mut clients)| Member {
        client: match clients.pop() {
            Some(client) if clients.is_empty() => client,
            _ => Err(ambiguous(&name)),
        },
        name,
    });
    Ok(members.collect())
}

/// Returns the failure for a name that none of the `names` equals. `denied` is the number of
/// sockets that this user may not use, so that their guests are not known.
fn not_found(name: &str, names: &[String], denied: u64) -> Failure {
    if denied > 0 {
        return Failure::error(format!(
            "no guest that this user may use is named {name:?}, and this user has no permission \
             for {}; see `patchbay guest list`, or run the command as root",
            counted(denied, "socket")
        ));
    }
    let near = failure::did_you_mean(name, names.iter().map(String::as_str));
    let near = if near.is_empty() {
        "; see `patchbay guest list`"
    } else {
        &near
    };
    Failure::error(format!("no guest is named {name:?}{near}"))
}

fn ambiguous(name: &str) -> Failure {
    Failure::usage(format!(
        "several sockets serve a guest named {name:?}; see `patchbay guest list`, and choose one with --socket"
    ))
}

/// Finds the guest with this name. If the file name of a socket is the guest's name, the socket is
/// used without checking which guest it serves.
async fn find(name: &str) -> Result<Client, Failure> {
    let all = sockets::all()?;
    let mut named = vec![];
    let mut dead = None;
    for socket in all.iter().filter(|socket| socket.name == name) {
        match Client::open(&socket.path, LIST_TIMEOUT).await {
            Ok(client) => named.push(client),
            Err(failure) => dead = Some(failure),
        }
    }
    match named.len() {
        0 => {}
        1 => return Ok(named.remove(0).with_guest(name)),
        _ => return Err(ambiguous(name)),
    }
    let others = all.into_iter().filter(|socket| socket.name != name);
    let mut found = vec![];
    let mut names = vec![];
    let mut denied = 0;
    for endpoint in endpoints(others.collect(), &[]).await {
        let guests = match endpoint.guests {
            Heard::Guests(guests) => guests,
            Heard::Denied(_) => {
                denied += 1;
                continue;
            }
            Heard::Failed(_) | Heard::Dead => continue,
        };
        for (status, client) in guests {
            if status.guest == name {
                found.push(client);
            } else {
                names.push(status.guest);
            }
        }
    }
    match (found.pop(), dead) {
        (Some(client), _) if found.is_empty() => Ok(client),
        (Some(_), _) => Err(ambiguous(name)),
        (None, Some(failure)) => Err(failure),
        (None, None) => Err(not_found(name, &names, denied)),
    }
}

/// Finds the endpoint of a command that names no guest.
async fn the_only_one() -> Result<Client, Failure> {
    // Sockets of dead monitors and of other users do not make the choice ambiguous.
    let (mut live, mut denied) = (vec![], None);
    for socket in sockets::all()? {
        match UnixStream::connect(&socket.path) {
            Ok(_) => live.push(socket),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                denied.get_or_insert(Failure::denied(&socket.path));
            }
            Err(_) => {}
        }
    }
    match live.as_slice() {
        [] => Err(denied.unwrap_or_else(|| {
            Failure::error(format!(
                "no guest runs: no monitor answers in {}; start one with `patchbay guest run`, or give --socket",
                sockets::searched()
            ))
        })),
        [socket] => Client::open(&socket.path, DEFAULT_TIMEOUT).await,
        _ => {
            let paths: Vec<String> = live.iter().map(|one| one.path.display().to_string()).collect();
            // The name of a socket is not always that of a guest, and a socket can serve several.
            let mut names = BTreeSet::new();
            for endpoint in endpoints(live, &[]).await {
                match endpoint.guests {
                    Heard::Guests(guests) => {
                        names.extend(guests.into_iter().map(|(status, _)| status.guest));
                    }
                    Heard::Failed(_) => {
                        names.insert(endpoint.socket.name);
                    }
                    Heard::Denied(_) | Heard::Dead => {}
                }
            }
            let names: Vec<String> = names.into_iter().collect();
            Err(Failure::usage(match names.len() {
                0 | 1 => format!(
                    "several sockets are served: {}; choose with --socket",
                    paths.join(", ")
                ),
                _ => format!(
                    "several guests run: {}; choose with --guest or --all",
                    names.join(", ")
                ),
            }))
        }
    }
}
