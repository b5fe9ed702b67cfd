// SPDX-License-Identifier: Apache-2.0
//! The keys of tracepoints, as tracing uses them.

use std::sync::Arc;

use static_keys::{Class, Key, Op};

use super::{Boxed, Switch, TracepointFacts, TracepointKeys};
use crate::keys::registry::Snapshot;
use crate::keys::{Caller, KeyUpdate, Keys, KeysError, TracepointUpdate, UpdateRequest, Use};

impl TracepointKeys for Keys {
    fn tracepoints(&self) -> Result<Vec<TracepointFacts>, KeysError> {
        let Snapshot { registration, .. } = self.registry().snapshot()?;
        let ram = self.ram()?;
        let memory = registration.memory(ram);
        let facts = |key: &Key| {
            // The guest may be changing the data now. A change of the key reads it again.
            let tracepoint = registration
                .catalog
                .tracepoint(&memory, key.id)
                .ok()
                .flatten();
            TracepointFacts {
                key: key.full_name.to_string(),
                enabled: registration
                    .catalog
                    .enabled(&memory, key.id)
                    .is_ok_and(|count| count != 0),
                probes: tracepoint.map(|tracepoint| tracepoint.probes),
                switched_by_function: key.switched_by_function,
            }
        };
        Ok(registration
            .catalog
            .keys()
            .filter(|key| key.class == Class::Tracepoint)
            .map(facts)
            .collect())
    }

    fn probes(&self, keys: &[String]) -> Result<Vec<Option<u32>>, KeysError> {
        let Snapshot { registration, .. } = self.registry().snapshot()?;
        let ram = self.ram()?;
        let memory = registration.memory(ram);
        let probes = |name: &String| {
            let key = registration.catalog.find(name)?;
            let tracepoint = registration.catalog.tracepoint(&memory, key.id);
            Some(tracepoint.ok()??.probes)
        };
        Ok(keys.iter().map(probes).collect())
    }

    fn holders(&self, keys: &[String]) -> Result<Vec<Vec<Arc<str>>>, KeysError> {
        let Snapshot { registration, .. } = self.registry().known()?;
        let holders = |name: &String| self.holders(&registration, name);
        Ok(keys.iter().map(holders).collect())
    }

    fn held_by(&self, client: &str) -> Result<Vec<String>, KeysError> {
        let Snapshot { registration, .. } = self.registry().known()?;
        let held = self.held_keys(client).into_iter();
        let is_tracepoint = |name: &Arc<str>| {
            let key = registration.catalog.find(name);
            key.is_some_and(|key| key.class == Class::Tracepoint)
        };
        Ok(held
            .filter(is_tracepoint)
            .map(|name| name.to_string())
            .collect())
    }

    fn permit(&self, caller: &Caller, keys: &[String], how: Use) -> Result<(), KeysError> {
        let keys = || keys.iter().map(String::as_str).collect();
        self.permit(caller, keys, how)
    }

    fn boot(&self) -> Option<u64> {
        self.registry().boot()
    }

    fn switch(
        &self,
        switch: Switch,
    ) -> Boxed<'_, Result<Option<crate::keys::FlipReport>, KeysError>> {
        let op = match switch.update {
            TracepointUpdate::Fire | TracepointUpdate::HandOver => Op::Enable,
            TracepointUpdate::Park | TracepointUpdate::Leave | TracepointUpdate::Silence => {
                Op::Disable
            }
        };
        let update = |name: String| KeyUpdate::new(name, op);
        let updates = switch.keys.into_iter().map(update).collect();
        let request = UpdateRequest {
            validate_only: switch.validate_only,
            tracepoints: Some(switch.update),
            ttl: switch.ttl,
            summary_only: true,
            reason: switch.reason.to_owned(),
            ..UpdateRequest::new(updates, switch.holder, switch.stop_timeout, switch.deadline)
        };
        Box::pin(async move { Ok(self.update(request).await?.report) })
    }
}
