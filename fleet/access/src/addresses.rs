// SPDX-License-Identifier: Apache-2.0
//! Hides addresses of a guest's kernel in text.
//!
//! A single address reveals where KASLR has placed the kernel, which helps an attacker of the
//! guest.

/// The number of hexadecimal digits of an address in the upper half of the address space, which
/// belongs to the kernel.
const DIGITS: usize = 16;

/// Returns whether a number is an address of the kernel, with four or five levels of page tables.
/// The last page is excluded, because small negative numbers look like addresses in it.
#[must_use]
pub fn is_kernel_address(number: u64) -> bool {
    (0xff00_0000_0000_0000..0xffff_ffff_ffff_f000).contains(&number)
}

/// Returns whether a signed number is an address of the kernel, like [`is_kernel_address`], but
/// excludes the last 2 MiB. Signed values are often negative differences, and Linux maps nothing
/// there.
#[must_use]
pub fn is_signed_kernel_address(number: i64) -> bool {
    let number = number.cast_unsigned();
    is_kernel_address(number) && number < 0xffff_ffff_ffe0_0000
}

/// Overwrites every hexadecimal address in a text, and the instructions that an oops shows, whose
/// operands are addresses. The text keeps its length.
pub fn hide_in_text(text: &mut [u8]) {
    hide_instructions(text);
    let mut start = 0;
    while start < text.len() {
        let run = text[start..]
            .iter()
            .take_while(|byte| byte.is_ascii_hexdigit());
        let length = run.count();
        // The zero of "0x" is not part of the run of digits, because `x` ends it.
        if length == DIGITS {
            let digits = &mut text[start..start + DIGITS];
            let number = std::str::from_utf8(digits).map(|text| u64::from_str_radix(text, 16));
            if matches!(number, Ok(Ok(number)) if is_kernel_address(number)) {
                digits.fill(b'x');
            }
        }
        start += length.max(1);
    }
}

/// Does the same as [`hide_in_text`] for a string.
pub fn hide_in_string(text: &mut String) {
    let mut bytes = std::mem::take(text).into_bytes();
    hide_in_text(&mut bytes);
    *text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    };
}

/// Overwrites the hexadecimal bytes after the first "Code: " of each line.
fn hide_instructions(text: &mut [u8]) {
    const LABEL: &[u8] = b"Code: ";
    for line in text.split_mut(|byte| *byte == b'\n') {
        let Some(at) = line.windows(LABEL.len()).position(|word| word == LABEL) else {
            continue;
        };
        for word in line[at + LABEL.len()..].split_mut(|byte| b" <>".contains(byte)) {
            if word.len() == 2 && word.iter().all(u8::is_ascii_hexdigit) {
                word.fill(b'x');
            }
        }
    }
}
