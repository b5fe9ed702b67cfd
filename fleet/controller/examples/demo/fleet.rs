// SPDX-License-Identifier: Apache-2.0
//! Runs the fleet and a rollout. Fails if a step does not have its effect.

#[path = "../hosts/mod.rs"]
mod hosts;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use patchbay_fleet::authority::Authority;
use patchbay_fleet::controller::{Config, Controller, Leadership};
use patchbay_fleet::drift::{Action, drift};
use patchbay_fleet::gates::commands::Commands;
use patchbay_fleet::inventory::Reach;
use patchbay_fleet::leader::Leader;
use patchbay_fleet::rollout::{End, Member, Phase, Rollout};
use patchbay_fleet::runner::{Command, Running};
use patchbay_fleet::storage::{Archive, RecordKeys};
use patchbay_fleet::store::EmbeddedStore;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_proto::v1;
use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServeError, ServedGuest};
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::trace::Tracing;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::page;

const NAME: &str = "receive-path";
const KEYS: [&str; 2] = ["net_rx_fast", "net_gro_batch"];
/// The owner whose claim decides about a key of one guest for a while.
const OTHER: &str = "on-call";
/// Timeout of a step, which no correct run reaches.
const PATIENCE: Duration = Duration::from_secs(60);

/// The spec of a second rollout, which waits for approval.
const SCHEDULER: &str = "\
title: Scheduler statistics on the databases
selector: {guests: [\"db-*\"]}
claims: [{want: on, keys: [sched_stats]}]
waves: [{name: canary, size: 2, bake: 10m}, {size: rest}]
approvals: 2
";

/// The size of the fleet, and the bake time of a wave.
#[derive(Clone, Copy)]
pub struct Size {
    pub guests: usize,
    pub hosts: usize,
    pub bake: &'static str,
}

/// Returns the spec of the rollout that runs.
fn receive_path(bake: &str) -> String {
    let keys = KEYS.join(", ");
    format!(
        "\
title: New receive path
selector: {{guests: [\"web-*\"]}}
claims: [{{want: on, keys: [{keys}]}}]
spread_over: rack
max_concurrent: {{count: 40, per_domain: {{label: rack, count: 10}}}}
gates: [{{pause_p99: 50ms, on_failure: pause}}, {{max_errors: 10, on_failure: abort}}]
waves:
  - {{name: canary, size: 1, bake: {bake}}}
  - {{name: tenth, size: 10%, bake: {bake}}}
  - {{name: half, size: 40%, bake: {bake}}}
  - {{name: rest, size: rest}}
"
    )
}

fn boot(index: usize) -> anyhow::Result<(Arc<InMemoryGuest>, ServedGuest)> {
    let kind = if index.is_multiple_of(5) { "db" } else { "web" };
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::named(Arc::clone(&registry), &format!("{kind}-{index:03}"));
    guest.run(&[
        TestKey::new(KEYS[0], 4),
        TestKey::new(KEYS[1], 2),
        TestKey::new("sched_stats", 8),
    ]);
    let (keys, _owner) = Keys::start(Arc::clone(&guest), registry, KeysConfig::default())?;
    Ok((guest, ServedGuest::start(keys, Tracing::default())?))
}

/// A host that serves its guests until it goes down.
struct Host {
    guests: Guests,
    end: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), ServeError>>,
}

impl Host {
    fn start(socket: &Path, guests: Guests) -> anyhow::Result<Self> {
        let endpoint = Endpoint::new(ApiSocket::bind(socket)?, guests.clone());
        let (end, ended) = oneshot::channel::<()>();
        let ended = async { drop(ended.await) };
        Ok(Self {
            guests,
            end,
            serving: tokio::spawn(endpoint.serve(ended)),
        })
    }

    /// Ends the host's service, and returns its guests, which go on.
    async fn stop(self) -> anyhow::Result<Guests> {
        drop(self.end);
        self.serving.await??;
        Ok(self.guests)
    }
}

/// The running rollout, and what of it was printed.
struct Show<'a> {
    print: &'a (dyn Fn(String) + Sync),
    start: Instant,
    link: String,
    leads: Arc<Leadership>,
    running: Arc<Running>,
    by: String,
    /// The number of entries of the timeline that were printed.
    shown: usize,
}

/// Shows the fleet, and prints a line for each step. With `keep` the rollout is not undone, and the
/// page stays.
///
/// # Errors
/// A step did not happen.
pub async fn run(
    folder: &Path,
    size: Size,
    keep: bool,
    print: &(dyn Fn(String) + Sync),
) -> anyhow::Result<()> {
    let start = Instant::now();
    let Size { guests, hosts, .. } = size;
    let (mut memory, mut served) = (Vec::new(), Vec::new());
    for host in 0..hosts {
        let of_host = Guests::default();
        for index in (host..guests).step_by(hosts) {
            let (guest, served) = boot(index)?;
            memory.push(guest);
            of_host.add(served)?;
        }
        served.push(Some(Host::start(&hosts::socket(folder, host), of_host)?));
    }
    print(format!(
        "{guests} guests on {hosts} hosts run in memory after {:.1?}.",
        start.elapsed()
    ));
    let controller = Arc::new(controller(folder, hosts)?);
    let page = page::bind(&controller).await?;
    let link = page.link()?;
    print(match keep {
        true => format!("The page is at {link}"),
        false => "The page ends with this demo; to look at it, add --keep.".to_owned(),
    });
    let runs = Arc::clone(&controller);
    let _runs = AbortOnDrop(tokio::spawn(async move {
        tokio::join!(page.run(), runs.run());
    }));

    let by = format!("uid:{}", rustix::process::geteuid().as_raw());
    let leads = controller.lead().await;
    leads.plan("scheduler", SCHEDULER, &by).await?;
    let running = leads.plan(NAME, &receive_path(size.bake), &by).await?;
    let mut show = Show {
        print,
        start,
        link,
        leads,
        running,
        by,
        shown: 0,
    };
    show.not_yet().await?;
    let canary = show.member(|members| members.first());
    let host: usize = canary.host.trim_start_matches("host-").parse()?;
    show.unknown(
        &canary.host,
        &mut served[host],
        &hosts::socket(folder, host),
        controller.authority(),
    )
    .await?;
    if keep {
        print(
            "Try Undo on the page, or approve the rollout \"scheduler\". Ctrl-C ends the demo."
                .to_owned(),
        );
        std::future::pending::<()>().await;
    }
    show.undo(&memory).await
}

/// A task that ends with its handle.
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn controller(folder: &Path, hosts: usize) -> anyhow::Result<Controller> {
    let config = Config {
        replica: Leader {
            name: "demo".to_owned(),
            address: None,
        },
        authority: Authority::new(page::own_user(), None),
        hosts: hosts::configs(folder, hosts)?,
        reach: Reach::default(),
        lease_ttl: Duration::from_secs(10),
        archive: Archive {
            folder: folder.join("archive"),
            keep: Duration::from_secs(24 * 3600),
        },
        commands: Commands::default(),
        keys: RecordKeys::default(),
    };
    let store = EmbeddedStore::open(&folder.join("fleet.redb"))?;
    Ok(Controller::new(config, Arc::new(store))?)
}

impl Show<'_> {
    fn say(&self, text: &str) {
        (self.print)(format!(
            "{:6.1} s  {text}",
            self.start.elapsed().as_secs_f64()
        ));
    }

    /// Returns the member that `choose` selects.
    fn member(&self, choose: impl Fn(&[Member]) -> Option<&Member>) -> Member {
        choose(self.running.rollout().members())
            .cloned()
            .expect("the rollout has guests")
    }

    async fn command(&self, command: Command) -> anyhow::Result<()> {
        let answer = self.running.command(command, &self.by).await;
        Ok(answer.context("the controller ended")??)
    }

    /// Prints each new entry of the timeline until the rollout is as `is_reached` says.
    async fn until(
        &mut self,
        what: &str,
        is_reached: impl Fn(&Rollout) -> bool,
    ) -> anyhow::Result<()> {
        let reached = async {
            let mut version = self.running.version();
            loop {
                version.mark_unchanged();
                let (texts, phase, is_reached) = {
                    let rollout = self.running.rollout();
                    let timeline = &rollout.header().timeline;
                    let texts = timeline[self.shown..]
                        .iter()
                        .map(|entry| entry.text.clone());
                    let texts: Vec<String> = texts.collect();
                    (texts, rollout.header().phase, is_reached(&rollout))
                };
                self.shown += texts.len();
                texts.iter().for_each(|text| self.say(text));
                match phase {
                    _ if is_reached => return Ok(()),
                    Phase::Paused | Phase::Ended(_) => bail!("the rollout is {}", phase.name()),
                    _ => version.changed().await?,
                }
            }
        };
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        reached.with_context(|| format!("not reached: {what}"))?
    }

    /// Prints the first guest that the page shows in this state and why, and the number of such
    /// guests, which must be `count`.
    async fn guests(&self, state: &str, count: usize) -> anyhow::Result<()> {
        let fields = [("rollout", NAME), ("state", state)];
        let found = page::ask(&self.link, "/api/guests", &fields).await?;
        ensure!(
            found["total"] == count,
            "{count} guests are {state}: {found}"
        );
        let row = &found["rows"][0];
        let [host, guest] = ["host", "guest"].map(|name| row[name].as_str().unwrap_or_default());
        let fields = [("rollout", NAME), ("host", host), ("guest", guest)];
        let reasons = page::ask(&self.link, "/api/explain", &fields).await?;
        let reasons = reasons.as_array().context("no reasons")?.iter();
        let reasons: Vec<&str> = reasons.filter_map(|reason| reason.as_str()).collect();
        let more = match count {
            1 => String::new(),
            _ => format!(" (the first of {count})"),
        };
        self.say(&format!(
            "{state}: {guest} on {host}{more}: {}",
            reasons.join("; ")
        ));
        Ok(())
    }

    /// Replaces the claims of the other owner.
    async fn claim(&self, member: &Member, generation: u64, is_off: bool) -> anyhow::Result<()> {
        let host = self.leads.hosts().get(&member.host).context("no host")?;
        let off = v1::KeyClaim {
            key: KEYS[0].to_owned(),
            want: v1::ClaimWant::Off.into(),
            patterns: vec![],
        };
        let request = v1::SetClaimsRequest {
            guest: member.guest.clone(),
            owner: OTHER.to_owned(),
            generation,
            claims: is_off.then_some(off).into_iter().collect(),
            ..v1::SetClaimsRequest::default()
        };
        host.set_claims(|| request, "").await?;
        Ok(())
    }

    /// Runs the waves while another owner's claim decides about a key of one guest, and then ends
    /// that claim.
    async fn not_yet(&mut self) -> anyhow::Result<()> {
        let held = self.member(|members| {
            let claims = |member: &&Member| !member.state.is_left_out();
            members.iter().rev().find(claims)
        });
        let (guest, host, key) = (&held.guest, &held.host, KEYS[0]);
        self.claim(&held, 1, true).await?;
        self.say(&format!(
            "{OTHER} claims {key} off on guest {guest} on {host}"
        ));
        let digest = self.running.rollout().header().digest.clone();
        self.command(Command::Start { digest }).await?;
        let completed = |rollout: &Rollout| rollout.header().phase == Phase::Completed;
        self.until("the rollout goes on without the guest", completed)
            .await?;
        self.guests("not yet", 1).await?;
        self.claim(&held, 2, false).await?;
        self.say(&format!(
            "{OTHER} ends the claim, and the guest is asked again"
        ));
        let is_late = |member: &Member| member.state.is_late();
        let all = |rollout: &Rollout| !rollout.members().iter().any(is_late);
        self.until("the guest is as wanted", all).await?;
        self.guests("as wanted", self.wanted()).await
    }

    /// Returns the number of guests that take part.
    fn wanted(&self) -> usize {
        let rollout = self.running.rollout();
        let members = rollout.members().iter();
        members.filter(|member| !member.state.is_left_out()).count()
    }

    /// Takes a host down for a while.
    async fn unknown(
        &mut self,
        name: &str,
        host: &mut Option<Host>,
        socket: &Path,
        authority: &Authority,
    ) -> anyhow::Result<()> {
        let guests = host.take().context("it is up")?.stop().await?;
        self.say(&format!("{name} is down; `rollout drift` reads all guests"));
        drift(
            self.leads.hosts(),
            authority,
            &self.running,
            Action::Report,
            &self.by,
        )
        .await?;
        let on_host = |rollout: &Rollout| {
            let members = rollout.members().iter();
            let members = members.filter(|one| one.host == name && !one.state.is_left_out());
            members.map(Member::is_unknown).collect::<Vec<bool>>()
        };
        let lost = |rollout: &Rollout| on_host(rollout).iter().all(|is_unknown| *is_unknown);
        self.until("the guests of the host are unknown", lost)
            .await?;
        let count = on_host(&self.running.rollout()).len();
        self.guests("unknown", count).await?;
        *host = Some(Host::start(socket, guests)?);
        self.say(&format!("{name} is up again, and its guests are asked"));
        let seen = |rollout: &Rollout| !on_host(rollout).contains(&true);
        self.until("the guests answer again", seen).await?;
        self.guests("as wanted", self.wanted()).await
    }

    /// Undoes the rollout, and checks the keys of all guests.
    async fn undo(&mut self, memory: &[Arc<InMemoryGuest>]) -> anyhow::Result<()> {
        let counts = || KEYS.map(|key| memory.iter().map(|guest| guest.count(key)).sum::<i32>());
        let wanted = self.wanted();
        let all = i32::try_from(wanted)?;
        ensure!(counts() == [all; 2], "{:?} of {all} keys are on", counts());
        self.command(Command::Undo).await?;
        let undone = |rollout: &Rollout| rollout.header().phase == Phase::Ended(End::Undone);
        self.until("the undo", undone).await?;
        self.guests("released", wanted).await?;
        ensure!(counts() == [0; 2], "{:?} keys are on", counts());
        self.say("No guest has the change.");
        Ok(())
    }
}
