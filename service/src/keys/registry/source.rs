// SPDX-License-Identifier: Apache-2.0
//! Builds a [`Registration`] from the tables that a source supplies.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use static_keys::Catalog;

use super::registered::Registration;
use super::request_memory::RequestMemory;
use super::tables::{Contents, KernelTables};
use crate::keys::boot::Boot;
use crate::keys::refused::RefusedModules;
use crate::keys::registration::Refused;

/// Reads everything that the numbers refer to.
pub(super) fn registration(
    memory: RequestMemory<'_>,
    tables: KernelTables,
    epoch: u64,
) -> Result<Registration, Refused> {
    let memory = memory.mapped_by(tables.page_table);
    let type_offset = tables.layout().map(|layout| layout.static_key_type);
    let catalog = match tables.contents {
        Contents::Described(kernel) => Catalog::new(&memory, &kernel),
        Contents::Found(kernel) => Catalog::found(kernel),
    };
    let catalog = catalog.map_err(|error| Refused(error.to_string()))?;
    Ok(Registration {
        generation: tables.generation,
        page_table: tables.page_table,
        page_table_isolation: tables.page_table_isolation,
        kaslr_offset: tables.kaslr_offset,
        release: tables.release,
        build_id: tables.build_id,
        promises: tables.promises,
        discovery: tables.discovery.map(Arc::new),
        catalog,
        debug: Arc::new(tables.debug),
        declared: HashMap::new(),
        undeclared: Vec::new(),
        type_offset,
        boot: tables.boot,
        epoch,
        modules: HashMap::new(),
        refused: RefusedModules::default(),
    })
}

/// Assigns epochs to the modules that came with the kernel. A module with the same name and the
/// same tables at the same addresses is the same load.
pub(super) fn add_epochs(
    registration: &mut Registration,
    boot: &mut Boot,
    mut next_epoch: impl FnMut() -> u64,
) {
    let modules = registration.catalog.modules();
    let modules: Vec<(u64, Arc<str>)> = modules.map(|(id, name)| (id, name.into())).collect();
    boot.retain(|id| modules.iter().any(|(module, _)| *module == id));
    let numbers = fingerprints(&registration.catalog);
    for ((id, name), number) in modules.into_iter().zip(numbers) {
        let epoch = boot.epoch_of(id, number).unwrap_or_else(&mut next_epoch);
        boot.loaded(id, number, epoch);
        registration.modules.insert(name, epoch);
    }
}

/// Returns a hash of each module's key addresses, id and name; never 0. The keys are read once,
/// because a kernel may have 131,072 keys and 4,096 modules.
fn fingerprints(catalog: &Catalog) -> Vec<u64> {
    let mut hashes: HashMap<&str, DefaultHasher> = HashMap::new();
    for key in catalog.keys_by_image() {
        key.id.0.hash(hashes.entry(key.module()).or_default());
    }
    let numbers = catalog.modules().map(|module| {
        let mut hash = hashes.remove(module.1).unwrap_or_default();
        module.hash(&mut hash);
        hash.finish().max(1)
    });
    numbers.collect()
}
