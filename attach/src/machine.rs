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

use serde_json::{Value, json};

use crate::flat_view::Removal;
use crate::monitor::{Connection, PATIENCE, unexpected};
use crate::qmp::QmpError;

/// The object whose children are the memory regions without an owner.
const UNATTACHED: &str = "/machine/unattached";
/// The names of the regions of the machine's own RAM, before the index in brackets.
const OWN: [&str; 2] = ["ram-below-4g", "ram-above-4g"];

/// The memory of QEMU's machine.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    /// The machine's own RAM; empty if the machine does not show it.
    own: Vec<Range<u64>>,
    devices: Vec<(Range<u64>, Removal)>,
}

impl Places {
    /// Asks QEMU.
    ///
    /// # Errors
    /// [`QmpError`].
    pub(crate) fn ask(connection: &Connection) -> Result<Self, QmpError> {
        let execute = |command: &str, arguments: Value| {
            let answer = connection.execute(command, arguments, PATIENCE);
            answer.map(|answer| (command.to_owned(), answer))
        };
        let list = |(command, answer): (String, Value)| match answer {
            Value::Array(list) => Ok(list),
            _ => Err(unexpected(&command, "a list")),
        };
        let mut places = Self::default();
        for child in list(execute("qom-list", json!({ "path": UNATTACHED }))?)? {
            let name = child["name"].as_str().unwrap_or_default();
            if !is_own(name) {
                continue;
            }
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
        for device in list(execute("query-memory-devices", Value::Null)?)? {
            places.devices.extend(place_of(&device));
        }
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
    use super::*;
    use crate::qmp::Qmp;
    use crate::qmp::fake::Fake;

    const GIB: u64 = 1 << 30;

    /// Asks a QEMU that has these memory regions and memory devices.
    fn ask(regions: Value, devices: Value) -> Result<Places, QmpError> {
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
                session.say(&json!({ "return": answer, "id": command["id"] }).to_string());
            }
        });
        let qmp = Qmp::connect(&fake.path(), PATIENCE, Box::new(|_| ())).expect("a monitor");
        Places::ask(&Connection::Socket(qmp))
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
}
