// SPDX-License-Identifier: Apache-2.0
//! Converts between the domain's types and `patchbay.v1`.

use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::guest::Transport;
use patchbay_kernel_image::live::Way;
use patchbay_observe::log::Record;
use patchbay_observe::state::{PRESSURES, State};
use patchbay_observe::tasks::Task;
use patchbay_proto::v1;
use static_keys::{Class, NotPatchable};

use crate::keys::DebugView;
use crate::keys::registry::DiscoveredKernel;
use crate::keys::{
    ClosedGate, Event, FlipReport, HoldId, HoldView, KeyOutcome, KeyView, KeysError, Known,
    Quarantine, QuarantineCause, RegistrationPhase, Safety, SiteView, UpdateSummary,
};
use crate::log::{Details, first_line};

pub fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Copies a text. The `to_string` of an [`Arc`] formats the text, and takes several times as many
/// instructions.
fn copy(text: &Arc<str>) -> String {
    String::from(&**text)
}

pub fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or(prost_types::Duration {
        seconds: i64::MAX,
        nanos: 0,
    })
}

pub fn class(class: Class) -> v1::KeyClass {
    match class {
        Class::Guarded => v1::KeyClass::Guarded,
        Class::Ref => v1::KeyClass::Ref,
        Class::Tracepoint => v1::KeyClass::Tracepoint,
        Class::DynamicDebug => v1::KeyClass::DynamicDebug,
        Class::Never => v1::KeyClass::Never,
    }
}

/// # Errors
/// INVALID_ARGUMENT for an unknown class.
pub fn class_from_proto(class: i32) -> Result<Class, KeysError> {
    match v1::KeyClass::try_from(class) {
        Ok(v1::KeyClass::Guarded) => Ok(Class::Guarded),
        Ok(v1::KeyClass::Ref) => Ok(Class::Ref),
        Ok(v1::KeyClass::Tracepoint) => Ok(Class::Tracepoint),
        Ok(v1::KeyClass::DynamicDebug) => Ok(Class::DynamicDebug),
        Ok(v1::KeyClass::Never) => Ok(Class::Never),
        Ok(v1::KeyClass::Unspecified) | Err(_) => Err(super::requests::invalid(
            "classes",
            format!("unknown class {class}; give guarded, ref, tracepoint, dyndbg or never"),
        )),
    }
}

pub fn transport(transport: Transport) -> v1::Transport {
    match transport {
        Transport::Hypercall => v1::Transport::Hypercall,
        Transport::Msr => v1::Transport::Msr,
    }
}

pub fn registration(phase: RegistrationPhase) -> v1::RegistrationState {
    match phase {
        RegistrationPhase::Absent => v1::RegistrationState::Absent,
        RegistrationPhase::Registered => v1::RegistrationState::Registered,
        RegistrationPhase::Withdrawn => v1::RegistrationState::Withdrawn,
        RegistrationPhase::Refused => v1::RegistrationState::Refused,
    }
}

/// Returns what a kernel's memory says of its state.
pub fn kernel_state(state: State, details: Details) -> v1::KernelState {
    let percent = |hundredths: u64| hundredths as f64 / 100.0;
    let kinds = PRESSURES.iter().zip(state.pressure.into_iter().flatten());
    let pressure = kinds.map(|(kind, [ten, sixty])| v1::Pressure {
        resource: (*kind).to_owned(),
        average_10s: percent(ten),
        average_60s: percent(sixty),
    });
    let log = details.log;
    v1::KernelState {
        taints: state.taints,
        load_hundredths: state.load.into_iter().flatten().collect(),
        warnings: state.reports.map(|[warnings, _]| warnings),
        oopses: state.reports.map(|[_, oopses]| oopses),
        pressure: pressure.collect(),
        panicked: state.panicked,
        uptime_seconds: state.uptime,
        last_warning: log.report.map(message),
        panic: log.panic.map(message),
        log_overwritten: log.overwritten,
        log_refused: log.refused,
        tasks: details.tasks.into_iter().map(task).collect(),
        trace_instances: details.instances,
    }
}

fn task(task: Task) -> v1::CpuTask {
    v1::CpuTask {
        cpu: task.cpu,
        pid: task.pid,
        process: task.process,
        name: first_line(&task.name),
    }
}

fn message(record: Record) -> v1::KernelMessage {
    v1::KernelMessage {
        sequence: record.seq,
        time: Duration::from_nanos(record.time).try_into().ok(),
        text: first_line(&record.text.unwrap_or_default()),
    }
}

pub fn discovery(found: &DiscoveredKernel) -> v1::Discovery {
    let way = match found.way {
        Way::Image => v1::DiscoveryWay::Image,
        Way::Note => v1::DiscoveryWay::Note,
    };
    let named = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    v1::Discovery {
        way: way.into(),
        time: Some(duration(found.time)),
        debug_file: found.file.as_ref().map(|file| v1::DebugFile {
            path: file.path.display().to_string(),
            symbols: file.data_symbols,
            types: file.types,
            same_build_id: file.build_id,
        }),
        gates: named(&found.gates),
        missing_gates: named(&found.missing_gates),
        left_out_modules: found
            .left_out
            .iter()
            .map(|module| v1::LeftOutModule {
                name: module.name.clone(),
                state: module.state.to_owned(),
            })
            .collect(),
    }
}

pub fn gate(gate: ClosedGate) -> v1::Gate {
    match gate {
        ClosedGate::SystemState => v1::Gate::SystemState,
        ClosedGate::JumpLabelMutex => v1::Gate::JumpLabelMutex,
        ClosedGate::TextMutex => v1::Gate::TextMutex,
        ClosedGate::TextPoke => v1::Gate::TextPoke,
        ClosedGate::TracepointsMutex => v1::Gate::TracepointsMutex,
        ClosedGate::ModuleMutex => v1::Gate::ModuleMutex,
        ClosedGate::ModuleState => v1::Gate::ModuleState,
        ClosedGate::KeyChanged => v1::Gate::KeyChanged,
        ClosedGate::VcpuInSite => v1::Gate::VcpuInSite,
        ClosedGate::BreakpointPending => v1::Gate::BreakpointPending,
        ClosedGate::RegistrationChanged => v1::Gate::RegistrationChanged,
        ClosedGate::Memory => v1::Gate::Memory,
        ClosedGate::Pause => v1::Gate::Pause,
        ClosedGate::Other => v1::Gate::Other,
    }
}

pub fn quarantine(quarantine: Quarantine) -> v1::Quarantine {
    let cause = match quarantine.cause {
        QuarantineCause::ForeignBytes => v1::quarantine::Cause::ForeignBytes,
        QuarantineCause::UndoIncomplete => v1::quarantine::Cause::UndoIncomplete,
    };
    v1::Quarantine {
        cause: cause.into(),
        message: quarantine.message,
    }
}

pub fn advice(known: Known) -> v1::Advice {
    let safety = match known.advice.safety {
        Safety::Safe => v1::FlipSafety::Safe,
        Safety::Conditional => v1::FlipSafety::Conditional,
        Safety::GuestState => v1::FlipSafety::GuestState,
        Safety::Crashes => v1::FlipSafety::Crashes,
    };
    v1::Advice {
        safety: safety.into(),
        message: known.advice.text.clone(),
        source: known.advice.source.clone(),
        tried: known.tried.to_owned(),
    }
}

pub fn key(key: KeyView, sites: Vec<SiteView>) -> v1::StaticKey {
    v1::StaticKey {
        name: copy(&key.name),
        key_class: class(key.class).into(),
        count: key.count,
        enabled: key.count > 0,
        address: key.address,
        patchable_sites: to_u32(key.patchable_sites),
        site_count: to_u32(key.site_count),
        initially_true: key.initially_true,
        sealed: key.sealed,
        quarantine: key.quarantine.map(quarantine),
        etag: key.etag,
        held_references: key.held_references,
        sites: sites.into_iter().map(site).collect(),
        advice: key.known.map(advice),
    }
}

pub fn debug_site(view: DebugView) -> v1::DebugSite {
    v1::DebugSite {
        key: view.key.to_string(),
        module: view.site.module,
        file: view.site.file,
        line: view.site.line,
        function: view.site.function,
        format: view.site.format,
        enabled: view.enabled,
        held_references: view.held_references,
    }
}

fn site(site: SiteView) -> v1::Site {
    let state = site.state;
    let obstacle = match &state.patchable {
        Ok(()) => v1::SiteObstacle::Unspecified,
        Err(NotPatchable::Init) => v1::SiteObstacle::Init,
        Err(NotPatchable::OutsideText) => v1::SiteObstacle::OutsideText,
        Err(NotPatchable::Sealed) => v1::SiteObstacle::Sealed,
        Err(NotPatchable::Never) => v1::SiteObstacle::Never,
        Err(NotPatchable::Busy(_)) => v1::SiteObstacle::Busy,
        Err(NotPatchable::Foreign) => v1::SiteObstacle::ForeignBytes,
        Err(NotPatchable::OutOfReach(_)) => v1::SiteObstacle::OutOfReach,
        Err(NotPatchable::Unreadable(_)) => v1::SiteObstacle::Unreadable,
    };
    let obstacle_message = state.patchable.as_ref().err().map(ToString::to_string);
    v1::Site {
        address: state.address,
        symbol: site.symbol,
        target: state.target,
        target_symbol: site.target_symbol,
        size: state.size().map_or(0, |size| to_u32(size.bytes())),
        disassembly: site.disassembly,
        other_bytes: site.other_bytes,
        other_disassembly: site.other_disassembly,
        likely: state.likely,
        obstacle: obstacle.into(),
        obstacle_message: obstacle_message.unwrap_or_default(),
        module: state.module.to_string(),
        current_bytes: state.bytes,
    }
}

pub fn hold(hold: HoldView) -> v1::Hold {
    v1::Hold {
        id: hold.id,
        key: copy(&hold.key),
        holder: copy(&hold.holder),
        reason: copy(&hold.reason),
        references: hold.references,
        since: Some(hold.since.into()),
        expires_at: hold.expires_at.map(Into::into),
    }
}

pub fn results(results: &[KeyOutcome]) -> Vec<v1::KeyResult> {
    let result = |of: &KeyOutcome| v1::KeyResult {
        name: copy(&of.key),
        count_before: of.count_before,
        count_after: of.count_after,
        sites_patched: of.sites_patched,
        etag: copy(&of.etag),
        hold_id: of.hold_id.as_ref().map(HoldId::text).unwrap_or_default(),
        advice: of.known.map(advice),
    };
    results.iter().map(result).collect()
}

pub fn summary(summary: UpdateSummary) -> v1::UpdateSummary {
    v1::UpdateSummary {
        keys: summary.keys,
        keys_changed: summary.keys_changed,
        sites_patched: summary.sites_patched,
        keys_left_out: summary.keys_left_out,
    }
}

pub fn report(report: FlipReport) -> v1::FlipReport {
    let FlipReport {
        pause,
        sites_patched,
        attempts,
    } = report;
    v1::FlipReport {
        paused: pause.is_some(),
        sites_patched,
        stop_time: pause.map(|times| duration(times.stop)),
        patch_time: pause.map(|times| duration(times.patch)),
        resume_time: pause.map(|times| duration(times.resume)),
        attempts,
    }
}

pub fn event(event: Event<'_>) -> v1::KeyEvent {
    use v1::key_event::Kind;
    match event {
        Event::Changed { change, by } => v1::KeyEvent {
            kind: Kind::Changed.into(),
            name: copy(&change.name),
            count: change.after,
            principal: by.principal.clone(),
            reason: by.reason.clone(),
            request_id: by.request_id.clone().unwrap_or_default(),
            ..v1::KeyEvent::default()
        },
        Event::Added { module } => v1::KeyEvent {
            kind: Kind::Added.into(),
            module: module.to_owned(),
            ..v1::KeyEvent::default()
        },
        Event::Removed { module } => v1::KeyEvent {
            kind: Kind::Removed.into(),
            module: module.to_owned(),
            ..v1::KeyEvent::default()
        },
        Event::Quarantined { key, why } => v1::KeyEvent {
            kind: Kind::Quarantined.into(),
            name: key.to_string(),
            quarantine: Some(quarantine(why.clone())),
            ..v1::KeyEvent::default()
        },
    }
}
