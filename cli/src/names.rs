// SPDX-License-Identifier: Apache-2.0
//! Reads names from the command line and standard input.

use std::io::Read;

use crate::failure::Failure;

/// The maximum number of keys in one request.
const MAX_NAMES: usize = 65_536;
const MAX_BYTES: u64 = 16 << 20;
/// The argument that stands for the names in standard input.
const STDIN: &str = "-";

pub fn is_glob(name: &str) -> bool {
    name.starts_with('!') || name.contains(['*', '?', '['])
}

/// Replaces `-` by the lines of standard input.
///
/// # Errors
/// There is more than one `-`, or standard input is not text, has no name, or has too many.
pub fn expand(names: Vec<String>) -> Result<Vec<String>, Failure> {
    let Some(at) = names.iter().position(|name| name == STDIN) else {
        return Ok(names);
    };
    let read = read(std::io::stdin().lock())?;
    replace(names, at, read)
}

fn replace(mut names: Vec<String>, at: usize, read: Vec<String>) -> Result<Vec<String>, Failure> {
    names.splice(at..=at, read);
    if names.iter().any(|name| name == STDIN) {
        return Err(Failure::usage(
            "- stands for standard input, which can be read once; give one -",
        ));
    }
    Ok(names)
}

/// Reads one name per line; `#` begins a comment.
fn read(input: impl Read) -> Result<Vec<String>, Failure> {
    let mut text = String::new();
    input
        .take(MAX_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(|error| {
            Failure::usage(format!(
                "standard input cannot be read: {error}; give one name per line"
            ))
        })?;
    let names: Vec<String> = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect();
    if text.len() as u64 > MAX_BYTES || names.len() > MAX_NAMES {
        return Err(Failure::usage(format!(
            "standard input has more than {MAX_NAMES} names or {} MiB; split it",
            MAX_BYTES >> 20
        )));
    }
    if names.is_empty() {
        return Err(Failure::usage(
            "standard input has no name; give one per line",
        ));
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_names_and_comments_are_not() {
        let names = read(&b"# keys\nalpha\n\n  beta # the second\r\n!b*\n"[..]).expect("names");
        assert_eq!(names, ["alpha", "beta", "!b*"]);
        let words = ["x", "-", "y"].map(str::to_owned).to_vec();
        let replaced = replace(words, 1, names).expect("one -");
        assert_eq!(replaced, ["x", "alpha", "beta", "!b*", "y"]);
    }

    #[test]
    fn standard_input_is_bounded_and_read_once() {
        let many = "a\n".repeat(MAX_NAMES + 1);
        let long = "a".repeat(usize::try_from(MAX_BYTES).expect("small") + 1);
        for bad in [
            &b""[..],
            b"# nothing\n",
            b"\xff\n",
            many.as_bytes(),
            long.as_bytes(),
        ] {
            let failure = read(bad).expect_err("refused");
            assert_eq!(failure.exit_code, crate::failure::USAGE);
        }
        assert_eq!(
            read("a\n".repeat(MAX_NAMES).as_bytes())
                .expect("fits")
                .len(),
            MAX_NAMES
        );
        let twice = ["-", "-"].map(str::to_owned).to_vec();
        assert!(replace(twice, 0, vec!["a".to_owned()]).is_err());
    }
}
