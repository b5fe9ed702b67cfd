// SPDX-License-Identifier: Apache-2.0
//! Tests rollouts with the real service code, with guests in memory behind real sockets.

mod rollouts {
    mod agent;
    mod drift;
    mod faults;
    mod gates;
    mod guarded;
    mod refused;
    mod standing;
    mod storage;
    mod support;
    mod tracepoints;
    mod waves;
    mod webhooks;
}
