// SPDX-License-Identifier: Apache-2.0

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use patchbay_guest::testing::TestKey;
use patchbay_service::testing::{GuestRings, numbered};
use serde_json::Value;

use super::lab::{Commands, Following, Host, Lab};

#[test]
fn events_are_listed_and_switched() {
    let host = Host::with(&["only"]);
    let (out, said, code) = host.all(&["trace", "events", "-o", "name"]);
    assert_eq!(
        (out.as_str(), code),
        ("sched:sched_switch\nsched:sched_waking\n", Some(0))
    );
    assert!(
        said.contains("the last known one: no agent is connected"),
        "{said}"
    );
    let text = host.ok(&[
        "trace", "arm", "a:b", "--filter", "pid == 1", "--ttl", "10m",
    ]);
    assert!(text.contains("a:b   parked"), "{text}");
    assert_eq!(host.fake.seen("ttl: Some(Duration { seconds: 600").len(), 1);
    let output = host.fed(&["trace", "fire", "-", "--ttl", "20m"], "a:b\n");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(
        host.fake.seen("ttl: Some(Duration { seconds: 1200").len(),
        1
    );
    host.ok(&["trace", "park", "a:b", "--force", "--even-if-others"]);
    host.ok(&["trace", "disarm", "a:b", "--force"]);
    assert!(host.ok(&["trace", "agent"]).contains("1.2.3"));
    let text = host.ok(&["trace", "stat", "--interval", "1ms"]);
    assert!(text.contains("lost: none"), "{text}");
    assert_eq!(
        host.ok(&["trace", "tail", "x", "-n", "2", "-o", "name"])
            .lines()
            .count(),
        2
    );
}

#[test]
fn events_that_are_not_armed_are_named() {
    let lab = Lab::new();
    for verb in ["fire", "park", "disarm"] {
        let message = lab.fails(1, &["trace", verb, "sched*"]);
        assert!(
            message.contains("no armed event matches sched*; see"),
            "{message}"
        );
    }
}

#[test]
fn events_that_others_keep_are_partly_done() {
    let host = Host::with(&["only"]);
    for verb in ["park", "disarm"] {
        let (out, said, code) = host.all(&["trace", verb, "a:b"]);
        assert_eq!(code, Some(3), "{said}");
        assert!(
            out.contains("uid:7") && said.contains("--force"),
            "{out}{said}"
        );
        let remark = "a:b: its key also serves probe_sched_switch, by which";
        assert_eq!(said.contains(remark), verb == "park", "{said}");
    }
    let (_, _, code) = host.all(&["trace", "park", "a:b", "--dry-run"]);
    assert_eq!(code, Some(0));
    let (out, _, code) = host.all(&["--all", "trace", "park", "a:b", "-o", "json"]);
    let entries: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(code, Some(3));
    assert!(entries[0]["result"].is_object() && entries[0]["error"]["exit_code"] == 3);
    for usage in [
        &["trace"][..],
        &["trace", "arm"],
        &["trace", "fire"],
        &["trace", "park"],
        &["trace", "disarm"],
        &["trace", "events", "--all-of-them"],
        &["trace", "stat", "--interval", "soon"],
        &["trace", "tail", "-n", "many"],
        &["trace", "record", "x"],
        &["trace", "agent", "x"],
    ] {
        assert_eq!(host.run(usage).status.code(), Some(2), "{usage:?}");
    }
}

/// Checks a recording while nothing is armed, which is therefore empty, and a recording that cannot
/// start because the disk is full.
#[test]
fn a_recording_is_written_to_the_named_file() {
    let lab = Lab::new();
    let file = lab.folder().join("t.json");
    let name = file.to_str().expect("text");
    let record = ["trace", "record", "--listen", "--duration", "1ms", "-o"];
    let said = lab.ok(&[&record[..], &[name]].concat());
    assert!(said.contains("t.json: 0 events"), "{said}");
    let timeline = std::fs::read(&file).expect("written");
    let timeline: Value = serde_json::from_slice(&timeline).expect("JSON");
    assert!(timeline["traceEvents"].is_array());
    let output = lab.run(&[&record[..], &["/dev/full"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("/dev/full: the disk is full"), "{said}");
}

#[test]
fn a_recording_that_is_refused_leaves_the_files_alone() {
    let lab = Lab::new();
    let path = |name| lab.folder().join(name);
    let (earlier, new, nowhere) = (path("earlier"), path("new"), path("no-folder/new"));
    std::fs::write(&earlier, "an earlier recording").expect("writable");
    let record = |file: &PathBuf, code: i32| {
        let file = file.to_str().expect("text");
        // The recording is refused, because no agent can arm events.
        let output = lab.run(&["trace", "record", "-o", file, "sched:*"]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = record(&earlier, 1);
    assert!(said.contains("agent"), "{said}");
    let kept = std::fs::read_to_string(&earlier).expect("there");
    assert_eq!(kept, "an earlier recording");
    record(&new, 1);
    assert!(!new.exists());
    let said = record(&nowhere, 2);
    assert!(
        said.contains("no-folder/new cannot be written: No such file"),
        "{said}"
    );
}

/// An event as trace-cmd and `patchbay trace tail` show it: CPU, time in nanoseconds, process,
/// name, and fields.
type Shown = (u64, u64, u64, String, String);

/// The events of a file as trace-cmd shows them, and each loss with its CPU and its number of
/// events.
type Report = (Vec<Shown>, Vec<(u64, u64)>);

/// Returns what trace-cmd shows of a file; `None` without trace-cmd.
fn report(file: &Path) -> Option<Report> {
    let mut command = Command::new("trace-cmd");
    let output = command.args(["report", "-t", "-R", "-i"]).arg(file);
    let output = match output.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("SKIPPED: there is no trace-cmd");
            return None;
        }
        output => output.expect("started"),
    };
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let (mut events, mut lost) = (vec![], vec![]);
    for line in text.lines() {
        // CPU:0 [12 EVENTS DROPPED]
        if let Some((cpu, rest)) = line.strip_prefix("CPU:").and_then(|of| of.split_once(" [")) {
            let count = rest.strip_suffix(" EVENTS DROPPED]").expect("a number");
            lost.push((cpu.parse().unwrap(), count.parse().unwrap()));
            continue;
        }
        //  <...>-42 [001] 0.000003000: numbered: number=3 ...
        let Some((task, rest)) = line.split_once(" [") else {
            assert!(line.starts_with("cpus="), "{line}");
            continue;
        };
        let (cpu, rest) = rest.split_once(']').expect("a CPU");
        let mut words = rest.split_whitespace();
        let time = words.next().and_then(|time| time.strip_suffix(':'));
        let time = time.expect("a time").replace('.', "");
        let name = words.next().and_then(|name| name.strip_suffix(':'));
        let pid = task.rsplit_once('-').expect("a process").1.trim();
        events.push((
            cpu.parse().unwrap(),
            time.parse().unwrap(),
            pid.parse().unwrap(),
            name.expect("a name").to_owned(),
            words.collect::<Vec<_>>().join(" "),
        ));
    }
    Some((events, lost))
}

/// A guest can have many instances with long names of any bytes. The error still reaches the
/// client, names some of them, and steers no terminal.
#[test]
fn an_instance_is_read_by_name_and_a_missing_one_lists_others() {
    let lab = Lab::with(&[TestKey::new("alpha", 1)]);
    let rings = lab.rings();
    rings.write(|writer| {
        writer.put_instances([&b"boot"[..], b"a\x1b[2J"]);
    });
    for number in 0..3 {
        rings.write(|writer| writer.event(0, 1000 * number, &numbered(number)));
    }
    let tail = |instance| {
        [
            "trace",
            "tail",
            "--buffered",
            "-n",
            "3",
            "--instance",
            instance,
        ]
    };
    for instance in ["boot", "a\x1b[2J"] {
        let shown = lab.ok(&tail(instance));
        assert_eq!(shown.matches("test:numbered").count(), 3, "{shown}");
    }
    let said = lab.fails(1, &tail("bo"));
    assert!(
        said.contains("no tracefs instance \"bo\"; it has boot, a\\x1b[2J"),
        "{said}"
    );

    let names: Vec<Vec<u8>> = (0..100).map(|number| vec![0x80 + number; 255]).collect();
    rings.write(|writer| {
        writer.put_instances(names.iter().map(Vec::as_slice));
    });
    let missing = "\u{1}".repeat(255);
    let said = lab.fails(1, &tail(&missing));
    let name = "\\x80".repeat(255);
    assert!(
        said.contains(&format!("it has {name} and 99 more")),
        "{said}"
    );
    let names: Vec<String> = (0..12).map(|number| format!("i{number}")).collect();
    rings.write(|writer| {
        writer.put_instances(names.iter().map(|name| name.as_bytes()));
    });
    let said = lab.fails(1, &tail("x"));
    let listed = "it has i0, i1, i2, i3, i4, i5, i6, i7, i8, i9 and 2 more";
    assert!(said.contains(listed), "{said}");
}

/// Writes events until a command prints a line.
pub fn next_line(mut following: Following, rings: &GuestRings) -> (String, Following) {
    let reader = std::thread::spawn(move || (following.line(), following));
    for number in 0.. {
        if reader.is_finished() {
            break;
        }
        rings.write(|writer| writer.event(0, 1000 * number, &numbered(number)));
        std::thread::sleep(Duration::from_millis(20));
    }
    reader.join().expect("a line")
}

#[test]
fn named_events_are_read_in_memory_without_an_agent() {
    let lab = Lab::with(&[TestKey::new("alpha", 1)]);
    let tail = ["trace", "tail", "test:*", "-n", "1", "--timeout", "20s"];
    let said = lab.fails(1, &["trace", "tail", "test:*"]);
    assert!(
        said.contains("no agent is connected") && said.contains("not found in its memory"),
        "{said}"
    );
    let rings = lab.rings();
    let following = lab.follow(&tail);
    let (line, following) = next_line(following, &rings);
    assert!(line.contains("test:numbered"), "{line:?}");
    let (_, said, code) = following.output();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("no event is armed"), "{said}");

    let file = lab.folder().join("t.json");
    let file = file.to_str().expect("UTF-8");
    let record = ["trace", "record", "--duration", "1ms", "-o", file, "test:*"];
    let said = lab.ok(&record);
    assert!(said.contains("t.json: "), "{said}");

    // Only the agent applies these options.
    for option in [
        &["--source", "agent"][..],
        &["--filter", "number == 1"],
        &["--trigger", "stacktrace"],
        &["--even-if-others"],
    ] {
        let said = lab.fails(1, &[&tail, option].concat());
        assert!(
            said.contains("no agent is connected") && !said.contains("memory"),
            "{said}"
        );
    }
}

/// The figures of the ring buffer are read in memory where no agent is connected.
#[test]
fn the_ring_buffer_is_counted_in_memory_without_an_agent() {
    let lab = Lab::with(&[TestKey::new("alpha", 1)]);
    let stat = ["trace", "stat", "--interval", "1ms"];
    let counted = lab.json(&stat);
    assert_eq!(counted["source"], "agent");
    let stale = counted["stale"].as_str().expect("a reason");
    assert!(stale.contains("no agent is connected"), "{counted}");
    let said = lab.fails(1, &[&stat, &["--source", "memory"][..]].concat());
    assert!(said.contains("not found in its memory"), "{said}");

    let rings = lab.rings();
    rings.write(|writer| {
        writer.put_instances([&b"boot"[..]]);
        (0..2000).for_each(|number| writer.event(1, number, &numbered(number)));
    });
    for more in [&[][..], &["--instance", "boot"], &["--source", "memory"]] {
        let counted = lab.json(&[&stat, more].concat());
        assert_eq!(counted["source"], "memory", "{counted}");
        assert_eq!(counted["stale"], "");
        // The test guest has two CPUs with four pages each.
        assert_eq!(counted["buffer_bytes"], 2 * 4 * 4096);
        let number = |name: &str| counted[name].as_u64().expect("a number");
        let held = 2000 - number("overwritten_events");
        assert!(held < 2000, "{counted}");
        assert_eq!(number("buffered_events"), held);
        let written = serde_json::json!({
            "written_events": 2000,
            "consumed_events": 0,
            "written_per_second": 0.0,
        });
        assert_eq!(counted["ring"], written);
    }
    let text = lab.ok(&stat);
    assert!(text.contains("ring buffer of 32 KiB"), "{text}");
    assert!(text.contains("2000 in all"), "{text}");
    let said = lab.fails(1, &[&stat, &["--instance", "bo"][..]].concat());
    assert!(
        said.contains("no tracefs instance \"bo\"; it has boot"),
        "{said}"
    );
    let agent = ["--source", "agent", "--instance", "boot"];
    let said = lab.fails(2, &[&stat, &agent[..]].concat());
    assert!(said.contains("instance"), "{said}");
}

/// A process in the guest has mapped the ring of a CPU and takes its events.
#[test]
fn a_ring_that_user_space_has_mapped_is_read_and_counted() {
    let lab = Lab::with(&[TestKey::new("alpha", 1)]);
    let rings = lab.rings();
    rings.write(|writer| {
        (0..2000).for_each(|number| writer.event(1, number, &numbered(number)));
        for _ in 0..3 {
            assert!(writer.consume_mapped(1));
        }
    });
    let counted = lab.json(&["trace", "stat", "--interval", "1ms", "--source", "memory"]);
    let number = |value: &Value| value.as_u64().expect("a number");
    let taken = number(&counted["ring"]["consumed_events"]);
    let gone = taken + number(&counted["overwritten_events"]);
    let held = number(&counted["buffered_events"]);
    assert!(taken > 0 && held > 0, "{counted}");
    assert_eq!(
        (held + gone, number(&counted["ring"]["written_events"])),
        (2000, 2000)
    );

    let held = held.to_string();
    let tail = ["trace", "tail", "--buffered", "-o", "json", "-n", &held];
    let shown = lab.ok(&tail);
    let lines = shown.lines().map(serde_json::from_str);
    let lines: Vec<Value> = lines.collect::<Result<_, _>>().expect("JSON");
    let damaged = lines
        .iter()
        .filter_map(|line| line["lost"]["malformed"].as_u64());
    assert_eq!(damaged.sum::<u64>(), 0, "{shown}");
    let numbers = lines
        .iter()
        .filter_map(|line| line["fields"]["number"].as_u64());
    assert!(numbers.eq(gone..2000), "{gone}: {shown}");
    let armed = lab.run(&["trace", "events", "--armed"]);
    assert!(armed.status.success(), "{armed:?}");
}

/// Checks that only `--armed` lists the instances that have enabled an event.
#[test]
fn armed_events_name_the_instances_that_have_enabled_them() {
    let keys = [
        TestKey::tracepoint("numbered", true),
        TestKey::tracepoint("alike", true),
    ];
    let lab = Lab::with(&keys);
    let rings = lab.rings();
    rings.write(|writer| {
        writer.put_files(false, [1, 0, 1]);
        writer.put_files(true, [1, 0, 0]);
    });
    let armed = lab.json(&["trace", "events", "--armed"]);
    let enabled: Vec<_> = armed
        .as_array()
        .expect("a list")
        .iter()
        .map(|event| (event["name"].as_str(), event["enabled_in"].clone()))
        .collect();
    let expected = [
        (Some("test:alike"), serde_json::json!([])),
        (
            Some("test:numbered"),
            serde_json::json!(["foo", "top level"]),
        ),
    ];
    assert_eq!(enabled, expected);
    let text = lab.ok(&["trace", "events", "--armed"]);
    assert!(text.contains("enabled in foo, top level"), "{text}");
    // Without --armed, the instances are not read.
    let all = lab.json(&["trace", "events", "numbered"]);
    assert_eq!(all[0]["enabled_in"], serde_json::json!([]));
}

/// Records what the rings of a guest hold.
fn dat(lab: &Lab, file: &Path, more: &[&str]) -> String {
    let record = [
        "trace",
        "record",
        "--format",
        "trace-dat",
        "--buffered",
        "--duration",
        "1s",
        "-o",
        file.to_str().expect("UTF-8"),
    ];
    lab.ok(&[&record, more].concat())
}

#[test]
fn trace_cmd_reads_a_recording_as_tail_shows_it() {
    let lab = Lab::with(&[TestKey::new("alpha", 1)]);
    let rings = lab.rings();
    let write = |cpu, time, number| {
        rings.write(|writer| writer.event(cpu, time, &numbered(number)));
    };
    let file = lab.folder().join("t.dat");
    let said = dat(&lab, &file, &[]);
    assert!(said.contains("t.dat: 0 events, none lost; read"), "{said}");
    if report(&file).is_none_or(|(events, _)| !events.is_empty()) {
        return;
    }
    // On CPU 0, ten events have no known format. Three times, the next event is 2^30 ns later,
    // which is more than the 27 bits of a time delta hold.
    let unknown = [50, 0, 0, 0, 42, 0, 0, 0];
    for number in 0..200 {
        let time = 1000 + 3 * number + ((number / 50) << 30);
        for _ in 0..[0, 2][usize::from(number % 40 == 20)] {
            rings.write(|writer| writer.event(0, time, &unknown));
        }
        write(0, time, number);
    }
    for number in 0..40 {
        write(1, 2000 + 40 * number, number);
    }
    let said = dat(&lab, &file, &[]);
    let (events, lost) = report(&file).expect("there");
    let tail = ["trace", "tail", "-o", "json", "--buffered", "-n"];
    let shown = lab.ok(&[&tail[..], &[&events.len().to_string()]].concat());
    let (mut expected, mut malformed) = (vec![], 0);
    for line in shown.lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        if let Some(lost) = line.get("lost") {
            malformed += lost["malformed"].as_u64().expect("a number");
            continue;
        }
        let (_, name) = line["name"].as_str().unwrap().split_once(':').unwrap();
        let fields = &line["fields"];
        expected.push((
            line["cpu"].as_u64().unwrap(),
            line["guest_time_ns"].as_u64().unwrap(),
            line["pid"].as_u64().unwrap(),
            name.to_owned(),
            ["number", "comm", "text", "rest"]
                .map(|name| match &fields[name] {
                    Value::String(text) => format!("{name}={text}"),
                    value => format!("{name}={value}"),
                })
                .join(" "),
        ));
    }
    assert_eq!((expected.len(), malformed), (240, 10), "{said}");
    assert_eq!(lost, [(0, 2); 5], "{said}");
    expected.sort();
    let mut events = events;
    events.sort();
    for (event, expected) in events.iter().zip(&expected) {
        assert_eq!(event, expected);
    }
    assert_eq!(events.len(), expected.len());
    let count = "t.dat: 240 events, lost: 10 could not be decoded; read";
    assert!(said.contains(count), "{said}");
}

/// A trace.dat must be a file on a disk with room, and an earlier one is kept if the recording is
/// refused.
#[test]
fn a_trace_dat_needs_a_file_and_the_memory() {
    let lab = Lab::with(&[TestKey::new("alpha", 1)]);
    let file = lab.folder().join("t.dat");
    std::fs::write(&file, "an earlier recording").expect("writable");
    let file = file.to_str().expect("UTF-8");
    let record = ["trace", "record", "--duration", "1ms"];
    let refused = |more: &[&str], code| {
        let format = match more.contains(&"--format") {
            true => &[][..],
            false => &["--format", "trace-dat"],
        };
        let (_, said, found) = lab.all(&[&record, format, more].concat());
        assert_eq!(found, Some(code), "{said}");
        said
    };
    let said = refused(&["-o", file], 1);
    assert!(said.contains("not found in its memory"), "{said}");
    let said = refused(&["-o", file, "--source", "agent"], 2);
    assert!(said.contains("records"), "{said}");
    let kept = std::fs::read_to_string(file).expect("there");
    assert_eq!(kept, "an earlier recording");

    lab.rings();
    let said = refused(&["-o", "/dev/full"], 1);
    assert!(
        said.contains("/dev/full: the disk is full; nothing"),
        "{said}"
    );
    // The output of this command is a pipe, and nothing reads the other one.
    let pipe = lab.folder().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.is_ok_and(|status| status.success()));
    for pipe in ["/dev/stdout", pipe.to_str().expect("UTF-8")] {
        for format in ["trace-dat", "perfetto"] {
            let said = refused(&["--format", format, "-o", pipe], 2);
            assert!(said.contains("cannot be written: "), "{said}");
        }
    }
}
