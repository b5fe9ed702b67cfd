// SPDX-License-Identifier: Apache-2.0
//! Pages of lists: their size and their tokens.

use super::error::KeysError;

/// Byte limit of a page, well below the 4 MiB that stock gRPC clients accept.
pub(crate) const PAGE_BYTES: usize = 3 << 20;
/// Upper bound of the size of a key, site or hold without its texts, in bytes.
pub(super) const ITEM_BYTES: usize = 192;

pub(super) const MALFORMED: &str = "is malformed; give one from an answer";

pub(super) fn invalid_token(message: &str) -> KeysError {
    KeysError::InvalidArgument {
        field: "page_token",
        message: message.to_owned(),
    }
}

/// Returns the token "generation.position". The next page starts after this position, even if keys
/// were added or removed meanwhile.
pub(super) fn page_token(generation: u64, position: &str) -> String {
    format!("{generation:x}.{position}")
}

pub(super) fn parse_page_token(token: &str, generation: u64) -> Result<Option<&str>, KeysError> {
    if token.is_empty() {
        return Ok(None);
    }
    let (of, position) = token
        .split_once('.')
        .ok_or_else(|| invalid_token(MALFORMED))?;
    match u64::from_str_radix(of, 16) {
        Ok(of) if of == generation => Ok(Some(position)),
        Ok(_) => Err(invalid_token(
            "belongs to an earlier registration of the guest; list from the start",
        )),
        Err(_) => Err(invalid_token(MALFORMED)),
    }
}
