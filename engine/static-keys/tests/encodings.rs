// SPDX-License-Identifier: Apache-2.0
//! Checks every encoding with an independent decoder.

use iced_x86::{Code, Decoder, DecoderOptions, Mnemonic};
use proptest::prelude::*;
use static_keys::{Branch, Instruction, Nops, Size, disassemble, recognise_in_file};

fn decode(bytes: &[u8], address: u64) -> iced_x86::Instruction {
    let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
    let instruction = decoder.decode();
    assert_eq!(
        instruction.len(),
        bytes.len(),
        "one instruction, all of the bytes"
    );
    instruction
}

fn check_jump(size: Size, code: u64, target: u64) {
    let jump = Instruction::jump(size, code, target).expect("within reach");
    let decoded = decode(jump.as_bytes(), code);
    let expected = match size {
        Size::Two => Code::Jmp_rel8_64,
        Size::Five => Code::Jmp_rel32_64,
    };
    assert_eq!(decoded.code(), expected);
    assert_eq!(decoded.near_branch_target(), target);
    assert_eq!(
        Nops::Fixed.recognise(jump.as_bytes(), code, target),
        Some((size, Branch::Jump))
    );
    assert_eq!(
        disassemble(jump.as_bytes(), code),
        format!("jmp {target:#x}")
    );
}

const CODE: u64 = 0xffff_ffff_8123_4567;

#[test]
fn nops_do_nothing() {
    let long = "nop dword ptr [rax+rax]";
    for (nops, size, code, text) in [
        (Nops::Fixed, Size::Two, Code::Nopw, "xchg ax, ax"),
        (Nops::Fixed, Size::Five, Code::Nop_rm32, long),
        (Nops::P6, Size::Five, Code::Nop_rm32, long),
        (
            Nops::K8,
            Size::Five,
            Code::Nopw,
            "data16 data16 data16 xchg ax, ax",
        ),
    ] {
        let nop = nops.nop(size);
        let decoded = decode(nop.as_bytes(), CODE);
        assert_eq!((decoded.mnemonic(), decoded.code()), (Mnemonic::Nop, code));
        assert_eq!(nop.as_bytes().len(), size.bytes());
        assert_eq!(
            nops.recognise(nop.as_bytes(), CODE, 0),
            Some((size, Branch::Nop))
        );
        assert_eq!(disassemble(nop.as_bytes(), CODE), text);
    }
}

#[test]
fn short_jumps_reach_their_limits_and_no_further() {
    let next = CODE + 2;
    for displacement in -128..=127 {
        check_jump(Size::Two, CODE, next.wrapping_add_signed(displacement));
    }
    for displacement in [-129, 128, 1 << 31, i64::MIN, i64::MAX] {
        assert!(
            Instruction::jump(Size::Two, CODE, next.wrapping_add_signed(displacement)).is_err(),
            "{displacement}"
        );
    }
}

#[test]
fn near_jumps_reach_their_limits_and_no_further() {
    // The site is far from the ends of the address space, so that the limits do not wrap.
    let code = 0x0000_4000_0000_0000;
    let (least, most) = (i64::from(i32::MIN), i64::from(i32::MAX));
    for displacement in [least, least + 1, -1, 0, 1, most - 1, most] {
        check_jump(
            Size::Five,
            code,
            (code + 5).wrapping_add_signed(displacement),
        );
    }
    for displacement in [least - 1, most + 1, i64::MIN, i64::MAX] {
        let error = Instruction::jump(
            Size::Five,
            code,
            (code + 5).wrapping_add_signed(displacement),
        );
        assert!(error.is_err(), "{displacement}");
    }
}

#[test]
fn sites_at_the_end_of_the_address_space_have_no_encoding() {
    for (size, code) in [(Size::Two, u64::MAX), (Size::Five, u64::MAX - 3)] {
        assert!(Instruction::jump(size, code, code).is_err());
    }
    // A jump across the end of the address space is refused, although its displacement modulo 2^64
    // fits.
    assert!(Instruction::jump(Size::Five, u64::MAX - 16, 16).is_err());
    check_jump(Size::Five, u64::MAX - 5, u64::MAX);
}

#[test]
fn the_historic_nops_are_known_in_files_alone() {
    let elsewhere = CODE + 0x40;
    for bytes in [
        [0xe9, 0x00, 0x00, 0x00, 0x00], // JUMP_LABEL_INIT_NOP
        [0x66, 0x66, 0x66, 0x66, 0x90], // K8_NOP5_ATOMIC
        [0x3e, 0x8d, 0x74, 0x26, 0x00], // GENERIC_NOP5_ATOMIC
    ] {
        assert_eq!(
            recognise_in_file(&bytes, CODE, elsewhere),
            Some((Size::Five, Branch::Nop)),
            "{bytes:x?}"
        );
        assert_eq!(
            Nops::Fixed.recognise(&bytes, CODE, elsewhere),
            None,
            "{bytes:x?}"
        );
    }
    assert_eq!(
        recognise_in_file(&[0xe9, 0, 0, 0, 0], CODE, CODE + 5),
        Some((Size::Five, Branch::Jump))
    );
}

#[test]
fn nothing_else_is_recognised() {
    let target = CODE + 0x40;
    for bytes in [
        &[][..],
        &[0x66],
        &[0xeb],
        &[0x0f, 0x1f, 0x44, 0x00],
        &[0xcc, 0x1f, 0x44, 0x00, 0x00], // int3 of text_poke_bp()
        &[0xcc, 0x90],
        &[0x0f, 0x1f, 0x44, 0x00, 0x01],
        &[0xeb, 0x3f], // to one byte further
        &[0xe9, 0x3c, 0x00, 0x00, 0x00],
        &[0xe8, 0x3b, 0x00, 0x00, 0x00], // a call
        &[0x90, 0x90, 0x90, 0x90, 0x90],
    ] {
        assert_eq!(
            Nops::Fixed.recognise(bytes, CODE, target),
            None,
            "{bytes:x?}"
        );
    }
    assert_eq!(disassemble(&[0xcc], CODE), "int3");
    for bytes in [&[0xe8, 0, 0, 0, 0][..], &[], &[0x66]] {
        assert_eq!(disassemble(bytes, CODE), "unknown");
    }
}

proptest! {
    #[test]
    fn any_jump_is_what_the_decoder_says(code in any::<u64>(), displacement in any::<i32>(), short in any::<bool>()) {
        let size = if short { Size::Two } else { Size::Five };
        let displacement = if short { i64::from(displacement as i8) } else { i64::from(displacement) };
        let next = code.checked_add(size.bytes() as u64);
        if let Some(target) = next.and_then(|next| next.checked_add_signed(displacement)) {
            check_jump(size, code, target);
        }
    }

    #[test]
    fn any_target_is_reached_or_refused(code in any::<u64>(), target in any::<u64>(), short in any::<bool>()) {
        let size = if short { Size::Two } else { Size::Five };
        if let Ok(jump) = Instruction::jump(size, code, target) {
            prop_assert_eq!(decode(jump.as_bytes(), code).near_branch_target(), target);
        }
    }

    /// The decoder agrees with whatever `recognise` accepts.
    #[test]
    fn what_is_recognised_is_right(bytes in prop::collection::vec(any::<u8>(), 0..8), code in any::<u64>(), target in any::<u64>(), nops in prop::sample::select(vec![Nops::Fixed, Nops::P6, Nops::K8])) {
        if let Some((size, branch)) = nops.recognise(&bytes, code, target) {
            let decoded = decode(&bytes[..size.bytes()], code);
            match branch {
                Branch::Nop => prop_assert_eq!(decoded.mnemonic(), Mnemonic::Nop),
                Branch::Jump => prop_assert_eq!(decoded.near_branch_target(), target),
            }
        }
    }
}
