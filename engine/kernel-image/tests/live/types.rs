// SPDX-License-Identifier: Apache-2.0

use patchbay_kernel_image::{Btf, BtfError};

use crate::craft_btf::{POINTER, Types, U32, U64, kernel};

#[test]
fn members_are_found_through_anonymous_ones_arrays_and_bit_fields() {
    let types = kernel().finish();
    let btf = Btf::parse(
        &types,
        &["static_key", "module", "_ddebug", "mod_tree_root"],
    )
    .unwrap();
    assert_eq!(btf.offset("static_key", &["type"]), Some(8));
    assert_eq!(btf.offset("module", &["list", "prev"]), Some(16));
    let sequence = ["root", "seq", "seqcount", "sequence"];
    assert_eq!(btf.offset("mod_tree_root", &sequence), Some(0));
    let line = btf.member("_ddebug", &["lineno"]).unwrap();
    assert_eq!((line.offset, line.shift, line.width), (32, 0, 18));
    let memory = btf.member("module", &["mem"]).unwrap();
    assert_eq!(btf.size_of_member(memory), Some(64));
    assert_eq!(btf.offset("module", &["no_member"]), None);
    assert_eq!(btf.offset("not_asked_for", &["type"]), None);
    assert_eq!(btf.enumerator("module", "MODULE_STATE_LIVE"), None);
}

#[test]
fn a_modules_types_continue_the_kernels() {
    let mut base = Types::new();
    let list = base.structure("list", 16, &[("next", 0, POINTER), ("prev", 64, POINTER)]);
    base.structure("shared", 8, &[("only_here", 0, U64)]);
    base.enumeration("state", &[("LIVE", 7)]);
    let mut module = Types::after(&base);
    let inner = module.structure("", 8, &[("count", 0, U64)]);
    assert_eq!(inner, list + 3);
    let lists = module.array(list, 3);
    module.structure("vm", 64, &[("", 64, inner), ("lists", 128, lists)]);
    module.structure("shared", 16, &[("in_the_module", 64, U64)]);
    module.enumeration("kind", &[("NEW", 9)]);
    let (base, module) = (base.finish(), module.finish());
    let wanted = ["vm", "list", "shared", "state", "kind"];
    let base = Btf::parse(&base, &wanted).unwrap();
    assert_eq!(base.offset("vm", &["count"]), None);
    let module_types = Btf::parse_split(&base, &module, &wanted).unwrap();
    assert_eq!(module_types.offset("vm", &["count"]), Some(8));
    assert_eq!(module_types.offset("vm", &["lists"]), Some(16));
    let lists = module_types.member("vm", &["lists"]).unwrap();
    assert_eq!(module_types.size_of_member(lists), Some(48));
    assert_eq!(module_types.offset("list", &["prev"]), Some(8));
    assert_eq!(module_types.offset("shared", &["in_the_module"]), Some(8));
    assert_eq!(module_types.size("shared"), Some(16));
    assert_eq!(module_types.enumerator("kind", "NEW"), Some(9));
    assert_eq!(module_types.enumerator("state", "LIVE"), Some(7));
    // Without its base, the module's types refer to types that are absent.
    let alone = Btf::parse(&module, &wanted).unwrap();
    assert_eq!(alone.offset("vm", &["count"]), None);
}

#[test]
fn a_type_that_passes_the_end_is_refused() {
    let mut types = Types::new();
    types.structure("last", 8, &[("one", 0, U32), ("two", 32, U64)]);
    let whole = types.finish();
    Btf::parse(&whole, &[]).unwrap();
    let length = u32::from_le_bytes(*whole[12..].first_chunk().unwrap());
    for cut in 1..24 {
        let mut bytes = whole.clone();
        bytes[12..16].copy_from_slice(&(length - cut).to_le_bytes());
        assert_eq!(
            Btf::parse(&bytes, &[]).unwrap_err(),
            BtfError::Truncated,
            "{cut}"
        );
    }
}

#[test]
fn kinds_that_are_not_known_are_refused() {
    let mut types = Types::new();
    types.header("new", 31 << 24, 0);
    let error = Btf::parse(&types.finish(), &[]).unwrap_err();
    assert_eq!(
        error,
        BtfError::Kind {
            number: 4,
            kind: 31
        }
    );
}

/// A structure that contains itself many times, and a typedef that refers to itself.
#[test]
fn types_that_hold_themselves_end() {
    let mut types = Types::new();
    let mut members = vec![("", 0, 4); 64];
    members.extend([("", 0, 5), ("pointer", 0, POINTER)]);
    types.structure("loop", 8, &members);
    types.header("self", 8 << 24, 5);
    let types = types.finish();
    let btf = Btf::parse(&types, &["loop"]).unwrap();
    assert_eq!(btf.offset("loop", &["absent"]), None);
}
