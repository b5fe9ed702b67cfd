// SPDX-License-Identifier: Apache-2.0
//! A discovered kernel in the form in which the engine changes its keys.

use std::ops::Range;

use static_keys::{
    EntryFormat, FoundImage, FoundKernel, FoundKey, GateError, GateKind, Gates, JumpEntry,
    ListedGate,
};

use super::kernel::Kernel;

impl Kernel {
    /// Returns the tables and gates of the kernel. Keys whose entries the kernel no longer refers
    /// to are left out. The names of the keys move into the result.
    ///
    /// # Errors
    /// [`GateError`], which names a gate that cannot be used.
    pub fn found(&mut self) -> Result<FoundKernel, GateError> {
        let gates = self.gates.iter().filter(|gate| self.is_checked(gate));
        let gates: Vec<ListedGate> = gates.cloned().collect();
        Ok(FoundKernel {
            format: EntryFormat::Relative,
            nops: self.nops,
            layout: self.layout.keys,
            gates: Gates::new(&gates, &self.per_cpu_offsets)?,
            images: self.found_images(),
        })
    }

    /// Returns whether a change reads the gate. The engine itself checks the states of the modules
    /// that a change involves. It reports a key as busy if a module that was left out uses the key.
    fn is_checked(&self, gate: &ListedGate) -> bool {
        match gate.kind {
            GateKind::ModuleState | GateKind::ModuleLeftOut => false,
            // If there is a gate for the number of module changes, that gate proves that no module
            // was loaded or unloaded.
            GateKind::ModuleTable => {
                let missing = &self.evidence.missing_gates;
                missing.contains(&GateKind::ModuleCount)
            }
            _ => true,
        }
    }

    fn found_images(&mut self) -> Vec<FoundImage> {
        let mut keys: Vec<Vec<FoundKey>> = self.images.iter().map(|_| Vec::new()).collect();
        for key in &mut self.keys {
            let forgotten = key.sealed
                && !self
                    .images
                    .get(key.image)
                    .is_some_and(|image| image.ro_after_init.contains(&key.address));
            // The entries of a forgotten key stay in the table, so that the key of each site is
            // known.
            if let Some(list) = keys.get_mut(key.image).filter(|_| !forgotten) {
                list.push(FoundKey {
                    address: key.address,
                    name: std::mem::take(&mut key.name),
                    class: key.class,
                    tracepoint: key.tracepoint.as_ref().map_or(0, |found| found.address),
                    switched_by_function: key.switched_by_function,
                });
            }
        }
        let images = self.images.iter().zip(keys);
        images
            .map(|(image, keys)| FoundImage {
                id: image.module,
                name: image.name.clone(),
                text: range(&image.text),
                ro_after_init: range(&image.ro_after_init),
                jump_table: range(&image.jump_table),
                entries: image
                    .sites
                    .iter()
                    .map(|site| JumpEntry {
                        // A site that holds neither an instruction nor a mixture lies in init text
                        // that was freed, even if the entry's init bit is clear.
                        init: site.holds.is_none() && !site.is_mixture,
                        ..site.entry
                    })
                    .collect(),
                keys,
            })
            .collect()
    }
}

fn range(found: &Range<u64>) -> static_keys::Range {
    static_keys::Range {
        start: found.start,
        end: found.end,
    }
}
