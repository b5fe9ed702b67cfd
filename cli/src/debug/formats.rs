// SPDX-License-Identifier: Apache-2.0
//! Recognizes the records of the kernel's log that were printed by selected pr_debug() lines.
//!
//! A record does not name the line that printed it. It is a line's record if it has the level of
//! dynamic debug and its text consists of the line's prefix, a device's name, and the line's
//! format. The prefix and the name may be missing. In a format, any text may stand for a
//! conversion. Lines with equal formats cannot be distinguished without a prefix, and a format
//! without literal text matches every debug record whose prefix is not that of another line.

/// The level of dynamic debug's records (KERN_DEBUG).
const DEBUG: u32 = 7;
/// The sizes of the buffer in which the kernel composes a prefix, with its final zero byte: 128
/// in later kernels (lib/dynamic_debug.c, `PREFIX_SIZE`).
const PREFIX_SIZES: [usize; 2] = [64, 128];

/// A line that can print.
#[derive(Clone, Copy, Debug, Default)]
pub struct Site<'a> {
    pub module: &'a str,
    pub function: &'a str,
    pub file: &'a str,
    pub line: u32,
    /// The format as the service prints it, with escaped control characters.
    pub format: &'a str,
}

/// The formats and the prefixes of the selected lines.
pub struct Formats(Vec<Format>);

struct Format {
    /// The literal texts before, between and after conversions; some may be empty. The first one
    /// begins the text and the last one ends it.
    literals: Vec<String>,
    /// The parts of the line's prefix in their order, for dynamic debug's flags m, f, s and l.
    prefix: [String; 4],
}

impl Formats {
    pub fn new<'a>(sites: impl IntoIterator<Item = Site<'a>>) -> Self {
        Self(sites.into_iter().map(Format::new).collect())
    }

    /// Returns whether one of the lines may have printed a record.
    pub fn print(&self, level: u32, text: &str) -> bool {
        level == DEBUG && self.0.iter().any(|format| format.prints(text))
    }
}

impl Format {
    fn new(site: Site<'_>) -> Self {
        Self {
            literals: literals(site.format),
            prefix: [
                site.module.to_owned(),
                site.function.to_owned(),
                site.file.to_owned(),
                site.line.to_string(),
            ],
        }
    }

    fn prints(&self, text: &str) -> bool {
        let after_thread = after_thread(text);
        let thread = text.len() - after_thread.len();
        // pr_fmt() may make a format begin as the prefix of a thread or of a line does.
        let begins = !self.literals[0].is_empty();
        if begins && (self.fits(text) || self.fits(after_thread)) {
            return true;
        }
        match self.after_prefix(after_thread, thread) {
            Some(rest) => self.is_message(rest),
            None => !has_prefix(after_thread) && self.is_message(after_thread),
        }
    }

    /// Returns the text after the prefix of this line, which follows `thread` bytes about the
    /// thread. The prefix is cut off where the kernel's buffer for it ends.
    fn after_prefix<'a>(&self, text: &'a str, thread: usize) -> Option<&'a str> {
        let after = |flags: u32| {
            let chosen = self.prefix.iter().zip(0..);
            let chosen = chosen.filter(|(_, flag)| flags & (1 << flag) != 0);
            let prefix: String = chosen.map(|(part, _)| format!("{part}:")).collect();
            let prefix = prefix + " ";
            let cut = PREFIX_SIZES.iter().filter_map(|size| {
                let end = size.checked_sub(thread + 1)?;
                text.strip_prefix(prefix.get(..end)?)
            });
            text.strip_prefix(&prefix)
                .or_else(|| cut.min_by_key(|rest| rest.len()))
        };
        (1..16).filter_map(after).min_by_key(|rest| rest.len())
    }

    /// Returns whether the text is a message of this format, after the names of a driver and a
    /// device if there are any (`dev_dbg()`, `netdev_dbg()`).
    fn is_message(&self, text: &str) -> bool {
        let ends = text.match_indices(": ").map(|(at, end)| at + end.len());
        self.fits(text) || ends.into_iter().any(|at| self.fits(&text[at..]))
    }

    fn fits(&self, text: &str) -> bool {
        let [first, others @ ..] = self.literals.as_slice() else {
            return false;
        };
        let Some(mut text) = text.strip_prefix(first.as_str()) else {
            return false;
        };
        let Some((last, others)) = others.split_last() else {
            return text.is_empty();
        };
        let Some(before) = text.strip_suffix(last.as_str()) else {
            return false;
        };
        text = before;
        others.iter().all(|literal| {
            let found = text.split_once(literal.as_str());
            text = found.map_or("", |(_, after)| after);
            found.is_some()
        })
    }
}

/// Returns the text after what the flag t prints: the thread, or that it was an interrupt.
fn after_thread(text: &str) -> &str {
    let after_number = || {
        let (thread, rest) = text.strip_prefix('[')?.split_once("] ")?;
        let is_number = !thread.is_empty() && thread.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then_some(rest)
    };
    let after_interrupt = text.strip_prefix("<intr> ");
    after_interrupt.or_else(after_number).unwrap_or(text)
}

/// Returns whether the text begins as the prefix of a line does: its first word ends with a colon
/// and either has several parts, of which only the last one is a number, or is a number. A word of
/// one part may be a network device, and one that begins with a number a PCI device.
fn has_prefix(text: &str) -> bool {
    let word = text
        .split(' ')
        .next()
        .and_then(|word| word.strip_suffix(':'));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    word.is_some_and(|word| match word.rsplit_once(':') {
        Some((parts, _)) => !parts
            .split(':')
            .any(|part| part.is_empty() || is_number(part)),
        None => is_number(word),
    })
}

/// Returns the literal texts of a format.
fn literals(escaped: &str) -> Vec<String> {
    let (mut literals, mut literal, mut rest) = (Vec::new(), String::new(), escaped);
    while let Some(at) = rest.find(['%', '\\']) {
        literal.push_str(&rest[..at]);
        let special = &rest[at..];
        let known = [
            ("%%", '%'),
            ("\\n", '\n'),
            ("\\t", '\t'),
            ("\\\"", '"'),
            ("\\\\", '\\'),
        ];
        let known = known
            .iter()
            .find_map(|(escape, c)| Some((c, special.strip_prefix(escape)?)));
        if let Some((c, after)) = known {
            literal.push(*c);
            rest = after;
            continue;
        }
        literals.push(std::mem::take(&mut literal));
        rest = match special.strip_prefix('%') {
            Some(conversion) => after_conversion(conversion),
            // The log escapes other control characters differently, so they match any text.
            None => special[1..].trim_start_matches(|c: char| c.is_ascii_digit() || c == 'r'),
        };
    }
    literal.push_str(rest);
    // printk() removes the end of line. Without one, pr_cont() or a dump can continue the record.
    match literal.strip_suffix('\n') {
        Some(ended) => literals.push(ended.to_owned()),
        None => literals.extend([literal, String::new()]),
    }
    literals
}

/// Returns the text after a conversion; `text` begins after the `%`. The kernel's own conversions,
/// such as `%pI4`, consist of a `p` and letters or digits (lib/vsprintf.c, `format_decode()` and
/// `pointer()`).
fn after_conversion(text: &str) -> &str {
    let text = text.trim_start_matches(|c: char| "-+ #0".contains(c));
    let text = text.trim_start_matches(|c: char| c.is_ascii_digit() || "*.".contains(c));
    let text = text.trim_start_matches(|c: char| "hlLqjzt".contains(c));
    match text.strip_prefix('p') {
        Some(pointer) => pointer.trim_start_matches(|c: char| c.is_ascii_alphanumeric()),
        None => text.get(1..).unwrap_or(""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(format: &str) -> Site<'_> {
        Site {
            module: "net",
            function: "a_open",
            file: "drivers/net/a.c",
            line: 10,
            format,
        }
    }

    #[test]
    fn a_text_is_compared_with_a_format() {
        for (format, text, expected) in [
            (r"open %s\n", "open eth0", true),
            (r"open %s\n", "close eth0", false),
            (r"open %s\n", "re-open eth0", false),
            (r"%s: up\n", "eth0: up", true),
            (r"%s: up\n", "eth0: up again", false),
            // pr_cont() continues a record that has no end of line.
            (r"%s: up", "eth0: up again", true),
            (r"up\n", "up", true),
            (r"up\n", "link up", false),
            (r"up\n", "up again", false),
            (r"a %d of %d\n", "b 1 of 2", false),
            (r"a %d of %d\n", "a 1 of 2", true),
            // One occurrence does not serve two parts.
            (r"ab%sab\n", "ab", false),
            (r"ab%sab\n", "abab", true),
            (r"%pI4 up\n", "10.0.0.1 up", true),
            (r"%-08.3llx!\n", "1f      !", true),
            ("100%% of %*pE.", "100% of a.", true),
            ("100%% of %*pE.", "100 of a.", false),
            (r"a\tb\033c\n", "a\tb\\x1bc", true),
            (r#"\"%s\" C:\\n"#, r#""x" C:\n"#, true),
            (r#"\"%s\"\n"#, "'x'", false),
            (r"%s\n", "anything", true),
            (r"%s\n", "net:b_open:10: anything", false),
            (r"%s: up\n", "0000:00:03.0: up", true),
            (r"%s\n", "net:a_open:10: anything", true),
            ("%", "anything", true),
            (r"\", "anything", true),
            (r"\r", "anything", true),
            ("", "anything", true),
        ] {
            let formats = Formats::new([site(format)]);
            assert_eq!(formats.print(7, text), expected, "{format:?} {text:?}");
            assert!(!formats.print(6, text), "a debug line has level 7");
        }
    }

    #[test]
    fn a_prefix_must_be_that_of_the_line() {
        for (text, expected) in [
            ("net: open 1", true),
            ("a_open: open 1", true),
            ("10: open 1", true),
            ("net:a_open:10: open 1", true),
            ("[12] net:a_open:drivers/net/a.c:10: open 1", true),
            ("[12] open 1", true),
            ("<intr> a_open:10: open 1", true),
            ("net:b_open:10: open 1", false),
            ("net:a_open:11: open 1", false),
            ("<intr> 11: open 1", false),
            ("[x] open 1", false),
            // dev_dbg() and netdev_dbg()
            ("e1000 0000:00:03.0: open 1", true),
            ("net:a_open:10: e1000 0000:00:03.0 eth0: open 1", true),
            ("net:b_open:10: e1000 0000:00:03.0 eth0: open 1", false),
            ("eth0: open 1", true),
            ("net:a_open:10: close 1", false),
        ] {
            let formats = Formats::new([site(r"open %d\n")]);
            assert_eq!(formats.print(7, text), expected, "{text:?}");
        }
        // The format itself may look like a prefix.
        let formats = Formats::new([site(r"b:c: open\n"), site(r"[12] x\n")]);
        assert!(formats.print(7, "b:c: open") && formats.print(7, "[12] x"));
    }

    #[test]
    fn a_long_prefix_is_cut_off_at_the_end_of_its_buffer() {
        let function = "f".repeat(130);
        let long = Site {
            function: &function,
            ..site(r"open %d\n")
        };
        let formats = Formats::new([long]);
        let whole = format!("net:{function}:10: ");
        for (thread, size, expected) in [
            ("", 63, true),
            ("", 127, true),
            ("[12] ", 58, true),
            ("", 62, false),
            ("[12] ", 63, false),
        ] {
            let text = format!("{thread}{}open 1", &whole[..size]);
            assert_eq!(formats.print(7, &text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_text_of_any_format_is_recognized() {
        let formats = Formats::new([site("a %d"), site("b %d")]);
        assert!(formats.print(7, "b 1") && !formats.print(7, "c 1"));
        assert!(!Formats::new([]).print(7, "a 1"));
    }
}
