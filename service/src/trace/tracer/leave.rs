// SPDX-License-Identifier: Apache-2.0
//! Disarming: on request, when a client is gone, or when an agent's list differs from the book.

use std::collections::BTreeSet;
use std::time::Duration;

use patchbay_guest::log_limit::limited;
use patchbay_proto::v1::TracepointResult;
use tokio::time::Instant;

use super::arm::CLAIM_PATIENCE;
use super::{Facts, SwitchTerms, Tracer};
use crate::keys::{Caller, KeysError, TracepointUpdate, Use};
use crate::trace::book::Armed;
use crate::trace::error::{AgentError, TraceError};
use crate::trace::select::{self, Wanted};

/// Delays before a failed park or disarm of a departed or expired client is retried: the first and
/// the maximum.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(64);

impl Tracer {
    /// Parks and disarms a client's events, except those that another client armed. The permission
    /// of `caller` is checked, if there is one.
    ///
    /// # Errors
    /// [`TraceError`]. If the agent does not answer, the events are parked now, and detached when
    /// the agent answers.
    pub async fn disarm(
        &self,
        client: &str,
        wanted: &Wanted,
        force: bool,
        caller: Option<&Caller>,
    ) -> Result<Vec<TracepointResult>, TraceError> {
        let moving = self.claim(&self.armed(wanted)?, CLAIM_PATIENCE).await?;
        // Another call may have disarmed some of the events while this one waited.
        let names = self.armed(wanted)?;
        let names: Vec<String> = names
            .into_iter()
            .filter(|name| moving.names.contains(name))
            .collect();
        if let Some(caller) = caller {
            let how = match force {
                true => Use::Change,
                false => Use::GiveBack,
            };
            let keys = self.book().keys(&names);
            self.keys.permit(caller, &keys, how)?;
        }
        let to_disarm = self.remove(client, &names, force).await?;
        if let Some(error) = self.detach(&to_disarm).await {
            return Err(error.into());
        }
        Ok(self.results(names.into_iter(), client, None))
    }

    /// Removes the client from the events. Events without remaining clients, or all with `force`,
    /// are parked and removed from the book; the caller detaches them.
    async fn remove(
        &self,
        client: &str,
        names: &[String],
        force: bool,
    ) -> Result<Vec<String>, TraceError> {
        let _turn = self.turn.lock().await;
        let mut to_disarm = self.book().to_disarm(names, client, force);
        // When the guest removes the probe, it also turns the key off, but possibly late or never.
        // The guest does not turn keys on, so a key that other users still trace is turned on here.
        let (theirs, ours) = self.split_by_others(&to_disarm).await;
        let kept = self.kept_armed(names, &to_disarm, client);
        for (names, update) in [
            (ours, TracepointUpdate::Silence),
            (theirs, TracepointUpdate::HandOver),
            (kept, TracepointUpdate::Leave),
        ] {
            let keys = self.book().keys(&names);
            let terms = SwitchTerms::default();
            match self
                .switch(keys, update, client, "disarm tracepoints", &terms)
                .await
            {
                // The guest has ended or has registered again, so there is nothing to park.
                Ok(_)
                | Err(TraceError::Keys(
                    KeysError::NotRegistered { .. } | KeysError::KeyNotFound { .. },
                )) => {}
                Err(error) => return Err(error),
            }
        }
        let mut book = self.book();
        book.release_arm(names, client);
        // The agent has no probe to detach from an event that the guest's kernel has armed.
        to_disarm.retain(|name| {
            let armed = book.events.remove(name);
            armed.is_some_and(|armed| {
                self.remove_source(&armed);
                !armed.is_guests()
            })
        });
        Ok(to_disarm)
    }

    /// Returns the events that the client fires and that other clients armed.
    fn kept_armed(&self, names: &[String], to_disarm: &[String], client: &str) -> Vec<String> {
        let fired_by = self.fired_by(names);
        let fires = |name: &&String| {
            let holders = fired_by.get(*name);
            let fires = holders.is_some_and(|of| of.iter().any(|holder| **holder == *client));
            fires && !to_disarm.contains(*name)
        };
        names.iter().filter(fires).cloned().collect()
    }

    /// Parks and disarms the events that only this client armed, because it is gone.
    pub async fn leave(&self, client: &str) {
        let mut wait = FIRST_RETRY;
        while let Err(error) = self.park_without(client).await {
            tracing::warn!(client, %error, "the events of a client that is gone could not be parked");
            if error.retry_after().is_none() || wait > LAST_RETRY {
                break;
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
        let names = self.book().armed_by(client);
        let moving = self.claim_whenever(&names).await;
        match self.remove(client, &moving.names, false).await {
            Ok(to_disarm) => {
                if let Some(error) = self.detach(&to_disarm).await {
                    tracing::warn!(client, %error, "events of a client that is gone wait for being disarmed");
                }
            }
            Err(error) => {
                tracing::warn!(client, %error, "the events of a client that is gone could not be disarmed");
            }
        }
    }

    async fn park_without(&self, client: &str) -> Result<(), KeysError> {
        let _turn = self.turn.lock().await;
        let keys = match self.keys.held_by(client) {
            // The guest has ended or is registering again, so there is nothing to park.
            Err(KeysError::NotRegistered { .. }) => return Ok(()),
            held => held?,
        };
        let names: Vec<String> = {
            let book = self.book();
            let events = book.events.iter();
            let held = events.filter(|(_, armed)| keys.contains(&armed.key));
            held.map(|(name, _)| name.clone()).collect()
        };
        let to_park = self.without_others(&names, client);
        let terms = SwitchTerms::default();
        let leave = TracepointUpdate::Leave;
        match self
            .switch(keys, leave, client, "park tracepoints", &terms)
            .await
        {
            Ok(report) => self.mark("parked", &to_park, client, report.as_ref()),
            Err(TraceError::Keys(error)) => return Err(error),
            // Switching keys needs no answer from the agent.
            Err(_) => {}
        }
        Ok(())
    }

    /// Disarms events whose time to live has passed.
    pub async fn disarm_expired(&self) {
        let now = Instant::now();
        let expired = self.book().expired(now);
        for (client, names) in expired {
            let disarmed = self.disarm_for(&client, &names, now).await;
            if let Err(error) = disarmed {
                limited!(warn, client, %error, "expired events could not be disarmed yet");
                let mut book = self.book();
                let mut still = book.expired(now);
                let names = still.remove(&client).unwrap_or_default();
                book.set_expiry(&names, &client, Instant::now() + FIRST_RETRY);
            }
        }
    }

    async fn disarm_for(
        &self,
        client: &str,
        names: &[String],
        now: Instant,
    ) -> Result<(), TraceError> {
        let moving = self.claim(names, FIRST_RETRY).await?;
        // The client may have armed the events again while this call waited.
        let mut names = self.book().expired(now).remove(client).unwrap_or_default();
        names.retain(|name| moving.names.contains(name));
        let to_disarm = self.remove(client, &names, false).await?;
        if let Some(error) = self.detach(&to_disarm).await {
            tracing::warn!(client, %error, "expired events wait for being disarmed");
        }
        Ok(())
    }

    /// Reconciles the agent and the book when an agent connects. An event that only the agent knows
    /// is detached. An event that only the book knows has vanished with its module, boot or tracefs
    /// instance.
    pub async fn reconcile(&self) {
        let peer = match self.link.peer() {
            Ok(peer) => peer,
            Err(error) => {
                self.hub.mark(format!("{error}; armed events stay armed"));
                return;
            }
        };
        self.hub
            .mark("an agent has connected in the guest".to_owned());
        let enabled: BTreeSet<String> = peer.hello.enabled.into_iter().collect();
        self.forget_lost(&enabled, peer.connection).await;
        self.hub.agent_connected();
        let strangers = self.claim_unarmed(enabled.into_iter().collect());
        self.detach(&strangers.names).await;
        drop(strangers);
        // The previous agent may have died between stopping and starting the recording.
        match self.settle().await {
            // The agent has disconnected again. This is not logged, because a guest that connects
            // in a loop must not fill the log.
            Ok(_) | Err(TraceError::Agent(AgentError::Absent { .. })) => {}
            Err(error) => tracing::warn!(%error, "the agent does not record"),
        }
    }

    /// Removes events that an earlier connection armed and the new agent does not know.
    async fn forget_lost(&self, enabled: &BTreeSet<String>, connection: u64) {
        let _turn = self.turn.lock().await;
        let is_lost = |name: &String, armed: &mut Armed| {
            !armed.is_guests() && !enabled.contains(name) && armed.connection != connection
        };
        let lost: Vec<_> = self.book().events.extract_if(.., is_lost).collect();
        self.forgotten(&lost);
    }

    /// Tells the streams of events that were removed from the book.
    fn forgotten(&self, gone: &[(String, Armed)]) {
        for (name, armed) in gone {
            self.remove_source(armed);
            self.hub
                .mark(format!("{name} is no longer armed in the guest"));
        }
    }

    fn remove_source(&self, armed: &Armed) {
        if let Some(source) = &armed.source {
            self.hub.remove_source(source.format.id);
        }
    }

    /// Removes events without a probe. Either the module is gone (another module of the same name
    /// may be loaded), or a user in the guest removed the probe. Returns whether there were such
    /// events.
    pub(crate) fn forget_vanished(&self, facts: &Facts) -> bool {
        let mut book = self.book();
        let vanished = |name: &str, armed: &Armed| {
            armed.serial <= facts.armed
                && match select::of_event(&facts.by_name, name) {
                    Some(facts) => facts.key != armed.key || facts.probes == Some(0),
                    None => true,
                }
        };
        let gone: Vec<_> = book
            .events
            .extract_if(.., |name, armed| vanished(name, armed))
            .collect();
        self.forgotten(&gone);
        !gone.is_empty()
    }

    /// Detaches events that could not be detached when they were due.
    pub async fn catch_up(&self) {
        if self.link.silent_for().is_some() || self.book().overdue.is_empty() {
            return;
        }
        let overdue = self.book().overdue.iter().cloned().collect();
        let moving = self.claim_unarmed(overdue);
        let silent = self.detach(&moving.names).await;
        // The failed arming may have stopped the recording.
        if silent.is_none() && !moving.names.is_empty() {
            self.settle().await.ok();
        }
    }
}
