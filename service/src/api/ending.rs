// SPDX-License-Identifier: Apache-2.0
//! The end of a stream when its guest is removed.

use tokio::sync::{mpsc, watch};
use tonic::Status;

use super::status::ends;

/// Waits until the guest is removed.
pub async fn wait_for_end(ending: &mut watch::Receiver<bool>) {
    // An error means that the sender is dropped, which also ends the guest.
    let _ = ending.wait_for(|ending| *ending).await;
}

/// Runs `tell`, which fills a stream, until it returns, the client is gone or the guest is removed.
/// Only a removed guest ends the stream with an error.
pub async fn until_end<T>(
    sender: &mpsc::Sender<Result<T, Status>>,
    mut ending: watch::Receiver<bool>,
    tell: impl Future<Output = ()>,
) {
    tokio::select! {
        () = tell => {}
        () = sender.closed() => {}
        () = wait_for_end(&mut ending) => {
            let _ = sender.send(Err(ends())).await;
        }
    }
}
