// SPDX-License-Identifier: Apache-2.0
//! Queries the monitors about their guests when Prometheus reads the metrics. A monitor exports no
//! metrics itself, so `patchbayd` makes calls that any viewer may make.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt;
use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;

use crate::monitors::{Directory, HostedGuest};

/// The timeout for guests. Guests that have not answered by then are left out. Prometheus waits for
/// 10 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// The maximum number of guests that are queried at the same time.
const FAN_OUT: usize = 64;

/// A monitor's answers about its guest.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// The guest, its keys and its revision.
    pub guest: v1::DescribeGuestResponse,
    /// The statistics of its tracepoints.
    pub events: v1::GetTracepointStatsResponse,
}

/// Queries all guests, and returns the answers by name; `None` for a guest that did not answer.
pub async fn look(directory: &Directory) -> BTreeMap<String, Option<Sample>> {
    let guests = directory.all();
    let names = guests.iter().map(|guest| (guest.name.clone(), None));
    let mut found: BTreeMap<_, _> = names.collect();
    let answers = futures_util::stream::iter(guests)
        .map(|guest| async move { (guest.name.clone(), ask(guest).await) })
        .buffer_unordered(FAN_OUT)
        .take_until(tokio::time::sleep(PATIENCE));
    let mut answers = std::pin::pin!(answers);
    while let Some((name, sample)) = answers.next().await {
        found.insert(name, sample);
    }
    found
}

async fn ask(guest: HostedGuest) -> Option<Sample> {
    let _permit = guest.monitor.admit(false)?;
    let mut guests = GuestServiceClient::new(guest.monitor.channel());
    let mut tracepoints = TracepointsServiceClient::new(guest.monitor.channel());
    let name = guest.name;
    let request = v1::DescribeGuestRequest {
        guest: name.clone(),
        ..v1::DescribeGuestRequest::default()
    };
    let guest = guests.describe_guest(request).await.ok()?.into_inner();
    // A search for the ring buffer in memory may take as long as a discovery.
    let request = v1::GetTracepointStatsRequest {
        guest: name,
        source: v1::TraceSource::Agent.into(),
        ..v1::GetTracepointStatsRequest::default()
    };
    let events = tracepoints.get_tracepoint_stats(request).await;
    let events = events.ok()?.into_inner();
    Some(Sample { guest, events })
}
