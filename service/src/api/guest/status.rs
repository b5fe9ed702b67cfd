// SPDX-License-Identifier: Apache-2.0
//! `GuestStatus`: read, listed in pages, and watched without polling.

use std::sync::Arc;

use patchbay_proto::v1;
use prost::Message;
use tokio::sync::watch;

use super::super::convert;
use super::super::guests::ServedGuest;
use super::super::requests::page_size;
use static_keys::Patterns;

use crate::keys::{Description, KeysError, PauseState, RegistrationPhase};

/// Maximum size of a page in bytes: stock clients accept messages of up to 4 MiB.
const MAX_PAGE_BYTES: usize = 3 << 20;

pub fn status(guest: &ServedGuest, registration: Description) -> v1::GuestStatus {
    let (state, paused_until) = match guest.keys.pause_state() {
        _ if guest.keys.machine().has_ended() => (v1::GuestState::Stopped, None),
        PauseState::Running => (v1::GuestState::Running, None),
        PauseState::Until(at) => (v1::GuestState::Paused, Some(at)),
        PauseState::UntilResumed => (v1::GuestState::Paused, None),
    };
    let table_source = match registration.phase {
        RegistrationPhase::Registered if registration.discovery.is_some() => {
            v1::TableSource::Discovered
        }
        RegistrationPhase::Registered => v1::TableSource::Registered,
        RegistrationPhase::Absent | RegistrationPhase::Withdrawn | RegistrationPhase::Refused => {
            v1::TableSource::Unspecified
        }
    };
    v1::GuestStatus {
        guest: guest.name().to_owned(),
        state: state.into(),
        paused_until: paused_until.map(Into::into),
        registration: convert::registration(registration.phase).into(),
        registration_error: registration.error.unwrap_or_default(),
        table_source: table_source.into(),
        kernel_release: registration.release,
        kernel_build_id: registration.build_id,
        generation: registration.generation,
        agent_connected: guest.tracer.link.is_connected(),
        incarnation: guest.keys.incarnation().to_string(),
        boot: registration.boot,
    }
}

/// Returns one page of guests, ordered by name. The token is the name of the last guest of the
/// previous page.
pub fn page(
    guests: &[Arc<ServedGuest>],
    request: &v1::ListGuestsRequest,
) -> Result<v1::ListGuestsResponse, KeysError> {
    let patterns = Patterns::parse(&request.patterns)?;
    let size = page_size(request.page_size)?;
    let wanted = |guest: &&Arc<ServedGuest>| {
        guest.name() > request.page_token.as_str() && patterns.select_whole(guest.name())
    };
    let mut bytes = 0;
    let mut page = v1::ListGuestsResponse::default();
    for guest in guests.iter().filter(wanted) {
        let status = status(guest, guest.keys.describe());
        bytes += status.encoded_len() + status.guest.len() + 16;
        if let Some(last) = page.guests.last()
            && (page.guests.len() == size || bytes > MAX_PAGE_BYTES)
        {
            page.next_page_token.clone_from(&last.guest);
            break;
        }
        page.guests.push(status);
    }
    Ok(page)
}

/// Follows the status of one guest.
pub struct StatusWatch {
    guest: Arc<ServedGuest>,
    registration: watch::Receiver<()>,
    pause: watch::Receiver<PauseState>,
    agent: watch::Receiver<u64>,
    told: Option<v1::GuestStatus>,
}

impl StatusWatch {
    pub fn new(guest: Arc<ServedGuest>) -> Self {
        Self {
            registration: guest.keys.registration_changes(),
            pause: guest.keys.pause_changes(),
            agent: guest.tracer.link.connections(),
            guest,
            told: None,
        }
    }

    /// Returns the status. The first call returns immediately; each later call waits until the
    /// status changes. Changes between two calls are merged.
    pub async fn next(&mut self) -> v1::GuestStatus {
        loop {
            // The receivers are marked before the status is read, so that a later change is not
            // missed.
            self.registration.mark_unchanged();
            self.pause.mark_unchanged();
            self.agent.mark_unchanged();
            let status = status(&self.guest, self.guest.keys.describe());
            if self.told.as_ref() != Some(&status) {
                self.told = Some(status.clone());
                return status;
            }
            self.changed().await;
        }
    }

    /// Waits for a possible change.
    async fn changed(&mut self) {
        let told = self.told.as_ref().map(v1::GuestStatus::state);
        let stopped = told == Some(v1::GuestState::Stopped);
        tokio::select! {
            Ok(()) = self.registration.changed() => {}
            Ok(()) = self.pause.changed() => {}
            Ok(()) = self.agent.changed() => {}
            () = self.guest.ended(), if !stopped => {}
        }
    }
}
