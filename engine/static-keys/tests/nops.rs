// SPDX-License-Identifier: Apache-2.0
//! Kernels before 5.13 choose their 5-byte NOP when they boot.

mod common;

use common::world::{Home, World, update};
use static_keys::{
    Catalog, Class, EntryFormat, FoundImage, FoundKernel, FoundKey, GuestMemory, Image, Nops, Op,
    Options, Plan, VerifyError,
};

const K8: [u8; 5] = [0x66, 0x66, 0x66, 0x66, 0x90];
const P6: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];

/// The result of discovering a kernel with one key.
fn found(world: &World, nops: Nops) -> Catalog {
    let kernel = world.kernel();
    let mut bytes = vec![0; kernel.jump_table.len().expect("a table") as usize];
    let read = world.memory.read_gva(kernel.jump_table.start, &mut bytes);
    read.expect("mapped");
    let entries = EntryFormat::Relative.entries(kernel.jump_table.start, &bytes, Image::Live);
    let key = FoundKey {
        address: world.key(0).0,
        name: "key".to_owned(),
        class: Class::Ref,
        tracepoint: 0,
        switched_by_function: false,
    };
    let image = FoundImage {
        id: 0,
        name: String::new(),
        text: world.text(Home::Kernel),
        ro_after_init: kernel.ro_after_init,
        jump_table: kernel.jump_table,
        entries: entries.collect(),
        keys: vec![key],
    };
    Catalog::found(FoundKernel {
        format: EntryFormat::Relative,
        nops,
        layout: kernel.layout,
        gates: kernel.gates,
        images: vec![image],
    })
    .expect("follows the rules")
}

fn site(world: &World, site: usize) -> [u8; 5] {
    let mut bytes = [0; 5];
    let read = world.memory.read_gva(world.site(site), &mut bytes);
    read.expect("mapped");
    bytes
}

fn flip(world: &World, nops: Nops, op: Op) -> Result<(), VerifyError> {
    let updates = [update(world.key(0), op)];
    let catalog = found(world, nops);
    let plan = Plan::new(&catalog, &world.memory, &updates, &Options::default());
    let plan = plan.expect("planned");
    plan.verify(&world.memory, &[])?;
    plan.commit(&world.memory).expect("committed");
    Ok(())
}

#[test]
fn a_flip_and_its_undoing_leave_the_nop_that_the_kernel_chose() {
    for (nops, nop) in [(Nops::K8, K8), (Nops::P6, P6), (Nops::Fixed, P6)] {
        let world = World::simple(0, 2);
        for index in 0..2 {
            world.memory.poke(world.site(index), &nop);
        }
        flip(&world, nops, Op::Enable).expect("every site is recognised");
        for index in 0..2 {
            assert_eq!(site(&world, index)[0], 0xe9);
        }
        flip(&world, nops, Op::Disable).expect("every site is recognised");
        for index in 0..2 {
            assert_eq!(site(&world, index), nop, "{nops:?}");
        }
    }
}

#[test]
fn a_nop_of_another_kernel_is_foreign() {
    for (nops, nop) in [
        (Nops::Fixed, &K8[..]),
        (Nops::P6, &K8),
        (Nops::K8, &P6),
        // Sites of two bytes came with 5.14.
        (Nops::K8, &[0x66, 0x90]),
        (Nops::P6, &[0x66, 0x90]),
        (Nops::P6, &[0xeb, 0x20]),
    ] {
        let world = World::simple(0, 2);
        for index in 0..2 {
            let own = nops.nop(static_keys::Size::Five);
            world.memory.poke(world.site(index), own.as_bytes());
        }
        world.memory.poke(world.site(1), nop);
        let before = world.memory.snapshot();
        let error = flip(&world, nops, Op::Enable).expect_err("one site is not its own");
        assert!(
            matches!(&error, VerifyError::ForeignBytes { site, .. } if *site == world.site(1)),
            "{error}"
        );
        assert!(world.memory.snapshot() == before);
        let states = found(&world, nops).site_states(&world.memory, world.key(0));
        assert!(states[0].patchable.is_ok() && states[1].patchable.is_err());
    }
}

#[test]
fn only_nops_that_a_kernel_has_are_taken() {
    assert_eq!(Nops::ideal(K8), Some(Nops::K8));
    assert_eq!(Nops::ideal(P6), Some(Nops::P6));
    for other in [
        [0x66, 0x66, 0x90, 0x66, 0x90],
        [0x3e, 0x8d, 0x74, 0x26, 0x00],
        [0x90; 5],
        [0; 5],
    ] {
        assert_eq!(Nops::ideal(other), None, "{other:x?}");
    }
}
