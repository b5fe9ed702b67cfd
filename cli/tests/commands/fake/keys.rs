// SPDX-License-Identifier: Apache-2.0

use std::pin::Pin;

use patchbay_kernel_image::Patterns;
use patchbay_proto::v1;
use patchbay_proto::v1::static_keys_service_server::StaticKeysService;
use tokio_stream::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status};

use super::{Fake, FakeGuest, INCARNATION, page, refuse};

/// Returns the results that updates would have: the counts of each key before and after.
fn plan(guest: &FakeGuest, updates: &[v1::KeyUpdate]) -> Result<Vec<v1::KeyResult>, Status> {
    let mut results = vec![];
    for update in updates {
        let names = [update.name.clone()];
        let patterns = match update.patterns.as_slice() {
            // The fake does not evaluate queries: each query selects every key.
            [] if !update.debug_queries.is_empty() => Patterns::parse(&[]),
            [] => Patterns::parse(&names),
            patterns => Patterns::parse(patterns),
        };
        let patterns = patterns.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let keys = guest.keys.iter();
        let found = keys.filter(|key| patterns.select("", &key.name));
        let before = results.len();
        results.extend(found.map(|key| v1::KeyResult {
            name: key.name.clone(),
            count_before: key.count,
            count_after: match update.op() {
                v1::KeyOp::Inc => key.count + 1,
                v1::KeyOp::Dec => key.count - 1,
                v1::KeyOp::Enable => 1,
                v1::KeyOp::Disable | v1::KeyOp::Unspecified => 0,
            },
            sites_patched: key.site_count,
            etag: key.etag.clone(),
            ..Default::default()
        }));
        if results.len() == before {
            return Err(refuse(
                Code::NotFound,
                "KEY_NOT_FOUND",
                "no key is named so",
            ));
        }
    }
    Ok(results)
}

/// Returns the first result, a token for the others, and the summary.
fn paged(
    guest: &mut FakeGuest,
    results: &[v1::KeyResult],
) -> (Vec<v1::KeyResult>, String, Option<v1::UpdateSummary>) {
    let count = u32::try_from(results.len()).expect("few");
    let summary = v1::UpdateSummary {
        keys: count,
        keys_changed: count,
        sites_patched: results.iter().map(|result| result.sites_patched).sum(),
        keys_left_out: 0,
    };
    let mut token = String::new();
    for (at, result) in results.iter().enumerate().skip(1) {
        guest.pages.insert(at.to_string(), vec![result.clone()]);
        if at == 1 {
            token = at.to_string();
        }
    }
    (
        results.iter().take(1).cloned().collect(),
        token,
        Some(summary),
    )
}

fn commit(
    guest: &mut FakeGuest,
    updates: &[v1::KeyUpdate],
) -> Result<v1::UpdateStaticKeysResponse, Status> {
    if guest.busy {
        let message = "the guest was busy in all 3 attempts, last with text_mutex";
        return Err(refuse(Code::Unavailable, "GUEST_BUSY", message));
    }
    let results = plan(guest, updates)?;
    for result in &results {
        guest.set_count(&result.name, result.count_after);
    }
    let (results, next_page_token, summary) = paged(guest, &results);
    Ok(v1::UpdateStaticKeysResponse {
        results,
        next_page_token,
        summary,
        report: Some(v1::FlipReport {
            paused: true,
            stop_time: micros(20),
            patch_time: micros(10),
            resume_time: micros(2),
            attempts: 1,
            ..Default::default()
        }),
        revision: guest.revision,
        incarnation: INCARNATION.to_owned(),
    })
}

fn micros(count: i32) -> Option<prost_types::Duration> {
    Some(prost_types::Duration {
        seconds: 0,
        nanos: count * 1000,
    })
}

fn hold_of(guest: &FakeGuest, id: &str) -> Result<usize, Status> {
    let at = guest.holds.iter().position(|hold| hold.id == id);
    at.ok_or_else(|| refuse(Code::NotFound, "HOLD_NOT_FOUND", "no hold has that id"))
}

#[tonic::async_trait]
impl StaticKeysService for Fake {
    async fn list_static_keys(
        &self,
        request: Request<v1::ListStaticKeysRequest>,
    ) -> Result<Response<v1::ListStaticKeysResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let (keys, next_page_token) = page(&guest.keys, &request.page_token);
            Ok(Response::new(v1::ListStaticKeysResponse {
                keys,
                next_page_token,
                revision: guest.revision,
                incarnation: INCARNATION.to_owned(),
                total_size: 3,
                panicked: false,
            }))
        })
    }

    async fn list_debug_sites(
        &self,
        request: Request<v1::ListDebugSitesRequest>,
    ) -> Result<Response<v1::ListDebugSitesResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let line = |key: &v1::StaticKey| v1::DebugSite {
                key: key.name.clone(),
                module: "mod".to_owned(),
                file: "dir/file.c".to_owned(),
                line: 7,
                function: "print".to_owned(),
                format: "the \\\"line\\\"\\n".to_owned(),
                enabled: key.enabled,
                held_references: key.held_references,
            };
            let lines: Vec<v1::DebugSite> = guest.keys.iter().map(line).collect();
            let (sites, next_page_token) = page(&lines, &request.page_token);
            Ok(Response::new(v1::ListDebugSitesResponse {
                sites,
                next_page_token,
                revision: guest.revision,
                incarnation: INCARNATION.to_owned(),
                total_size: 3,
            }))
        })
    }

    async fn get_static_key(
        &self,
        request: Request<v1::GetStaticKeyRequest>,
    ) -> Result<Response<v1::GetStaticKeyResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let key = guest.keys.iter().find(|key| key.name == request.name);
            let mut key = key
                .cloned()
                .ok_or_else(|| refuse(Code::NotFound, "KEY_NOT_FOUND", "no key is named so"))?;
            let site = |address| v1::Site {
                address,
                ..Default::default()
            };
            let next_page_token;
            (key.sites, next_page_token) = page(&[site(1), site(2)], &request.page_token);
            Ok(Response::new(v1::GetStaticKeyResponse {
                key: Some(key),
                next_page_token,
                revision: guest.revision,
                incarnation: INCARNATION.to_owned(),
            }))
        })
    }

    async fn update_static_keys(
        &self,
        request: Request<v1::UpdateStaticKeysRequest>,
    ) -> Result<Response<v1::UpdateStaticKeysResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            commit(guest, &request.updates).map(Response::new)
        })
    }

    async fn list_update_results(
        &self,
        request: Request<v1::ListUpdateResultsRequest>,
    ) -> Result<Response<v1::ListUpdateResultsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let results = guest.pages.get(&request.page_token).cloned();
            let results = results.ok_or_else(|| Status::invalid_argument("unknown token"))?;
            let at: usize = request.page_token.parse().expect("a number");
            let next = (at + 1).to_string();
            let next_page_token = match guest.pages.contains_key(&next) {
                true => next,
                false => String::new(),
            };
            Ok(Response::new(v1::ListUpdateResultsResponse {
                results,
                next_page_token,
            }))
        })
    }

    async fn prepare_update(
        &self,
        request: Request<v1::PrepareUpdateRequest>,
    ) -> Result<Response<v1::PrepareUpdateResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let results = plan(guest, &request.updates)?;
            let plan_id = format!("plan-{}", guest.plans.len() + 1);
            guest.plans.insert(plan_id.clone(), request.updates.clone());
            let (results, next_page_token, summary) = paged(guest, &results);
            Ok(Response::new(v1::PrepareUpdateResponse {
                plan_id,
                digest: "d16e57".to_owned(),
                results,
                next_page_token,
                summary,
                predicted_pause: Some(prost_types::Duration {
                    seconds: 0,
                    nanos: 42_500,
                }),
                expires_at: Some(prost_types::Timestamp {
                    seconds: 1_700_000_000,
                    nanos: 0,
                }),
                revision: guest.revision,
                incarnation: INCARNATION.to_owned(),
            }))
        })
    }

    async fn commit_update(
        &self,
        request: Request<v1::CommitUpdateRequest>,
    ) -> Result<Response<v1::CommitUpdateResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let updates = guest.plans.get(&request.plan_id).cloned();
            let message = "no plan has that id";
            let updates =
                updates.ok_or_else(|| refuse(Code::NotFound, "PLAN_NOT_FOUND", message))?;
            if !["", "d16e57"].contains(&request.digest.as_str()) {
                let message = "the digest is not the plan's";
                return Err(refuse(Code::FailedPrecondition, "PLAN_STALE", message));
            }
            let done = commit(guest, &updates)?;
            Ok(Response::new(v1::CommitUpdateResponse {
                results: done.results,
                next_page_token: done.next_page_token,
                summary: done.summary,
                report: done.report,
                revision: done.revision,
                incarnation: done.incarnation,
            }))
        })
    }

    async fn discard_update(
        &self,
        request: Request<v1::DiscardUpdateRequest>,
    ) -> Result<Response<v1::DiscardUpdateResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            guest.plans.remove(&request.plan_id);
            Ok(Response::new(v1::DiscardUpdateResponse {}))
        })
    }

    type WatchStaticKeysStream =
        Pin<Box<dyn Stream<Item = Result<v1::WatchStaticKeysResponse, Status>> + Send>>;

    async fn watch_static_keys(
        &self,
        request: Request<v1::WatchStaticKeysRequest>,
    ) -> Result<Response<Self::WatchStaticKeysStream>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let script = guest.watches.pop_front().unwrap_or_default();
            let answers = tokio_stream::iter(script).chain(tokio_stream::pending());
            let answers: Self::WatchStaticKeysStream = Box::pin(answers);
            Ok(Response::new(answers))
        })
    }

    async fn list_holds(
        &self,
        request: Request<v1::ListHoldsRequest>,
    ) -> Result<Response<v1::ListHoldsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let holds = guest.holds.iter();
            let holds: Vec<v1::Hold> = holds
                .filter(|hold| request.holder.is_empty() || hold.holder == request.holder)
                .cloned()
                .collect();
            let (holds, next_page_token) = page(&holds, &request.page_token);
            Ok(Response::new(v1::ListHoldsResponse {
                holds,
                next_page_token,
            }))
        })
    }

    async fn release_holds(
        &self,
        request: Request<v1::ReleaseHoldsRequest>,
    ) -> Result<Response<v1::ReleaseHoldsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let mut keys = vec![];
            for id in &request.ids {
                let at = hold_of(guest, id)?;
                if guest.holds[at].holder != "uid:0" && !request.force {
                    let message = "the hold is another client's";
                    return Err(refuse(Code::FailedPrecondition, "NOT_HOLDER", message));
                }
                keys.push(guest.holds.remove(at).key);
            }
            let results: Vec<_> = keys
                .into_iter()
                .map(|name| v1::KeyResult {
                    name,
                    count_before: 1,
                    ..Default::default()
                })
                .collect();
            let (results, next_page_token, summary) = paged(guest, &results);
            Ok(Response::new(v1::ReleaseHoldsResponse {
                results,
                next_page_token,
                summary,
                ..Default::default()
            }))
        })
    }

    async fn renew_holds(
        &self,
        request: Request<v1::RenewHoldsRequest>,
    ) -> Result<Response<v1::RenewHoldsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |guest| {
            let mut holds = vec![];
            for id in &request.ids {
                let at = hold_of(guest, id)?;
                guest.holds[at].expires_at = request.ttl.map(|ttl| prost_types::Timestamp {
                    seconds: ttl.seconds,
                    nanos: 0,
                });
                holds.push(guest.holds[at].clone());
            }
            Ok(Response::new(v1::RenewHoldsResponse { holds }))
        })
    }

    async fn set_claims(
        &self,
        _: Request<v1::SetClaimsRequest>,
    ) -> Result<Response<v1::SetClaimsResponse>, Status> {
        Err(Status::unimplemented("the real service is tested"))
    }

    async fn list_claims(
        &self,
        request: Request<v1::ListClaimsRequest>,
    ) -> Result<Response<v1::ListClaimsResponse>, Status> {
        let request = request.into_inner();
        self.on(&request.guest, &request, |_| {
            Err(Status::unimplemented("the real service is tested"))
        })
    }

    async fn verify_static_keys(
        &self,
        _: Request<v1::VerifyStaticKeysRequest>,
    ) -> Result<Response<v1::VerifyStaticKeysResponse>, Status> {
        Err(Status::unimplemented("the real service is tested"))
    }

    async fn repair_static_key(
        &self,
        _: Request<v1::RepairStaticKeyRequest>,
    ) -> Result<Response<v1::RepairStaticKeyResponse>, Status> {
        Err(Status::unimplemented("the real service is tested"))
    }
}
