// SPDX-License-Identifier: Apache-2.0
//! Repair of a key whose sites do not match its count, for example because the process that changed
//! them was killed. The count is not changed, because the guest's own code may have changed it
//! since.
//!
//! A repair is a [`Plan`] that writes sites and no count. It is verified and committed like any
//! other plan: every gate must be open, no vCPU may be inside a site, and each site must still hold
//! the bytes that it held when the repair was planned. A site that holds neither its NOP nor its
//! JMP is repaired only if it is a mixture of the two, as left by a writer that was killed between
//! two stores.

use crate::catalog::{Catalog, CodeImage};
use crate::entry::JumpEntry;
use crate::instruction::{Branch, Instruction, Nops, Size};
use crate::key::{Class, KeyId};
use crate::memory::GuestMemory;
use crate::plan::{Plan, PlanError, PlannedSite};
use crate::planner::{Planner, read_site, unreadable};

/// Plans the repair of a key. The plan has no sites if there is nothing to repair.
pub(crate) fn plan<M: GuestMemory>(
    catalog: &Catalog,
    memory: &M,
    id: KeyId,
) -> Result<Plan<M::Place>, PlanError> {
    let key = catalog.key(id).ok_or(PlanError::UnknownKey { key: id })?;
    if key.class == Class::Never {
        return Err(PlanError::Never {
            key: key.full_name.clone(),
        });
    }
    let mut planner = Planner::new(catalog, memory, 1);
    planner.open_for_repair(key)?;
    let enabled = planner.changes[0].before > 0;
    for (image, run) in planner.all_users(key)? {
        for entry in run.iter().filter(|entry| !entry.init) {
            if let Some((site, is_whole)) =
                repaired(catalog.nops, memory, image, entry, enabled, &key.full_name)?
            {
                planner.plan.needs_rips |= !is_whole;
                planner.plan.sites.push(site);
                planner.changes[0].sites += 1;
            }
        }
    }
    planner.finish()
}

/// The write that repairs a site, and whether the site currently holds one whole instruction.
type Repair<P> = (PlannedSite<P>, bool);

/// Plans the repair of a site. Returns `None` if the site matches the count.
fn repaired<M: GuestMemory>(
    nops: Nops,
    memory: &M,
    image: &CodeImage,
    entry: &JumpEntry,
    enabled: bool,
    key: &std::sync::Arc<str>,
) -> Result<Option<Repair<M::Place>>, PlanError> {
    let JumpEntry { code, target, .. } = *entry;
    let found =
        read_site(memory, image, code).map_err(|error| unreadable("a site", code, error))?;
    let found = found.ok_or_else(|| PlanError::SiteOutsideText {
        key: key.clone(),
        site: code,
    })?;
    let wanted = Branch::of(enabled, entry.likely);
    let bytes = found.as_slice();
    let (size, is_whole) = match nops.recognise(bytes, code, target) {
        Some((_, branch)) if branch == wanted => return Ok(None),
        Some((size, _)) => (size, true),
        None => mixture(nops, bytes, code, target)
            .ok_or_else(|| PlanError::Foreign {
                key: key.clone(),
                site: code,
                length: found.length,
                found: found.bytes,
            })
            .map(|size| (size, found.bytes[0] == size.test()))?,
    };
    let after =
        nops.encode(wanted, size, code, target)
            .map_err(|source| PlanError::OutOfReach {
                key: key.clone(),
                source,
            })?;
    let place = match size.bytes() {
        length if length == found.length => found.place,
        length => memory
            .locate(code, length)
            .map_err(|error| unreadable("a site", code, error))?,
    };
    let site = PlannedSite {
        address: code,
        place,
        key: 0,
        before: Instruction::of_bytes(size, found.bytes),
        after,
    };
    Ok(Some((site, is_whole)))
}

/// Returns the size of the site at `code` if the bytes are a mixture of its NOP and its JMP to
/// `target`, and `None` otherwise. A writer that is killed between two stores leaves such a
/// mixture, with or without a TEST ([`crate::instruction::replace`]). The first byte distinguishes
/// the two sizes.
#[must_use]
pub fn mixture(nops: Nops, bytes: &[u8], code: u64, target: u64) -> Option<Size> {
    let is_mixed = |size: &Size| {
        let found = bytes.get(..size.bytes()).filter(|_| nops.has(*size));
        let jump = Instruction::jump(*size, code, target).ok();
        let Some((found, jump)) = found.zip(jump) else {
            return false;
        };
        let nop = nops.nop(*size);
        let pairs = nop.as_bytes().iter().zip(jump.as_bytes());
        let mut explained = found.iter().zip(pairs).enumerate();
        explained.all(|(at, (byte, (nop, jump)))| {
            byte == nop || byte == jump || at == 0 && *byte == size.test()
        })
    };
    [Size::Two, Size::Five].into_iter().find(is_mixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: u64 = 0xffff_ffff_8100_0000;

    fn size(bytes: &[u8], distance: u64) -> Option<Size> {
        mixture(Nops::Fixed, bytes, CODE, CODE + distance)
    }

    #[test]
    fn each_mixture_of_a_nop_and_a_jmp_is_recognised() {
        let jump = [0xe9, 0xfb, 0x0f, 0, 0];
        let nop = [0x0f, 0x1f, 0x44, 0, 0];
        for mask in 0..1_u8 << 5 {
            let mut bytes = [0; 5];
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = if mask >> at & 1 == 0 {
                    nop[at]
                } else {
                    jump[at]
                };
            }
            assert_eq!(size(&bytes, 0x1000), Some(Size::Five), "{bytes:x?}");
            bytes[0] = Size::Five.test();
            assert_eq!(size(&bytes, 0x1000), Some(Size::Five), "{bytes:x?}");
        }
        for bytes in [[0x66, 0x0e], [0xeb, 0x90], [0xa8, 0x90], [0xa8, 0x0e]] {
            assert_eq!(size(&bytes, 0x10), Some(Size::Two), "{bytes:x?}");
        }
    }

    #[test]
    fn other_bytes_are_not() {
        for bytes in [
            [0xcc, 0x1f, 0x44, 0, 0],
            [0x0f, 0x1f, 0x44, 0, 1],
            [0xe8, 0xfb, 0x0f, 0, 0],
            [0xa9, 0xfb, 0x0f, 0, 7],
            [0xa8, 0xfb, 0x0f, 0, 0],
            [0; 5],
        ] {
            assert_eq!(size(&bytes, 0x1000), None, "{bytes:x?}");
        }
        assert_eq!(size(&[0x66], 0x10), None);
        assert_eq!(size(&[], 0x10), None);
        // The target is out of reach of a 2-byte JMP.
        assert_eq!(size(&[0x66, 0x90, 0, 0, 0], 0x1000), None);
        // A kernel before 5.13 has no sites of two bytes.
        assert_eq!(mixture(Nops::P6, &[0xeb, 0x90], CODE, CODE + 0x10), None);
    }

    /// A site is recognised after any byte at which [`crate::instruction::replace`] was
    /// interrupted.
    #[test]
    fn each_half_replaced_site_is_recognised() {
        for nops in [Nops::Fixed, Nops::K8] {
            for expected in [Size::Two, Size::Five] {
                let jump = Instruction::jump(expected, CODE, CODE + 0x20).expect("near");
                let nop = nops.nop(expected);
                for (before, after) in [(nop, jump), (jump, nop)] {
                    let mut bytes = before.as_bytes().to_vec();
                    let mut seen = Vec::new();
                    let _ = crate::instruction::replace(after.as_bytes(), |written| {
                        for (at, byte) in written.iter().enumerate() {
                            bytes[at] = *byte;
                            seen.push(bytes.clone());
                        }
                        Ok::<(), ()>(())
                    });
                    seen.pop();
                    for bytes in seen {
                        let found = mixture(nops, &bytes, CODE, CODE + 0x20);
                        assert_eq!(found, nops.has(expected).then_some(expected), "{bytes:x?}");
                    }
                }
            }
        }
    }
}
