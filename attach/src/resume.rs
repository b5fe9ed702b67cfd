// SPDX-License-Identifier: Apache-2.0
//! Ends a stop by QMP without continuing a guest that has migrated.
//!
//! At the source of a completed migration, `cont` takes the disk images back (`qmp_cont()`,
//! `monitor/qmp-cmds.c` of QEMU) while the guest uses them at the destination. So `cont` is sent
//! only while QEMU says "paused" and no migration is in progress. A migration that began while the
//! guest was stopped is cancelled first, because it could complete before the `cont` and would
//! leave the guest stopped at the destination.
//!
//! QMP has no command that checks and continues atomically. A race remains if another client's
//! migration begins and completes between the answer to the check and the `cont` that follows.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::monitor::Migration;

/// Interval of queries about a migration that is ending. Polling is needed, because QEMU emits
/// events about migrations only with a capability that the migration's user sets.
const INTERVAL: Duration = Duration::from_millis(2);

/// The state in which a resume leaves the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// `cont` was carried out.
    Continued,
    /// Another client has resumed the guest.
    Runs,
    /// Another client stopped the guest.
    Anothers,
    /// This QEMU must not continue the guest.
    Left {
        /// QEMU's run state.
        status: String,
        /// The status of the migration.
        migration: String,
    },
}

/// Continues the guest if it is stopped here. `execute` carries out a command without arguments.
/// `is_ours` returns whether this process made the stop. `ends` returns the same, and is called
/// just before `cont`.
///
/// # Errors
/// Those of `execute`.
pub fn resume<E>(
    mut execute: impl FnMut(&str) -> Result<Value, E>,
    (is_ours, ends): (impl Fn() -> bool, impl Fn() -> bool),
    deadline: Instant,
) -> Result<Resumed, E> {
    let mut cancelled = false;
    loop {
        let status = execute("query-status")?;
        let status = status["status"].as_str().unwrap_or_default();
        let migration = Migration::new(execute("query-migrate")?);
        let left = || Resumed::Left {
            status: status.to_owned(),
            migration: migration.status().to_owned(),
        };
        match status {
            "running" => return Ok(Resumed::Runs),
            // The stop is another client's, so a migration that began during it is not cancelled.
            "paused" if !is_ours() => return Ok(Resumed::Anothers),
            "paused" if !migration.is_under_way() => {
                if !ends() {
                    return Ok(Resumed::Anothers);
                }
                execute("cont")?;
                return Ok(Resumed::Continued);
            }
            "paused" if !cancelled && migration.can_be_cancelled() => {
                execute("migrate_cancel")?;
                cancelled = true;
            }
            // If the migration fails now, the guest can be continued here.
            "paused" | "finish-migrate" if !migration.is_at_destination() => {
                if Instant::now() >= deadline {
                    return Ok(left());
                }
                std::thread::sleep(INTERVAL);
            }
            _ => return Ok(left()),
        }
    }
}

impl Resumed {
    /// Returns the message for a log; `None` if the guest runs.
    #[must_use]
    pub fn complaint(&self) -> Option<String> {
        match self {
            Self::Continued | Self::Runs => None,
            Self::Anothers => Some(
                "the guest is left stopped: another client has resumed it and stopped it again; that client has to send cont".to_owned(),
            ),
            Self::Left { status, migration } if status == "postmigrate" => Some(format!(
                "the guest is left stopped: it was migrated while it was stopped (migration {migration:?}); send cont where the guest is to run, and \
                 only there: at the destination if it arrived, else here"
            )),
            Self::Left { status, migration } => Some(format!(
                "the guest is left stopped: QEMU says that it is {status:?} (migration {migration:?}); send cont when the guest may run here"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use serde_json::json;

    use super::*;

    /// Simulates a QEMU that goes through these states. A command that changes the state, or the
    /// end of a check, leads to the next state.
    fn play(states: &[(&str, &str)], ours: bool) -> (Resumed, Vec<String>) {
        let at = Cell::new(0);
        let mut sent = Vec::new();
        let execute = |command: &str| -> Result<Value, ()> {
            let (status, migration) = states[at.get().min(states.len() - 1)];
            match command {
                "query-status" => Ok(json!({ "status": status })),
                "query-migrate" => {
                    at.set(at.get() + 1);
                    Ok(json!({ "status": migration }))
                }
                _ => {
                    sent.push(command.to_owned());
                    Ok(Value::Null)
                }
            }
        };
        let deadline = Instant::now() + Duration::from_millis(20);
        let resumed = resume(execute, (|| ours, || ours), deadline).expect("answered");
        (resumed, sent)
    }

    fn left(status: &str, migration: &str) -> Resumed {
        Resumed::Left {
            status: status.to_owned(),
            migration: migration.to_owned(),
        }
    }

    #[test]
    fn a_guest_that_is_only_stopped_is_continued() {
        for migration in ["none", "completed", "failed", "cancelled"] {
            let (resumed, sent) = play(&[("paused", migration)], true);
            assert_eq!((resumed, sent), (Resumed::Continued, vec!["cont".into()]));
        }
    }

    #[test]
    fn a_guest_that_is_not_here_is_not_continued() {
        for status in [
            "postmigrate",
            "inmigrate",
            "prelaunch",
            "shutdown",
            "guest-panicked",
            "internal-error",
            "restore-vm",
            "save-vm",
            "colo",
            "",
        ] {
            for migration in ["none", "active", "completed", "cancelled"] {
                let (resumed, sent) = play(&[(status, migration)], true);
                assert_eq!((resumed, sent), (left(status, migration), Vec::new()));
            }
        }
        for migration in ["postcopy-active", "postcopy-paused", "colo"] {
            for status in ["paused", "finish-migrate"] {
                let (resumed, sent) = play(&[(status, migration)], true);
                assert_eq!((resumed, sent), (left(status, migration), Vec::new()));
            }
        }
    }

    #[test]
    fn a_migration_that_began_meanwhile_is_cancelled_first() {
        let states = [
            ("paused", "active"),
            ("paused", "cancelling"),
            ("paused", "cancelled"),
        ];
        let (resumed, sent) = play(&states, true);
        assert_eq!(resumed, Resumed::Continued);
        assert_eq!(sent, ["migrate_cancel", "cont"]);
        // The migration completes despite the cancellation.
        let states = [
            ("paused", "active"),
            ("finish-migrate", "device"),
            ("postmigrate", "completed"),
        ];
        let (resumed, sent) = play(&states, true);
        assert_eq!(resumed, left("postmigrate", "completed"));
        assert_eq!(sent, ["migrate_cancel"]);
        let (resumed, sent) = play(&[("paused", "active"), ("paused", "cancelling")], true);
        assert_eq!(resumed, left("paused", "cancelling"), "it does not end");
        assert_eq!(sent, ["migrate_cancel"]);
    }

    #[test]
    fn a_stop_of_another_client_is_left_to_it() {
        let (resumed, sent) = play(&[("paused", "none")], false);
        assert_eq!((resumed, sent), (Resumed::Anothers, Vec::new()));
        let (resumed, sent) = play(&[("paused", "active")], false);
        assert_eq!(
            (resumed, sent),
            (Resumed::Anothers, Vec::new()),
            "its migration as well"
        );
        let (resumed, sent) = play(&[("running", "active")], true);
        assert_eq!((resumed, sent), (Resumed::Runs, Vec::new()));
    }

    #[test]
    fn a_guest_that_is_left_stopped_is_complained_of() {
        assert_eq!(Resumed::Continued.complaint(), None);
        assert_eq!(Resumed::Runs.complaint(), None);
        for (left, words) in [
            (Resumed::Anothers, "another client"),
            (left("postmigrate", "completed"), "at the destination"),
            (left("paused", "cancelling"), "\"cancelling\""),
        ] {
            let complaint = left.complaint().expect("it is stopped");
            assert!(complaint.contains(words), "{complaint}");
        }
    }
}
