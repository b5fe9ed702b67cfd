// SPDX-License-Identifier: Apache-2.0
//! Messages between agent and monitor on a stream; see `proto/patchbay/v1/agent.proto`.

use std::io;

use patchbay_proto::AGENT_FRAME_MAX_BYTES;
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Why there is no further message.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Between two frames.
    #[error("the agent closed the connection")]
    Closed,
    /// An I/O error, or the end of the stream within a frame.
    #[error("the connection to the agent broke: {0}")]
    Broken(#[from] io::Error),
    /// Not this protocol.
    #[error(
        "the agent announced a message of {bytes} bytes, and {AGENT_FRAME_MAX_BYTES} is the maximum"
    )]
    TooLong {
        /// Length that the frame announced.
        bytes: usize,
    },
    /// Not this protocol.
    #[error("the agent sent a message that cannot be decoded: {0}")]
    Malformed(#[from] prost::DecodeError),
}

/// Reads one message. Memory is taken for what has arrived, not for what was announced.
///
/// # Errors
/// [`FrameError`].
pub async fn read<M: Message + Default>(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<M, FrameError> {
    let mut length = [0; 4];
    match stream.read(&mut length).await? {
        0 => return Err(FrameError::Closed),
        read => stream.read_exact(&mut length[read..]).await?,
    };
    let bytes = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if bytes > AGENT_FRAME_MAX_BYTES {
        return Err(FrameError::TooLong { bytes });
    }
    let mut frame = Vec::new();
    stream.take(bytes as u64).read_to_end(&mut frame).await?;
    if frame.len() < bytes {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(M::decode(frame.as_slice())?)
}

/// Writes one message.
///
/// # Errors
/// An I/O error; `InvalidInput` if the message is too long for a frame.
pub async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Message,
) -> io::Result<()> {
    let bytes = message.encoded_len();
    let length = u32::try_from(bytes)
        .ok()
        .filter(|_| bytes <= AGENT_FRAME_MAX_BYTES);
    let length = length.ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "message too long for a frame")
    })?;
    let mut frame = Vec::with_capacity(4 + bytes);
    frame.extend_from_slice(&length.to_le_bytes());
    message.encode(&mut frame).map_err(io::Error::other)?;
    stream.write_all(&frame).await
}
