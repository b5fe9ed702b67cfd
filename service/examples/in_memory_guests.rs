// SPDX-License-Identifier: Apache-2.0
//! Serves guests in memory on one socket, for tests of clients in other languages.
//!
//! `in_memory_guests SOCKET NAME...` prints "listening" when the socket exists, and ends when its
//! standard input ends. The lines "busy NAME" and "idle NAME" close and open a gate of that guest.
//! The answer to each is "done".

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use patchbay_guest::testing::{Gate, InMemoryGuest, TestKey};
use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServedGuest};
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::trace::Tracing;

/// `system_state` of a kernel that runs, and of one that does not.
const RUNNING: u64 = 2;
const REBOOTING: u64 = 5;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut words = std::env::args().skip(1);
    let socket = words
        .next()
        .ok_or("usage: in_memory_guests SOCKET NAME...")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let _context = runtime.enter();
    let (guests, mut machines) = (Guests::default(), HashMap::new());
    for name in words {
        let (machine, served) = boot(&name)?;
        guests
            .add(served)
            .map_err(|_| format!("two guests are named {name}"))?;
        machines.insert(name, machine);
    }
    let endpoint = Endpoint::new(ApiSocket::bind(Path::new(&socket))?, guests);
    runtime.spawn(async move { endpoint.serve(std::future::pending()).await });
    println!("listening");
    for line in std::io::stdin().lines() {
        let line = line?;
        let command = line.split_once(' ').unwrap_or_default();
        let (value, name) = match command {
            ("busy", name) => (REBOOTING, name),
            ("idle", name) => (RUNNING, name),
            _ => return Err(format!("unknown command {line:?}: busy NAME or idle NAME").into()),
        };
        let machine = machines
            .get(name)
            .ok_or(format!("no guest is named {name}"))?;
        machine.set_gate(Gate::SystemState, value);
        println!("done");
    }
    runtime.shutdown_background();
    Ok(())
}

fn boot(name: &str) -> Result<(Arc<InMemoryGuest>, ServedGuest), Error> {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::named(Arc::clone(&registry), name);
    guest.run(&[
        TestKey::new("alpha", 1),
        TestKey::new("beta", 3),
        TestKey::guarded("guarded"),
        TestKey::tracepoint("sched_switch", true),
    ]);
    let (keys, _executor) = Keys::start(Arc::clone(&guest), registry, KeysConfig::default())?;
    Ok((guest, ServedGuest::start(keys, Tracing::default())?))
}
