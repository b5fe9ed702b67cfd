// SPDX-License-Identifier: Apache-2.0

//! Makes many transactions on the keys of a guest whose vCPUs execute only its sites, with the real
//! executor and the real pause. Each transaction must succeed, and no branch may be torn.
//!
//! `PATCHBAY_STORM_FLIPS` sets the number of transactions; the default is 20,000.
//!
//! The guest's code, one block of 64 bytes per site:
//!
//! ```text
//!  +0x3d          site: nopl 0(%rax,%rax,1)  |  jmp taken    across a cache line
//!  +0x42                incq NOT_TAKEN(%rdi) ; jmp next site
//!  +0x444d        taken: incq TAKEN(%rdi) ; jmp next site
//!  +0x4461        torn: incq TORN(%rdi) ; jmp next site
//! ```
//!
//! A mixture of the encodings jumps to `torn` or is undefined, as in `bare_metal`. All other bytes
//! are instructions that end the guest.

mod bare_metal;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bare_metal::{created, load, wait_until, watchdog};
use patchbay_guest::abi;
use patchbay_guest::requests::GuestRequests;
use patchbay_guest::testing::structures;
use patchbay_service::keys::{KeyUpdate, Keys, KeysConfig, KeysError, Registry, UpdateRequest};
use patchbay_vmm::config::{Payload, RawCode, RawEntry, VmConfig};
use patchbay_vmm::guest::{FilteredThreads, VmGuest};
use patchbay_vmm::memory::GuestRam;
use patchbay_vmm::seccomp::{self, SeccompLevel};
use patchbay_vmm::vm::{ExitReason, Vm};
use static_keys::Op;
use zerocopy::{FromZeros, IntoBytes};

/// Default number of transactions.
const FLIPS: u32 = 20_000;
/// Number of transactions between two checks that every vCPU takes each branch in the expected
/// direction.
const LOOK_EVERY: u32 = 500;

/// Offset of the kernel's virtual addresses from the physical ones.
const KERNEL: u64 = 0xffff_ffff_8000_0000;
/// Address of the top-level page table that the monitor sets up for machine code.
const PAGE_TABLE: u64 = 0x9000;
/// Address of the page directory that maps the first gigabyte.
const FIRST_GIGABYTE: u64 = PAGE_TABLE + 0x2000;

// Physical addresses.
const CODE: u64 = 0x10_0000;
const CODE_BYTES: usize = 0x6000;
const COUNTERS: u64 = 0x18_0000;
const KEYS: u64 = 0x20_0000;
const JUMP_TABLE: u64 = 0x20_1000;
const GATE_WORDS: u64 = 0x20_2000;
const GATES: u64 = 0x20_2800;
const DIRECTORY: u64 = 0x20_3000;
const NAMES: u64 = 0x20_4000;
const REQUEST: u64 = 0x20_5000;
const KERNEL_POINTERS: u64 = 0x20_6000;

/// Number of sites of each key, and whether the last of them is likely.
const SITES_OF: [(u64, bool); 8] = [
    (1, false),
    (1, false),
    (1, true),
    (1, true),
    (2, false),
    (2, true),
    (3, true),
    (5, true),
];
const SITES: u64 = 16;

const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
const JMP: [u8; 5] = [0xe9, 0x0b, 0x44, 0x00, 0x00];
const TAKEN_DISTANCE: u64 = 5 + 0x440b;
const TORN_DISTANCE: u64 = 5 + 0x441f;

/// Offset of a counter in a vCPU's page of counters, after the two counters per site.
const TORN: u64 = 0x400;
const ROUNDS: u64 = 0x408;

fn site(index: u64) -> u64 {
    CODE + 64 * index + 0x3d
}

fn code() -> Vec<u8> {
    // hlt, which user mode may not execute.
    let mut image = vec![0xf4; CODE_BYTES];
    let mut put = |address: u64, bytes: &[u8]| {
        let at = usize::try_from(address - CODE).unwrap();
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    // incq counter(%rdi); jmp to
    let mut count = |address: u64, counter: u64, to: u64| {
        let counter = u32::try_from(counter).unwrap();
        put(address, &[0x48, 0xff, 0x87]);
        put(address + 3, &counter.to_le_bytes());
        let distance = i32::try_from(to.cast_signed() - (address + 12).cast_signed()).unwrap();
        put(address + 7, &[0xe9]);
        put(address + 8, &distance.to_le_bytes());
    };
    for index in 0..SITES {
        let next = site(index + 1);
        count(site(index) + 5, 16 * index, next);
        count(site(index) + TAKEN_DISTANCE, 16 * index + 8, next);
        count(site(index) + TORN_DISTANCE, TORN, next);
    }
    count(site(SITES), ROUNDS, site(0));
    for index in 0..SITES {
        put(site(index), &NOP);
    }
    image
}

/// The expected state of a key.
struct Model {
    name: String,
    count: i32,
    /// Index of each site, and whether it is likely.
    sites: Vec<(u64, bool)>,
}

impl Model {
    fn jumps(&self, likely: bool) -> bool {
        (self.count > 0) != likely
    }
}

fn models() -> Vec<Model> {
    let mut next = 0;
    let key = |(index, (sites, last_likely)): (usize, (u64, bool))| {
        let sites = (0..sites).map(|site| {
            next += 1;
            (next - 1, last_likely && site + 1 == sites)
        });
        Model {
            name: format!("key_{index}"),
            count: 0,
            sites: sites.collect(),
        }
    };
    let models = SITES_OF.into_iter().enumerate().map(key).collect();
    assert_eq!(next, SITES);
    models
}

/// Writes the kernel's tables and the request that registers them to memory.
fn lay_out(ram: &GuestRam, models: &[Model]) {
    let write = |address: u64, bytes: &[u8]| ram.write(address, bytes).unwrap();
    write(
        KERNEL_POINTERS + 8 * 510,
        &(FIRST_GIGABYTE | 7).to_le_bytes(),
    );
    write(PAGE_TABLE + 8 * 511, &(KERNEL_POINTERS | 7).to_le_bytes());
    // The system state is SYSTEM_RUNNING, and all other gates are open.
    write(GATE_WORDS, &2_u64.to_le_bytes());
    write(GATES, structures::gates(KERNEL + GATE_WORDS).as_bytes());
    let mut entry = JUMP_TABLE;
    let mut names = vec![];
    for (index, model) in (0..).zip(models) {
        let key = KEYS + 16 * index;
        write(key + 8, &(KERNEL + entry).to_le_bytes());
        for &(index, likely) in &model.sites {
            let near = |to: u64, from: u64| i32::try_from(to.cast_signed() - from.cast_signed());
            let target = site(index) + TAKEN_DISTANCE;
            let key = (key | u64::from(likely)).wrapping_sub(entry + 8);
            write(entry, &near(site(index), entry).unwrap().to_le_bytes());
            write(entry + 4, &near(target, entry + 4).unwrap().to_le_bytes());
            write(entry + 8, &key.to_le_bytes());
            write(site(index), if model.jumps(likely) { &JMP } else { &NOP });
            entry += 16;
        }
        let named = abi::Key {
            address: KERNEL + key,
            name: u32::try_from(names.len()).unwrap(),
            class: abi::KEY_REF,
            flags: 0,
            tracepoint: 0,
            module: 0,
        };
        write(
            DIRECTORY + index * size_of::<abi::Key>() as u64,
            named.as_bytes(),
        );
        names.extend_from_slice(model.name.as_bytes());
        names.push(0);
    }
    write(NAMES, &names);

    let range = |start: u64, end: u64| abi::Range {
        start: KERNEL + start,
        end: KERNEL + end,
    };
    let mut descriptor = abi::Descriptor::new_zeroed();
    descriptor.header = abi::Header {
        magic: abi::HEADER_MAGIC,
        abi_version: abi::ABI_VERSION,
        op: u16::try_from(abi::OP_REGISTER).unwrap(),
        size: u32::try_from(size_of::<abi::Descriptor>()).unwrap(),
        status: 0,
        generation: 1,
    };
    structures::describe(&mut descriptor);
    descriptor.boot = 1;
    descriptor.jump_table = range(JUMP_TABLE, entry);
    descriptor.text = range(CODE, CODE + CODE_BYTES as u64);
    descriptor.page_table = PAGE_TABLE;
    descriptor.gates = KERNEL + GATES;
    descriptor.gate_count = 6;
    descriptor.directory = structures::directory(
        KERNEL + DIRECTORY,
        u32::try_from(models.len()).unwrap(),
        KERNEL + NAMES,
        u32::try_from(names.len()).unwrap(),
    );
    write(REQUEST, descriptor.as_bytes());
}

/// Starts a guest whose vCPUs execute its sites in user mode. Returns the guest and its keys.
fn storm_guest(vcpus: u8, models: &[Model]) -> Option<(Arc<Vm>, Keys)> {
    let registry = Arc::new(Registry::default());
    let entries = (0..vcpus).map(|vcpu| {
        Some(RawEntry {
            rip: KERNEL + site(0),
            rsp: 0,
            argument: counters(vcpu),
            user_mode: true,
        })
    });
    let config = VmConfig {
        memory_bytes: 4 << 20,
        vcpus,
        offer_patchbay: false,
        ..VmConfig::new(Payload::Raw(RawCode {
            image: code(),
            address: CODE,
            entries: entries.collect(),
        }))
    };
    let vm = Arc::new(created(config, registry.clone())?);
    lay_out(vm.ram(), models);
    // The threads run under their filters, as in the monitor.
    seccomp::enforce(SeccompLevel::On);
    let guest = Arc::new(VmGuest::new("storm".into(), vm.clone()));
    let config = KeysConfig {
        threads: Arc::new(FilteredThreads),
        ..KeysConfig::default()
    };
    let (keys, _) = Keys::start(guest, registry.clone(), config).unwrap();
    let status = registry.request(abi::OP_REGISTER, REQUEST);
    assert_eq!(status, 0, "{:?}", keys.describe().error);
    vm.start().unwrap();
    for vcpu in 0..vcpus {
        wait_until("every vCPU runs", || counter(&vm, vcpu, ROUNDS) > 0);
    }
    Some((vm, keys))
}

fn counters(vcpu: u8) -> u64 {
    COUNTERS + 4096 * u64::from(vcpu)
}

fn counter(vm: &Vm, vcpu: u8, offset: u64) -> u64 {
    load(vm.ram(), counters(vcpu) + offset)
}

/// Returns two counters per site: not taken and taken.
fn passed(vm: &Vm, vcpu: u8) -> Vec<[u64; 2]> {
    let counts = (0..SITES).map(|site| [16 * site, 16 * site + 8].map(|at| counter(vm, vcpu, at)));
    counts.collect()
}

/// Asserts that every site and every count in memory matches the model.
fn assert_memory(vm: &Vm, models: &[Model]) {
    for (index, model) in (0..).zip(models) {
        let mut count = [0; 4];
        vm.ram().read(KEYS + 16 * index, &mut count).unwrap();
        assert_eq!(i32::from_le_bytes(count), model.count, "{}", model.name);
        for &(index, likely) in &model.sites {
            let mut found = [0; 5];
            vm.ram().read(site(index), &mut found).unwrap();
            let expected = if model.jumps(likely) { JMP } else { NOP };
            assert_eq!(found, expected, "site {index} of {}", model.name);
        }
    }
}

/// Asserts that every vCPU takes every branch in the direction of the model, and executes nothing
/// else.
fn assert_passed(vm: &Vm, vcpus: u8, models: &[Model]) {
    assert_eq!(vm.exit_reason(), None, "a vCPU met what is no instruction");
    for vcpu in 0..vcpus {
        let rounds = |more: u64| {
            let now = counter(vm, vcpu, ROUNDS);
            wait_until("the vCPU goes round", || {
                counter(vm, vcpu, ROUNDS) >= now + more
            });
        };
        // The round in which a vCPU was stopped may have counted a site before the flip.
        rounds(1);
        let before = passed(vm, vcpu);
        rounds(2);
        let after = passed(vm, vcpu);
        assert_eq!(counter(vm, vcpu, TORN), 0, "vCPU {vcpu}: torn branches");
        for model in models {
            for &(index, likely) in &model.sites {
                let at = usize::try_from(index).unwrap();
                let ways = [0, 1].map(|way| after[at][way] - before[at][way]);
                let right = usize::from(model.jumps(likely));
                assert!(
                    ways[right] > 0 && ways[1 - right] == 0,
                    "vCPU {vcpu}, site {index} of {} with count {}: straight on and jumped {ways:?}",
                    model.name,
                    model.count
                );
            }
        }
    }
}

/// Returns a random update of keys, and the model's counts after it.
fn draw(models: &[Model], random: &mut fastrand::Rng) -> (Vec<KeyUpdate>, Vec<i32>) {
    let mut counts: Vec<i32> = models.iter().map(|model| model.count).collect();
    // The first key's count crosses zero if any key's can, so that the transaction patches sites.
    let crossing: Vec<usize> = (0..models.len()).filter(|&key| counts[key] < 2).collect();
    let first = match crossing.get(random.usize(..crossing.len().max(1))) {
        Some(&key) => key,
        None => random.usize(..models.len()),
    };
    let mut updates = vec![];
    for number in 0..=random.usize(..4) {
        let key = match random.usize(..models.len()) {
            _ if number == 0 => first,
            key if key == first => continue,
            key => key,
        };
        let op = match counts[key] {
            0 => Op::Inc,
            1 if number == 0 => Op::Dec,
            2 => Op::Dec,
            _ if random.usize(..2) == 0 => Op::Inc,
            _ => Op::Dec,
        };
        counts[key] += if op == Op::Inc { 1 } else { -1 };
        updates.push(KeyUpdate::new(&models[key].name, op));
    }
    (updates, counts)
}

async fn update(keys: &Keys, updates: Vec<KeyUpdate>) -> Result<bool, KeysError> {
    let request = UpdateRequest::new(
        updates,
        "uid:0".to_owned(),
        Duration::from_secs(10),
        Instant::now() + Duration::from_secs(30),
    );
    let outcome = keys.update(request).await?;
    Ok(outcome
        .report
        .as_ref()
        .is_some_and(|report| report.pause.is_some()))
}

#[test]
fn a_storm_of_flips_and_not_one_wrong() {
    const VCPUS: u8 = 2;
    let flips = match std::env::var("PATCHBAY_STORM_FLIPS") {
        Ok(flips) => flips.parse().expect("PATCHBAY_STORM_FLIPS"),
        Err(_) => FLIPS,
    };
    let _watchdog = watchdog(600);
    let mut models = models();
    let Some((vm, keys)) = storm_guest(VCPUS, &models) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    // The seed is fixed, so that every run is the same.
    let mut random = fastrand::Rng::with_seed(0x2545_f491_4f6c_dd1d);
    let began = Instant::now();
    let mut pauses = 0;
    for flip in 0..flips {
        let (updates, counts) = draw(&models, &mut random);
        match runtime.block_on(update(&keys, updates)) {
            Ok(paused) => pauses += u32::from(paused),
            Err(error) => panic!("flip {flip}: {error}"),
        }
        for (model, count) in models.iter_mut().zip(counts) {
            model.count = count;
        }
        assert_memory(&vm, &models);
        if flip % LOOK_EVERY == 0 {
            assert_passed(&vm, VCPUS, &models);
        }
    }
    assert_passed(&vm, VCPUS, &models);
    println!(
        "{flips} transactions, {pauses} with a pause, in {:.1} s",
        began.elapsed().as_secs_f64()
    );
    assert!(pauses >= flips / 2, "{pauses} pauses: the storm was none");
    vm.shutdown();
    assert_eq!(vm.wait(), ExitReason::Shutdown);
}
