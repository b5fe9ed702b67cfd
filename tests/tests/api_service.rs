// SPDX-License-Identifier: Apache-2.0
//! The API, through a real client and a real unix socket, against an in-memory guest.

mod api_service {
    mod boots;
    mod busy;
    mod faults;
    mod guest;
    mod holds;
    mod keys;
    mod limits;
    mod patterns;
    mod reflection;
    mod roles;
    mod several;
    mod support;
    mod updates;
    mod watch;
}
