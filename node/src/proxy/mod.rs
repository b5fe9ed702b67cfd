// SPDX-License-Identifier: Apache-2.0
//! wip
mod frame;
mod status;
