// SPDX-License-Identifier: Apache-2.0

//! Attacks, grouped by what they abuse.

mod descriptors;
mod devices;
mod directories;
mod kernel;
mod modules;
mod program;
mod races;
mod rig;
mod tables;
mod vcpus;
