// SPDX-License-Identifier: Apache-2.0
//! Compares the images of two kernels.

pub mod compare;
pub mod image;

pub use compare::{Changed, Comparison, functions, sections};
pub use image::Image;
