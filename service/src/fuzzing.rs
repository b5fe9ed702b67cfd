// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets of the service: functions of the fuzzer's bytes, each of which panics if an
//! invariant is broken. libFuzzer calls them from `service/fuzz`. A test calls them over the corpus
//! and a few thousand mutations.

use std::sync::Arc;

use patchbay_guest::abi;
use patchbay_guest::fuzzing::{Numbers, Target};
use patchbay_memory::paging::{Levels, PageTable, WalkError};
use static_keys::{GuestMemory, Op, Options, Plan, Update};
use zerocopy::FromBytes;

use crate::keys::Registry;
use crate::trace::decode::{Format, Page, Record};
use patchbay_guest::testing::{InMemoryGuest, Memory, TestKey};

pub use crate::trace::fuzzing::agent;

/// Name and entry point of each fuzz target.
pub const TARGETS: &[(&str, Target)] = &[
    ("descriptor", descriptor),
    ("gates", gates),
    ("module_events", module_events),
    ("page_tables", page_tables),
    ("trace_events", trace_events),
    ("agent", agent),
];

fn guest() -> (Arc<InMemoryGuest>, Arc<Registry>) {
    let registry = Arc::new(Registry::default());
    let keys = [
        TestKey::new("alpha", 2),
        TestKey::new("beta", 1),
        TestKey::tracepoint("event", true),
        TestKey {
            initially_true: true,
            count: 1,
            ..TestKey::new("likely", 2)
        },
        TestKey {
            sealed: true,
            ..TestKey::guarded("sealed")
        },
    ];
    (InMemoryGuest::boot(registry.clone(), &keys), registry)
}

/// Reads and changes the keys of the current registration.
fn use_it(guest: &InMemoryGuest, registry: &Registry) {
    use patchbay_guest::guest::Guest;
    let description = registry.describe();
    let texts = [&description.release, &description.build_id];
    for text in texts.into_iter().chain(&description.error) {
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
    let Ok(snapshot) = registry.snapshot() else {
        return;
    };
    let registration = &snapshot.registration;
    let memory = registration.memory(guest.ram());
    let catalog = &registration.catalog;
    let keys: Vec<_> = catalog.keys().take(64).collect();
    for key in &keys {
        assert!(registration.has(registration.instance(key)));
        assert!(registration.find(&key.full_name).is_ok());
        let _ = registration.initially_true(guest.ram(), key);
        let _ = catalog.site_states(&memory, key.id);
        let _ = catalog.tracepoint(&memory, key.id);
    }
    let options = Options {
        allow_guarded: true,
    };
    for op in [Op::Inc, Op::Dec] {
        let updates: Vec<Update> = keys.iter().map(|key| Update { key: key.id, op }).collect();
        for updates in std::iter::once(&updates[..]).chain(updates.chunks(1)) {
            let Ok(plan) = Plan::new(catalog, &memory, updates, &options) else {
                continue;
            };
            if plan.verify(&memory, &[0]).is_ok() && plan.needs_pause() {
                let _ = plan.commit(&memory);
            }
        }
    }
}

/// Registers with a page whose first bytes are the fuzzer's. The rest is the page of a kernel that
/// follows the rules.
pub fn descriptor(data: &[u8]) {
    let (guest, registry) = guest();
    let page = &data[..data.len().min(abi::REQUEST_PAGE_SIZE)];
    let status = guest.request(abi::OP_REGISTER, page);
    let registered = registry.snapshot().is_ok();
    assert_eq!(status == 0, registered, "{:?}", registry.describe().error);
    use_it(&guest, &registry);
}

/// Registers with the fuzzer's bytes over the list of gates and the offsets of CPUs of a kernel
/// that follows the rules.
pub fn gates(data: &[u8]) {
    let mut numbers = Numbers(data);
    let (guest, registry) = guest();
    let mut page = guest.last_request();
    let Ok((descriptor, _)) = abi::Descriptor::mut_from_prefix(&mut page) else {
        return;
    };
    descriptor.gate_count = u32::from(numbers.u8());
    descriptor.gate_size = 64 + u32::from(numbers.u8()) % 72;
    descriptor.cpu_count = u32::from(numbers.u8());
    // Offsets beyond the list point to zeroes or to other parts of the image.
    descriptor.cpu_offsets = descriptor.gates + u64::from(numbers.u16());
    let list = numbers.take(0x1000);
    guest.write(descriptor.gates, list);
    let status = guest.request(abi::OP_REGISTER, &page);
    let registered = registry.snapshot().is_ok();
    assert_eq!(status == 0, registered, "{:?}", registry.describe().error);
    use_it(&guest, &registry);
}

/// Sends requests of every kind. Each is a valid request with some bytes changed.
pub fn module_events(data: &[u8]) {
    let mut numbers = Numbers(data);
    let (guest, registry) = guest();
    let register = guest.last_request();
    let requests = ["one", "two"].map(|name| {
        assert_eq!(guest.add_module(name, &[TestKey::new("key", 1)]), 0);
        guest.last_request()
    });
    for _ in 0..24 {
        if !numbers.more() {
            break;
        }
        let event = numbers.u8();
        let op = match event % 8 {
            0..3 => abi::OP_MODULE_ADD,
            3..5 => abi::OP_MODULE_DEL,
            5 => abi::OP_UNREGISTER,
            6 => abi::OP_REGISTER,
            _ => numbers.u32(),
        };
        let mut page = match op {
            abi::OP_REGISTER => register.clone(),
            _ => requests[usize::from(event >> 7)].clone(),
        };
        page[6] = u8::try_from(op & 0xff).unwrap_or(0);
        if op == abi::OP_UNREGISTER {
            page[8] = 24;
        }
        for _ in 0..(event >> 3) % 8 {
            let at = usize::from(numbers.u16()) % page.len();
            page[at] = numbers.u8();
        }
        let before = (registry.version(), registry.describe());
        let status = guest.request(op, &page);
        assert!(status == 0 || status == -libc::EINVAL);
        let (version, known) = (registry.version(), registry.describe());
        // A refused registration ends the earlier one too. A refused module is remembered, but
        // changes neither keys nor modules.
        let remembered = op == abi::OP_MODULE_ADD
            && (known.keys, known.modules) == (before.1.keys, before.1.modules);
        assert!(status == 0 || version == before.0 || op == abi::OP_REGISTER || remembered);
    }
    use_it(&guest, &registry);
}

/// Walks page tables of any shape for an address and a range.
pub fn page_tables(data: &[u8]) {
    let mut numbers = Numbers(data);
    let shape = numbers.u8();
    let levels = Levels::of(shape & 1 != 0);
    let (mut root, mut address) = (numbers.u64(), numbers.u64());
    let length = usize::from(numbers.u16());
    if shape & 2 == 0 {
        root &= 0xf000;
    }
    if shape & 4 == 0 {
        // The address is canonical and has small indices.
        address &= 0x0000_7fff_c0e0_7fff;
    }
    let ram = Memory::ram(2 << 20);
    for _ in 0..64 {
        if !numbers.more() {
            break;
        }
        let at = u64::from(numbers.u16() & 0x1fff) * 8;
        let value = match shape & 8 {
            0 => u64::from(numbers.u32()) & 0x1f_ffff,
            _ => numbers.u64(),
        };
        ram.write(at, &value.to_le_bytes()).expect("inside");
    }
    let table = PageTable { root, levels };
    let walk = |address| table.translate(&*ram, address);
    if let Ok(mapping) = walk(address) {
        assert_eq!((mapping.physical ^ address) & 0xfff, 0);
        let sizes = [12, 21, 30].map(|bits| 1_u64 << bits);
        assert!(
            sizes
                .iter()
                .any(|size| mapping.remaining == size - (address & (size - 1))
                    && (mapping.physical ^ address) & (size - 1) == 0)
        );
    }
    let gibibyte = address & !((1 << 30) - 1);
    if let Some(runs) = table.runs_of_gibibyte(&*ram, gibibyte) {
        let mut end = gibibyte;
        for run in &runs {
            assert!(end <= run.range.start && run.range.start < run.range.end);
            if let Ok(mapping) = walk(run.range.start) {
                assert_eq!(mapping.physical, run.physical);
            }
            end = run.range.end;
        }
    }
    let mut done = 0;
    let result = table.for_each_piece(&*ram, address, length, |physical, here| {
        assert!(here > 0);
        assert_eq!(
            Some(physical),
            walk(address + done as u64).ok().map(|it| it.physical)
        );
        done += here;
        Ok::<(), WalkError>(())
    });
    match result {
        Ok(()) => assert_eq!(done, length),
        Err(_) => assert!(done < length),
    }
    let memory = patchbay_guest::kernel_memory::KernelMemory::new(&ram, table);
    let mut bytes = vec![0; length];
    let read = memory.read_gva(address, &mut bytes).is_ok();
    let short = length.clamp(1, static_keys::LOCATE_MAX);
    if let Ok(place) = memory.locate(address, short) {
        let mut found = vec![0; short];
        assert!(memory.read(place, &mut found).is_ok());
        assert!(!read || length < short || found == bytes[..short]);
    }
}

/// Parses the format of an event and decodes a page of such events.
pub fn trace_events(data: &[u8]) {
    let text = data.split(|byte| *byte == 0).next().unwrap_or_default();
    let page = data.get(text.len() + 1..).unwrap_or_default();
    let format = std::str::from_utf8(text)
        .ok()
        .and_then(|text| Format::parse(text).ok());
    let Ok(page) = Page::parse(page) else {
        return;
    };
    let mut events = 0;
    for event in page.events() {
        events += 1;
        assert!(events <= 0x1_0000, "more events than bytes");
        let Ok((_, payload)) = event else { continue };
        if let (Some(record), Some(format)) = (Record::parse(payload), &format) {
            let values = record.values(format);
            assert!(values.len() <= payload.len(), "more values than bytes");
        }
    }
}

#[cfg(test)]
#[path = "../../engine/static-keys/fuzz/src/short_run.rs"]
mod short_run;

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of mutations of each target's corpus.
    const CASES: u32 = 1500;

    fn run(name: &str) {
        short_run::short_run(TARGETS, name, CASES);
    }

    #[test]
    fn descriptor() {
        run("descriptor");
    }

    #[test]
    fn gates() {
        run("gates");
    }

    #[test]
    fn module_events() {
        run("module_events");
    }

    #[test]
    fn page_tables() {
        run("page_tables");
    }

    #[test]
    fn trace_events() {
        run("trace_events");
    }

    #[test]
    fn agent() {
        run("agent");
    }
}
