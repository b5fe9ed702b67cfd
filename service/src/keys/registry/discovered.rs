// SPDX-License-Identifier: Apache-2.0
//! A kernel that was discovered in the guest's memory, as a source of tables.

use std::sync::Arc;
use std::time::Duration;

use patchbay_kernel_image::{DebugLine, live};
use static_keys::{GateKind, KeyId};

use super::tables::{Contents, DiscoveredKernel, KernelTables, Promises};
use crate::keys::debug::DebugSites;
use crate::keys::registration::Refused;

/// Returns the tables of a kernel that was discovered in `time`, after `resets` resets of the
/// guest. `generation` is different for each discovery, and never 0.
///
/// # Errors
/// [`Refused`]: a gate cannot be used.
pub fn tables(
    mut kernel: live::Kernel,
    resets: u64,
    generation: u64,
    time: Duration,
) -> Result<KernelTables, Refused> {
    let kinds = kernel.gates.iter().map(|gate| gate.kind);
    let looked_at = kinds.filter(|kind| *kind != GateKind::ModuleLeftOut);
    let discovery = DiscoveredKernel {
        resets,
        way: kernel.evidence.way,
        time,
        file: kernel.evidence.file.take(),
        gates: names(looked_at),
        missing_gates: names(kernel.evidence.missing_gates.iter().copied()),
        left_out: std::mem::take(&mut kernel.left_out),
        functions: Arc::new(kernel.functions()),
        torn: kernel
            .keys
            .iter()
            .filter(|key| key.torn.is_some())
            .map(|key| KeyId(key.address))
            .collect(),
    };
    let debug = DebugSites::new(debug_lines(&mut kernel))?;
    let found = kernel.found().map_err(|error| Refused(error.to_string()))?;
    let missing = &kernel.evidence.missing_gates;
    let text_gates = ![GateKind::TextMutex, GateKind::TextPoke]
        .iter()
        .any(|kind| missing.contains(kind));
    Ok(KernelTables {
        boot: boot_number(kernel.boot, resets),
        generation,
        page_table: kernel.page_table,
        page_table_isolation: kernel.page_table_isolation.unwrap_or_default(),
        kaslr_offset: kernel.kaslr_offset.unwrap_or_default(),
        release: kernel.release.clone(),
        build_id: kernel.build_id.clone(),
        contents: Contents::Found(found),
        debug,
        // The removal of a module is not reported. In the stopped guest, the gates detect it.
        promises: Promises {
            fence: false,
            text_gates,
        },
        discovery: Some(discovery),
    })
}

/// Returns a number that differs from boot to boot and is never 0. In a kernel without a stack
/// canary and KASLR, the number `found` is the same in each boot, so the number of resets is mixed
/// into it.
pub(crate) fn boot_number(found: u64, resets: u64) -> u64 {
    (found ^ resets.wrapping_mul(GOLDEN)).max(1)
}

/// 2^64 divided by the golden ratio. The number is odd, so each number of resets gives another
/// product.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the number that was found in the kernel of this boot. This number does not depend on the
/// resets that the process has seen.
pub(super) fn found_number(boot: u64, resets: u64) -> u64 {
    boot ^ resets.wrapping_mul(GOLDEN)
}

/// Takes the lines of dynamic debug out of `kernel`. Each line has the address of its key.
fn debug_lines(kernel: &mut live::Kernel) -> Vec<(u64, DebugLine)> {
    let keys = kernel.keys.iter_mut();
    let lines = keys.filter_map(|key| Some((key.address, key.debug.take()?)));
    lines.collect()
}

/// Returns the names of these gates in order, each only once.
fn names(kinds: impl Iterator<Item = GateKind>) -> Vec<&'static str> {
    let mut names = Vec::new();
    for name in kinds.map(GateKind::name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_makes_another_boot_of_the_same_kernel() {
        let boots: Vec<u64> = (0..4).map(|resets| boot_number(7, resets)).collect();
        for (resets, boot) in boots.iter().enumerate() {
            assert_ne!(*boot, 0);
            assert!(!boots[..resets].contains(boot), "{boots:x?}");
        }
        assert_eq!(boot_number(7, 2), boots[2], "the same boot");
        assert_ne!(boot_number(0, 0), 0);
        for (resets, boot) in (0..).zip(&boots) {
            assert_eq!(found_number(*boot, resets), 7, "the same kernel");
        }
    }
}
