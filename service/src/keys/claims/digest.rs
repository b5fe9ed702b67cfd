// SPDX-License-Identifier: Apache-2.0
//! The digest of an intent, which people approve before a set of claims is made.

use patchbay_proto::text::hex;
use sha2::{Digest, Sha256};

use super::Want;

/// Returns the SHA-256 of a set of claims, in hexadecimal: a line "NAME WANT" for each key, ordered
/// by name. `WANT` is "on", "off" or "held". The digest does not depend on the kernel.
#[must_use]
pub fn intent_digest(claims: &[(String, Want)]) -> String {
    let mut lines: Vec<(&str, &str)> = claims
        .iter()
        .map(|(key, want)| (key.as_str(), want.name()))
        .collect();
    lines.sort_unstable();
    let mut hash = Sha256::new();
    for (key, want) in lines {
        hash.update(format!("{key} {want}\n"));
    }
    hex(&hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_covers_names_and_wants_in_any_order() {
        let one = [("a".to_owned(), Want::On), ("m:b".to_owned(), Want::Off)];
        let mut other = one.clone();
        other.reverse();
        assert_eq!(intent_digest(&one), intent_digest(&other));
        // printf 'a on\nm:b off\n' | sha256sum
        assert_eq!(
            intent_digest(&one)[..16],
            hex(&Sha256::digest(b"a on\nm:b off\n"))[..16]
        );
        other[0].1 = Want::Held;
        assert_ne!(intent_digest(&one), intent_digest(&other));
    }
}
