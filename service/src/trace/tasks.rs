// SPDX-License-Identifier: Apache-2.0
//! Names of the guest's tasks by process id.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_proto::agent::v1::AgentGetTasks;
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::v1::trace_field::Value;

use super::error::AgentError;
use super::link::{AgentLink, bounded};
use super::stream::Event;

/// Maximum number of cached names, and the time for which they are cached. The time is limited
/// because pids are reused.
const MAX_NAMES: usize = 16_384;
const LIFE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_millis(250);
/// Maximum number of names per request to the agent.
const MAX_ASKED: usize = 1024;
const COMM_BYTES: usize = 32;
/// The event that contains names of tasks.
pub const NAMING: &str = "sched:sched_switch";

/// Cache of task names.
#[derive(Debug)]
pub struct Tasks {
    names: HashMap<i32, Arc<str>>,
    since: Instant,
    /// True if the agent did not answer. The agent is then not asked again for a while.
    mute: bool,
    idle: Arc<str>,
    unknown: Arc<str>,
}

impl Default for Tasks {
    fn default() -> Self {
        Self {
            names: HashMap::new(),
            since: Instant::now(),
            mute: false,
            idle: "<idle>".into(),
            unknown: "".into(),
        }
    }
}

impl Tasks {
    /// Fills in the tasks' names. Asks the agent for the unknown ones.
    pub async fn name(&mut self, link: &AgentLink, events: &mut [Event]) {
        self.forget_old();
        self.learn(events);
        let known = |pid: i32| pid == 0 || self.names.contains_key(&pid);
        let unknown: BTreeSet<i32> = events
            .iter()
            .map(|event| event.pid)
            .filter(|&pid| !known(pid))
            .collect();
        if !unknown.is_empty() && !self.mute {
            self.ask(link, unknown.into_iter().take(MAX_ASKED).collect())
                .await;
        }
        self.fill_in(events);
    }

    /// Fills in the tasks' names that events contain. This needs no work by the guest.
    pub fn name_from_events(&mut self, events: &mut [Event]) {
        self.forget_old();
        self.learn(events);
        self.fill_in(events);
    }

    fn forget_old(&mut self) {
        if self.since.elapsed() > LIFE || self.names.len() > MAX_NAMES {
            self.names.clear();
            self.since = Instant::now();
            self.mute = false;
        }
    }

    fn fill_in(&self, events: &mut [Event]) {
        for event in events {
            event.comm = Arc::clone(match event.pid {
                0 => &self.idle,
                pid => self.names.get(&pid).unwrap_or(&self.unknown),
            });
        }
    }

    async fn ask(&mut self, link: &AgentLink, pids: Vec<i32>) {
        // Tasks without an answer are cached as nameless, so that the agent is not asked again with
        // each batch.
        for &pid in &pids {
            self.names.insert(pid, Arc::clone(&self.unknown));
        }
        match link
            .ask(Question::GetTasks(AgentGetTasks { pids }), PATIENCE)
            .await
        {
            Ok(Answer::Tasks(tasks)) => {
                for task in tasks.tasks.into_iter().take(MAX_ASKED) {
                    self.insert(task.pid, &task.comm);
                }
            }
            // Otherwise each batch would wait for the timeout.
            Err(AgentError::Silent { .. }) => self.mute = true,
            _ => {}
        }
    }

    fn insert(&mut self, pid: i32, comm: &str) {
        if !comm.is_empty() && self.names.get(&pid).is_none_or(|known| **known != *comm) {
            let comm = bounded(comm.chars().take(COMM_BYTES).collect());
            self.names.insert(pid, comm.into());
        }
    }

    /// Takes the names from events [`NAMING`], which also contain the names of tasks that have
    /// exited.
    fn learn(&mut self, events: &[Event]) {
        for event in events.iter().filter(|event| event.source.name == NAMING) {
            for (comm, pid) in [("prev_comm", "prev_pid"), ("next_comm", "next_pid")] {
                let (Some(Value::Text(comm)), Some(&Value::Signed(pid))) =
                    (event.value(comm), event.value(pid))
                else {
                    continue;
                };
                if let Ok(pid) = i32::try_from(pid) {
                    self.insert(pid, comm);
                }
            }
        }
    }
}
