// SPDX-License-Identifier: Apache-2.0
//! The words of a monitor's command line.

/// The maximum number of bytes of a command line that are split.
const MAX_LINE: usize = 64 << 10;
/// The maximum number of words. The ones that follow are dropped.
const MAX_WORDS: usize = 4096;

/// The words of a command line, as in `unix:PATH,server=on` and `path=PATH`. A process chooses its
/// own command line, so its length and the number of its words are limited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words {
    sorted: Box<[Box<[u8]>]>,
}

impl Words {
    /// Splits a command line as /proc shows it.
    #[must_use]
    pub fn of(line: &[u8]) -> Self {
        let words = split(&line[..line.len().min(MAX_LINE)]).take(MAX_WORDS);
        let mut sorted: Vec<Box<[u8]>> = words.map(Box::from).collect();
        sorted.sort_unstable();
        sorted.dedup();
        Self {
            sorted: sorted.into(),
        }
    }

    /// Returns whether the command line contains a path, and not only as the beginning or the end
    /// of another path. A path that has a separator in it consists of several words, whose order is
    /// not compared.
    #[must_use]
    pub fn contain(&self, path: &[u8]) -> bool {
        let is_word = |word: &[u8]| {
            self.sorted
                .binary_search_by(|own| (**own).cmp(word))
                .is_ok()
        };
        split(path).next().is_some() && split(path).all(is_word)
    }
}

fn split(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    let words = line.split(|byte| b"\0,:=".contains(byte));
    words.filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_not_found_in_a_longer_one() {
        for (line, is_there) in [
            ("-qmp\0unix:/run/vm/a,server=on,wait=off\0", true),
            (
                "-chardev\0socket,path=/run/vm/a,id=m\0-mon\0chardev=m\0",
                true,
            ),
            ("--api-sock\0/run/vm/a\0--id\0a\0", true),
            ("--api-socket\0path=/run/vm/a\0", true),
            ("/run/vm/a", true),
            ("-qmp\0unix:/run/vm/ab,server=on\0", false),
            ("-qmp\0unix:/srv/run/vm/a\0", false),
            ("-qmp\0unix:/run/vm/ab\0-qmp\0unix:/run/vm/a\0", true),
            ("", false),
        ] {
            let words = Words::of(line.as_bytes());
            assert_eq!(words.contain(b"/run/vm/a"), is_there, "{line}");
        }
        assert!(!Words::of(b"x").contain(b""));
        let words = Words::of(b"-qmp\0unix:/run/0000:00:1f,server=on\0");
        assert!(words.contain(b"/run/0000:00:1f"));
        assert!(!words.contain(b"/run/0000:00:2f"));
    }

    #[test]
    fn a_huge_command_line_costs_no_more_than_a_long_one() {
        let line: Vec<String> = (0..1 << 19).map(|n| format!("/{n}")).collect();
        let line = line.join("\0");
        let words = Words::of(line.as_bytes());
        assert_eq!(words.sorted.len(), MAX_WORDS);
        let endless = Words::of(&[b'/'; 4 << 20]);
        assert_eq!(
            endless.sorted.iter().map(|word| word.len()).sum::<usize>(),
            MAX_LINE
        );
        // Words that repeat are kept once.
        assert_eq!(Words::of(&b"/a,".repeat(1 << 20)).sorted.len(), 1);
    }
}
