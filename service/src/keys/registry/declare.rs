// SPDX-License-Identifier: Apache-2.0
//! Gives each key that the host declares its class.

use std::sync::Arc;

use patchbay_guest::log_limit::limited;
use static_keys::{Class, split_name};

use super::registered::Registration;
use crate::keys::declared::{Declaration, Declarations};

/// The maximum number of reasons in a description. The log contains all of them.
const MAX_REPORTED: usize = 100;

impl Registration {
    /// Gives declared keys their class. Declarations that do not apply to this kernel are added to
    /// [`Registration::undeclared`].
    pub(super) fn declare(&mut self, declarations: &Declarations) {
        self.declared.clear();
        self.undeclared.clear();
        let (release, build_id) = (self.release.clone(), self.build_id.clone());
        for declaration in declarations.of(&release, &build_id) {
            if let Err(why) = self.declare_one(declaration) {
                let Declaration { key, file, .. } = &**declaration;
                let why = format!("{file}: key {key}: {why}");
                limited!(
                    warn,
                    why,
                    "a declaration does not apply to the guest's kernel"
                );
                if self.undeclared.len() < MAX_REPORTED {
                    self.undeclared.push(why);
                }
            }
        }
    }

    fn declare_one(&mut self, declaration: &Arc<Declaration>) -> Result<(), String> {
        let name = declaration.key.as_str();
        let (module, _) = split_name(name);
        let Some(key) = self.catalog.find(name) else {
            let loaded = self.catalog.modules().any(|(_, name)| name == module);
            // A module that is not loaded has no keys.
            return match module.is_empty() || loaded {
                true => Err(format!(
                    "kernel {} has no such key; correct the name or the kernels",
                    self.release
                )),
                false => Ok(()),
            };
        };
        let (id, class) = (key.id, key.class);
        if self.catalog.is_ro_after_init(id) {
            return Err("it is sealed and cannot change after the kernel's init; remove it".into());
        }
        if let Some(first) = self.declared.get(&id) {
            return Err(format!("{} declares it too; remove one", first.file));
        }
        match class {
            Class::Guarded => self.catalog.set_class(id, Class::Ref),
            // An earlier module event, or the guest itself, has declared the key.
            Class::Ref => {}
            Class::Tracepoint | Class::DynamicDebug | Class::Never => {
                return Err(format!(
                    "it is of class {}, only guarded keys can be declared; remove it",
                    class.name()
                ));
            }
        }
        self.declared.insert(id, Arc::clone(declaration));
        Ok(())
    }
}
