// SPDX-License-Identifier: Apache-2.0
//! Frames of the protocol between agent and service on a stream: the length of a message in four
//! bytes, little-endian, and the message.

use std::io::{self, Read, Write};

use prost::Message;

/// A longer message ends the connection.
pub const MAX_BYTES: usize = 512 << 10;

/// The reason why there is no further message.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The stream ended between two frames.
    #[error("the other side closed the connection")]
    Closed,
    /// An I/O error, or the end of the stream within a frame.
    #[error("the connection broke: {0}")]
    Broken(#[from] io::Error),
    /// The stream does not carry this protocol.
    #[error("the other side announced a message of {bytes} bytes, and {MAX_BYTES} is the maximum")]
    TooLong {
        /// Length that the frame announced.
        bytes: usize,
    },
    /// The stream does not carry this protocol.
    #[error("the other side sent a message that cannot be decoded: {0}")]
    Malformed(#[from] prost::DecodeError),
}

/// The length that a frame announces.
///
/// # Errors
/// [`FrameError::TooLong`].
pub fn length(header: [u8; 4]) -> Result<usize, FrameError> {
    let bytes = usize::try_from(u32::from_le_bytes(header)).unwrap_or(usize::MAX);
    if bytes > MAX_BYTES {
        return Err(FrameError::TooLong { bytes });
    }
    Ok(bytes)
}

/// The message in a frame that announced `bytes` bytes.
///
/// # Errors
/// [`FrameError::Broken`] if the stream ended first, [`FrameError::Malformed`].
pub fn decode<M: Message + Default>(frame: &[u8], bytes: usize) -> Result<M, FrameError> {
    if frame.len() < bytes {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(M::decode(frame)?)
}

/// The frame of a message.
///
/// # Errors
/// `InvalidInput` if the message is too long for a frame.
pub fn encode(message: &impl Message) -> io::Result<Vec<u8>> {
    let bytes = message.encoded_len();
    let length = u32::try_from(bytes).ok().filter(|_| bytes <= MAX_BYTES);
    let length = length.ok_or_else(|| {
        let message = "the message is too long for a frame";
        io::Error::new(io::ErrorKind::InvalidInput, message)
    })?;
    let mut frame = Vec::with_capacity(4 + bytes);
    frame.extend_from_slice(&length.to_le_bytes());
    message.encode(&mut frame).map_err(io::Error::other)?;
    Ok(frame)
}

/// Reads one message from a blocking stream. Allocates memory for the bytes that have arrived, not
/// for the announced length.
///
/// # Errors
/// [`FrameError`].
pub fn read<M: Message + Default>(stream: &mut impl Read) -> Result<M, FrameError> {
    let mut header = [0; 4];
    match stream.read(&mut header)? {
        0 => return Err(FrameError::Closed),
        read => stream.read_exact(&mut header[read..])?,
    }
    let bytes = length(header)?;
    let mut frame = Vec::new();
    stream.take(bytes as u64).read_to_end(&mut frame)?;
    decode(&frame, bytes)
}

/// Writes one message to a blocking stream.
///
/// # Errors
/// An I/O error; `InvalidInput` if the message is too long for a frame.
pub fn write(stream: &mut impl Write, message: &impl Message) -> io::Result<()> {
    stream.write_all(&encode(message)?)
}

#[cfg(test)]
mod tests {
    use crate::agent::v1::{AgentPong, FromAgent, from_agent};

    use super::*;

    fn pong() -> FromAgent {
        FromAgent {
            id: 7,
            message: Some(from_agent::Message::Pong(AgentPong {
                guest_time_ns: 1 << 60,
            })),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let mut stream = Vec::new();
        write(&mut stream, &pong()).expect("written");
        write(&mut stream, &FromAgent::default()).expect("written");
        let mut stream = stream.as_slice();
        assert_eq!(read::<FromAgent>(&mut stream).expect("a message"), pong());
        assert_eq!(
            read::<FromAgent>(&mut stream).expect("an empty message"),
            FromAgent::default()
        );
        assert!(matches!(
            read::<FromAgent>(&mut stream),
            Err(FrameError::Closed)
        ));
    }

    #[test]
    fn half_frames_long_frames_and_garbage_are_errors() {
        let mut whole = Vec::new();
        write(&mut whole, &pong()).expect("written");
        for cut in 1..whole.len() {
            assert!(
                matches!(
                    read::<FromAgent>(&mut &whole[..cut]),
                    Err(FrameError::Broken(_))
                ),
                "{cut}"
            );
        }
        let long = [0, 0, 0x20, 0];
        assert!(matches!(
            read::<FromAgent>(&mut long.as_slice()),
            Err(FrameError::TooLong { bytes: 0x20_0000 })
        ));
        let garbage = [2, 0, 0, 0, 0xff, 0xff];
        assert!(matches!(
            read::<FromAgent>(&mut garbage.as_slice()),
            Err(FrameError::Malformed(_))
        ));
        let page = crate::agent::v1::AgentPage {
            cpu: 0,
            data: vec![0; MAX_BYTES],
        };
        assert!(write(&mut Vec::new(), &page).is_err());
    }
}
