// SPDX-License-Identifier: Apache-2.0
//! Runs `keys verify` and `keys repair`.

use patchbay_proto::v1;

use crate::args::keys::RepairArgs;
use crate::client::{Client, to_proto};
use crate::failure::Failure;
use crate::print::Answer;
use crate::view;

/// Compares sites with counts.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn verify(
    client: &Client,
    patterns: Vec<String>,
) -> Result<Answer<view::Verification>, Failure> {
    let request = v1::VerifyStaticKeysRequest {
        patterns,
        ..Default::default()
    };
    let mut keys = client.keys();
    let found = keys.verify_static_keys(client.request(request)).await?;
    Ok(view::Verification::from(found.into_inner()).into())
}

/// Shows a repair, or makes it.
///
/// # Errors
/// [`Failure`] with the sentence for the operator.
pub async fn repair(
    client: &Client,
    arguments: &RepairArgs,
) -> Result<Answer<view::Repair>, Failure> {
    let request = v1::RepairStaticKeyRequest {
        name: arguments.key.clone(),
        validate_only: !arguments.yes,
        reason: arguments.reason.clone(),
        stop_timeout: to_proto(arguments.stop_timeout),
        retry_timeout: client.retry_timeout().try_into().ok(),
        ..Default::default()
    };
    let mut keys = client.keys();
    let made = keys.repair_static_key(client.change(request)).await?;
    Ok(view::Repair::from(made.into_inner()).into())
}
