// SPDX-License-Identifier: Apache-2.0
//! Tests the search for the newest reports of errors.

use super::*;

const REPORTS: &[&str] = &["WARNING: ", "BUG: "];

fn summary(log: &Log) -> Summary {
    Summary::read(log, &log.source(), REPORTS).expect("readable")
}

fn text(record: Option<&Record>) -> Option<String> {
    let text = record?.text.clone()?;
    String::from_utf8(text).ok()
}

#[test]
fn the_newest_report_and_panic_of_the_kernel_are_found() {
    for version in VERSIONS {
        let log = Log::new(version, 6, 12);
        assert_eq!(summary(&log).report, None, "an empty log");
        log.write(|writer| {
            writer.print(4, "WARNING: CPU: 0 PID: 1 at kernel/first.c:1 first()");
            writer.print(4, "BUG: second");
            writer.print(6, "a text with WARNING: in it");
            let id = writer.print(4, "WARNING: of a process");
            writer.set_facility(id, 1);
            let id = writer.reserve();
            writer.commit(id, 4 << 5 | 8, 7, b"WARNING: the end of a line");
            writer.finalize(id);
        });
        let found = summary(&log);
        assert_eq!(text(found.report.as_ref()).as_deref(), Some("BUG: second"));
        assert_eq!(found.panic, None);
        log.write(|writer| {
            writer.print(0, "Kernel panic - not syncing: out of luck");
            // The CPU of the panic may not finish its last line.
            let id = writer.reserve();
            writer.commit(id, 0, 7, b"---[ end ...");
            writer.reserve();
        });
        let found = summary(&log);
        assert_eq!(text(found.report.as_ref()).as_deref(), Some("BUG: second"));
        let panic = found.panic.expect("a panic");
        let expected = "Kernel panic - not syncing: out of luck";
        assert_eq!(text(Some(&panic)).as_deref(), Some(expected));
        assert_eq!((panic.seq, panic.level), (5, 0));
    }
}

#[test]
fn losses_since_boot_are_counted() {
    let log = Log::new(Version::V6_12, 4, 12);
    log.write(|writer| writer.print(6, "0"));
    let found = summary(&log);
    assert_eq!((found.overwritten, found.refused), (Some(0), Some(0)));
    log.write(|writer| {
        (0..99).for_each(|_| _ = writer.print(6, "another"));
        writer.refuse(7);
    });
    let found = summary(&log);
    assert_eq!(
        (found.overwritten, found.refused),
        (Some(100 - 16), Some(7))
    );
}

/// A report that was overwritten is not found, and the search ends.
#[test]
fn the_search_ends_at_the_oldest_record() {
    let log = Log::new(Version::V6_12, 4, 12);
    log.write(|writer| {
        writer.print(4, "WARNING: long ago");
        (0..99).for_each(|_| _ = writer.print(6, "another"));
    });
    assert_eq!(summary(&log).report, None);
}

#[test]
fn a_huge_ring_takes_a_bounded_number_of_reads() {
    let log = Log::new(Version::V6_12, 15, 20);
    log.write(|writer| {
        writer.print(4, "WARNING: long ago");
        // More than are examined, although the reads would suffice.
        (0..9000).for_each(|_| _ = writer.print(6, "another"));
    });
    log.before_read(|_, _| {});
    assert_eq!(summary(&log).report, None);
    assert!(log.reads() <= 1 << 16, "{}", log.reads());
    log.write(|writer| writer.print(4, "WARNING: now"));
    let found = summary(&log);
    assert_eq!(text(found.report.as_ref()).as_deref(), Some("WARNING: now"));
}
