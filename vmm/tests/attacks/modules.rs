// SPDX-License-Identifier: Apache-2.0

//! Malformed module events.

use patchbay_guest::abi;
use static_keys::Op;

use super::kernel::*;
use super::rig::{Rig, assert_printable, count, site};

const ADD: u32 = abi::OP_MODULE_ADD;
const DEL: u32 = abi::OP_MODULE_DEL;

#[test]
fn a_module_before_its_kernel() {
    let Some(rig) = Rig::new(vec![]) else { return };
    let module = rig.memory().write_module(0);
    rig.refuses_request(ADD, &module, "before the kernel had registered");
    // Removing a module that is not registered succeeds.
    assert_eq!(rig.ask(DEL, &module_del(&module)), 0);
    rig.survives();
}

#[test]
fn a_module_of_another_generation() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let mut module = rig.memory().write_module(0);
    module.header.generation = 1;
    rig.refuses_request(ADD, &module, "another generation");
    module.header.generation = 0;
    rig.refuses_request(ADD, &module, "generation is 0");
    let mut module = rig.memory().write_module(0);
    module.load = 0;
    rig.refuses_request(ADD, &module, "load is 0");
    rig.flips(&["beta"], &[site(BETA_SITE), count(BETA)]);
    rig.survives();
}

#[test]
fn modules_at_addresses_that_no_module_has() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let mut module = rig.memory().write_module(0);
    for address in [0, 1, 0x1000, 1 << 63] {
        module.module = address;
        rig.refuses_request(ADD, &module, "no address of a kernel");
    }
    let mut module = rig.memory().write_module(0);
    module.text = range(u64::MAX, 0);
    rig.refuses_request(ADD, &module, "text ends at");
    module.text = range(0, 1);
    rig.refuses_request(ADD, &module, "no address of a kernel");
    // The state word of these `struct module`s wraps or is unmapped. Such a module is never LIVE.
    for address in [u64::MAX, BEYOND] {
        let mut module = rig.memory().write_module(0);
        module.module = address;
        rig.memory()
            .write_module_key(0, module_parts(0).key, address);
        assert_eq!(rig.ask(ADD, &module), 0);
        rig.fails(
            &["module0:mod_key"],
            Op::Enable,
            "TABLE_REFUSED",
            "cannot be read",
        );
        rig.look_at_everything();
        assert_eq!(rig.ask(DEL, &module_del(&module)), 0);
    }
    rig.survives();
}

#[test]
fn a_module_twice() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let at = module_parts(0);
    let module = rig.memory().write_module(0);
    assert_eq!(rig.ask(ADD, &module), 0);
    rig.refuses_request(ADD, &module, "registered already");
    // Another module with the same name.
    let mut other = rig.memory().write_module(1);
    other.name = module.name;
    rig.refuses_request(ADD, &other, "registered already");
    // Another module claims to define the first module's key.
    let other = rig.memory().write_module(1);
    rig.memory().write_module_key(1, at.key, other.module);
    rig.refuses_request(ADD, &other, "listed twice");
    rig.flips(&["module0:mod_key"], &[site(at.text), count(at.key)]);
    rig.survives();
}

#[test]
fn names_that_no_module_has() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let mut module = rig.memory().write_module(0);
    module.name = [0; 64];
    rig.refuses_request(ADD, &module, "name is not");
    module.name = [b'm'; 64];
    rig.refuses_request(ADD, &module, "name is not");
    module.name[..8].copy_from_slice(b"\x1b[2J\xff:#\0");
    assert_eq!(rig.ask(ADD, &module), 0);
    rig.look_at_everything();
    let details = rig.details("?[2J???:mod_key");
    assert_printable(&details.key.name);
    rig.survives();
}

/// The module's text range and its site belong to the kernel. Only the key is the module's own.
#[test]
fn a_module_that_overlaps_the_kernel() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let memory = rig.memory();
    let mut module = memory.write_module(0);
    let at = module_parts(0);
    memory.write(at.table, &entry(at.table, BETA_SITE, TARGET, at.key));
    module.text = range(TEXT, TEXT_END);
    assert_eq!(rig.ask(ADD, &module), 0);
    // A change of both keys is refused. If one follows the other, the second finds foreign bytes at
    // the site.
    let both = ["beta", "module0:mod_key"];
    rig.fails(&both, Op::Enable, "TABLE_REFUSED", "overlaps");
    rig.change(&["beta"], Op::Enable).unwrap();
    rig.fails(&["module0:mod_key"], Op::Enable, "FOREIGN_BYTES", "mod_key");
    assert_eq!(rig.ask(DEL, &module_del(&module)), 0);
    // The module's text covers the kernel's keys.
    module.text = range(TEXT, TABLE);
    module.text.end = KEYS + 0x100;
    rig.refuses_request(ADD, &module, "lies in text");
    rig.survives();
}

/// Two modules with the same text and the same site.
#[test]
fn modules_that_overlap_each_other() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let memory = rig.memory();
    let first = memory.write_module(0);
    let second = memory.write_module(1);
    let [a, b] = [0, 1].map(module_parts);
    memory.write(b.table, &entry(b.table, a.text, a.text + 0x100, b.key));
    let mut second = second;
    second.text = first.text;
    assert_eq!(rig.ask(ADD, &first), 0);
    assert_eq!(rig.ask(ADD, &second), 0);
    let both = ["module0:mod_key", "module1:mod_key"];
    rig.fails(&both, Op::Enable, "TABLE_REFUSED", "overlaps");
    rig.flips(&["module1:mod_key"], &[site(a.text), count(b.key)]);
    rig.survives();
}

#[test]
fn modules_that_were_never_added_or_only_half() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let mut module = rig.memory().write_module(0);
    assert_eq!(rig.ask(DEL, &module_del(&module)), 0);
    module.directory.key_count = u32::MAX;
    rig.refuses_request(ADD, &module, "keys exceed the limit");
    assert_eq!(rig.ask(DEL, &module_del(&module)), 0);
    module.directory.key_count = 1;
    module.jump_table.end = BEYOND + 16;
    rig.refuses_request(ADD, &module, "not present");
    assert_eq!(rig.ask(DEL, &module_del(&module)), 0);
    assert_eq!(rig.keys.describe().modules, 0);
    assert_eq!(rig.keys.describe().keys, 4);
    // The kernel is not a module.
    module.module = 0;
    assert_eq!(rig.ask(DEL, &module_del(&module)), 0);
    rig.flips(&["beta"], &[site(BETA_SITE), count(BETA)]);
    rig.survives();
}

#[test]
fn a_flood_of_modules() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let mut module = rig.memory().write_module(0);
    module.directory = abi::Directory::default();
    module.jump_table = range(0, 0);
    for number in 0..500_u64 {
        module.module = MODULES + number;
        module.name[..8].copy_from_slice(&format!("m{number:06}\0").into_bytes());
        assert_eq!(rig.ask(ADD, &module), 0, "{number}");
    }
    assert_eq!(rig.keys.describe().modules, 500);
    rig.flips(&["beta"], &[site(BETA_SITE), count(BETA)]);
    rig.survives();
}

/// A module that is no longer LIVE.
#[test]
fn modules_in_other_states() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    let module = rig.memory().write_module(0);
    assert_eq!(rig.ask(ADD, &module), 0);
    for state in [1, 2, 3, u64::from(u32::MAX)] {
        rig.memory().write_u64(module_parts(0).address, state);
        rig.fails(
            &["module0:mod_key"],
            Op::Enable,
            "GUEST_BUSY",
            "module0 is not LIVE",
        );
    }
    rig.survives();
}
