// SPDX-License-Identifier: Apache-2.0
//! Registers and withdraws kernels.

use std::sync::{Arc, PoisonError};

use patchbay_guest::log_limit::limited;

use super::request_memory::RequestMemory;
use super::source;
use super::tables::{Contents, KernelTables};
use super::{Identity, OwnRequest, Registration, RegistrationPhase, Registry, Writer};
use crate::keys::boot::Boot;
use crate::keys::registration::Refused;

impl Registry {
    /// Registers a kernel whose tables were found. An earlier kernel is replaced.
    ///
    /// # Errors
    /// [`Refused`], also if the registry has no memory yet. Nothing is registered then, except that
    /// an earlier kernel stays registered if a discovery is refused.
    pub fn register_kernel(&self, tables: KernelTables) -> Result<(), Refused> {
        let ram = self
            .ram
            .get()
            .ok_or_else(|| Refused("the guest's memory is not attached".to_owned()))?;
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let discovered = tables.discovery.is_some();
        if discovered {
            self.check_own(&tables)?;
        }
        let checked = tables.check().map(|()| tables);
        self.install(ram.into(), checked, discovered, &mut writer)
    }

    /// Returns what the tables of a kernel say, without registering it.
    ///
    /// # Errors
    /// [`Refused`]: they are malformed.
    pub(super) fn to_registration(&self, tables: KernelTables) -> Result<Registration, Refused> {
        let unattached = || Refused("the guest's memory is not attached".to_owned());
        let ram = self.ram.get().ok_or_else(unattached)?;
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        tables.check()?;
        let (registration, _) = self.built(ram.into(), tables, None, &mut writer)?;
        Ok(registration)
    }

    /// Returns what the tables of a kernel say, and its boot. It continues the boot `last` if the
    /// tables are of the same one.
    fn built(
        &self,
        memory: RequestMemory<'_>,
        tables: KernelTables,
        last: Option<Boot>,
        writer: &mut Writer,
    ) -> Result<(Registration, Boot), Refused> {
        let mut boot = last
            .filter(|boot| boot.id == tables.boot)
            .unwrap_or_else(|| Boot::new(tables.boot, writer.next_epoch()));
        boot.generation = tables.generation;
        // A kernel that registers itself adds its modules afterwards, each with the number of its
        // load.
        let with_modules = matches!(tables.contents, Contents::Found(..));
        let mut registration = source::registration(memory, tables, boot.epoch)?;
        if with_modules {
            source::add_epochs(&mut registration, &mut boot, || writer.next_epoch());
        }
        self.apply_declarations(&mut registration);
        Ok((registration, boot))
    }

    /// Keeps a discovered kernel that has panicked, so that its keys can be read.
    pub(super) fn keep_panicked(&self, registration: Arc<Registration>) {
        self.state().panicked = Some(registration);
    }

    /// Returns the kernel that has panicked.
    pub(super) fn panicked(&self) -> Option<Arc<Registration>> {
        self.state().panicked.clone()
    }

    /// Forgets the kernel that has panicked, if there is one: another one runs.
    pub(super) fn forget_panicked(&self) {
        let had = self.state().panicked.take().is_some();
        if had {
            self.announce_removed("");
        }
    }

    /// Refuses the discovery of a kernel that registers itself.
    fn check_own(&self, tables: &KernelTables) -> Result<(), Refused> {
        let mut state = self.state();
        let found = Identity {
            page_table: tables.page_table,
            release: tables.release.clone(),
        };
        match &state.own {
            None => return Ok(()),
            Some(OwnRequest {
                withdrawn: Some(withdrawn),
            }) if *withdrawn != found => {}
            Some(_) => return Err(Refused("the kernel registers itself".to_owned())),
        }
        state.own = None;
        Ok(())
    }

    /// Withdraws the registration. Does nothing if there is none.
    pub fn withdraw(&self) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.take_back();
    }

    pub(super) fn take_back(&self) {
        let registration = self.state().registration.clone();
        if let Some(registration) = registration {
            if let Some(own) = &mut self.state().own {
                own.withdrawn = Some(Identity {
                    page_table: registration.page_table,
                    release: registration.release.clone(),
                });
            }
            self.publish(RegistrationPhase::Withdrawn, None, None);
            self.announce_removed("");
        }
    }

    /// Publishes a kernel's registration, or the reason for its refusal. A discovery that is
    /// refused changes nothing.
    pub(super) fn install(
        &self,
        memory: RequestMemory<'_>,
        tables: Result<KernelTables, Refused>,
        discovered: bool,
        writer: &mut Writer,
    ) -> Result<(), Refused> {
        let (had, last) = {
            let state = self.state();
            (state.registration.is_some(), state.boot.clone())
        };
        let result = match tables.and_then(|tables| self.built(memory, tables, last, writer)) {
            // The last discovery is kept until its gates close or another discovery succeeds.
            Err(refused) if discovered => return Err(refused),
            result => result,
        };
        if had {
            // The earlier registration is void in any case.
            self.announce_removed("");
        }
        match result {
            Ok((registration, boot)) => {
                self.forget_panicked();
                self.state().boot = Some(boot);
                limited!(
                    info,
                    release = registration.release,
                    keys = registration.catalog.key_count(),
                    discovered,
                    "the guest's keys are known"
                );
                self.publish(
                    RegistrationPhase::Registered,
                    None,
                    Some(Arc::new(registration)),
                );
                self.announce_added("");
                Ok(())
            }
            Err(refused) => {
                self.publish(RegistrationPhase::Refused, Some(refused.to_string()), None);
                Err(refused)
            }
        }
    }
}

#[cfg(test)]
mod tests;
