// SPDX-License-Identifier: Apache-2.0
//! Records the cost of changes in the metrics.

use bytes::Bytes;
use patchbay_proto::methods::Effect;
use patchbay_proto::v1;
use prost::Message;

use super::frame;
use super::node::Node;

/// The fields of an answer that report the cost of a change.
#[derive(Clone, PartialEq, Message)]
struct Flip {
    #[prost(message, optional, tag = "4")]
    report: Option<v1::FlipReport>,
}

#[derive(Clone, PartialEq, Message)]
struct TracepointFlip {
    #[prost(message, optional, tag = "2")]
    report: Option<v1::FlipReport>,
}

/// Records the cost of a change that an answer reports.
pub fn count_flip(node: &Node, effect: Effect, answer: &Bytes) {
    let Some(message) = frame::unframed(answer) else {
        return;
    };
    let report = match effect {
        Effect::Update | Effect::Commit | Effect::Holds | Effect::Claims => {
            Flip::decode(message).ok().and_then(|flip| flip.report)
        }
        Effect::Arm | Effect::Armed => TracepointFlip::decode(message)
            .ok()
            .and_then(|flip| flip.report),
        _ => None,
    };
    if let Some(report) = report {
        count_report(node, &report);
    }
}

/// Records the pause and the sites of a change.
fn count_report(node: &Node, report: &v1::FlipReport) {
    let times = [report.stop_time, report.patch_time, report.resume_time];
    let seconds = times.iter().flatten().map(|time| {
        let time = std::time::Duration::try_from(*time).unwrap_or_default();
        time.as_secs_f64()
    });
    if report.paused {
        node.metrics.pause(seconds.sum());
    }
    node.metrics.sites(report.sites_patched);
}
