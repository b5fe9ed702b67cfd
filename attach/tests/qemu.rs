// SPDX-License-Identifier: Apache-2.0
//! Tests the interfaces on a QEMU without KVM, where everything works except changes of code.

mod support;

use patchbay_attach::PauseWay;
use support::Accelerator::Tcg;
use support::Memory::{Private, SharedMemfd};

#[test]
fn memory() {
    support::memory(Tcg);
}

#[test]
fn holes() {
    support::holes(Tcg);
}

#[test]
fn pause_by_ptrace() {
    support::pause(Tcg, PauseWay::Freeze);
}

#[test]
fn pause_by_qmp() {
    support::pause(Tcg, PauseWay::Qmp);
}

#[test]
fn migration_by_ptrace() {
    support::migration(Tcg, PauseWay::Freeze);
}

#[test]
fn migration_by_qmp() {
    support::migration(Tcg, PauseWay::Qmp);
}

#[test]
fn a_guest_that_moves_to_another_qemu() {
    support::bad_input::moves(Tcg);
}

#[test]
fn an_undo_during_a_migration() {
    support::migration::undo(Tcg);
}

#[test]
fn a_migration_that_begins_before_the_first_write() {
    support::migration::nothing_written(Tcg);
}

#[test]
fn a_rollback_during_a_migration() {
    support::migration::rolled_back(Tcg, "a_rollback_during_a_migration");
}

#[test]
fn a_guest_that_is_migrated_while_it_is_stopped() {
    support::migration::source_stays_stopped(Tcg, "a_guest_that_is_migrated_while_it_is_stopped");
}

#[test]
fn a_stop_that_another_client_makes() {
    support::migration::stop_of_another(Tcg, "a_stop_that_another_client_makes");
}

#[test]
fn migrations_that_race_changes() {
    support::migration::races(Tcg);
}

#[test]
fn guests_without_a_kernel_of_64_bits() {
    support::bad_input::no_kernel(Tcg);
}

#[test]
fn forbidden() {
    support::bad_input::forbidden(Tcg);
}

#[test]
fn files_that_a_hostile_monitor_may_not_write() {
    support::hostile::files_of_others("files_that_a_hostile_monitor_may_not_write");
}

#[test]
fn a_guest_with_vmx_on_that_runs_no_guest() {
    support::hostile::nested_guests("a_guest_with_vmx_on_that_runs_no_guest");
}

#[test]
fn memory_that_is_plugged_in() {
    support::hotplug::plugged_in(Tcg);
}

#[test]
fn memory_that_is_removed() {
    support::hotplug::removed(Tcg);
}

#[test]
fn memory_of_virtio_mem() {
    support::hotplug::virtio_mem(Tcg);
}

#[test]
fn memory_of_ivshmem() {
    support::hotplug::ivshmem(Tcg);
}

#[test]
fn a_vcpu_that_is_plugged_in_before_a_freeze() {
    support::hotplug::vcpu(Tcg);
}

#[test]
fn memory_that_is_not_shared() {
    support::hotplug::not_shared(Tcg);
}

#[test]
fn a_second_flat_view_that_makes_no_sense() {
    support::hotplug::second_view(Tcg);
}

#[test]
fn a_guest_that_another_client_may_have_set_back_by_ptrace() {
    support::set_back(Tcg, PauseWay::Freeze);
}

#[test]
fn a_guest_that_another_client_may_have_set_back_by_qmp() {
    support::set_back(Tcg, PauseWay::Qmp);
}

#[test]
fn lifecycle() {
    support::lifecycle(Tcg);
}

#[test]
fn kill() {
    support::kill::kill(Tcg);
}

#[test]
fn commands_of_a_stop_that_qemu_does_not_answer() {
    support::relay::unanswered(Tcg);
}

#[test]
fn a_map_of_memory_that_qemu_does_not_answer() {
    support::relay::unanswered_map(Tcg);
}

#[test]
fn commands_of_another_client_between_the_query_and_the_stop() {
    support::relay::between(Tcg);
}

#[test]
fn a_guest_that_another_client_resumes_during_a_change() {
    support::relay::resumed_in_a_change(Tcg);
}

#[test]
fn refusals() {
    support::refusals(Tcg);
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_kernel_by_ptrace() {
    support::stock::stock(Tcg, PauseWay::Freeze, Private).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_kernel_by_qmp() {
    support::stock::stock(Tcg, PauseWay::Qmp, SharedMemfd).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn module_in_memory_that_is_plugged_in() {
    support::stock::plugged_in(Tcg, PauseWay::Freeze, SharedMemfd).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn module_in_memory_of_the_process() {
    support::stock::plugged_in(Tcg, PauseWay::Qmp, Private).await;
}

#[test]
fn the_log_of_a_stock_kernel() {
    support::log::log(Tcg);
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_an_attacher_that_is_killed() {
    support::adopt::adopted(Tcg, "claims_of_an_attacher_that_is_killed").await;
}

#[test]
fn a_ledger_whose_attachers_are_killed() {
    support::kill_ledger::kill_ledger(Tcg, "a_ledger_whose_attachers_are_killed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_ends_in_time_after_its_attacher_was_killed() {
    const TEST: &str = "a_claim_ends_in_time_after_its_attacher_was_killed";
    support::supervised::ends_a_claim_in_time(Tcg, TEST).await;
}

#[test]
fn the_trace_events_of_a_stock_kernel() {
    support::trace::trace(Tcg);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_the_command_line_arms() {
    support::boot_events::boot_events(Tcg).await;
}
