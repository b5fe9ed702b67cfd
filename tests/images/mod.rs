// SPDX-License-Identifier: Apache-2.0
//! Two kernels' images beside each other: which code of one the other has too.

pub mod compare;
pub mod image;

pub use compare::{Changed, Comparison, functions, sections};
pub use image::Image;
