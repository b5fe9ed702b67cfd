//! Runnable examples of Patchbay.
#![forbid(unsafe_code)]
