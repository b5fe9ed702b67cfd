// SPDX-License-Identifier: Apache-2.0
//! Defines the lines of the audit log.

use patchbay_proto::text::{cut, hex, printable_json};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The maximum number of bytes of a string in a line. JSON escapes a byte to at most six bytes, so
/// no line exceeds the maximum length of a line.
pub const MAX_TEXT_BYTES: usize = 8 << 10;

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The time, in milliseconds since 1970.
    pub time_ms: u64,
    /// The number of the intent. Its outcome has the same number.
    pub id: u64,
    /// The recorded event.
    #[serde(flatten)]
    pub entry: Entry,
    /// The SHA-256 of the line before this one, in hexadecimal.
    pub previous: String,
}

/// An event in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Entry {
    /// A client is about to change something.
    Intent {
        /// The principal of the call.
        principal: String,
        /// The person for whom the principal makes the call, if it has asserted one.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        person: String,
        /// The full name of the gRPC method.
        method: String,
        /// The guest of the call.
        guest: String,
        /// The rule of the policy that allows the call.
        rule: String,
        /// A summary of the request with its keys, ops and reason.
        request: String,
        /// The W3C trace id of the call, if it had one.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        trace_id: String,
    },
    /// The call was denied by the policy, or because of the client's certificate.
    Denied {
        /// The principal of the call.
        principal: String,
        /// The person for whom the principal makes the call, if it has sent an assertion that was
        /// accepted.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        person: String,
        /// The full name of the gRPC method.
        method: String,
        /// The guest of the call.
        guest: String,
        /// The reason that the policy gave, or why the client's certificate is not accepted.
        why: String,
    },
    /// The certificate of a new connection was not accepted.
    Refused {
        /// The client's address and port.
        address: String,
        /// The principal of the certificate; empty if no trusted CA has issued it for its name.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        principal: String,
        /// The reason.
        why: String,
    },
    /// Reports lines that were not recorded since the last line of this kind, because they came too
    /// fast.
    LeftOut {
        /// The number of denied calls.
        denied: u64,
        /// The number of refused certificates.
        refused: u64,
    },
    /// The outcome of an intent.
    Outcome {
        /// "OK", or the name of the gRPC status.
        code: String,
        /// A short form of the answer, or the error.
        message: String,
    },
    /// The first line of a file that continues another file. Its previous hash is the hash of that
    /// file's last line.
    Continued {
        /// The name of the continued file.
        file: String,
        /// The number of lines before this one, in all files.
        records: usize,
    },
    /// An incomplete line before this one was removed. It was incomplete because the writer was
    /// killed or the disk was full.
    Repaired {
        /// The length of the removed line in bytes.
        bytes: u64,
        /// The removed line's SHA-256, in hexadecimal.
        sha256: String,
        /// The beginning of the removed line.
        text: String,
    },
}

impl Entry {
    /// Cuts every string that comes from outside the log to [`MAX_TEXT_BYTES`].
    pub fn cut(&mut self) {
        let texts: &mut [&mut String] = match self {
            Self::Intent {
                principal,
                person,
                method,
                guest,
                rule,
                request,
                trace_id,
            } => &mut [principal, person, method, guest, rule, request, trace_id],
            Self::Denied {
                principal,
                person,
                method,
                guest,
                why,
            } => &mut [principal, person, method, guest, why],
            Self::Refused {
                address,
                principal,
                why,
            } => &mut [address, principal, why],
            Self::Outcome { code, message } => &mut [code, message],
            Self::LeftOut { .. } | Self::Continued { .. } => &mut [],
            Self::Repaired { text, .. } => &mut [text],
        };
        for text in texts {
            if text.len() > MAX_TEXT_BYTES {
                **text = cut(text, MAX_TEXT_BYTES).into_owned();
            }
        }
    }
}

impl Record {
    /// The maximum length in bytes of a line without its entry. It contains two numbers, a hash and
    /// field names.
    const FRAME_BYTES: u64 = 160;

    /// Returns the maximum length in bytes of a line with this entry.
    pub(super) fn bytes(entry: &Entry) -> u64 {
        let json = serde_json::to_string(entry).unwrap_or_default();
        printable_json(&json).len() as u64 + Self::FRAME_BYTES
    }

    /// Returns the line without its line break. Control characters are escaped, so the line can be
    /// shown on a terminal.
    ///
    /// # Errors
    /// The error of the serializer.
    pub fn line(&self) -> serde_json::Result<Vec<u8>> {
        let json = serde_json::to_string(self)?;
        Ok(printable_json(&json).into_owned().into_bytes())
    }
}

/// Returns the SHA-256 of bytes, in hexadecimal.
pub fn hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}
