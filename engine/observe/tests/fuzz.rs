// SPDX-License-Identifier: Apache-2.0
//! Short run of the fuzz targets; `cargo xtask fuzz` runs them for longer.

#[path = "../../static-keys/fuzz/src/short_run.rs"]
mod short_run;
#[path = "../fuzz/src/targets.rs"]
mod targets;

short_run::short_runs!(targets::TARGETS, 5000; logs);
short_run::short_runs!(targets::TARGETS, 2000; rings);
