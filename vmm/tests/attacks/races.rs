// SPDX-License-Identifier: Apache-2.0

//! Guests that change their registered data while the monitor uses it. In most attacks another vCPU
//! changes the data continuously at full speed.

use std::ops::Range;

use patchbay_guest::abi;
use patchbay_guest::testing::structures;
use patchbay_service::keys::KeysError;
use static_keys::{CPUS_MAX, Concerns, Op};
use zerocopy::IntoBytes;

use super::kernel::*;
use super::program::Program;
use super::rig::{BRIEF, DEADLINE, Rig, count, out_of_time, site};

/// Changes made during each attack.
const CHANGES: usize = 150;

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Turns keys on and off while another vCPU attacks. Each attempt succeeds completely or fails for
/// one of these reasons, and only the `legal` ranges change. Returns the number of successes.
fn storm(rig: &Rig, names: &[&str], reasons: &[&str], legal: &[Range<u64>]) -> usize {
    // If no failure is expected, the deadline is long.
    let within = if reasons.is_empty() { DEADLINE } else { BRIEF };
    rig.wait_for_rounds(1, 10);
    let before = rig.picture();
    let mut done = 0;
    for round in 0..CHANGES {
        let op = if round % 2 == 0 {
            Op::Enable
        } else {
            Op::Disable
        };
        match rig.change_within(names, op, within) {
            Ok(_) => done += 1,
            Err(error) if error.reason() == "FOREIGN_BYTES" => {
                expected(&error, reasons);
                // Registering again lifts the quarantine.
                rig.register();
            }
            Err(error) => expected(&error, reasons),
        }
    }
    rig.only_changed(&before, legal);
    println!("{done} of {CHANGES} changes were made");
    done
}

fn expected(error: &KeysError, reasons: &[&str]) {
    assert!(
        reasons.contains(&error.reason()) || out_of_time(error),
        "{error}"
    );
}

#[test]
fn tables_rewritten_all_the_time() {
    // The site, target and key of `beta`'s entry, and the records of the directory.
    let at = |index: u64| physical(TABLE + 16 * index);
    let toggle = Program::toggle(&[
        (at(2), [0, u64::MAX]),
        (at(2) + 8, [0, 0x1234_5678]),
        (physical(DIRECTORY + 32), [0, TEXT]),
        (physical(DIRECTORY + 40), [u64::MAX, 0]),
    ]);
    let Some(rig) = Rig::new(vec![toggle]) else {
        return;
    };
    // The monitor reads each value only once, so a registration is consistent even while the guest
    // rewrites the tables.
    for _ in 0..100 {
        if rig.ask(abi::OP_REGISTER, &descriptor()) == 0 {
            let _ = rig.change_within(&["alpha", "beta"], Op::Enable, BRIEF);
            let _ = rig.change_within(&["alpha", "beta"], Op::Disable, BRIEF);
        }
    }
    let before = rig.picture();
    let image = physical(TABLE)..physical(DIRECTORY) + 0x1000;
    let _ = rig.change_within(&["alpha"], Op::Enable, BRIEF);
    let sites = [site(EXECUTED), site(STRADDLING)];
    rig.only_changed(&before, &[&sites[..], &[image]].concat());
    rig.vm.shutdown();
}

#[test]
fn tables_rewritten_after_they_were_read() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    rig.memory().write(TABLE, &[0xff; 80]);
    rig.memory().write(DIRECTORY, &[0xff; 96]);
    rig.memory().write(NAMES, &[0xff; 32]);
    rig.flips(
        &["alpha", "beta"],
        &[
            site(EXECUTED),
            site(STRADDLING),
            site(BETA_SITE),
            count(ALPHA),
            count(BETA),
        ],
    );
    rig.survives();
}

/// The guest continuously swaps the two pages of a site by remapping them. The monitor must write
/// the bytes that it has checked, even if the site is mapped elsewhere when it writes.
#[test]
fn a_site_whose_pages_change_places() {
    let leaf = |page: u64| LEAF_TABLE + 8 * page;
    let mapping = |page: u64| (IMAGE_PHYSICAL + page * 0x1000) | PRESENT;
    let toggle = Program::toggle(&[
        (leaf(1), [mapping(1), mapping(2)]),
        (leaf(2), [mapping(2), mapping(1)]),
    ]);
    let Some(rig) = Rig::new(vec![toggle]) else {
        return;
    };
    // Each page ends with the first half of the site and begins with the second half. The site is
    // whole with either mapping, and broken if the mappings are mixed.
    let [first, second] = [physical(STRADDLING), physical(STRADDLING) + 0x1000];
    rig.memory().write_physical(second, &NOP[..3]);
    rig.memory()
        .write_physical(physical(TEXT) + 0x1000, &NOP[3..]);
    rig.register();
    let legal = [
        site(EXECUTED),
        first..first + 3,
        second..second + 3,
        physical(TEXT) + 0x1000..physical(TEXT) + 0x1002,
        physical(TEXT) + 0x2000..physical(TEXT) + 0x2002,
        count(ALPHA),
        LEAF_TABLE + 8..LEAF_TABLE + 24,
    ];
    storm(&rig, &["alpha"], &["FOREIGN_BYTES", "GUEST_BUSY"], &legal);
    rig.vm.shutdown();
}

#[test]
fn a_site_that_is_rewritten_all_the_time() {
    let toggle = Program::toggle(&[(physical(BETA_SITE), [word(&NOP), 0x9090_9090_9090])]);
    let Some(rig) = Rig::registered(vec![toggle]) else {
        return;
    };
    let legal = [
        site(BETA_SITE),
        count(BETA),
        physical(BETA_SITE)..physical(BETA_SITE) + 8,
    ];
    let reasons = ["FOREIGN_BYTES", "GUEST_BUSY"];
    storm(&rig, &["beta"], &reasons, &legal);
    rig.vm.shutdown();
}

#[test]
fn a_count_that_never_stands_still() {
    let Some(rig) = Rig::registered(vec![Program::count_up(physical(BETA))]) else {
        return;
    };
    rig.wait_for_rounds(1, 10);
    let before = rig.picture();
    for op in [Op::Inc, Op::Dec, Op::Enable, Op::Disable] {
        for _ in 0..10 {
            match rig.change_within(&["beta"], op, BRIEF) {
                // An increment may succeed between two increments of the guest.
                Ok(outcome) => assert_eq!(outcome.results[0].sites_patched, 0),
                Err(error) => expected(&error, &["GUEST_BUSY", "WOULD_WARN"]),
            }
        }
    }
    rig.only_changed(&before, &[count(BETA)]);
    rig.vm.shutdown();
}

#[test]
fn gates_that_are_always_closed() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    for (gate, value, words) in [
        (Gate::SystemState, 0, "SYSTEM_RUNNING"),
        (Gate::SystemState, 3, "SYSTEM_RUNNING"),
        (Gate::JumpLabelMutex, u64::MAX, "jump_label_mutex"),
        (Gate::TextMutex, 8, "text_mutex"),
        (Gate::TracepointsMutex, 1 << 63, "tracepoints_mutex"),
        (Gate::TextPokeQueue, 1, "tp_vec_nr"),
        (Gate::TextPoke, u64::MAX, "bp_desc.refs"),
    ] {
        rig.memory().write_kernel();
        rig.memory().write_u64(gate_word(gate), value);
        rig.fails(&["beta", "event"], Op::Enable, "GUEST_BUSY", words);
    }
    rig.survives();
}

#[test]
fn gates_that_lead_nowhere_or_to_each_other() {
    let Some(rig) = Rig::new(vec![]) else { return };
    for nowhere in [BEYOND, u64::MAX - 7, 0xffff_8000_0000_0000] {
        for gate in [
            Gate::SystemState,
            Gate::JumpLabelMutex,
            Gate::TextMutex,
            Gate::TextPoke,
        ] {
            let mut gates = structures::gates(GATE_WORDS);
            gates[gate as usize].address = nowhere;
            rig.memory().gates(&gates);
            assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor()), 0);
            rig.fails(&["beta"], Op::Enable, "TABLE_REFUSED", "cannot be read");
        }
    }
    // All gates are the same word, the key's own count, so they are closed as soon as the key is
    // on.
    let gates = structures::gates(GATE_WORDS).map(|gate| abi::Gate {
        address: BETA,
        mask: u32::MAX.into(),
        wanted: 0,
        width: 4,
        ..gate
    });
    rig.memory().gates(&gates);
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor()), 0);
    rig.change(&["beta"], Op::Enable).unwrap();
    rig.fails(&["beta"], Op::Disable, "GUEST_BUSY", "found 0x1");
    rig.survives();
}

/// A per-CPU gate has the maximum number of words, and the last word is closed. Rewriting the array
/// of gates after the registration has no effect.
#[test]
fn a_gate_of_thousands_of_cpus() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let cpus = u32::try_from(CPUS_MAX).unwrap();
    let offsets: Vec<u64> = (0..u64::from(cpus)).map(|cpu| FREE + 4 * cpu).collect();
    rig.memory().write(CPU_OFFSETS, offsets.as_bytes());
    rig.memory().write(FREE, &[0; 0x4000]);
    let mut gates = structures::gates(GATE_WORDS).to_vec();
    gates.push(abi::Gate {
        flags: abi::GATE_PER_CPU,
        mask: 0xff,
        width: 4,
        ..structures::gate(abi::GATE_TEXT_POKE, "refs", 0, Concerns::SITES)
    });
    rig.memory().gates(&gates);
    let mut descriptor = descriptor();
    descriptor.gate_count = 7;
    descriptor.cpu_offsets = CPU_OFFSETS;
    descriptor.cpu_count = cpus;
    assert_eq!(rig.ask(abi::OP_REGISTER, &descriptor), 0);
    rig.change(&["beta"], Op::Enable).unwrap();
    rig.memory().write(FREE + 4 * u64::from(cpus - 1), &[1]);
    rig.fails(&["beta"], Op::Disable, "GUEST_BUSY", "(refs) on CPU 4095");
    // The gates that were listed at the registration apply.
    rig.memory().write(GATES, &[0xff; 7 * 64]);
    rig.memory().write(CPU_OFFSETS, &[0xff; 64]);
    rig.fails(&["beta"], Op::Disable, "GUEST_BUSY", "(refs) on CPU 4095");
    rig.memory().write(FREE + 4 * u64::from(cpus - 1), &[0]);
    rig.change(&["beta"], Op::Disable).unwrap();
    rig.memory().write_kernel();
    rig.survives();
}

#[test]
fn a_gate_that_opens_and_closes() {
    let toggle = Program::toggle(&[(physical(gate_word(Gate::JumpLabelMutex)), [0, 0x1000])]);
    let Some(rig) = Rig::registered(vec![toggle]) else {
        return;
    };
    let gate = physical(GATE_WORDS)..physical(GATE_WORDS) + 64;
    let legal = [site(BETA_SITE), count(BETA), gate];
    storm(&rig, &["beta"], &["GUEST_BUSY"], &legal);
    rig.vm.shutdown();
}

/// Address of the second vCPU's requests.
const OTHER_REQUEST: u64 = REQUEST + 0x1000;

/// Starts a guest whose second vCPU makes these requests for ever.
fn requesting(requests: &[(u32, Vec<u8>)]) -> Option<Rig> {
    let values: Vec<u64> = (0..)
        .zip(requests)
        .map(|(index, (op, _))| (OTHER_REQUEST + index * 0x1000) | u64::from(*op))
        .collect();
    let mut programs = vec![Program::requests(&values)];
    // The program waits until its requests are written.
    programs[0].code.splice(0..0, super::program::WAIT);
    let rig = Rig::registered(programs)?;
    for (index, (_, request)) in (0..).zip(requests) {
        rig.memory()
            .write_physical(OTHER_REQUEST + index * 0x1000, request);
    }
    rig.let_go(1);
    Some(rig)
}

fn statuses(requests: u64) -> Vec<Range<u64>> {
    (0..requests)
        .map(|index| OTHER_REQUEST + index * 0x1000 + abi::STATUS_OFFSET)
        .map(|status| status..status + 4)
        .collect()
}

#[test]
fn registering_again_during_changes() {
    let again = |generation| {
        let mut descriptor = descriptor();
        descriptor.header.generation = generation;
        (abi::OP_REGISTER, descriptor.as_bytes().to_vec())
    };
    let Some(rig) = requesting(&[again(1), again(2)]) else {
        return;
    };
    let legal = [statuses(2), vec![site(BETA_SITE), count(BETA)]].concat();
    storm(&rig, &["beta"], &["GUEST_BUSY"], &legal);
    rig.vm.shutdown();
}

#[test]
fn registering_and_taking_it_back_during_changes() {
    let register = (abi::OP_REGISTER, descriptor().as_bytes().to_vec());
    let header = header(abi::OP_UNREGISTER, size_of::<abi::Header>());
    let unregister = (abi::OP_UNREGISTER, header.as_bytes().to_vec());
    let Some(rig) = requesting(&[register, unregister]) else {
        return;
    };
    let legal = [statuses(2), vec![site(BETA_SITE), count(BETA)]].concat();
    storm(
        &rig,
        &["beta"],
        &["GUEST_BUSY", "GUEST_NOT_REGISTERED"],
        &legal,
    );
    rig.vm.shutdown();
}

#[test]
fn a_module_that_comes_and_goes_during_changes() {
    let bare = patchbay_vmm::memory::GuestRam::new(MEMORY).unwrap();
    let add = Memory(&bare).write_module(0);
    let requests = [
        (abi::OP_MODULE_ADD, add.as_bytes().to_vec()),
        (abi::OP_MODULE_DEL, module_del(&add).as_bytes().to_vec()),
    ];
    let Some(rig) = requesting(&requests) else {
        return;
    };
    rig.memory().write_module(0);
    let at = module_parts(0);
    let legal = [
        statuses(2),
        vec![site(BETA_SITE), count(BETA), site(at.text), count(at.key)],
    ]
    .concat();
    let names = ["beta", "module0:mod_key"];
    storm(&rig, &names, &["GUEST_BUSY", "KEY_NOT_FOUND"], &legal);
    // The two keys were changed together or not at all.
    let paused = rig.vm.pause(DEADLINE).unwrap();
    let (beta, module) = (rig.memory().count(BETA), rig.memory().count(at.key));
    assert_eq!(beta, module);
    drop(paused);
    rig.vm.shutdown();
}

#[test]
fn a_flood_of_unknown_requests() {
    let values: Vec<u64> = [0, 5, 6, 0xfff]
        .into_iter()
        .flat_map(|op| {
            [OTHER_REQUEST, OTHER_REQUEST + 0x1000, MEMORY, !0xfff].map(|page| page | op)
        })
        .collect();
    let flood = Program::requests(&values);
    let Some(rig) = Rig::registered(vec![flood.clone(), flood]) else {
        return;
    };
    let legal = [statuses(2), vec![site(BETA_SITE), count(BETA)]].concat();
    let done = storm(&rig, &["beta"], &[], &legal);
    assert_eq!(done, CHANGES);
    assert!(
        rig.keys
            .describe()
            .error
            .is_some_and(|error| error.contains("unknown"))
    );
    rig.survives();
}
