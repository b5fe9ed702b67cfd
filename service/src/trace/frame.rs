// SPDX-License-Identifier: Apache-2.0
//! Messages between agent and monitor on an asynchronous stream.

use std::io;

pub use patchbay_proto::agent_frame::FrameError;
use patchbay_proto::agent_frame::{decode, encode, length};
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Reads one message. Allocates memory only for the bytes that have arrived, not for the announced
/// length.
///
/// # Errors
/// [`FrameError`].
pub async fn read<M: Message + Default>(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<M, FrameError> {
    let mut header = [0; 4];
    match stream.read(&mut header).await? {
        0 => return Err(FrameError::Closed),
        read => stream.read_exact(&mut header[read..]).await?,
    };
    let bytes = length(header)?;
    let mut frame = Vec::new();
    stream.take(bytes as u64).read_to_end(&mut frame).await?;
    decode(&frame, bytes)
}

/// Writes one message.
///
/// # Errors
/// An I/O error; `InvalidInput` if the message is too long for a frame.
pub async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Message,
) -> io::Result<()> {
    stream.write_all(&encode(message)?).await
}
