// SPDX-License-Identifier: Apache-2.0
//! Checks names that people choose.

const MAX_BYTES: usize = 64;

/// Returns whether this is a name of 1 to 64 letters, digits and characters of `others`.
pub fn is_name(name: &str, others: &[u8]) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    !name.is_empty() && name.len() <= MAX_BYTES && name.bytes().all(is_of_name)
}
