// SPDX-License-Identifier: Apache-2.0
//! Injects faults with real processes: etcd, replicas of the controller, `patchbayd`, and monitors
//! with guests in memory. A monitor and a `patchbayd` are this program, started with an environment
//! that selects one of its tests.

mod processes {
    mod access;
    mod alone;
    mod bad_input;
    mod children;
    mod etcd;
    mod faults;
    mod fleet;
    mod gate_file;
    mod host_kills;
    mod killing;
    mod kills;
    mod network;
    mod outages;
    mod partitions;
    mod people;
    mod persons;
    mod proxy;
    mod records;
    mod registry;
    mod samples;
    mod setup;
    mod stalls;
    mod stopped;
    mod storage;
}
