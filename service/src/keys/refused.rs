// SPDX-License-Identifier: Apache-2.0
//! Modules whose registration was refused. They are loaded nevertheless, and their sites are
//! unknown, so the keys that they use cannot be flipped.

use std::collections::BTreeMap;
use std::sync::Arc;

use static_keys::MODULES_MAX;

use super::error::{KeyRefusal, KeysError};

/// A loaded module whose registration was refused.
#[derive(Clone, Debug)]
struct RefusedModule {
    name: String,
    why: Arc<str>,
}

/// The refused modules, by address of `struct module`.
#[derive(Clone, Debug, Default)]
pub struct RefusedModules(BTreeMap<u64, RefusedModule>);

impl RefusedModules {
    /// Records a module, unless as many are recorded as a guest can register.
    pub fn insert(&mut self, module: u64, name: String, why: &str) {
        if self.0.len() < MODULES_MAX || self.has(module) {
            let why = why.into();
            self.0.insert(module, RefusedModule { name, why });
        }
    }

    /// Returns whether the module at this address was refused.
    pub fn has(&self, module: u64) -> bool {
        self.0.contains_key(&module)
    }

    /// Removes a module that was unloaded or has registered.
    pub fn remove(&mut self, module: u64) {
        self.0.remove(&module);
    }

    /// Returns the names of the modules.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.values().map(|refused| &*refused.name)
    }

    /// Returns the error for a key that the module at this address uses.
    pub fn user(&self, module: u64, key: &str) -> Option<KeysError> {
        Some(self.0.get(&module)?.refusal(key))
    }

    /// Returns the error for an unknown key with this full name.
    pub fn home(&self, full_name: &str) -> Option<KeysError> {
        let (module, _) = full_name.split_once(':')?;
        let refused = self.0.values().find(|refused| refused.name == module)?;
        Some(refused.refusal(full_name))
    }
}

impl RefusedModule {
    fn refusal(&self, key: &str) -> KeysError {
        let Self { name, why } = self;
        KeysError::KeyRefused {
            key: key.into(),
            reason: KeyRefusal::ModuleRefused,
            message: format!(
                "key {key} belongs to module {name} or is used by it, and the registration of that module was refused: {why}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_kept_than_a_guest_can_have() {
        let mut refused = RefusedModules::default();
        for module in 0..2 * MODULES_MAX as u64 {
            refused.insert(module, format!("m{module}"), "once");
        }
        assert_eq!(refused.0.len(), MODULES_MAX);
        refused.insert(0, "m0".into(), "twice");
        let error = refused.user(0, "key").expect("known");
        assert_eq!(error.reason(), "MODULE_REFUSED");
        assert!(error.to_string().contains("twice"), "{error}");
        assert!(refused.has(0));
        refused.remove(0);
        assert!(refused.user(0, "key").is_none() && refused.home("m0:key").is_none());
        assert!(refused.home("m1:key").is_some() && refused.home("m1").is_none());
    }
}
