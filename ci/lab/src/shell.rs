// SPDX-License-Identifier: Apache-2.0
//! Quotes words for the POSIX shell.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Returns the word in single quotes, such that a shell reads back exactly these bytes.
pub fn quote(word: &OsStr) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => quoted.extend_from_slice(b"'\\''"),
            _ => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

/// Returns whether a shell accepts the text as the name of a variable.
pub fn is_variable_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    bytes.first().is_some_and(|first| !first.is_ascii_digit()) && bytes.iter().all(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        for word in [
            "",
            "plain",
            "two words",
            "it's",
            "'",
            "$HOME `id` \\ \"x\"\n\t*",
        ] {
            let mut script = b"printf %s ".to_vec();
            script.extend(quote(OsStr::new(word)));
            let script = OsStr::from_bytes(&script);
            let output = Command::new("sh").arg("-c").arg(script).output().unwrap();
            assert_eq!(output.stdout, word.as_bytes());
        }
    }

    #[test]
    fn variable_names() {
        assert!(is_variable_name(OsStr::new("PATH")));
        assert!(is_variable_name(OsStr::new("_a1")));
        for bad in ["", "1a", "BASH_FUNC_x%%", "a b", "a-b"] {
            assert!(!is_variable_name(OsStr::new(bad)), "{bad}");
        }
    }
}
