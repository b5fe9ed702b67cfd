// SPDX-License-Identifier: Apache-2.0
//! Finds the machine's own RAM and the memory devices of QEMU, which decide how memory can be
//! removed. Only QEMU knows this, because KVM shows both as memory slots.
//!
//! | memory | from |
//! |---|---|
//! | the machine's own, which is never removed | the properties `addr` and `size` of its memory regions `ram-below-4g` and `ram-above-4g` |
//! | DIMMs, virtio-mem and others | `query-memory-devices` |
//!
//! Any other memory, such as that of a display or of ivshmem, belongs to a device.

use std::ops::Range;
use std::time::Instant;

use serde_json::{Value, json};

use crate::error::AttachError;
use crate::flat_view::{MAX_RANGES, Removal};
use crate::monitor::{Connection, unexpected};

/// The object whose children are the memory regions without an owner.
const UNATTACHED: &str = "/machine/unattached";
/// The names of the regions of the machine's own RAM, before the index in brackets.
const OWN: [&str; 2] = ["ram-below-4g", "ram-above-4g"];

/// The maximum number of regions of the machine's own RAM. QEMU has two, and two questions are
/// asked about each.
const MAX_OWN: usize = 64;

/// The memory of QEMU's machine.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    /// The machine's own RAM; empty if the machine does not show it.
    own: Vec<Range<u64>>,
    devices: Vec<(Range<u64>, Removal)>,
}

impl Places {
    /// Asks QEMU, which must answer all questions before the deadline.
    ///
    /// # Errors
    /// [`AttachError`].
    pub(crate) fn ask(connection: &Connection, deadline: Instant) -> Result<Self, AttachError> {
        let execute = |command: &str, arguments: Value| {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = connection.execute(command, arguments, left);
            answer.map(|answer| (command.to_owned(), answer))
        };
        let list = |(command, answer): (String, Value)| match answer {
            Value::Array(list) => Ok(list),
            _ => Err(unexpected(&command, "a list")),
        };
        let mut places = Self::default();
        let children = list(execute("qom-list", json!({ "path": UNATTACHED }))?)?;
        let names = children.iter().filter_map(|child| child["name"].as_str());
        let own: Vec<&str> = names.filter(|name| is_own(name)).collect();
        limit(own.len(), MAX_OWN, "regions of the machine's own RAM")?;
        for name in own {
            let number = |property: &str| {
                let path = format!("{UNATTACHED}/{name}");
                let arguments = json!({ "path": path, "property": property });
                let (command, answer) = execute("qom-get", arguments)?;
                answer
                    .as_u64()
                    .ok_or_else(|| unexpected(&command, property))
            };
            let (start, size) = (number("addr")?, number("size")?);
            places.own.push(start..start.saturating_add(size));
        }
        let devices = list(execute("query-memory-devices", Value::Null)?)?;
        limit(devices.len(), MAX_RANGES, "memory devices")?;
        places.devices.extend(devices.iter().filter_map(place_of));
        Ok(places)
    }

    /// Returns the way in which memory at these addresses can be removed; `None` if it belongs to a
    /// device that is not a memory device. If the machine does not show its own RAM, that RAM
    /// cannot be told from such a device.
    pub(crate) fn removal(&self, range: &Range<u64>) -> Option<Removal> {
        let contains = |place: &Range<u64>| place.start <= range.start && range.end <= place.end;
        if self.own.iter().any(contains) {
            return Some(Removal::Never);
        }
        let mut devices = self.devices.iter();
        let device = devices.find(|(place, _)| contains(place));
        let unknown = self.own.is_empty().then_some(Removal::ByMonitor);
        device.map(|(_, removal)| *removal).or(unknown)
    }
}

fn limit(count: usize, most: usize, what: &str) -> Result<(), AttachError> {
    match count <= most {
        true => Ok(()),
        false => Err(AttachError::Refused(format!(
            "QEMU says that the guest has {count} {what}, and no more than {most} are supported; check which process listens on its QMP socket"
        ))),
    }
}

/// Returns whether this is the name of a region of the machine's own RAM: `ram-below-4g[0]`.
fn is_own(name: &str) -> bool {
    name.split_once('[')
        .is_some_and(|(name, _)| OWN.contains(&name))
}

/// Returns the place of a memory device, as `query-memory-devices` describes it.
fn place_of(device: &Value) -> Option<(Range<u64>, Removal)> {
    let removal = match device["type"].as_str() {
        Some("dimm" | "nvdimm") => Removal::ByVcpu,
        _ => Removal::ByMonitor,
    };
    let data = &device["data"];
    let start = data["addr"].as_u64().or(data["memaddr"].as_u64())?;
    // The memory of virtio-mem may fill less of its region than `size` later says.
    let size = data["max-size"].as_u64().or(data["size"].as_u64())?;
    Some((start..start.checked_add(size)?, removal))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::monitor::PATIENCE;
    use crate::qmp::fake::Fake;
    use crate::qmp::{Qmp, QmpError};

    const GIB: u64 = 1 << 30;

    /// Asks a QEMU that has these memory regions and memory devices.
    fn ask(regions: Value, devices: Value) -> Result<Places, AttachError> {
        ask_within(PATIENCE, Duration::ZERO, regions, devices)
    }

    /// Asks a QEMU that takes `each` to answer a question, and waits `patience` for all answers.
    fn ask_within(
        patience: Duration,
        each: Duration,
        regions: Value,
        devices: Value,
    ) -> Result<Places, AttachError> {
        let fake = Fake::new(move |mut session| {
            session.greet();
            while let Some(command) = session.next() {
                let arguments = &command["arguments"];
                let path = arguments["path"].as_str().unwrap_or_default();
                let region = path.rsplit('/').next().unwrap_or_default();
                let names = regions.as_object().into_iter().flatten();
                let answer = match command["execute"].as_str() {
                    Some("qom-list") => names
                        .map(|(name, _)| json!({ "name": name, "type": "child<memory-region>" }))
                        .collect(),
                    Some("qom-get") => {
                        let property = arguments["property"].as_str().unwrap_or_default();
                        regions[region][property].clone()
                    }
                    _ => devices.clone(),
                };
                std::thread::sleep(each);
                session.say(&json!({ "return": answer, "id": command["id"] }).to_string());
            }
        });
        let qmp = Qmp::connect(&fake.path(), PATIENCE, Box::new(|_| ())).expect("a monitor");
        Places::ask(&Connection::Socket(qmp), Instant::now() + patience)
    }

    /// Returns `count` regions of the machine's own RAM.
    fn regions(count: usize) -> Value {
        let region = json!({ "addr": 0, "size": GIB });
        let name = |number| format!("ram-below-4g[{number}]");
        let regions = (0..count).map(|number| (name(number), region.clone()));
        Value::Object(regions.collect())
    }

    #[test]
    fn each_kind_of_memory_is_removed_in_its_own_way() {
        let regions = json!({
            "ram-below-4g[0]": { "addr": 0, "size": 2 * GIB },
            "ram-above-4g[0]": { "addr": 4 * GIB, "size": 2 * GIB },
            "vga.vram[0]": { "addr": 3 * GIB, "size": 1 << 24 },
        });
        let devices = json!([
            { "type": "dimm", "data": { "addr": 8 * GIB, "size": GIB } },
            { "type": "nvdimm", "data": { "addr": 9 * GIB, "size": GIB } },
            { "type": "virtio-mem", "data": { "memaddr": 10 * GIB, "size": 0, "max-size": GIB } },
            { "type": "unknown", "data": {} },
        ]);
        let places = ask(regions, devices).expect("answered");
        for (range, expected) in [
            (0..0xa_0000, Some(Removal::Never)),
            (1 << 20..2 * GIB, Some(Removal::Never)),
            (4 * GIB..6 * GIB, Some(Removal::Never)),
            (8 * GIB..9 * GIB, Some(Removal::ByVcpu)),
            (9 * GIB..9 * GIB + 4096, Some(Removal::ByVcpu)),
            (10 * GIB..11 * GIB, Some(Removal::ByMonitor)),
            // A display, and ranges that only begin or end in RAM.
            (3 * GIB..3 * GIB + (1 << 24), None),
            (GIB..3 * GIB, None),
            (3 * GIB..5 * GIB, None),
            (8 * GIB..10 * GIB, None),
        ] {
            assert_eq!(places.removal(&range), expected, "{range:x?}");
        }
    }

    #[test]
    fn a_machine_that_does_not_show_its_ram_may_remove_all_of_it() {
        let devices = json!([{ "type": "dimm", "data": { "addr": 8 * GIB, "size": GIB } }]);
        let places = ask(json!({ "ram[0]": { "addr": 0, "size": GIB } }), devices);
        let places = places.expect("answered");
        assert_eq!(places.removal(&(0..GIB)), Some(Removal::ByMonitor));
        let dimm = 8 * GIB..9 * GIB;
        assert_eq!(places.removal(&dimm), Some(Removal::ByVcpu));
    }

    #[test]
    fn answers_that_make_no_sense_are_errors() {
        for (regions, devices) in [
            (json!({ "ram-below-4g[0]": { "addr": 0 } }), json!([])),
            (
                json!({ "ram-below-4g[0]": { "addr": -1, "size": GIB } }),
                json!([]),
            ),
            (json!({}), json!({})),
        ] {
            ask(regions, devices).expect_err("nonsense");
        }
    }

    #[test]
    fn the_number_of_regions_and_devices_is_limited() {
        let device = json!({ "type": "dimm", "data": { "addr": GIB, "size": GIB } });
        let devices = |count: usize| json!(vec![device.clone(); count]);
        let most = ask(regions(MAX_OWN), devices(MAX_RANGES)).expect("as many as are supported");
        assert_eq!((most.own.len(), most.devices.len()), (MAX_OWN, MAX_RANGES));
        for (regions, devices, expected) in [
            (regions(MAX_OWN + 1), devices(0), "65 regions"),
            (regions(1), devices(MAX_RANGES + 1), "1025 memory devices"),
        ] {
            let error = ask(regions, devices).expect_err("too many").to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn all_questions_have_one_deadline() {
        // Each answer comes in time, and all of them together do not.
        let (patience, each) = (Duration::from_millis(200), Duration::from_millis(20));
        let asked = ask_within(patience, each, regions(MAX_OWN), json!([]));
        let error = asked.expect_err("too slow");
        let is_late = matches!(&error, AttachError::Monitor(QmpError::TimedOut { .. }));
        assert!(is_late, "{error}");
    }
}
