// SPDX-License-Identifier: Apache-2.0
//! Reads lists that come in pages. The server decides where a list ends, so each list that is read
//! in full has a budget.

use prost::Message;
use tonic::Status;

/// The maximum number of pages of one list. A page has at most 1,000 items, unless the request
/// gives another size, and 3 MiB.
const MAX_PAGES: usize = 1000;
/// The maximum number of bytes of one list. 65,536 keys or 100,000 lines of dynamic debug take a
/// third of this.
const MAX_BYTES: usize = 64 << 20;
/// The maximum length of a page token, which is a name or a few numbers.
const MAX_TOKEN_BYTES: usize = 4 << 10;

/// The budget of one list.
///
/// ```
/// # use patchbay_proto::{pages::Pages, v1};
/// # fn ask(request: &v1::ListHoldsRequest) -> v1::ListHoldsResponse { Default::default() }
/// # fn main() -> Result<(), tonic::Status> {
/// let (mut request, mut pages) = (v1::ListHoldsRequest::default(), Pages::of("holds"));
/// let mut holds = vec![];
/// loop {
///     let page = ask(&request);
///     let next = pages.next(&page, &page.next_page_token)?;
///     holds.extend(page.holds);
///     match next {
///         Some(token) => request.page_token = token,
///         None => break,
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Pages {
    what: &'static str,
    pages: usize,
    bytes: usize,
    token: String,
}

impl Pages {
    /// Creates the state of a list, before its first page. `what` names the members in errors.
    #[must_use]
    pub fn of(what: &'static str) -> Self {
        Self {
            what,
            pages: 0,
            bytes: 0,
            token: String::new(),
        }
    }

    /// Counts a page against the budget. Returns the token of the next page, or `None` after the
    /// last.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if the list exceeds the budget or repeats a page.
    pub fn next(&mut self, page: &impl Message, token: &str) -> Result<Option<String>, Status> {
        self.pages += 1;
        self.bytes = self.bytes.saturating_add(page.encoded_len());
        if token.is_empty() {
            return Ok(None);
        }
        let what = self.what;
        let (pages, bytes) = (self.pages, self.bytes);
        let why = if token == self.token {
            "its next page repeats the last one".to_owned()
        } else if token.len() > MAX_TOKEN_BYTES {
            format!("the token of its next page has {} bytes", token.len())
        } else if pages >= MAX_PAGES || bytes > MAX_BYTES {
            format!(
                "it has not ended after {pages} pages and {bytes} bytes; the maximum is {MAX_PAGES} pages or {MAX_BYTES} bytes"
            )
        } else {
            token.clone_into(&mut self.token);
            return Ok(Some(self.token.clone()));
        };
        Err(Status::resource_exhausted(format!(
            "the list of {what} was cut off: {why}; give narrower patterns, or see the monitor's log"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1;

    fn page(bytes: usize) -> v1::ListStaticKeysResponse {
        v1::ListStaticKeysResponse {
            incarnation: "x".repeat(bytes),
            ..Default::default()
        }
    }

    /// Returns the number of pages that are read of a list that never ends.
    fn read(page: &v1::ListStaticKeysResponse, token: impl Fn(usize) -> String) -> usize {
        let mut pages = Pages::of("holds");
        let read = (1..).take_while(|number| {
            let next = pages.next(page, &token(*number));
            next.is_ok_and(|token| token.is_some())
        });
        read.count()
    }

    #[test]
    fn a_list_ends_with_its_last_page() {
        let mut pages = Pages::of("holds");
        let next = pages.next(&page(10), "a").expect("within the budget");
        assert_eq!(next.as_deref(), Some("a"));
        assert_eq!(pages.next(&page(10), "").expect("the last"), None);
    }

    #[test]
    fn a_list_that_never_ends_is_given_up() {
        assert_eq!(read(&page(0), |number| number.to_string()), MAX_PAGES - 1);
        assert_eq!(read(&page(3 << 20), |number| number.to_string()), 21);
        assert_eq!(read(&page(0), |_| "same".to_owned()), 1);
        assert_eq!(read(&page(0), |_| "x".repeat(5000)), 0);
    }
}
