// SPDX-License-Identifier: Apache-2.0
//! The events of a page of a ring, as memory holds it and `trace_pipe_raw` delivers it.
//!
//! Layout: `struct buffer_data_page` and `struct ring_buffer_event` in
//! `include/linux/ring_buffer.h` and `kernel/trace/ring_buffer.c`. The guest documents it in
//! `events/header_page` and `events/header_event`.

use crate::number;

/// Size of a page header: the time stamp, then the length of the data with two flags.
pub(super) const HEADER_BYTES: usize = 16;
/// `RB_MISSED_EVENTS`: events were lost before this page.
const MISSED: u64 = 1 << 31;
/// `RB_MISSED_STORED`: the number of lost events follows the data.
const MISSED_STORED: u64 = 1 << 30;
pub(super) const LENGTH_MASK: u64 = MISSED_STORED - 1;

/// `enum ring_buffer_type`: type lengths below this one are data events.
const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;
/// Number of bits of the time delta in an event's header.
const TIME_SHIFT: u32 = 27;
/// An absolute time stamp has 59 bits. Its upper bits are those of the previous time.
const ABSOLUTE_BITS: u32 = 59;
const ALIGNMENT: usize = 4;

/// The reason why the rest of a page cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// The page is shorter than its header or than its length field.
    Short,
    /// An event ends beyond the data.
    EventTooLong,
}

impl std::error::Error for PageError {}

impl std::fmt::Display for PageError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Short => "a page ends before its data",
            Self::EventTooLong => "an event reaches beyond its page",
        })
    }
}

/// One page.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    time: u64,
    missed: u64,
    data: &'a [u8],
}

impl<'a> Page<'a> {
    /// Checks the header of a page.
    ///
    /// # Errors
    /// [`PageError::Short`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PageError> {
        let time = number(bytes, 0, 8).ok_or(PageError::Short)?;
        let commit = number(bytes, 8, 8).ok_or(PageError::Short)?;
        let length = usize::try_from(commit & LENGTH_MASK).map_err(|_| PageError::Short)?;
        let end = HEADER_BYTES.checked_add(length).ok_or(PageError::Short)?;
        let data = bytes.get(HEADER_BYTES..end).ok_or(PageError::Short)?;
        let missed = match (commit & MISSED != 0, commit & MISSED_STORED != 0) {
            (_, true) => {
                let rest = bytes.get(end..).ok_or(PageError::Short)?;
                number(rest, 0, 8).ok_or(PageError::Short)?
            }
            // At least one event was lost. The page had no room for the number.
            (true, false) => 1,
            (false, false) => 0,
        };
        Ok(Self { time, missed, data })
    }

    /// Returns the number of events lost before this page, as reported by the guest.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// Returns the events with their times, in order. The last item is an error if the rest is
    /// malformed.
    #[must_use]
    pub fn events(self) -> Events<'a> {
        Events {
            time: self.time,
            rest: self.data,
        }
    }
}

/// Iterator of [`Page::events`].
#[derive(Clone, Debug)]
pub struct Events<'a> {
    time: u64,
    rest: &'a [u8],
}

impl<'a> Events<'a> {
    /// Returns the events in `data` after the time `time`.
    pub(super) fn new(time: u64, data: &'a [u8]) -> Self {
        Self { time, rest: data }
    }

    /// Returns the time after the last item, which need not be an event.
    pub(super) fn time(&self) -> u64 {
        self.time
    }

    /// Returns the number of bytes that are left.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], PageError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(PageError::EventTooLong)?;
        self.rest = rest;
        Ok(taken)
    }

    fn take_u32(&mut self) -> Result<u32, PageError> {
        let word = self.take(4)?.try_into();
        let word = word.map_err(|_| PageError::EventTooLong)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Returns the next event with its time, or `None` at the end of the data.
    fn step(&mut self) -> Result<Option<(u64, &'a [u8])>, PageError> {
        while !self.rest.is_empty() {
            let header = self.take_u32()?;
            let (kind, delta) = (header & 0x1f, u64::from(header >> 5));
            match kind {
                // The rest of the page is unused.
                PADDING if delta == 0 => self.rest = &[],
                PADDING => {
                    let length = self.take_u32()?;
                    self.take(
                        bytes_of(length)?
                            .checked_sub(4)
                            .ok_or(PageError::EventTooLong)?,
                    )?;
                    // This is a discarded event. A delta of 1 only marks that it is not the end.
                    if delta != 1 {
                        self.time = self.time.wrapping_add(delta);
                    }
                }
                TIME_EXTEND => {
                    let high = u64::from(self.take_u32()?);
                    self.time = self.time.wrapping_add((high << TIME_SHIFT) + delta);
                }
                TIME_STAMP => {
                    let high = u64::from(self.take_u32()?);
                    self.time = absolute((high << TIME_SHIFT) + delta, self.time);
                }
                0 => {
                    self.time = self.time.wrapping_add(delta);
                    let length = bytes_of(self.take_u32()?)?;
                    let payload =
                        self.take(length.checked_sub(4).ok_or(PageError::EventTooLong)?)?;
                    let aligned = length.next_multiple_of(ALIGNMENT);
                    self.take(aligned - length)?;
                    return Ok(Some((self.time, payload)));
                }
                words => {
                    self.time = self.time.wrapping_add(delta);
                    return Ok(Some((self.time, self.take(bytes_of(words)? * ALIGNMENT)?)));
                }
            }
        }
        Ok(None)
    }
}

impl<'a> Iterator for Events<'a> {
    type Item = Result<(u64, &'a [u8]), PageError>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step();
        if step.is_err() {
            self.rest = &[];
        }
        step.transpose()
    }
}

/// Returns an event's length in bytes. The maximum prevents a length chosen by the guest from
/// overflowing the arithmetic.
fn bytes_of(length: u32) -> Result<usize, PageError> {
    usize::try_from(length)
        .ok()
        .filter(|&length| length <= 1 << 20)
        .ok_or(PageError::EventTooLong)
}

/// Completes an absolute time stamp, like `rb_fix_abs_ts()` in `kernel/trace/ring_buffer.c`.
fn absolute(time: u64, before: u64) -> u64 {
    let high = before >> ABSOLUTE_BITS << ABSOLUTE_BITS;
    let time = time | high;
    if high != 0 && time < before {
        time.wrapping_add(1 << ABSOLUTE_BITS)
    } else {
        time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(commit: u64, data: &[u8]) -> Vec<u8> {
        let mut page = 1000u64.to_le_bytes().to_vec();
        page.extend_from_slice(&commit.to_le_bytes());
        page.extend_from_slice(data);
        page
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn header(kind: u32, delta: u32) -> u32 {
        delta << 5 | kind
    }

    fn events(data: &[u8]) -> Vec<Result<(u64, Vec<u8>), PageError>> {
        let page = page(data.len() as u64, data);
        let page = Page::parse(&page).expect("a header");
        page.events()
            .map(|event| event.map(|(time, payload)| (time, payload.to_vec())))
            .collect()
    }

    #[test]
    fn short_long_extended_and_absolute_events() {
        let data = words(&[
            header(1, 5),
            0xaaaa,
            header(0, 1),
            10,
            0xbbbb,
            0xcccc,
            header(TIME_EXTEND, 3),
            1,
            header(1, 0),
            0xdddd,
            header(PADDING, 7),
            8,
            0,
            header(PADDING, 1),
            4,
            header(1, 1),
            0xeeee,
            header(TIME_STAMP, 9),
            2,
            header(1, 1),
            0xffff,
            header(PADDING, 0),
            0xffff_ffff,
        ]);
        let extended = 1006 + (1 << 27) + 3;
        let expected = [
            (1005, words(&[0xaaaa])),
            (1006, words(&[0xbbbb, 0xcccc])[..6].to_vec()),
            (extended, words(&[0xdddd])),
            (extended + 8, words(&[0xeeee])),
            ((2 << 27) + 10, words(&[0xffff])),
        ];
        assert_eq!(events(&data), expected.map(Ok));
    }

    #[test]
    fn lengths_that_lie_are_errors_and_end_the_page() {
        for data in [
            words(&[header(28, 1), 0]),
            words(&[header(0, 1), 3]),
            words(&[header(0, 1), u32::MAX, 0]),
            words(&[header(0, 1)]),
            words(&[header(PADDING, 2), 3]),
            words(&[header(PADDING, 2), u32::MAX]),
            words(&[header(TIME_EXTEND, 2)]),
            vec![1, 2, 3],
        ] {
            assert_eq!(events(&data), [Err(PageError::EventTooLong)], "{data:?}");
        }
        assert_eq!(Page::parse(&page(9, &[0; 8])).err(), Some(PageError::Short));
        assert_eq!(Page::parse(&[0; 15]).err(), Some(PageError::Short));
        assert_eq!(
            Page::parse(&page(8 | MISSED_STORED, &[0; 8])).err(),
            Some(PageError::Short)
        );
    }

    #[test]
    fn lost_events_are_told() {
        assert_eq!(Page::parse(&page(0, &[])).expect("a page").missed(), 0);
        assert_eq!(Page::parse(&page(MISSED, &[])).expect("a page").missed(), 1);
        let stored = page(MISSED | MISSED_STORED, &77u64.to_le_bytes());
        assert_eq!(Page::parse(&stored).expect("a page").missed(), 77);
    }

    /// Pseudorandom input must neither panic nor loop forever.
    #[test]
    fn garbage_ends() {
        let mut state = 1u64;
        for _ in 0..2000 {
            let data: Vec<u8> = (0..256)
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    state.to_be_bytes()[0]
                })
                .collect();
            assert!(events(&data).len() <= 64);
        }
    }
}
