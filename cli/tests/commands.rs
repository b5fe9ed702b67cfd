// SPDX-License-Identifier: Apache-2.0
//! Tests the `patchbay` program over unix sockets, against the real service with an in-memory guest
//! and against a fake service that follows a script.

mod commands {
    mod apply;
    mod autopsies;
    mod ci;
    mod ci_bad_input;
    mod ci_compare;
    mod ci_early_end;
    mod ci_files;
    mod ci_fresh;
    mod ci_guest;
    mod ci_pairs;
    mod ci_signals;
    mod claims;
    mod completion;
    mod daemon;
    mod debug;
    mod fake;
    mod fleet;
    mod guests;
    mod holds;
    mod host;
    mod keys;
    mod lab;
    mod log;
    mod plans;
    mod rollout_status;
    mod rollouts;
    mod run;
    mod several;
    mod snapshots;
    mod spelling;
    mod trace;
    mod traceparent;
    mod usage;
    mod viewers;
    mod watches;
}
