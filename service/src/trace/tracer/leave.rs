// SPDX-License-Identifier: Apache-2.0
//! Disarming, by request, because a client is gone, or because an agent says something else than
//! the book.

use std::collections::{BTreeSet, HashMap};

use patchbay_proto::v1::TracepointResult;

use super::others::OTHERS;
use super::{SwitchTerms, Tracer};
use crate::keys::KeysError;
use crate::trace::book::Armed;
use crate::trace::error::TraceError;
use crate::trace::link::AgentError;
use crate::trace::select::{self, Wanted};
use crate::trace::switch::TracepointFacts;

impl Tracer {
    /// Parks and disarms for a client what no other keeps armed.
    ///
    /// # Errors
    /// [`TraceError`]; if it is the agent's silence, the events are parked, and disarmed when it
    /// answers again.
    pub async fn disarm(
        &self,
        client: &str,
        wanted: &Wanted,
        force: bool,
    ) -> Result<Vec<TracepointResult>, TraceError> {
        let _turn = self.turn.lock().await;
        let names = self.armed(wanted)?;
        let to_disarm = self.book().to_disarm(&names, client, force);
        let silent = self.remove(client, &names, &to_disarm).await?;
        if let Some(error) = silent {
            return Err(error.into());
        }
        Ok(self.results(names.into_iter(), client, None))
    }

    /// `names` are the client's no more; `to_disarm` are nobody's.
    async fn remove(
        &self,
        client: &str,
        names: &[String],
        to_disarm: &[String],
    ) -> Result<Option<AgentError>, TraceError> {
        // The guest's own removal of the probe parks as well, but perhaps late, perhaps never. It
        // turns on nothing, so what others go on tracing is turned on here.
        let (theirs, ours) = self.split_by_others(to_disarm).await;
        for (names, on, owner) in [(ours, false, client), (theirs, true, OTHERS)] {
            let keys = self.book().keys(&names);
            let terms = SwitchTerms::default();
            match self
                .switch(keys, on, owner, "disarm tracepoints", &terms)
                .await
            {
                // The guest is gone or registered anew: there is nothing to park.
                Ok(_)
                | Err(TraceError::Keys(
                    KeysError::NotRegistered { .. } | KeysError::KeyNotFound { .. },
                )) => {}
                Err(error) => return Err(error),
            }
        }
        {
            let mut book = self.book();
            book.release_fire(names, client, false);
            book.release_arm(names, client);
            for name in to_disarm {
                if let Some(armed) = book.events.remove(name) {
                    self.hub.remove_source(armed.source.format.id);
                }
            }
        }
        Ok(self.detach(to_disarm.to_vec()).await)
    }

    /// A client is gone: what it alone kept is parked and disarmed.
    pub async fn leave(&self, client: &str) {
        let _turn = self.turn.lock().await;
        let (leaving, names) = {
            let book = self.book();
            (
                book.leaving(client),
                book.events.keys().cloned().collect::<Vec<_>>(),
            )
        };
        let keys = self.book().keys(&leaving.park);
        if let Err(error) = self
            .switch(
                keys,
                false,
                client,
                "park tracepoints",
                &SwitchTerms::default(),
            )
            .await
        {
            tracing::warn!(client, %error, "the events of a client that is gone could not be parked");
        }
        self.book().release_fire(&names, client, false);
        self.mark("parked", &leaving.park, client, None);
        match self.remove(client, &names, &leaving.disarm).await {
            Ok(None) => {}
            Ok(Some(error)) => {
                tracing::warn!(client, %error, "events of a client that is gone wait for being disarmed")
            }
            Err(error) => {
                tracing::warn!(client, %error, "the events of a client that is gone could not be disarmed")
            }
        }
    }

    /// Brings agent and book together when an agent has connected: what only the agent knows is
    /// disarmed, and what only the book knows is gone with its module, its boot or its instance.
    pub async fn reconcile(&self) {
        let _turn = self.turn.lock().await;
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
        let (lost, strangers) = {
            let book = self.book();
            let lost: Vec<String> = book
                .events
                .iter()
                .filter(|(name, armed)| {
                    !enabled.contains(*name) && armed.connection != peer.connection
                })
                .map(|(name, _)| name.clone())
                .collect();
            let strangers: Vec<String> = enabled
                .into_iter()
                .filter(|name| !book.events.contains_key(name))
                .collect();
            (lost, strangers)
        };
        for name in &lost {
            if let Some(armed) = self.book().events.remove(name) {
                self.hub.remove_source(armed.source.format.id);
                self.hub
                    .mark(format!("{name} is no longer armed in the guest"));
            }
        }
        self.detach(strangers).await;
        // If the agent before died between stopping and starting.
        if let Err(error) = self.settle().await {
            tracing::warn!(%error, "the agent does not record");
        }
        self.hub.agent_connected();
    }

    /// Takes out of the book what has no probe any longer: its module is gone (another of that name
    /// may have come), or somebody in the guest has removed it. True: there was something.
    pub(crate) fn forget_vanished(&self, facts: &HashMap<String, TracepointFacts>) -> bool {
        let mut book = self.book();
        let vanished = |name: &str, armed: &Armed| match facts.get(select::split(name).1) {
            Some(facts) => facts.key != armed.key || facts.probes == Some(0),
            None => true,
        };
        let gone: Vec<_> = book
            .events
            .extract_if(.., |name, armed| vanished(name, armed))
            .collect();
        for (name, armed) in &gone {
            self.hub.remove_source(armed.source.format.id);
            self.hub
                .mark(format!("{name} is no longer armed in the guest"));
        }
        !gone.is_empty()
    }

    /// Disarms what could not be disarmed when it was due.
    pub async fn catch_up(&self) {
        if self.link.silent_for().is_some() || self.book().overdue.is_empty() {
            return;
        }
        let _turn = self.turn.lock().await;
        let overdue: Vec<String> = {
            let book = self.book();
            book.overdue
                .iter()
                .filter(|name| !book.events.contains_key(*name))
                .cloned()
                .collect()
        };
        self.detach(overdue).await;
    }
}
