// SPDX-License-Identifier: Apache-2.0
//! A kernel that was discovered in the guest's memory, as a source of tables.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use patchbay_kernel_image::Class as FoundClass;
use patchbay_kernel_image::live::{self, GateKind as Found};
use static_keys::{
    Class, Concerns, EntryFormat, FoundImage, FoundKernel, FoundKey, GateKind, Gates, KeyId,
    Layout, ListedGate,
};

use super::{Contents, DiscoveredKernel, KernelTables, Promises, Refused};
use crate::keys::debug::{DebugSite, DebugSites};

/// Returns the tables of a kernel that was discovered within `time`, after so many resets.
/// `generation` differs from discovery to discovery; never 0.
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
    let looked_at = kinds.filter(|kind| *kind != Found::ModuleLeftOut);
    let discovery = DiscoveredKernel {
        resets,
        way: kernel.evidence.way,
        time,
        file: kernel.evidence.file.take(),
        gates: names(looked_at),
        missing_gates: names(kernel.evidence.missing_gates.iter().copied()),
        left_out: std::mem::take(&mut kernel.left_out),
        functions: Arc::new(kernel.take_functions()),
        torn: kernel
            .keys
            .iter()
            .filter(|key| key.torn.is_some())
            .map(|key| KeyId(key.address))
            .collect(),
    };
    let debug = DebugSites::new(debug_sites(&mut kernel))?;
    let gates: Vec<ListedGate> = kernel
        .gates
        .iter()
        .filter_map(|gate| listed(&kernel, gate))
        .collect();
    let gates =
        Gates::new(&gates, &kernel.per_cpu_offsets).map_err(|error| Refused(error.to_string()))?;
    let layout = layout(&kernel.layout);
    let missing = &kernel.evidence.missing_gates;
    let text_gates = ![Found::TextMutex, Found::TextPoke]
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
        contents: Contents::Found(FoundKernel {
            format: EntryFormat::Relative,
            nops: kernel.nops,
            layout,
            gates,
            images: images(kernel),
        }),
        debug,
        // A module's removal is not reported. The gates detect it in the stopped guest.
        promises: Promises {
            fence: false,
            text_gates,
        },
        discovery: Some(discovery),
    })
}

/// Differs from boot to boot. The number that was found does not in a kernel without a stack canary
/// and KASLR; never 0.
fn boot_number(found: u64, resets: u64) -> u64 {
    // 2^64 divided by the golden ratio. It is odd, so each number of resets gives another product.
    (found ^ resets.wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1)
}

fn layout(found: &live::Layout) -> Layout {
    Layout {
        static_key_type: found.static_key_type,
        static_key_mod_next: found.static_key_mod_next,
        static_key_mod_entries: found.static_key_mod_entries,
        static_key_mod_mod: found.static_key_mod_mod,
        module_state: found.module_state,
        module_state_live: found.module_state_live,
        tracepoint_key: found.tracepoint_key,
        tracepoint_funcs: found.tracepoint_funcs,
    }
}

fn debug_sites(kernel: &mut live::Kernel) -> Vec<(u64, DebugSite)> {
    let keys = kernel.keys.iter_mut();
    let sites = keys.filter_map(|key| Some((key.address, key.debug.take()?)));
    sites
        .map(|(address, line)| {
            let site = DebugSite {
                module: line.module,
                file: line.file,
                function: line.function,
                line: line.line,
                format: line.format,
                classed: line.classed,
            };
            (address, site)
        })
        .collect()
}

/// Removes keys whose entries the kernel has forgotten. Their entries stay, so that the key of a
/// site is known.
fn images(kernel: live::Kernel) -> Vec<FoundImage> {
    let mut keys: Vec<Vec<FoundKey>> = kernel.images.iter().map(|_| Vec::new()).collect();
    for key in kernel.keys {
        let forgotten = key.sealed
            && !kernel
                .images
                .get(key.image)
                .is_some_and(|image| image.ro_after_init.contains(&key.address));
        let class = match key.class {
            FoundClass::Tracepoint => Class::Tracepoint,
            FoundClass::Ref => Class::Ref,
            FoundClass::Dyndbg => Class::DynamicDebug,
            FoundClass::Never => Class::Never,
            FoundClass::Guarded => Class::Guarded,
        };
        if let Some(list) = keys.get_mut(key.image).filter(|_| !forgotten) {
            list.push(FoundKey {
                address: key.address,
                name: key.name,
                class,
                tracepoint: key.tracepoint.map_or(0, |tracepoint| tracepoint.address),
                switched_by_function: key.switched_by_function,
            });
        }
    }
    let images = kernel.images.into_iter().zip(keys);
    images
        .map(|(image, keys)| FoundImage {
            id: image.module,
            name: image.name,
            text: range(&image.text),
            ro_after_init: range(&image.ro_after_init),
            jump_table: range(&image.jump_table),
            entries: image
                .sites
                .iter()
                .map(|site| static_keys::JumpEntry {
                    // The text was freed, whatever the entry says.
                    init: site.holds.is_none() && !site.is_mixture,
                    ..site.entry
                })
                .collect(),
            keys,
        })
        .collect()
}

fn range(found: &Range<u64>) -> static_keys::Range {
    static_keys::Range {
        start: found.start,
        end: found.end,
    }
}

/// Returns the names of these gates, once each, in their order.
fn names(kinds: impl Iterator<Item = Found>) -> Vec<&'static str> {
    let mut names = Vec::new();
    for name in kinds.map(Found::name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Converts a gate; `None` if the engine checks it by itself.
fn listed(kernel: &live::Kernel, gate: &live::Gate) -> Option<ListedGate> {
    let counted = !kernel.evidence.missing_gates.contains(&Found::ModuleCount);
    let kind = match gate.kind {
        Found::SystemState => GateKind::SystemState,
        Found::JumpLabelMutex => GateKind::JumpLabelMutex,
        Found::TextMutex => GateKind::TextMutex,
        Found::TextPoke => GateKind::TextPoke,
        Found::TextPokeQueue => GateKind::TextPokeQueue,
        Found::TracepointsMutex => GateKind::TracepointsMutex,
        Found::ModuleMutex => GateKind::ModuleMutex,
        Found::SameKernel => GateKind::Other(1),
        Found::Panic => GateKind::Other(2),
        Found::DynamicDebugMutex => GateKind::Other(3),
        Found::ModuleCount | Found::ModuleList => GateKind::Modules,
        // An unchanged counter proves that no module was loaded or unloaded.
        Found::ModuleTable if counted => return None,
        Found::ModuleTable => GateKind::Modules,
        // The engine checks the modules that a change involves. A key that any other module uses
        // has an unknown user.
        Found::ModuleState | Found::ModuleLeftOut => return None,
    };
    let concerns = match gate.concerns {
        live::Concerns::All => Concerns::ALL,
        live::Concerns::Tracepoints => Concerns::TRACEPOINT,
        live::Concerns::DynamicDebug => Concerns::DYNAMIC_DEBUG,
        live::Concerns::Modules | live::Concerns::Module(_) => Concerns::MODULES,
    };
    Some(ListedGate {
        kind,
        name: Arc::from(gate.kind.name()),
        address: gate.address,
        per_cpu: gate.per_cpu,
        width: gate.width,
        mask: gate.mask,
        wanted: gate.wanted,
        concerns,
    })
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
    }
}
