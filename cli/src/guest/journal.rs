// SPDX-License-Identifier: Apache-2.0
//! Writes records of a guest's log as entries of systemd's journal.

use std::time::{Duration, SystemTime};

use patchbay_proto::v1;

use super::log::time;
use crate::client::Client;
use crate::failure::Failure;
use crate::text::harmless;

/// A boot of a guest. The journal takes no entry without the time of day, and the kernel's log only
/// has the time since boot.
pub struct Boot {
    /// The name of the guest.
    guest: String,
    /// The time of the boot by the clock of this computer, since 1970.
    at: Duration,
    /// The id of the boot, 32 hexadecimal digits; `None` if the kernel's keys are not known.
    id: Option<String>,
}

impl Boot {
    /// Asks for the present boot.
    ///
    /// # Errors
    /// The time since boot is not known.
    pub async fn of(client: &Client) -> Result<Self, Failure> {
        let request = v1::DescribeGuestRequest {
            find_kernel_state: true,
            ..Default::default()
        };
        let request = client.request(request);
        let described = client.guest().describe_guest(request).await?.into_inner();
        let uptime = described
            .kernel_state
            .and_then(|state| state.uptime_seconds);
        let uptime = uptime.ok_or_else(|| {
            Failure::error(
                "the guest's uptime cannot be read in its memory, and an entry of a journal needs the \
                 time of day; give --output json",
            )
        })?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let request = v1::ListClaimsRequest {
            page_size: 1,
            ..Default::default()
        };
        let listed = client.keys().list_claims(client.request(request)).await?;
        Ok(Self {
            guest: described.status.unwrap_or_default().guest,
            at: now
                .unwrap_or_default()
                .saturating_sub(Duration::from_secs(uptime)),
            id: boot_id(&listed.into_inner().boot),
        })
    }

    /// Returns a record in the journal's export format (systemd's JOURNAL_EXPORT_FORMATS). In a
    /// field whose value has several lines, the length of the value as a 64-bit number precedes it.
    pub fn entry(&self, record: &v1::KernelLogRecord) -> Vec<u8> {
        let mut entry = Vec::new();
        let mut field = |name: &str, value: &str| {
            // A tab does not act on a terminal, and the journal keeps it.
            let value = value
                .split('\t')
                .map(harmless)
                .collect::<Vec<_>>()
                .join("\t");
            entry.extend_from_slice(name.as_bytes());
            if value.contains('\n') {
                entry.push(b'\n');
                entry.extend_from_slice(&(value.len() as u64).to_le_bytes());
            } else {
                entry.push(b'=');
            }
            entry.extend_from_slice(value.as_bytes());
            entry.push(b'\n');
        };
        let since_boot = time(record);
        let micros = since_boot.as_micros().to_string();
        let time_of_day = self.at.saturating_add(since_boot);
        field("__REALTIME_TIMESTAMP", &time_of_day.as_micros().to_string());
        field("__MONOTONIC_TIMESTAMP", &micros);
        if let Some(id) = &self.id {
            field("_BOOT_ID", id);
        }
        field("_SOURCE_MONOTONIC_TIMESTAMP", &micros);
        field("_TRANSPORT", "kernel");
        field("_HOSTNAME", &self.guest);
        field("PRIORITY", &record.level.to_string());
        field("SYSLOG_FACILITY", &record.facility.to_string());
        field("SYSLOG_IDENTIFIER", "kernel");
        for (name, value) in [
            ("_KERNEL_SUBSYSTEM", &record.subsystem),
            ("_KERNEL_DEVICE", &record.device),
        ] {
            if !value.is_empty() {
                field(name, value);
            }
        }
        field("MESSAGE", &record.text);
        entry.push(b'\n');
        entry
    }
}

/// Returns the id of a boot with this name of 16 hexadecimal digits. An id of the journal has 32
/// digits.
fn boot_id(name: &str) -> Option<String> {
    let is_hex = name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| format!("{name}{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_the_time_of_day_and_acts_on_no_terminal() {
        let boot = Boot {
            guest: "web-1".to_owned(),
            at: Duration::from_secs(1_700_000_000),
            id: boot_id("00112233445566ff"),
        };
        let record = v1::KernelLogRecord {
            time: Some(prost_types::Duration {
                seconds: 5,
                nanos: 7_000,
            }),
            text: "a\u{9b}2J\u{7f}".to_owned(),
            ..Default::default()
        };
        let entry = String::from_utf8(boot.entry(&record)).expect("UTF-8");
        for field in [
            "__REALTIME_TIMESTAMP=1700000005000007",
            "__MONOTONIC_TIMESTAMP=5000007",
            "_BOOT_ID=00112233445566ff00112233445566ff",
            "_HOSTNAME=web-1",
            "MESSAGE=a\u{fffd}2J\u{fffd}",
        ] {
            assert!(entry.lines().any(|line| line == field), "{field}: {entry}");
        }
    }

    #[test]
    fn only_a_boot_whose_name_is_known_has_an_id() {
        for name in ["", "boot", "00112233445566fg"] {
            assert_eq!(boot_id(name), None, "{name}");
        }
    }
}
