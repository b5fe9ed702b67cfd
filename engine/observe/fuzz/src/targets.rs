// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets. In [`logs`], the input determines what a kernel prints and how a hostile guest
//! damages its log.

#[path = "rings.rs"]
mod rings;

use patchbay_observe::log::{Follower, Start, Summary, Terms, newest};
use patchbay_observe::testing::{BASE, Log, Version};

pub use self::rings::rings;

/// A target and its name.
pub type Named = (&'static str, fn(&[u8]));

/// The targets by name.
pub const TARGETS: &[Named] = &[("logs", logs), ("rings", rings)];

/// The maximum number of reads in one poll of a small log.
const MAX_READS: u64 = 40_000;

/// The first byte chooses the version and the start. Each four further bytes are a step: print a
/// line, reserve a record, poll, change a byte now, or change a byte while the next poll reads.
pub fn logs(data: &[u8]) {
    let Some((choice, steps)) = data.split_first() else {
        return;
    };
    let version = [Version::V5_10, Version::V6_12, Version::V7_3][usize::from(choice & 3) % 3];
    let start = match choice >> 2 & 3 {
        0 => Start::Oldest,
        1 => Start::End,
        2 => Start::Seq(3),
        _ => Start::Seq(u64::MAX),
    };
    let log = Log::new(version, 3, 9);
    let source = log.source();
    let length = log.write(|writer| writer.memory().len());
    let mut follower = Follower::new(source.clone(), start);
    let mut open = None;
    for step in steps.chunks_exact(4) {
        let at = BASE + (usize::from(u16::from_le_bytes([step[1], step[2]])) % length) as u64;
        let byte = step[3];
        match step[0] % 6 {
            0 => {
                _ = log.write(|writer| writer.print(byte & 7, &"x".repeat(usize::from(byte % 60))))
            }
            1 => open = Some(log.write(|writer| writer.reserve())),
            2 => {
                let Some(id) = open.take() else { continue };
                log.write(|writer| writer.commit(id, byte, at as u32, b"part"));
            }
            3 => log.write(|writer| writer.put_bytes(at, &[byte])),
            4 => {
                let when = u64::from(byte % 32);
                log.before_read(move |number, writer| {
                    if number == when {
                        writer.put_bytes(at, &[byte]);
                    }
                });
            }
            _ => poll(&log, &mut follower, byte),
        }
    }
    poll(&log, &mut follower, 0);
    let _ = newest(&log, &source);
    let before = log.reads();
    let summary = Summary::read(&log, &source, &["xx"]);
    let reads = log.reads() - before;
    assert!(reads < MAX_READS, "{reads} reads");
    let report = summary.and_then(|summary| summary.report?.text);
    assert!(report.is_none_or(|text| text.starts_with(b"xx")));
}

/// Polls, and checks the guarantees of a batch.
fn poll(log: &Log, follower: &mut Follower, byte: u8) {
    let terms = Terms {
        records: usize::from(byte >> 1).max(1),
        bytes: 4096,
        unfinished: byte & 1 != 0,
    };
    let before = log.reads();
    let batch = follower.poll(log, terms);
    let reads = log.reads() - before;
    assert!(reads < MAX_READS, "{reads} reads");
    assert!(batch.records.len() <= terms.records);
    let in_order = |pair: &[patchbay_observe::log::Record]| pair[0].seq < pair[1].seq;
    assert!(
        batch.records.windows(2).all(in_order),
        "numbers only rise in a batch"
    );
    for record in &batch.records {
        assert!(record.text.as_ref().is_none_or(|text| text.len() < 1 << 16));
        assert!(record.level < 8 && record.subsystem.len() <= 16 && record.device.len() <= 48);
        assert!(terms.unfinished || record.finished);
    }
}
