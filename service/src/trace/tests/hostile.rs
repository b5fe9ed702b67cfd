// SPDX-License-Identifier: Apache-2.0
//! Agents of other versions, and programs that are not agents.

use std::collections::BTreeSet;
use std::time::Duration;

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{AgentListEvents, AgentPage, AgentPages, FromAgent, ToAgent};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::super::error::{AgentError, TraceError};
use super::super::frame;
use super::super::link::WINDOW;
use super::super::select::Wanted;
use super::fake::{Fake, hello};
use super::tracing::until;
use crate::auth::Principal;

const PATIENCE: Duration = Duration::from_secs(30);

async fn ends(mut stream: impl tokio::io::AsyncRead + Unpin) {
    let mut rest = vec![];
    let end = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
    // A reset also ends the connection.
    let _ = end.expect("the monitor closes the connection");
}

async fn until_absent(fake: &Fake) -> String {
    let mut connections = fake.tracer.link.connections();
    loop {
        if let Err(error) = fake.tracer.link.peer() {
            return error.to_string();
        }
        tokio::time::timeout(PATIENCE, connections.changed())
            .await
            .expect("in time")
            .expect("open");
    }
}

#[tokio::test]
async fn without_an_agent_the_error_says_so() {
    let fake = Fake::new();
    let error = fake
        .tracer
        .link
        .ask(Question::ListEvents(AgentListEvents {}), PATIENCE)
        .await
        .expect_err("none");
    assert!(
        matches!(error, AgentError::Absent { .. }) && error.to_string().contains("patchbay-agent"),
        "{error}"
    );
}

#[tokio::test]
async fn another_version_is_refused_with_both() {
    let fake = Fake::new();
    for (oldest, newest) in [(2, 3), (0, 0), (5, 4)] {
        let (mut reader, _writer) = fake.connect(hello(oldest, newest, &BTreeSet::new())).await;
        let answer: ToAgent = frame::read(&mut reader).await.expect("an answer");
        let Some(Question::Refusal(refusal)) = answer.message else {
            panic!("{answer:?}")
        };
        assert!(
            refusal.reason.contains(&format!("{oldest} to {newest}")),
            "{}",
            refusal.reason
        );
        assert!(refusal.reason.contains("1 to 1"), "{}", refusal.reason);
        ends(reader).await;
    }
    let error = fake.tracer.link.peer().expect_err("refused").to_string();
    assert!(error.contains("9.9.9"), "{error}");
}

#[tokio::test]
async fn a_newer_agent_that_speaks_ours_too_is_welcome() {
    let fake = Fake::new();
    let (mut reader, _writer) = fake.connect(hello(1, 7, &BTreeSet::new())).await;
    let answer: ToAgent = frame::read(&mut reader).await.expect("an answer");
    let Some(Question::Welcome(welcome)) = answer.message else {
        panic!("{answer:?}")
    };
    assert_eq!(welcome.version, 1);
}

#[tokio::test]
async fn a_second_agent_is_refused_while_the_first_answers() {
    let fake = Fake::with_agent().await;
    let (mut reader, _writer) = fake.connect(hello(1, 1, &BTreeSet::new())).await;
    let answer: ToAgent = frame::read(&mut reader).await.expect("an answer");
    assert!(
        matches!(answer.message, Some(Question::Refusal(_))),
        "{answer:?}"
    );
    assert!(fake.tracer.link.peer().is_ok());
}

#[tokio::test]
async fn garbage_half_frames_and_long_frames_end_the_connection() {
    let fake = Fake::new();
    for bytes in [
        vec![0xff; 64],
        vec![0, 0, 0x10, 0x01],
        vec![8, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
        vec![200, 0, 0, 0, 1, 2, 3],
        vec![1],
        vec![],
    ] {
        let mut stream = UnixStream::connect(&fake.socket).await.expect("listening");
        stream.write_all(&bytes).await.expect("sent");
        stream.shutdown().await.expect("shut down");
        ends(stream).await;
    }
    // An agent can still connect.
    fake.agent().await;
}

fn pages_of(page: &[u8], count: usize) -> FromAgent {
    let page = || AgentPage {
        cpu: 0,
        data: page.to_vec(),
    };
    let pages = std::iter::repeat_with(page).take(count).collect();
    FromAgent {
        id: 0,
        message: Some(Answer::Pages(AgentPages { pages })),
    }
}

#[tokio::test]
async fn an_agent_that_turns_hostile_is_cut_off() {
    let fake = Fake::new();
    // These are the smallest pages, and no stream wants pages.
    for pages in [pages_of(&[], 1), pages_of(&[0; 16], 1)] {
        let agent = fake.agent().await;
        agent.send(pages).expect("sent");
        let error = until_absent(&fake).await;
        assert!(error.contains("had credit for 0"), "{error}");
    }
    let (mut reader, mut writer) = fake.connect(hello(1, 1, &BTreeSet::new())).await;
    let _: ToAgent = frame::read(&mut reader).await.expect("welcome");
    writer.write_all(&[0xff; 8]).await.expect("sent");
    let error = until_absent(&fake).await;
    assert!(error.contains("announced a message of"), "{error}");
}

/// The window holds for pages with any content, and however often streams are opened and closed.
#[tokio::test]
async fn credit_is_a_window() {
    for (page, count, why) in [
        (vec![0; 16], 70_000, "had credit for"),
        (vec![], 70_000, "had credit for"),
        (vec![0; 60 << 10], 140, "had credit for"),
        (vec![0; (64 << 10) + 1], 1, "a page of 65537 bytes"),
    ] {
        let fake = Fake::new();
        let agent = fake.agent().await;
        let principal = Principal::peer(None);
        for _ in 0..20 {
            let patterns = Wanted::parse(vec![], false)
                .expect("all")
                .patterns()
                .clone();
            let stream = fake
                .tracer
                .hub
                .subscribe(principal.as_str(), patterns, 1)
                .expect("a stream");
            fake.tracer.hub.unsubscribe(stream.id);
        }
        let credit = || *fake.script.credit.lock().unwrap();
        until(|| credit() > 0).await;
        assert_eq!(credit(), WINDOW);
        // No task decodes, so the link holds everything that is sent.
        let one_frame = count.min(7);
        for _ in 0..count / one_frame {
            agent.send(pages_of(&page, one_frame)).expect("sent");
        }
        let error = until_absent(&fake).await;
        assert!(error.contains(why), "{error}");
        assert!(fake.tracer.link.held() <= WINDOW);
        assert_eq!(credit(), WINDOW);
    }
}

/// One principal cannot use up all streams, and all principals together cannot use up the memory.
#[tokio::test]
async fn streams_are_counted_by_principal_and_in_all() {
    let fake = Fake::new();
    let all = Wanted::parse(vec![], false).expect("all");
    let open = |uid: u32| {
        let principal = Principal::peer(Some(uid));
        let patterns = all.patterns().clone();
        fake.tracer.hub.subscribe(principal.as_str(), patterns, 1)
    };
    let mut streams = vec![];
    for uid in 0..4 {
        for _ in 0..8 {
            streams.push(open(uid).expect("room"));
        }
        if uid < 3 {
            let refused = open(uid).err().expect("the ninth");
            assert!(
                matches!(refused, TraceError::TooManyStreamsOfOne { .. }),
                "{refused}"
            );
        }
    }
    let refused = open(4).err().expect("the last");
    assert!(
        matches!(refused, TraceError::TooManyStreams { max: 32 }),
        "{refused}"
    );
    fake.tracer.hub.unsubscribe(streams[0].id);
    open(4).expect("room again");
}

/// The agent disconnects while requests wait. The requests fail immediately, not at their
/// deadlines.
#[tokio::test]
async fn an_agent_that_goes_fails_what_was_asked() {
    let fake = Fake::new();
    let (mut reader, writer) = fake.connect(hello(1, 1, &BTreeSet::new())).await;
    let _: ToAgent = frame::read(&mut reader).await.expect("welcome");
    let link = fake.tracer.link.clone();
    let question = tokio::spawn(async move {
        link.ask(Question::ListEvents(AgentListEvents {}), PATIENCE * 10)
            .await
    });
    loop {
        let asked: ToAgent = frame::read(&mut reader).await.expect("a question");
        if matches!(asked.message, Some(Question::ListEvents(_))) {
            break;
        }
    }
    drop((reader, writer));
    let answer = tokio::time::timeout(PATIENCE, question)
        .await
        .expect("at once")
        .expect("no panic");
    assert!(
        matches!(answer, Err(AgentError::Absent { .. })),
        "{answer:?}"
    );
}

#[tokio::test]
async fn answers_to_nothing_and_wrong_answers_are_borne() {
    let fake = Fake::new();
    let (mut reader, mut writer) = fake.connect(hello(1, 1, &BTreeSet::new())).await;
    let _: ToAgent = frame::read(&mut reader).await.expect("welcome");
    tokio::spawn(async move {
        while let Ok(question) = frame::read::<ToAgent>(&mut reader).await {
            let wrong = Some(Answer::Tasks(Default::default()));
            for id in [question.id + 1000, question.id] {
                let _ = frame::write(
                    &mut writer,
                    &FromAgent {
                        id,
                        message: wrong.clone(),
                    },
                )
                .await;
            }
        }
    });
    let (_, stale) = fake.tracer.events().await;
    assert_eq!(stale, Some(AgentError::Confused));
    assert!(fake.tracer.link.peer().is_ok());
}
