// SPDX-License-Identifier: Apache-2.0
//! The encoding of messages in calls: protobuf, as in every gRPC service.
//!
//! A message arrives and leaves in one piece of memory. prost reads and writes a piece directly in
//! far fewer instructions than the buffers of gRPC, through which each byte would pass by itself.

use std::marker::PhantomData;

use prost::Message;
use prost::bytes::{Buf, BufMut};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Bytes that a call reserves for messages at first. Most messages are shorter; memory for a longer
/// one is reserved when its length is known. With tonic's 8 KiB, every call would search the
/// allocator's free memory four times.
const BUFFER_BYTES: usize = 1 << 10;
/// Bytes of messages after which a stream is sent, tonic's default.
const STREAM_BYTES: usize = 32 << 10;

/// Encodes messages `E` and decodes messages `D`.
#[derive(Debug, Clone, Copy)]
pub struct MessageCodec<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for MessageCodec<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<E, D> Codec for MessageCodec<E, D>
where
    E: Message + Send + 'static,
    D: Message + Default + Send + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<E: Message, D> Encoder for MessageCodec<E, D> {
    type Item = E;
    type Error = Status;

    fn encode(&mut self, message: E, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&message.encode_to_vec());
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, STREAM_BYTES)
    }
}

impl<E, D: Message + Default> Decoder for MessageCodec<E, D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        let message = from.copy_to_bytes(from.remaining());
        let message = D::decode(&*message);
        message
            .map(Some)
            .map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, STREAM_BYTES)
    }
}
