// SPDX-License-Identifier: Apache-2.0
//! Tests the API through a real client and a real unix socket, against an in-memory guest.

mod api_service {
    mod boots;
    mod busy;
    mod debug;
    mod discovery;
    mod faults;
    mod fired;
    mod guest;
    mod hold_ids;
    mod holds;
    mod keys;
    mod large;
    mod limits;
    mod patterns;
    mod plans;
    mod reflection;
    mod roles;
    mod several;
    mod stale_plans;
    mod support;
    mod updates;
    mod watch;
    mod watch_guest;
}
