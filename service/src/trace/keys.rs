// SPDX-License-Identifier: Apache-2.0
//! The keys of tracepoints, as tracing uses them.

use std::sync::Arc;

use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_kernel_image::live::TASK_NAME_PROBES;
use patchbay_observe::Bounded;
use patchbay_observe::trace::{Enabled, Event, Source};
use static_keys::{Class, Key, Op};

use super::switch::UNKNOWN_PROBE;
use super::{Boxed, Switch, TracepointFacts, TracepointKeys};
use crate::keys::registry::{Look, Registration, Snapshot};
use crate::keys::{Caller, KeyUpdate, Keys, KeysError, TracepointUpdate, UpdateRequest, Use};

/// The keys of the tracepoints to which the kernel attaches a probe that belongs to no event.
const SHARED: [&str; 3] = ["sched_switch", "sched_wakeup", "sched_wakeup_new"];

/// The maximum number of reads for the names of all events, and of bytes in them. A kernel with the
/// modules of a distribution takes a quarter.
const EVENT_READS: usize = 1 << 17;
const EVENT_BYTES: usize = 16 << 20;
/// The maximum number of probes of all tracepoints together whose names are returned. A kernel that
/// records all of its events has a quarter.
const NAMED_PROBES: usize = 1 << 14;

/// Returns the names of the functions of a tracepoint's probes. Empty if the kernel was not found
/// in memory.
fn names<'a>(registration: &'a Registration, functions: &[u64]) -> Vec<&'a str> {
    let Some(found) = &registration.discovery else {
        return vec![];
    };
    let name = |&function| found.functions.probe(function).unwrap_or(UNKNOWN_PROBE);
    functions.iter().map(name).collect()
}

/// Returns the names if they fit in `room`, which is the number of names that may still be
/// returned. Otherwise none are: the guest chooses the lists, and many tracepoints may have the
/// same one.
fn named(functions: &[&str], room: &mut usize) -> Vec<String> {
    let Some(left) = room.checked_sub(functions.len()) else {
        return vec![];
    };
    *room = left;
    functions.iter().map(|&name| name.to_owned()).collect()
}

/// Returns those of a tracepoint's probes that belong to no event.
fn also_serves(key: &str, functions: &[&str]) -> Vec<&'static str> {
    if !SHARED.contains(&key) {
        return vec![];
    }
    // A guest may repeat them.
    let is_there = |probe: &&str| functions.contains(probe);
    TASK_NAME_PROBES.into_iter().filter(is_there).collect()
}

/// Returns the kernel's tracing and the memory that contains it.
fn traced(keys: &Keys) -> Option<(Source, KernelMemory)> {
    let found = keys.registry().find_log(Look::Known).ok()?;
    let source = found.log.trace.clone().ok()?;
    let memory = KernelMemory::new(keys.ram().ok()?, found.log.page_table);
    Some((source, memory))
}

impl TracepointKeys for Keys {
    fn tracepoints(&self) -> Result<Vec<TracepointFacts>, KeysError> {
        let (registration, _) = self.registry().to_read()?;
        let ram = self.ram()?;
        let memory = registration.memory(ram);
        let mut room = NAMED_PROBES;
        let facts = |key: &Key| {
            // The guest may be changing the data now. A change of the key reads it again.
            let functions = match key.tracepoint {
                0 => None,
                _ => registration.catalog.probe_functions(&memory, key.id).ok(),
            };
            let names = names(&registration, functions.as_deref().unwrap_or_default());
            TracepointFacts {
                key: key.full_name.to_string(),
                enabled: registration
                    .catalog
                    .enabled(&memory, key.id)
                    .is_ok_and(|count| count != 0),
                probes: functions.map(|of| u32::try_from(of.len()).unwrap_or(u32::MAX)),
                switched_by_function: key.switched_by_function,
                also_serves: also_serves(&key.full_name, &names),
                functions: named(&names, &mut room),
            }
        };
        Ok(registration
            .catalog
            .keys()
            .filter(|key| key.class == Class::Tracepoint)
            .map(facts)
            .collect())
    }

    fn probes(&self, keys: &[String]) -> Result<Vec<Option<u32>>, KeysError> {
        let Snapshot { registration, .. } = self.registry().snapshot()?;
        let ram = self.ram()?;
        let memory = registration.memory(ram);
        let probes = |name: &String| {
            let key = registration.catalog.find(name)?;
            let tracepoint = registration.catalog.tracepoint(&memory, key.id);
            Some(tracepoint.ok()??.probes)
        };
        Ok(keys.iter().map(probes).collect())
    }

    fn also_serves(&self, key: &str) -> Vec<&'static str> {
        // A call asks about each of its events, and only these keys can serve other probes.
        if !SHARED.contains(&key) {
            return vec![];
        }
        let (Ok(Snapshot { registration, .. }), Ok(ram)) = (self.registry().known(), self.ram())
        else {
            return vec![];
        };
        let memory = registration.memory(ram);
        let found = registration.catalog.find(key);
        let functions = found.map(|found| registration.catalog.probe_functions(&memory, found.id));
        let functions = functions.and_then(Result::ok).unwrap_or_default();
        also_serves(key, &names(&registration, &functions))
    }

    fn events(&self) -> Vec<String> {
        let Some((source, memory)) = traced(self) else {
            return vec![];
        };
        let view = Bounded::new(&memory, EVENT_READS, EVENT_BYTES);
        let events = Event::all(&view, &source).unwrap_or_default().into_iter();
        events
            .map(|event| format!("{}:{}", event.system, event.name))
            .collect()
    }

    fn enabled_in(&self) -> Enabled {
        let found = traced(self).and_then(|(source, memory)| source.enabled(&memory));
        found.unwrap_or_default()
    }

    fn holders(&self, keys: &[String]) -> Result<Vec<Vec<Arc<str>>>, KeysError> {
        let Snapshot { registration, .. } = self.registry().known()?;
        let holders = |name: &String| self.holders(&registration, name);
        Ok(keys.iter().map(holders).collect())
    }

    fn held_by(&self, client: &str) -> Result<Vec<String>, KeysError> {
        let Snapshot { registration, .. } = self.registry().known()?;
        let held = self.held_keys(client).into_iter();
        let is_tracepoint = |name: &Arc<str>| {
            let key = registration.catalog.find(name);
            key.is_some_and(|key| key.class == Class::Tracepoint)
        };
        Ok(held
            .filter(is_tracepoint)
            .map(|name| name.to_string())
            .collect())
    }

    fn permit(&self, caller: &Caller, keys: &[String], how: Use) -> Result<(), KeysError> {
        let keys = || keys.iter().map(String::as_str).collect();
        self.permit(caller, keys, how)
    }

    fn boot(&self) -> Option<u64> {
        self.registry().boot()
    }

    fn switch(
        &self,
        switch: Switch,
    ) -> Boxed<'_, Result<Option<crate::keys::FlipReport>, KeysError>> {
        let op = match switch.update {
            TracepointUpdate::Fire | TracepointUpdate::HandOver => Op::Enable,
            TracepointUpdate::Park | TracepointUpdate::Leave | TracepointUpdate::Silence => {
                Op::Disable
            }
        };
        let update = |name: String| KeyUpdate::new(name, op);
        let updates = switch.keys.into_iter().map(update).collect();
        let request = UpdateRequest {
            validate_only: switch.validate_only,
            tracepoints: Some(switch.update),
            ttl: switch.ttl,
            summary_only: true,
            reason: switch.reason.to_owned(),
            ..UpdateRequest::new(updates, switch.holder, switch.stop_timeout, switch.deadline)
        };
        Box::pin(async move { Ok(self.update(request).await?.report) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tracepoints_together_have_so_many_names() {
        let (mut room, list) = (NAMED_PROBES, ["probe"; 256]);
        let lists = (0..1000).map(|_| named(&list, &mut room).len());
        assert_eq!(lists.sum::<usize>(), NAMED_PROBES);
        let mut room = 3;
        let mut count = |of: usize| named(&list[..of], &mut room).len();
        // A list is never returned in part, and a later one may fit.
        assert_eq!([2, 2, 1, 1, 0].map(&mut count), [2, 0, 1, 0, 0]);
    }
}
