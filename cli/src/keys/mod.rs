// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay keys`.

mod apply;
pub mod change;
pub mod claims;
mod repair;
mod wait;
mod watch;

use std::time::Duration;

use patchbay_proto::pages::Pages;
use patchbay_proto::v1;

use self::apply::File;
use self::change::{commit, discard, make};
use crate::args::keys::{ChangeArgs, Class, KeysCommand, ListArgs};
use crate::args::output::Output;
use crate::args::target::Target;
use crate::client::selected::{Selected, only_one};
use crate::client::{Client, lists};
use crate::failure::Failure;
use crate::names::{self, is_glob};
use crate::print::Detailed;
use crate::print::{Answer, complain};
use crate::{holds, view};

/// Runs one subcommand.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn run(
    mut target: Target,
    command: KeysCommand,
    limit: Option<Duration>,
    output: Output,
) -> Result<(), Failure> {
    // The file is read before any guest is contacted, because it may name the guests.
    let file = match &command {
        KeysCommand::Apply { file, .. } => Some(File::read(file)?),
        _ => None,
    };
    if let Some(file) = &file
        && target.guest.is_empty()
        && !target.all
    {
        target.guest = file.guests();
    }
    let selected = Selected::select(&target, limit).await?;
    match command {
        KeysCommand::List(mut arguments) => {
            arguments.patterns = names::expand(arguments.patterns)?;
            let request = &list_request(arguments);
            let verb = async |client: Client| {
                let listing = lists::keys(&client, request.clone()).await?;
                if listing.panicked {
                    complain(&format!(
                        "the kernel of {} has panicked; its keys are listed as it left them, and \
                         cannot be changed",
                        client.guest_name()
                    ));
                }
                let keys = listing.keys.into_iter().map(Into::into);
                let keys: Vec<view::ListedKey> = keys.collect();
                Ok(keys.into())
            };
            selected.run(output, "listing keys", verb).await
        }
        KeysCommand::Get { keys } => {
            let keys = &names::expand(keys)?;
            let verb = async |client: Client| get(&client, keys.clone()).await;
            selected.run(output, "reading keys", verb).await
        }
        KeysCommand::Enable(arguments) => {
            change(selected, arguments, v1::KeyOp::Enable, output).await
        }
        KeysCommand::Disable(arguments) => {
            change(selected, arguments, v1::KeyOp::Disable, output).await
        }
        KeysCommand::Inc(arguments) => change(selected, arguments, v1::KeyOp::Inc, output).await,
        KeysCommand::Dec(arguments) => change(selected, arguments, v1::KeyOp::Dec, output).await,
        KeysCommand::Apply { options, .. } => {
            let (file, options) = (&file.expect("read above"), &options);
            let verb = async |client: Client| apply::apply(&client, file, options).await;
            selected.run(output, "changing keys", verb).await
        }
        KeysCommand::Commit(arguments) => {
            // The id of a plan is valid for one guest only.
            let selected = Selected::One(selected.one("keys commit")?);
            let arguments = &arguments;
            let verb = async |client: Client| commit(&client, arguments).await;
            selected.run(output, "changing keys", verb).await
        }
        KeysCommand::Discard { plan } => {
            let selected = Selected::One(selected.one("keys discard")?);
            let plan = &plan;
            let verb = async |client: Client| discard(&client, plan).await;
            selected.run(output, "discarding a plan", verb).await
        }
        KeysCommand::Verify { patterns } => {
            let patterns = &names::expand(patterns)?;
            let verb = async |client: Client| repair::verify(&client, patterns.clone()).await;
            selected.run(output, "verifying keys", verb).await
        }
        KeysCommand::Repair(arguments) => {
            let selected = Selected::One(selected.one("keys repair")?);
            let arguments = &arguments;
            let verb = async |client: Client| repair::repair(&client, arguments).await;
            selected.run(output, "repairing a key", verb).await
        }
        KeysCommand::Watch(mut arguments) => {
            arguments.patterns = names::expand(arguments.patterns)?;
            let client = selected.one("keys watch")?;
            Failure::after(limit, watch::watch(&client, arguments, output)).await
        }
        KeysCommand::Wait { key, state } => {
            if is_glob(&key) {
                let message = format!("{key:?} is no name; `patchbay keys wait` waits for one key");
                return Err(Failure::usage(message));
            }
            let key = &key;
            let verb = async |client: Client| wait::wait(&client, key, state, limit).await;
            selected.run(output, "waiting for a key", verb).await
        }
        KeysCommand::Claims(arguments) => {
            let arguments = &arguments;
            let verb = async |client: Client| claims::list(&client, arguments).await;
            selected.run(output, "listing claims", verb).await
        }
        KeysCommand::Claim(command) => {
            let request = &claims::request(command)?;
            let verb = async |client: Client| claims::set(&client, request.clone()).await;
            selected.run(output, "claiming keys", verb).await
        }
        KeysCommand::Holds(arguments) => holds::list(selected, arguments, output).await,
    }
}

/// Applies one op to each name, or to the keys that globs select.
async fn change(
    selected: Selected,
    arguments: ChangeArgs,
    op: v1::KeyOp,
    output: Output,
) -> Result<(), Failure> {
    let names = names::expand(arguments.keys)?;
    let globs = names.iter().any(|name| is_glob(name));
    if arguments.etag.is_some() && matches!(selected, Selected::Many(_)) {
        return Err(only_one("keys with --etag"));
    }
    if arguments.etag.is_some() && (globs || names.len() != 1) {
        return Err(Failure::usage(
            "--etag belongs to one key, given by its name; use `patchbay keys apply` for several",
        ));
    }
    let update = |name, patterns| v1::KeyUpdate {
        name,
        op: op.into(),
        etag: arguments.etag.clone().unwrap_or_default(),
        patterns,
        ..Default::default()
    };
    let updates: &Vec<v1::KeyUpdate> = &match globs {
        // The globs are sent to the service, so that keys are selected and changed in one
        // transaction.
        true => vec![update(String::new(), names)],
        false => names.into_iter().map(|name| update(name, vec![])).collect(),
    };
    let options = &arguments.options;
    let verb = async |client: Client| make(&client, updates.clone(), options).await;
    selected.run(output, "changing keys", verb).await
}

fn list_request(arguments: ListArgs) -> v1::ListStaticKeysRequest {
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

fn class(class: &Class) -> i32 {
    match class {
        Class::Guarded => v1::KeyClass::Guarded.into(),
        Class::Ref => v1::KeyClass::Ref.into(),
        Class::Tracepoint => v1::KeyClass::Tracepoint.into(),
        Class::Dyndbg => v1::KeyClass::DynamicDebug.into(),
        Class::Never => v1::KeyClass::Never.into(),
    }
}

async fn get(client: &Client, names: Vec<String>) -> Result<Answer<Detailed>, Failure> {
    let mut keys = vec![];
    for name in matching(client, names).await? {
        let mut request = v1::GetStaticKeyRequest {
            name,
            ..Default::default()
        };
        let mut key: Option<v1::StaticKey> = None;
        let mut pages = Pages::of("sites");
        loop {
            let page = client
                .keys()
                .get_static_key(client.request(request.clone()))
                .await?
                .into_inner();
            let next = pages.next(&page, &page.next_page_token)?;
            match (&mut key, page.key) {
                (Some(key), Some(more)) => key.sites.extend(more.sites),
                (key, page) => *key = page,
            }
            match next {
                Some(token) => request.page_token = token,
                None => break,
            }
        }
        keys.extend(key.map(view::ListedKey::from));
    }
    Ok(Detailed(keys).into())
}

/// Replaces globs by the names of the keys that they match. Literal names are kept, so that the
/// service can suggest names for a misspelt one.
async fn matching(client: &Client, names: Vec<String>) -> Result<Vec<String>, Failure> {
    if !names.iter().any(|name| is_glob(name)) {
        return Ok(names);
    }
    let request = v1::ListStaticKeysRequest {
        patterns: names.clone(),
        ..Default::default()
    };
    let matched = lists::keys(client, request).await?.keys;
    let matched: Vec<String> = matched.into_iter().map(|key| key.name).collect();
    if matched.is_empty() {
        return Err(Failure::error(format!(
            "no key matches {}; see `patchbay keys list`",
            names.join(" ")
        )));
    }
    // The listing leaves out literal names that match no key. They are kept here, so that reading
    // them fails.
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
