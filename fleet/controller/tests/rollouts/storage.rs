// SPDX-License-Identifier: Apache-2.0
//! Tests rollouts whose records cannot be read or stored, and the deletion of those that are over.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use patchbay_fleet::api;
use patchbay_fleet::controller::Config;
use patchbay_fleet::rollout::{End, Phase};
use patchbay_fleet::runner::{Command, NoAnswer, Running};
use patchbay_fleet::storage::Archive;
use patchbay_fleet::store::{Layer, LeaseId, Revision, Store, StoreError, Transaction};
use patchbay_proto::client;
use patchbay_proto::fleet::v1;
use patchbay_proto::fleet::v1::rollout_service_client::RolloutServiceClient;
use patchbay_proto::socket::ListeningSocket;
use tokio::sync::watch;
use tonic::Streaming;

use super::support::{Fleet, PATIENCE, Replica, is_over, spec, tell, wait_for};

/// A store with faults.
struct Faulty {
    store: Arc<dyn Store>,
    /// True once the writes of every second rollout are refused for good.
    refuses: watch::Sender<bool>,
    /// The part of the commit of the header of the rollout "lost" that fails.
    loses: watch::Sender<Option<Lost>>,
    renewals: watch::Sender<u64>,
    /// The number of renewals of a lease that a list of rollouts takes.
    slow: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Lost {
    Request,
    Answer,
}

impl Faulty {
    fn wrap(fleet: &mut Fleet, slow: u64) -> Arc<Self> {
        let faulty = Arc::new(Self {
            store: Arc::clone(&fleet.store),
            refuses: watch::Sender::new(false),
            loses: watch::Sender::new(None),
            renewals: watch::Sender::new(0),
            slow,
        });
        fleet.store = Arc::<Self>::clone(&faulty);
        faulty
    }
}

#[async_trait]
impl Layer for Faulty {
    fn behind(&self) -> &dyn Store {
        self.store.as_ref()
    }

    async fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError> {
        let mut renewals = self.renewals.subscribe();
        let begun = *renewals.borrow_and_update();
        let enough = renewals.wait_for(|&renewals| renewals >= begun + self.slow);
        enough.await.expect("the store lives");
        self.store.next_key(prefix, from).await
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        if *self.refuses.borrow() && format!("{transaction:?}").contains("rollouts/refused/") {
            let (key, bytes) = ("rollouts/refused/header".to_owned(), 1);
            return Err(StoreError::TooLarge { key, bytes });
        }
        let is_put = format!("{transaction:?}").contains("Put { key: \"rollouts/lost/header\"");
        let loses = *self.loses.borrow();
        match loses.filter(|_| is_put) {
            None => return self.store.commit(transaction).await,
            Some(Lost::Request) => {}
            Some(Lost::Answer) => {
                self.store.commit(transaction).await?;
            }
        }
        Err(StoreError::Unavailable("lost".to_owned()))
    }

    async fn renew(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.store.renew(lease).await?;
        self.renewals.send_modify(|renewals| *renewals += 1);
        Ok(())
    }
}

fn beta(text: &str) -> String {
    text.replace("alpha", "beta")
}

/// Waits until the leader has no rollout of this name in service.
async fn wait_until_gone(replica: &Replica, name: &str) {
    let mut changes = replica.controller.changes();
    let leads = replica.lead().await;
    let gone = async {
        while leads.rollout(name).is_some() {
            changes.changed().await.expect("it runs");
        }
    };
    let gone = tokio::time::timeout(PATIENCE, gone).await;
    gone.expect("gone in time");
}

/// Watches a rollout by the API, until the first answer.
async fn watch_rollout(replica: &Replica, rollout: &str) -> Streaming<v1::WatchResponse> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("fleet.sock");
    let socket = ListeningSocket::bind(&path).expect("free");
    let controller = Arc::clone(&replica.controller);
    tokio::spawn(
        async move { api::serve(controller, &socket, None, std::future::pending()).await },
    );
    let endpoint = client::endpoint();
    let channel = endpoint.connect_with_connector(client::unix_socket(&path));
    let mut client = RolloutServiceClient::new(channel.await.expect("connected"));
    let rollout = rollout.to_owned();
    let watch = client.watch(v1::WatchRequest { rollout }).await;
    let mut watch = watch.expect("watched").into_inner();
    watch.message().await.expect("answered").expect("a state");
    watch
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_that_cannot_be_read_does_not_stop_the_others() {
    let fleet = Fleet::start(1, 2).await;
    let first = fleet.replica("one");
    let text = spec("waves: [{size: 1, bake: 1h}, {size: rest}]");
    let running = first.start("net", &text).await;
    let baking = |phase: Phase| phase.name() == "baking";
    wait_for(&running, baking).await;
    first.start("broken", &beta(&text)).await;
    drop(first);
    fleet
        .put("rollouts/broken/members/00000001", "not JSON")
        .await;
    fleet.put("rollouts/foreign/header", "not JSON").await;

    let second = fleet.replica("two");
    let leads = second.lead().await;
    let unreadable = leads.unreadable();
    assert_eq!(unreadable.len(), 2, "{unreadable:?}");
    let why = &unreadable["broken"];
    assert!(
        why.contains("rollouts/broken/members/00000001 is malformed"),
        "{why}"
    );
    let names = leads.rollouts();
    let names: Vec<_> = names
        .iter()
        .map(|one| one.rollout().header().name.clone())
        .collect();
    assert_eq!(names, ["net"]);
    let metrics = patchbay_fleet::scrape::text(&second.controller).expect("encoded");
    assert!(
        metrics.contains("patchbay_fleet_unreadable_rollouts 2"),
        "{metrics}"
    );
    let planned = leads.plan("broken", &text, "alice").await;
    let error = planned.err().expect("refused").to_string();
    assert!(error.contains("exists and cannot be read"), "{error}");
    let running = leads.rollout("net").expect("loaded");
    tell(&running, Command::Promote).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [1; 2]);

    // The keys that it holds are not known, so no rollout is planned beside it.
    let other = beta(&text);
    let plan = async |name: &str| leads.plan(name, &other, "alice").await;
    let error = plan("other").await.err().expect("refused").to_string();
    assert!(
        error.contains("`rollout delete broken --unreadable`"),
        "{error}"
    );

    // Only what is out of service is deleted so, and only once.
    let refused = leads.delete_unreadable("net", "alice").await;
    refused.expect_err("it is in service");
    assert!(leads.rollout("net").is_some());
    let kept = fleet.store.get("rollouts/net/header").await.expect("read");
    assert!(kept.is_some());

    // Its records go to a file, and its guests stay as they are.
    fleet.put("rollouts/broken/a/newer/key", "x").await;
    let before = fleet.counts("beta");
    let (one, two) = tokio::join!(
        leads.delete_unreadable("broken", "alice"),
        leads.delete_unreadable("broken", "alice"),
    );
    assert!(one.is_ok() != two.is_ok(), "{one:?} {two:?}");
    let file = one.or(two).expect("deleted");
    let text = std::fs::read_to_string(file).expect("written");
    assert!(text.contains("\"value\":\"not JSON\""), "{text}");
    assert!(text.contains("rollouts/broken/a/newer/key"), "{text}");
    assert_eq!(leads.unreadable().len(), 1);
    assert_eq!(fleet.counts("beta"), before);
    let left = fleet.store.range("rollouts/broken/").await.expect("read");
    assert_eq!(left.entries, []);
    let error = plan("other").await.err().expect("refused").to_string();
    assert!(error.contains("rollout foreign is out of"), "{error}");
    let deleted = leads.delete_unreadable("foreign", "alice").await;
    deleted.expect("deleted");
    plan("other").await.map(|_| ()).expect("planned");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_the_store_never_takes_stops_its_rollout_alone() {
    let mut fleet = Fleet::start(1, 2).await;
    let faulty = Faulty::wrap(&mut fleet, 0);
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    let refused = leads
        .plan("refused", &text, "alice")
        .await
        .expect("planned");
    let other = leads
        .plan("other", &beta(&text), "alice")
        .await
        .expect("planned");
    let mut watch = watch_rollout(&replica, "refused").await;
    faulty.refuses.send_replace(true);
    let start = |running: &Running| Command::Start {
        digest: running.rollout().header().digest.clone(),
    };
    let answer = refused.command(start(&refused), "alice").await;
    assert_eq!(
        answer,
        Err(NoAnswer::Lost),
        "it is not saved, so it is not confirmed"
    );
    tell(&other, start(&other)).await;
    assert_eq!(wait_for(&other, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [0; 2]);
    wait_until_gone(&replica, "refused").await;
    let ended = async {
        while watch.message().await?.is_some() {}
        Ok::<_, tonic::Status>(())
    };
    let ended = tokio::time::timeout(PATIENCE, ended).await;
    let status = ended.expect("ends in time").expect_err("it is not over");
    assert_eq!(status.code(), tonic::Code::Unavailable);
    let why = leads
        .unreadable()
        .remove("refused")
        .expect("out of service");
    assert!(why.contains("too large for the store"), "{why}");
    let still = replica.lead().await;
    assert!(Arc::ptr_eq(&leads, &still), "it leads on");

    // Its guests may be changed, so it still holds its keys.
    let plan = async || leads.plan("later", &text, "alice").await;
    let error = plan().await.err().expect("refused").to_string();
    assert!(
        error.contains("rollout refused, which is out of service, changes alpha"),
        "{error}"
    );
    faulty.refuses.send_replace(false);
    let deleted = leads.delete_unreadable("refused", "alice").await;
    deleted.expect("deleted");
    plan().await.map(|_| ()).expect("planned");
}

/// Checks that the header of a plan is not taken for that of the next one of its name.
#[tokio::test(flavor = "multi_thread")]
async fn a_plan_whose_answer_was_lost_is_not_mixed_with_the_next() {
    let mut fleet = Fleet::start(1, 2).await;
    let faulty = Faulty::wrap(&mut fleet, 0);
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    let header = async || {
        let header = fleet.store.get("rollouts/lost/header").await;
        header.expect("read").is_some()
    };
    faulty.loses.send_replace(Some(Lost::Answer));
    leads
        .plan("lost", &text, "alice")
        .await
        .err()
        .expect("lost");
    assert!(header().await, "it is stored");
    faulty.loses.send_replace(Some(Lost::Request));
    let other = beta(&text);
    leads
        .plan("lost", &other, "alice")
        .await
        .err()
        .expect("lost");
    assert!(!header().await, "the members are of the other plan");
    faulty.loses.send_replace(None);
    let running = replica.start("lost", &other).await;
    wait_for(&running, is_over).await;
    assert_eq!(
        (fleet.counts("alpha"), fleet.counts("beta")),
        (vec![0; 2], vec![1; 2])
    );
}

/// Checks that a leader renews its lease while it reads the rollouts.
#[tokio::test(flavor = "multi_thread")]
async fn reading_the_rollouts_may_take_longer_than_the_lease() {
    let mut fleet = Fleet::start(1, 1).await;
    Faulty::wrap(&mut fleet, 5);
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    leads
        .plan("net", &text, "alice")
        .await
        .expect("it still leads");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_is_deleted_only_while_no_guest_has_its_changes() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    let refused = async |running: &Running, why: &str| {
        let error = running.delete("alice").await.expect("it runs");
        let error = error.expect_err("refused").to_string();
        assert!(error.contains(why), "{error}");
        assert!(leads.rollout("net").is_some());
    };
    let running = leads.plan("net", &text, "alice").await.expect("planned");
    refused(&running, "net is planned; delete is legal").await;
    let running = replica.start("net", &text).await;
    wait_for(&running, is_over).await;
    refused(&running, "2 guests of rollout net are changed").await;
    tell(&running, Command::Undo).await;
    let undone = |phase| phase == Phase::Ended(End::Undone);
    wait_for(&running, undone).await;
    fleet.put("rollouts/net/notes", "x").await;
    let file = running
        .delete("alice")
        .await
        .expect("it runs")
        .expect("deleted");
    let lines = std::fs::read_to_string(file).expect("written");
    assert_eq!(
        lines.lines().count(),
        5,
        "header, spec, keys and two guests"
    );
    assert!(leads.rollout("net").is_none());
    let left = fleet.store.range("rollouts/").await.expect("read").entries;
    assert_eq!(left.len(), 1, "the foreign key");
    assert!(running.delete("alice").await.is_err(), "it is gone");
    // The name is free again.
    let again = replica.start("net", &beta(&text)).await;
    wait_for(&again, is_over).await;
    assert_eq!(fleet.counts("beta"), [1; 2]);
}

/// Checks that a guest does not take the requests of a rollout for repeats of those of an earlier
/// one with the same name.
#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_does_what_one_of_its_name_did_before_again() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{size: rest}]");
    for _ in 0..3 {
        let running = replica.start("net", &text).await;
        assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
        assert_eq!(fleet.counts("alpha"), [1; 2]);
        tell(&running, Command::Undo).await;
        wait_for(&running, |phase| phase == Phase::Ended(End::Undone)).await;
        assert_eq!(fleet.counts("alpha"), [0; 2]);
        let deleted = running.delete("alice").await.expect("it runs");
        deleted.expect("deleted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_ended_is_deleted_after_its_time_and_what_is_left_is_swept() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    let undone = replica.start("undone", &text).await;
    tell(&undone, Command::Undo).await;
    wait_for(&undone, |phase| phase == Phase::Ended(End::Undone)).await;
    let completed = replica.start("completed", &text).await;
    wait_for(&completed, is_over).await;
    leads
        .plan("planned", &beta(&text), "alice")
        .await
        .expect("planned");
    drop(replica);
    fleet.put("rollouts/half/members/00000000", "x").await;
    let half = async || {
        let left = fleet.store.range("rollouts/half/").await.expect("read");
        left.entries.len()
    };

    // A file stands where the folder of the archive should be.
    let config = fleet.config("three");
    let folder = config.archive.folder.with_extension("file");
    std::fs::write(&folder, "").expect("written");
    let replica = fleet.start_replica(Config {
        archive: Archive {
            folder,
            ..config.archive.clone()
        },
        ..config
    });
    replica.lead().await;
    assert_eq!(half().await, 1, "what is not kept is not deleted");
    drop(replica);

    let config = fleet.config("two");
    let archive = config.archive.folder.clone();
    let replica = fleet.start_replica(Config {
        archive: Archive {
            keep: Duration::ZERO,
            ..config.archive.clone()
        },
        ..config
    });
    let leads = replica.lead().await;
    let files = std::fs::read_dir(&archive).expect("created");
    let mut files = files.map(|file| file.expect("read").path());
    let is_half = |file: &std::path::PathBuf| file.to_string_lossy().contains("/half-");
    let file = files.find(is_half).expect("written");
    let kept = std::fs::read_to_string(file).expect("written");
    assert!(kept.contains("rollouts/half/members/00000000"), "{kept}");
    wait_until_gone(&replica, "undone").await;
    assert_eq!(leads.rollouts().len(), 2, "the others stay");
    let left = fleet.store.range("rollouts/").await.expect("read").entries;
    let mut folders = left.iter().filter_map(|entry| entry.key.split('/').nth(1));
    assert!(
        folders.all(|name| name == "completed" || name == "planned"),
        "{left:?}"
    );
}
