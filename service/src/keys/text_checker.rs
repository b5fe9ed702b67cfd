// SPDX-License-Identifier: Apache-2.0
//! Modules that check the kernel's text while it runs, and mistake a change from outside for an
//! attack.
//!
//! LKRG hashes the text of the kernel and of its modules, and hooks `arch_jump_label_transform()`
//! to notice the kernel's own changes. A change by the host does not pass this hook, so the next
//! check finds different text, and LKRG may panic the kernel.

use super::error::{KeyRefusal, KeysError};
use super::registry::Registration;

/// Names of modules, as `struct module` has them. LKRG was `p_lkrg` before 0.9.2.
const TEXT_CHECKERS: [&str; 2] = ["lkrg", "p_lkrg"];

/// A loaded module that checks the kernel's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TextChecker(&'static str);

impl TextChecker {
    fn find<'a>(modules: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut found = modules.filter_map(|module| {
            let known = TEXT_CHECKERS.iter();
            known.copied().find(|checker| *checker == module)
        });
        found.next().map(Self)
    }

    /// Returns the error for a change of this key.
    pub fn refusal(self, key: &str) -> KeysError {
        KeysError::KeyRefused {
            key: key.into(),
            reason: KeyRefusal::TextChecked,
            message: format!(
                "the guest has the module {} loaded, which checks the kernel's text and may panic when a site changes; unload it, or start the monitor with --allow-text-checker",
                self.0
            ),
        }
    }
}

impl Registration {
    /// Returns the module that checks the kernel's text, if one is loaded and does not hide. A
    /// module that is not live counts too, because LKRG makes its first check in its init function.
    pub(super) fn text_checker(&self) -> Option<TextChecker> {
        let registered = self.catalog.modules().map(|(_, name)| name);
        TextChecker::find(registered.chain(self.other_modules()))
    }
}

#[cfg(test)]
mod tests;
