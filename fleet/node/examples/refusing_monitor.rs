// SPDX-License-Identifier: Apache-2.0
//! A monitor for tests of clients. It refuses every call with the reason that the call names.
//!
//! `refusing_monitor SOCKET GUEST` prints "listening" when the socket exists, and exits when its
//! standard input ends. UpdateStaticKeys, GetStaticKey and WatchStaticKeys take the name of a
//! reason, without its prefix, instead of the name or pattern of a key, and answer with this
//! reason.

// The tests of the daemon use more of this module.
#[allow(dead_code)]
#[path = "../tests/node/fake.rs"]
mod fake;

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use patchbay_proto::{ERROR_DOMAIN, v1};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use self::fake::Fake;

/// The comment of each reason begins with its status code.
const ERRORS: &str = include_str!("../../../proto/patchbay/v1/errors.proto");

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [socket, guest] = arguments.as_slice() else {
        return Err("usage: refusing_monitor SOCKET GUEST".into());
    };
    let fake = Fake::start(Path::new(socket), &[guest]).await;
    fake.answer(
        "UpdateStaticKeys",
        |request: v1::UpdateStaticKeysRequest| {
            refuse::<v1::UpdateStaticKeysResponse>(
                request.updates.first().map(|update| &update.name),
            )
        },
    );
    fake.answer("GetStaticKey", |request: v1::GetStaticKeyRequest| {
        refuse::<v1::GetStaticKeyResponse>(Some(&request.name))
    });
    fake.answer("WatchStaticKeys", |request: v1::WatchStaticKeysRequest| {
        refuse::<v1::WatchStaticKeysResponse>(request.patterns.first())
    });
    println!("listening");
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}

fn refuse<M>(reason: Option<&String>) -> Result<M, Status> {
    let reason = reason.map_or("", String::as_str);
    let Some(code) = code(reason) else {
        return Err(Status::unimplemented(format!(
            "no reason is named {reason:?}"
        )));
    };
    let mut details = ErrorDetails::new();
    // The text is not ASCII and has a line break, because clients must decode messages.
    let metadata = HashMap::from([("near".to_owned(), "näher\nund näher".to_owned())]);
    details.set_error_info(reason, ERROR_DOMAIN, metadata);
    let message = format!("refused with {reason}: “100 %”\nas asked");
    Err(Status::with_error_details(code, message, details))
}

/// Returns the status code that errors.proto gives for a reason.
fn code(reason: &str) -> Option<Code> {
    let mut comment = "";
    for line in ERRORS.lines().map(str::trim) {
        match line.strip_prefix("// ") {
            // This is the first line of a comment.
            Some(text) if comment.is_empty() => comment = text,
            Some(_) => {}
            None if line.starts_with(&format!("ERROR_REASON_{reason} = ")) => {
                let word = comment.split(['.', ',']).next().unwrap_or_default();
                return (0..=16).map(Code::from_i32).find(|code| {
                    let name = format!("{code:?}").to_uppercase();
                    name == word.replace('_', "")
                });
            }
            None => comment = "",
        }
    }
    None
}
