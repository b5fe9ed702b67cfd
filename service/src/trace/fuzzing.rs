// SPDX-License-Identifier: Apache-2.0
//! Link and hub against an agent that sends the fuzzer's bytes.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::{
    AgentEnabled, AgentHello, AgentPage, AgentPages, AgentPong, AgentTasks, FromAgent,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};

use super::decode::Format;
use super::frame;
use super::hub::Hub;
use super::link::{AgentLink, WINDOW};
use super::select::Wanted;
use super::stream::{BATCH_BYTES, QUEUE, Source};
use patchbay_guest::fuzzing::Numbers;

const FORMATS: [&str; 2] = [
    include_str!("fixtures/sched_switch.format"),
    include_str!("fixtures/sched_process_exec.format"),
];
/// Maximum size of one decoded event of a page: 124 fields with long names.
const EVENT_BYTES: usize = 256 << 10;

/// Sends what an agent sends after its hello: messages, and bytes that are not messages.
pub fn agent(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(converse(data));
}

async fn converse(data: &[u8]) {
    let (sender, received) = mpsc::unbounded_channel();
    let link = AgentLink::new(sender);
    let hub = Hub::new(link.clone());
    for text in FORMATS {
        hub.add_source(Arc::new(Source {
            name: "sched:sched_switch".to_owned(),
            format: Format::parse(text).expect("of a real kernel"),
            text: Box::default(),
            settled_at: AtomicU64::new(0),
            events: AtomicU64::new(0),
        }));
    }
    let all = Wanted::parse(vec![], false).expect("all");
    let mut stream = hub
        .subscribe("uid:0", all.patterns().clone(), u32::MAX)
        .expect("the first");
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let permit = Arc::new(Semaphore::new(1)).try_acquire_owned();
    let serving = link.connected(ours, 1, permit.expect("the first"));
    let (mut reader, mut writer) = theirs.into_split();
    let playing = async {
        let hello = Answer::Hello(AgentHello {
            oldest_version: 1,
            newest_version: 1,
            ..Default::default()
        });
        send(&mut writer, 0, hello).await;
        let _: Result<patchbay_proto::agent::v1::ToAgent, _> = frame::read(&mut reader).await;
        hub.agent_connected();
        play(data, &mut writer).await;
        drop(writer);
        let _ = reader.read_to_end(&mut vec![]).await;
    };
    tokio::join!(serving, playing);
    assert!(link.held() <= WINDOW, "{} bytes held", link.held());
    assert!(link.peer().is_err(), "the connection is over");
    let decoding = async {
        while link.held() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = hub.run(received) => unreachable!("the link lives"),
        () = decoding => {}
    }
    let mut batches = 0;
    while let Ok(batch) = stream.batches.try_recv() {
        batches += 1;
        assert!(
            batch.bytes() <= BATCH_BYTES + EVENT_BYTES,
            "{}",
            batch.bytes()
        );
        let _ = batch.to_proto();
    }
    assert!(batches <= QUEUE);
}

/// Sends a message. Fails when the monitor has closed the connection.
async fn send(writer: &mut (impl tokio::io::AsyncWrite + Unpin), id: u64, message: Answer) {
    let message = Some(message);
    let _ = frame::write(writer, &FromAgent { id, message }).await;
}

async fn play(data: &[u8], writer: &mut (impl tokio::io::AsyncWrite + Unpin)) {
    let mut numbers = Numbers(data);
    while numbers.more() {
        let kind = numbers.u8();
        let id = u64::from(kind >> 4);
        let message = match kind % 8 {
            0..4 => pages(kind, &mut numbers),
            4 => Answer::Pong(AgentPong {
                guest_time_ns: numbers.u64(),
            }),
            5 => Answer::Tasks(AgentTasks::default()),
            6 => Answer::Enabled(AgentEnabled::default()),
            _ => {
                let length = usize::from(numbers.u8());
                if writer.write_all(numbers.take(length)).await.is_err() {
                    return;
                }
                continue;
            }
        };
        send(writer, id, message).await;
    }
}

/// Returns pages with the fuzzer's bytes; some messages have many or long pages.
fn pages(kind: u8, numbers: &mut Numbers<'_>) -> Answer {
    let (count, length) = (numbers.u8(), usize::from(numbers.u16()));
    let mut page = numbers.take(length).to_vec();
    if kind & 0x10 != 0 {
        page = page.repeat(1 + usize::from(kind >> 5));
    }
    let page = |cpu: u8| AgentPage {
        cpu: u32::from(cpu),
        data: page.clone(),
    };
    let pages = (0..count % 16).map(page).collect();
    Answer::Pages(AgentPages { pages })
}
