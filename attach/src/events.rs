// SPDX-License-Identifier: Apache-2.0
//! Reads the events of a domain's QEMU from a separate `virsh`.
//!
//! libvirt may delay an event, so an event may arrive after the answer to a command that was sent
//! after the event occurred. Each change therefore also checks that the vCPUs run the discovered
//! kernel (`Discoverable::confirms`).

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use patchbay_guest::limited;
use serde_json::Value;

use crate::error::AttachError;
use crate::libvirt::{Domain, START, unstarted};
use crate::life::Life;
use crate::qmp::{Event, QmpError};
use crate::virsh::{Failure, Kill, Virsh};

/// The delay before another attempt to subscribe.
const REST: Duration = Duration::from_secs(1);

/// A subscription, which ends on drop.
#[derive(Debug)]
pub struct Events {
    /// Dropping it ends the thread's wait.
    end: Option<Sender<()>>,
    virsh: Arc<Mutex<Option<Kill>>>,
    thread: Option<JoinHandle<()>>,
}

impl Events {
    /// Subscribes to the events of a domain's QEMU. If the subscription ends early, events may be
    /// lost, so the end counts as a reset.
    ///
    /// # Errors
    /// virsh cannot be started, or does not know the domain.
    pub fn of_domain(domain: &Domain, life: &Arc<Life>) -> Result<Self, AttachError> {
        // This virsh does not read its input, so it would not notice that this process was killed.
        let killed_with_us = ["setpriv", "--pdeathsig", "KILL"].map(str::to_owned);
        let virsh = domain.command_line().iter().cloned();
        let command_line = killed_with_us.into_iter().chain(virsh).collect();
        Self::follow(command_line, domain.name(), life)
    }

    /// Subscribes through a virsh with this command line.
    fn follow(
        command_line: Vec<String>,
        domain: &str,
        life: &Arc<Life>,
    ) -> Result<Self, AttachError> {
        let (end, ended) = channel();
        let (ready, first) = channel();
        let virsh = Arc::default();
        let subscription = Subscription {
            command_line,
            domain: domain.to_owned(),
            life: Arc::clone(life),
            virsh: Arc::clone(&virsh),
        };
        // The kernel kills each virsh when the thread that started it ends.
        let thread = std::thread::Builder::new()
            .name("virsh-events".to_owned())
            .spawn(move || subscription.run(&ready, &ended))
            .map_err(|error| failed(format!("a thread cannot be started ({error})")))?;
        let events = Self {
            end: Some(end),
            virsh,
            thread: Some(thread),
        };
        match first.recv() {
            Ok(Ok(())) => Ok(events),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(failed("it has ended".to_owned()).into()),
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.end = None;
        if let Some(virsh) = &*self.virsh.lock().unwrap_or_else(PoisonError::into_inner) {
            virsh.kill();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn failed(why: String) -> QmpError {
    QmpError::Virsh {
        command: "qemu-monitor-event".to_owned(),
        why,
    }
}

/// The state of the subscription's thread.
struct Subscription {
    command_line: Vec<String>,
    domain: String,
    life: Arc<Life>,
    virsh: Arc<Mutex<Option<Kill>>>,
}

impl Subscription {
    fn run(&self, ready: &Sender<Result<(), QmpError>>, ended: &Receiver<()>) {
        let mut virsh = match self.start() {
            Ok(virsh) => virsh,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let _ = ready.send(Ok(()));
        loop {
            self.read(&mut virsh);
            if self.is_over(ended, Duration::ZERO) {
                return;
            }
            self.life.set_back();
            limited!(
                warn,
                domain = self.domain,
                "virsh has ended, so events of the guest may be lost; holds on its keys are void"
            );
            virsh = loop {
                if self.is_over(ended, REST) {
                    return;
                }
                if let Ok(virsh) = self.start() {
                    break virsh;
                }
            };
            // Events since the last virsh ended may be lost.
            self.life.set_back();
        }
    }

    /// Waits at most `rest` for the end of the subscription, and returns whether it or the guest
    /// has ended.
    fn is_over(&self, ended: &Receiver<()>, rest: Duration) -> bool {
        use std::sync::mpsc::RecvTimeoutError::Timeout;
        self.life.has_ended() || ended.recv_timeout(rest) != Err(Timeout)
    }

    /// Starts a virsh that is connected and knows the domain.
    fn start(&self) -> Result<Virsh, QmpError> {
        let mut virsh =
            Virsh::start(&self.command_line).map_err(|error| failed(unstarted(&error)))?;
        let kill = virsh.kill().map_err(|error| failed(error.to_string()))?;
        *self.virsh.lock().unwrap_or_else(PoisonError::into_inner) = Some(kill);
        let known = virsh.run(&["domid", "--domain", &self.domain], Instant::now() + START);
        match known {
            Ok(text) if text.trim().parse::<u32>().is_ok() => Ok(virsh),
            Ok(text) | Err(Failure::Ended(text)) => {
                Err(failed(format!("it says {:?} of the domain", text.trim())))
            }
            Err(_) => Err(failed(format!("no answer within {START:?}"))),
        }
    }

    /// Reads until virsh ends.
    fn read(&self, virsh: &mut Virsh) {
        let words = ["qemu-monitor-event", "--domain", &self.domain, "--loop"];
        virsh.follow(&words, |line| {
            match parse(line, &self.domain) {
                // libvirt starts QEMU with -no-shutdown, and resets a guest that it restarts.
                Some(event) if event.name == "SHUTDOWN" => self.life.set_back(),
                Some(event) => self.life.event(&event),
                None => {}
            }
        });
    }
}

/// Parses `event NAME at SECONDS.MICROSECONDS for domain 'DOMAIN': DATA`.
fn parse(line: &str, domain: &str) -> Option<Event> {
    let (head, data) = line.split_once(&format!(" for domain '{domain}': "))?;
    let name = head.strip_prefix("event ")?.split(' ').next()?;
    Some(Event {
        name: name.to_owned(),
        data: serde_json::from_str(data).unwrap_or(Value::Null),
        number: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_virsh_prints_them() {
        let line = |name: &str, data: &str| {
            format!("event {name} at 1763888000.123456 for domain 'we: b': {data}")
        };
        let event = parse(&line("RESET", r#"{"guest":false}"#), "we: b").expect("an event");
        assert_eq!(event.name, "RESET");
        assert_eq!(event.data["guest"], false);
        let event = parse(&line("STOP", "<null>"), "we: b").expect("an event");
        assert_eq!((event.name.as_str(), event.data), ("STOP", Value::Null));
        for other in [
            line("RESET", "{}").replace("we: b", "web"),
            line("RESET", "{}").replace("event ", ""),
            "events received: 2".to_owned(),
            String::new(),
        ] {
            assert_eq!(parse(&other, "we: b"), None, "{other}");
        }
    }

    /// A shell script in place of virsh. It reports a domain, prints an event and keeps running.
    const ONE: &str = r#"read -r command; read -r mark; echo 7; eval "$mark"; echo; read -r command;
        echo "event RESET at 1.000000 for domain 'web': {}"; "#;

    fn follow(script: &str, life: &Arc<Life>) -> Result<Events, AttachError> {
        let command_line = ["sh", "-c", script].map(str::to_owned).to_vec();
        Events::follow(command_line, "web", life)
    }

    fn until_resets(life: &Life, at_least: u64) {
        let end = Instant::now() + START;
        while life.resets() < at_least {
            assert!(Instant::now() < end, "{} resets", life.resets());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_reset_is_counted_and_the_drop_ends_virsh() {
        let life = Arc::new(Life::default());
        let events = follow(&format!("{ONE} exec sleep 1000"), &life).expect("subscribed");
        until_resets(&life, 1);
        drop(events);
        assert_eq!(life.resets(), 1, "its end is no reset");
    }

    /// Simulates an event, the end of virsh, and an event from the next virsh.
    #[test]
    fn lost_events_count_as_a_reset() {
        let life = Arc::new(Life::default());
        let _events = follow(ONE, &life).expect("subscribed");
        until_resets(&life, 4);
    }

    #[test]
    fn a_domain_that_virsh_does_not_know_is_refused() {
        let life = Arc::new(Life::default());
        for (script, words) in [
            (
                r#"read -r c; read -r m; echo "error: failed to get domain"; eval "$m"; read -r c"#,
                "failed to get domain",
            ),
            ("echo no connection", "no connection"),
        ] {
            let error = follow(script, &life).expect_err("refused").to_string();
            assert!(error.contains(words), "{error}");
        }
        let missing = Events::follow(vec!["/nonexistent".to_owned()], "web", &life);
        let error = missing.expect_err("not installed").to_string();
        assert!(error.contains("install libvirt-clients"), "{error}");
    }
}
