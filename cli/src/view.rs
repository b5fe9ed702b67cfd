// SPDX-License-Identifier: Apache-2.0
//! Defines the printed form of the API's messages, with stable names and hexadecimal addresses and
//! bytes.

mod discovery;
mod guest;

use patchbay_proto::v1;
use serde::Serialize;

pub use self::guest::{Details, GuestDetails, Power, Status, Task, state};

#[derive(Debug, Serialize)]
pub struct ListedKey {
    pub name: String,
    pub class: &'static str,
    pub count: i32,
    pub enabled: bool,
    pub address: String,
    pub patchable_sites: u32,
    pub site_count: u32,
    pub initially_true: bool,
    pub sealed: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub quarantine: String,
    pub etag: String,
    pub holds: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<Advice>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sites: Vec<Site>,
}

/// The advice on a guarded key.
#[derive(Debug, Serialize)]
pub struct Advice {
    /// "safe", "conditional", "guest-state" or "crashes".
    pub safety: &'static str,
    pub message: String,
    pub source: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tried: String,
}

#[derive(Debug, Serialize)]
pub struct Site {
    pub address: String,
    pub symbol: String,
    pub size: u32,
    pub bytes: String,
    pub disassembly: String,
    pub other_bytes: String,
    pub other_disassembly: String,
    pub target: String,
    pub target_symbol: String,
    pub likely: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub not_patchable: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub module: String,
}

/// The results of a transaction.
#[derive(Debug, Default, Serialize)]
pub struct Update {
    pub results: Vec<KeyChange>,
    pub keys: u32,
    pub keys_changed: u32,
    pub keys_left_out: u32,
    pub revision: u64,
    pub incarnation: String,
    pub paused: bool,
    pub sites_patched: u32,
    pub stop_us: f64,
    pub patch_us: f64,
    pub resume_us: f64,
    pub attempts: u32,
}

#[derive(Debug, Serialize)]
pub struct KeyChange {
    pub name: String,
    pub before: i32,
    pub after: i32,
    pub sites_patched: u32,
    pub etag: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hold: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<Advice>,
}

/// The output of --dry-run.
#[derive(Debug, Serialize)]
pub struct PreparedUpdate {
    pub plan_id: String,
    pub digest: String,
    pub expires_at: String,
    pub results: Vec<KeyChange>,
    pub keys: u32,
    pub keys_changed: u32,
    pub keys_left_out: u32,
    pub sites_patched: u32,
    /// The predicted pause in microseconds; `None` if the service cannot predict it.
    pub predicted_pause_us: Option<f64>,
    pub revision: u64,
    pub incarnation: String,
    /// The first words of a command for the plan's guest.
    #[serde(skip)]
    pub command: String,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Applied {
    Update(Update),
    Plan(PreparedUpdate),
}

/// The results of `keys verify`.
#[derive(Debug, Serialize)]
pub struct Verification {
    pub keys: u32,
    pub sites: u32,
    pub torn: Vec<TornKey>,
    pub torn_total: u32,
    pub revision: u64,
    pub incarnation: String,
}

#[derive(Debug, Serialize)]
pub struct TornKey {
    pub name: String,
    pub count: i32,
    pub contrary_sites: u32,
    pub foreign_sites: u32,
}

/// The writes that `keys repair` has made or would make.
#[derive(Debug, Serialize)]
pub struct Repair {
    pub name: String,
    pub count: i32,
    pub repaired: bool,
    pub sites: Vec<RepairedSite>,
}

#[derive(Debug, Serialize)]
pub struct RepairedSite {
    pub address: String,
    pub before: String,
    pub after: String,
}

/// A plan that was discarded.
#[derive(Debug, Serialize)]
pub struct NoPlan {
    pub plan_id: String,
    pub discarded: bool,
}

/// The state for which `keys wait` has waited.
#[derive(Debug, Serialize)]
pub struct KeyState {
    pub name: String,
    pub enabled: bool,
    pub count: i32,
    pub revision: u64,
    pub incarnation: String,
}

#[derive(Debug, Serialize)]
pub struct Event {
    pub revision: u64,
    pub incarnation: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub time: String,
    /// "changed", "added", "removed" and "quarantined"; "resync" and "listed" when the watch lists
    /// the keys again.
    pub kind: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub count: i32,
    pub principal: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub request_id: String,
}

#[derive(Debug, Serialize)]
pub struct Hold {
    pub id: String,
    pub key: String,
    pub holder: String,
    pub references: u32,
    pub reason: String,
    pub since: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
}

fn hex(bytes: &[u8]) -> String {
    let bytes: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(" ")
}

fn micros(duration: Option<prost_types::Duration>) -> f64 {
    let duration = duration
        .and_then(|duration| std::time::Duration::try_from(duration).ok())
        .unwrap_or_default();
    // Rounds to whole nanoseconds, which are three decimals of a microsecond.
    (duration.as_secs_f64() * 1e9).round() / 1e3
}

/// Formats a time in RFC 3339 and UTC.
pub fn time(timestamp: Option<prost_types::Timestamp>) -> String {
    timestamp
        .map(|timestamp| timestamp.to_string())
        .unwrap_or_default()
}

impl From<v1::StaticKey> for ListedKey {
    fn from(key: v1::StaticKey) -> Self {
        let class = class(key.key_class());
        Self {
            name: key.name,
            class,
            count: key.count,
            enabled: key.enabled,
            address: format!("{:#018x}", key.address),
            patchable_sites: key.patchable_sites,
            site_count: key.site_count,
            initially_true: key.initially_true,
            sealed: key.sealed,
            quarantine: key.quarantine.map(|why| why.message).unwrap_or_default(),
            etag: key.etag,
            holds: key.held_references,
            advice: key.advice.map(Into::into),
            sites: key.sites.into_iter().map(Site::from).collect(),
        }
    }
}

impl From<v1::Advice> for Advice {
    fn from(advice: v1::Advice) -> Self {
        let safety = match advice.safety() {
            v1::FlipSafety::Unspecified => "unknown",
            v1::FlipSafety::Safe => "safe",
            v1::FlipSafety::Conditional => "conditional",
            v1::FlipSafety::GuestState => "guest-state",
            v1::FlipSafety::Crashes => "crashes",
        };
        Self {
            safety,
            message: advice.message,
            source: advice.source,
            tried: advice.tried,
        }
    }
}

pub fn class(class: v1::KeyClass) -> &'static str {
    match class {
        v1::KeyClass::Unspecified => "unknown",
        v1::KeyClass::Guarded => "guarded",
        v1::KeyClass::Ref => "ref",
        v1::KeyClass::Tracepoint => "tracepoint",
        v1::KeyClass::DynamicDebug => "dyndbg",
        v1::KeyClass::Never => "never",
    }
}

impl From<v1::Site> for Site {
    fn from(site: v1::Site) -> Self {
        Self {
            address: format!("{:#018x}", site.address),
            symbol: site.symbol,
            size: site.size,
            bytes: hex(&site.current_bytes),
            disassembly: site.disassembly,
            other_bytes: hex(&site.other_bytes),
            other_disassembly: site.other_disassembly,
            target: format!("{:#018x}", site.target),
            target_symbol: site.target_symbol,
            likely: site.likely,
            not_patchable: site.obstacle_message,
            module: site.module,
        }
    }
}

impl From<v1::KeyResult> for KeyChange {
    fn from(result: v1::KeyResult) -> Self {
        Self {
            name: result.name,
            before: result.count_before,
            after: result.count_after,
            sites_patched: result.sites_patched,
            etag: result.etag,
            hold: result.hold_id,
            advice: result.advice.map(Into::into),
        }
    }
}

impl From<v1::VerifyStaticKeysResponse> for Verification {
    fn from(found: v1::VerifyStaticKeysResponse) -> Self {
        let torn = |key: v1::TornKey| TornKey {
            name: key.name,
            count: key.count,
            contrary_sites: key.contrary_sites,
            foreign_sites: key.foreign_sites,
        };
        Self {
            keys: found.keys,
            sites: found.sites,
            torn: found.torn.into_iter().map(torn).collect(),
            torn_total: found.torn_total,
            revision: found.revision,
            incarnation: found.incarnation,
        }
    }
}

impl From<v1::RepairStaticKeyResponse> for Repair {
    fn from(made: v1::RepairStaticKeyResponse) -> Self {
        let site = |site: v1::RepairedSite| RepairedSite {
            address: format!("{:#018x}", site.address),
            before: hex(&site.bytes_before),
            after: hex(&site.bytes_after),
        };
        Self {
            name: made.name,
            count: made.count,
            repaired: made.report.is_some(),
            sites: made.sites.into_iter().map(site).collect(),
        }
    }
}

impl From<Transaction> for Update {
    fn from(transaction: Transaction) -> Self {
        let report = transaction.report.unwrap_or_default();
        let summary = transaction.summary.unwrap_or_default();
        Self {
            results: transaction.results.into_iter().map(Into::into).collect(),
            keys: summary.keys,
            keys_changed: summary.keys_changed,
            keys_left_out: summary.keys_left_out,
            revision: transaction.revision,
            incarnation: transaction.incarnation,
            paused: report.paused,
            sites_patched: summary.sites_patched,
            stop_us: micros(report.stop_time),
            patch_us: micros(report.patch_time),
            resume_us: micros(report.resume_time),
            attempts: report.attempts,
        }
    }
}

impl From<v1::PrepareUpdateResponse> for PreparedUpdate {
    fn from(plan: v1::PrepareUpdateResponse) -> Self {
        let summary = plan.summary.unwrap_or_default();
        Self {
            plan_id: plan.plan_id,
            digest: plan.digest,
            expires_at: time(plan.expires_at),
            results: plan.results.into_iter().map(Into::into).collect(),
            keys: summary.keys,
            keys_changed: summary.keys_changed,
            keys_left_out: summary.keys_left_out,
            sites_patched: summary.sites_patched,
            predicted_pause_us: plan.predicted_pause.map(|pause| micros(Some(pause))),
            revision: plan.revision,
            incarnation: plan.incarnation,
            command: String::new(),
        }
    }
}

/// The answer of an update, a commit or a release, which have the same fields.
pub struct Transaction {
    pub results: Vec<v1::KeyResult>,
    pub next_page_token: String,
    summary: Option<v1::UpdateSummary>,
    report: Option<v1::FlipReport>,
    revision: u64,
    incarnation: String,
}

macro_rules! transaction {
    ($($response:ident)*) => {
        $(impl From<v1::$response> for Transaction {
            fn from(response: v1::$response) -> Self {
                let v1::$response {
                    results,
                    next_page_token,
                    summary,
                    report,
                    revision,
                    incarnation,
                } = response;
                Self { results, next_page_token, summary, report, revision, incarnation }
            }
        })*
    };
}

transaction!(UpdateStaticKeysResponse CommitUpdateResponse ReleaseHoldsResponse);

impl Event {
    /// Returns the event that reports lost revisions. Events that list the present keys follow it.
    pub fn resync(revision: u64, incarnation: &str, reason: String) -> Self {
        Self {
            revision,
            incarnation: incarnation.to_owned(),
            time: String::new(),
            kind: "resync",
            name: String::new(),
            count: 0,
            principal: String::new(),
            reason,
            request_id: String::new(),
        }
    }

    pub fn listed(key: v1::StaticKey, revision: u64, incarnation: &str) -> Self {
        Self {
            kind: "listed",
            name: key.name,
            count: key.count,
            ..Self::resync(revision, incarnation, String::new())
        }
    }
}

/// Returns the events of one revision.
pub fn events(response: v1::WatchStaticKeysResponse) -> Vec<Event> {
    let (revision, time) = (response.revision, time(response.time));
    let incarnation = response.incarnation;
    response
        .events
        .into_iter()
        .map(|event| Event {
            revision,
            incarnation: incarnation.clone(),
            time: time.clone(),
            kind: match event.kind() {
                v1::key_event::Kind::Unspecified => "unknown",
                v1::key_event::Kind::Changed => "changed",
                v1::key_event::Kind::Added => "added",
                v1::key_event::Kind::Removed => "removed",
                v1::key_event::Kind::Quarantined => "quarantined",
            },
            name: match (event.module.as_str(), event.name.as_str()) {
                ("", "") => "*".to_owned(),
                (module, "") => format!("{module}:*"),
                (_, name) => name.to_owned(),
            },
            count: event.count,
            principal: event.principal,
            reason: match event.quarantine {
                Some(why) => why.message,
                None => event.reason,
            },
            request_id: event.request_id,
        })
        .collect()
}

impl From<v1::Hold> for Hold {
    fn from(hold: v1::Hold) -> Self {
        Self {
            id: hold.id,
            key: hold.key,
            holder: hold.holder,
            references: hold.references,
            reason: hold.reason,
            since: time(hold.since),
            expires_at: hold.expires_at.map(|at| time(Some(at))),
        }
    }
}
