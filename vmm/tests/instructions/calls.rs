// SPDX-License-Identifier: Apache-2.0
//! Calls to a served guest.

use std::fmt::Debug;

use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    CommitUpdateRequest, DescribeGuestRequest, FlipReport, KeyOp, KeyUpdate, PauseGuestRequest,
    PrepareUpdateRequest, ResultView, ResumeGuestRequest, UpdateStaticKeysRequest,
};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::claims::{self, Claims};
use super::kernel::{self, Kernel};
use super::served::{Served, Setup, counted};
use super::trace::{self, Agent, Player};

/// The number of uncounted turns before the counted one. A turn turns the keys on and off.
const WARM_UP: usize = 3;
/// The number of sites of a kernel whose turns are long.
const LONG: u64 = 4000;
/// The number of names in a request that is refused.
const REFUSED_NAMES: u64 = 4096;

/// A call that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Describes the guest.
    Nothing,
    /// Changes keys, by name. They are spread over the table.
    Names { count: u64, view: ResultView },
    /// Changes all keys, by a pattern, with a summary.
    Pattern,
    /// Changes all keys, by a query of dynamic debug, with a summary.
    Query,
    /// Commits a prepared change of all keys, with a summary.
    Commit,
    /// A change that is refused because the last of its many names is unknown.
    UnknownName,
    /// A commit that is refused because the key was changed after the prepare.
    Stale,
    /// A commit that is refused because the guest holds text_mutex. The guest has been paused by an
    /// operator, so the gate is checked once and not repeatedly.
    ClosedGate,
    /// Sets the claims of an owner.
    Claims(Claims),
    /// Fires the events of all tracepoints, or parks them, with a summary.
    Fire,
    /// Streams events that an agent forwards.
    Events,
}

impl Call {
    /// Returns the number of sites that a counted call changes.
    pub fn flipped(self, kernel: Kernel) -> u64 {
        match self {
            Self::Nothing | Self::UnknownName | Self::Stale | Self::ClosedGate | Self::Events => 0,
            Self::Claims(Claims::Again | Claims::Empty) => 0,
            Self::Names { count, .. } => count * kernel.sites,
            _ => kernel.keys * kernel.sites,
        }
    }

    /// Returns whether the call changes the keys on one turn and changes them back on the next.
    fn alternates(self) -> bool {
        !matches!(self, Self::Claims(_))
    }

    /// Returns the number of uncounted turns before the counted one. Long turns are not repeated.
    fn warm_up(self, kernel: Kernel) -> usize {
        let is_long = kernel.keys * kernel.sites >= LONG || matches!(self, Self::Claims(_));
        if is_long { 1 } else { WARM_UP }
    }

    pub const fn needs_agent(self) -> bool {
        matches!(self, Self::Fire | Self::Events)
    }
}

/// Performs the uncounted turns and two counted turns of a call. One of these turns the keys on.
pub async fn perform(setup: Setup, call: Call) {
    let player = setup.agent.then(Player::start);
    let served = Served::start(setup).await;
    let agent = match player {
        Some(player) => Some(Agent::connect(player, &served, setup.kernel).await),
        None => None,
    };
    let warm_up = call.warm_up(setup.kernel);
    let mut caller = Caller {
        served: &served,
        kernel: setup.kernel,
        call,
        agent,
        generation: 0,
    };
    for turn in 0..=warm_up {
        let is_counted = turn == warm_up;
        for op in [KeyOp::Enable, KeyOp::Disable] {
            Box::pin(caller.turn(op, is_counted)).await;
            let on = match op == KeyOp::Enable && call.alternates() {
                true => call.flipped(setup.kernel),
                false => 0,
            };
            // Counting the sites of every turn would take most of the time.
            if is_counted {
                let jumps = kernel::jumps(&*served.service.ram, setup.kernel);
                assert_eq!(jumps as u64, on, "sites that jump");
            }
        }
    }
}

struct Caller<'a> {
    served: &'a Served,
    kernel: Kernel,
    call: Call,
    agent: Option<Agent>,
    /// The generation of the last claims.
    generation: u64,
}

impl Caller<'_> {
    fn keys(&self) -> StaticKeysServiceClient<Channel> {
        StaticKeysServiceClient::new(self.served.channel.clone())
    }

    fn guest(&self) -> GuestServiceClient<Channel> {
        GuestServiceClient::new(self.served.channel.clone())
    }

    async fn turn(&mut self, op: KeyOp, is_counted: bool) {
        let mut keys = self.keys();
        match self.call {
            Call::Nothing => {
                let mut guest = self.guest();
                let call = guest.describe_guest(DescribeGuestRequest::default());
                counted(is_counted, call).await.expect("an answer");
            }
            Call::Names { .. } | Call::Pattern | Call::Query => {
                let call = keys.update_static_keys(self.update(op));
                let answer = counted(is_counted, call).await.expect("the change is made");
                self.check(answer.into_inner().report);
            }
            Call::Commit => {
                let commit = self.prepare(op).await;
                let answer = counted(is_counted, keys.commit_update(commit)).await;
                self.check(answer.expect("the change is made").into_inner().report);
            }
            Call::UnknownName => {
                let call = keys.update_static_keys(self.update(op));
                refused(counted(is_counted, call).await, Code::NotFound);
            }
            Call::Stale => {
                let commit = self.prepare(op).await;
                let other = keys.update_static_keys(self.update(KeyOp::Inc)).await;
                other.expect("the change is made");
                let answer = counted(is_counted, keys.commit_update(commit)).await;
                refused(answer, Code::FailedPrecondition);
                let back = keys.update_static_keys(self.update(KeyOp::Dec)).await;
                back.expect("the change is made");
            }
            Call::ClosedGate => self.commit_before_a_closed_gate(is_counted).await,
            Call::Claims(claims) => {
                let turn = claims::Turn {
                    keys,
                    kernel: self.kernel,
                    is_counted,
                };
                let report = turn.perform(claims, &mut self.generation).await;
                self.check(report);
            }
            Call::Fire => {
                let report = trace::fire(&self.served.channel, op, is_counted).await;
                self.check(report);
            }
            Call::Events => {
                let agent = self.agent.as_mut().expect("connected");
                agent.send_and_receive(is_counted).await;
            }
        }
    }

    async fn commit_before_a_closed_gate(&self, is_counted: bool) {
        // The op is INC, because DISABLE would change nothing while the key is off, and would
        // succeed.
        let commit = self.prepare(KeyOp::Inc).await;
        let mut guest = self.guest();
        let pause = guest.pause_guest(PauseGuestRequest::default()).await;
        pause.expect("the guest is paused");
        kernel::set_text_mutex(&*self.served.service.ram, 0x1000);
        let answer = counted(is_counted, self.keys().commit_update(commit)).await;
        refused(answer, Code::Unavailable);
        kernel::set_text_mutex(&*self.served.service.ram, 0);
        let resume = guest.resume_guest(ResumeGuestRequest::default()).await;
        resume.expect("the guest is resumed");
    }

    /// Prepares the change, and returns the request that commits it.
    async fn prepare(&self, op: KeyOp) -> CommitUpdateRequest {
        let prepare = PrepareUpdateRequest {
            updates: self.update(op).updates,
            result_view: ResultView::Summary.into(),
            ..Default::default()
        };
        let plan = self.keys().prepare_update(prepare).await.expect("a plan");
        let plan = plan.into_inner();
        CommitUpdateRequest {
            plan_id: plan.plan_id,
            digest: plan.digest,
            result_view: ResultView::Summary.into(),
            ..Default::default()
        }
    }

    fn check(&self, report: Option<FlipReport>) {
        let sites = report.map_or(0, |report| report.sites_patched);
        assert_eq!(u64::from(sites), self.call.flipped(self.kernel));
    }

    fn update(&self, op: KeyOp) -> UpdateStaticKeysRequest {
        let named = |key| KeyUpdate {
            name: Kernel::name(key),
            op: op.into(),
            ..Default::default()
        };
        let pattern = || KeyUpdate {
            patterns: vec!["k*".to_owned()],
            op: op.into(),
            ..Default::default()
        };
        let query = || KeyUpdate {
            debug_queries: vec!["module net".to_owned()],
            op: op.into(),
            ..Default::default()
        };
        let view = match self.call {
            Call::Pattern | Call::Query => ResultView::Summary,
            Call::Names { view, .. } => view,
            _ => ResultView::Unspecified,
        };
        UpdateStaticKeysRequest {
            updates: match self.call {
                Call::Names { count, .. } => {
                    let step = self.kernel.keys / count;
                    (0..count).map(|key| named(key * step)).collect()
                }
                Call::UnknownName => (1..REFUSED_NAMES)
                    .map(|key| named(key % self.kernel.keys))
                    .chain([named(self.kernel.keys)])
                    .collect(),
                Call::Stale | Call::ClosedGate => vec![named(0)],
                Call::Commit if self.kernel.keys == 1 => vec![named(0)],
                Call::Pattern | Call::Commit => vec![pattern()],
                Call::Query => vec![query()],
                Call::Nothing | Call::Claims(_) | Call::Fire | Call::Events => Vec::new(),
            },
            result_view: view.into(),
            ..Default::default()
        }
    }
}

/// Checks that a call was refused with this code.
fn refused<T: Debug>(answer: Result<T, Status>, code: Code) {
    let refusal = answer.expect_err("the call is refused");
    assert_eq!(refusal.code(), code, "{refusal}");
}
