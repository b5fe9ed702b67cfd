// SPDX-License-Identifier: Apache-2.0
//! Tests the interfaces on a QEMU with KVM. Only `qemu.rs` tests the rights to the process, because
//! they do not depend on the accelerator.

mod support;

use patchbay_attach::PauseWay;
use support::Accelerator::Kvm;
use support::Memory;

#[test]
fn pause_by_ptrace() {
    support::pause(Kvm, PauseWay::Freeze);
}

#[test]
fn pause_by_qmp() {
    support::pause(Kvm, PauseWay::Qmp);
}

#[test]
fn a_monitor_answers_while_a_guest_that_uses_its_devices_is_frozen() {
    support::answers_while_frozen(Kvm);
}

#[test]
fn migration_by_ptrace() {
    support::migration(Kvm, PauseWay::Freeze);
}

#[test]
fn migration_by_qmp() {
    support::migration(Kvm, PauseWay::Qmp);
}

#[test]
fn a_guest_that_moves_to_another_qemu() {
    support::bad_input::moves(Kvm);
}

#[test]
fn an_undo_during_a_migration() {
    support::migration::undo(Kvm);
}

#[test]
fn a_migration_that_begins_before_the_first_write() {
    support::migration::nothing_written(Kvm);
}

#[test]
fn a_rollback_during_a_migration() {
    support::migration::rolled_back(Kvm, "a_rollback_during_a_migration");
}

#[test]
fn a_guest_that_is_migrated_while_it_is_stopped() {
    support::migration::source_stays_stopped(Kvm, "a_guest_that_is_migrated_while_it_is_stopped");
}

#[test]
fn a_stop_that_another_client_makes() {
    support::migration::stop_of_another(Kvm, "a_stop_that_another_client_makes");
}

#[test]
fn migrations_that_race_changes() {
    support::migration::races(Kvm);
}

#[test]
fn guests_without_a_kernel_of_64_bits() {
    support::bad_input::no_kernel(Kvm);
}

#[test]
fn processes_that_a_hostile_monitor_points_at() {
    support::hostile::other_processes("processes_that_a_hostile_monitor_points_at");
}

#[test]
fn the_cid_that_a_hostile_monitor_names() {
    support::hostile::cids_of_others();
}

#[test]
fn a_renamed_audit_log_is_opened_again() {
    support::program::hangup();
}

#[test]
fn statistics_of_nested_guests() {
    support::hostile::statistics_of_qemu();
}

#[test]
fn a_guest_that_another_client_may_have_set_back_by_ptrace() {
    support::set_back(Kvm, PauseWay::Freeze);
}

#[test]
fn a_guest_that_another_client_may_have_set_back_by_qmp() {
    support::set_back(Kvm, PauseWay::Qmp);
}

#[test]
fn lifecycle() {
    support::lifecycle(Kvm);
}

#[test]
fn kill() {
    support::kill::kill(Kvm);
}

#[test]
fn a_kill_between_the_bytes_of_a_site() {
    support::cut::cut(
        "a_kill_between_the_bytes_of_a_site",
        Kvm,
        Memory::SharedMemfd,
    );
}

#[test]
fn a_kill_between_the_bytes_of_a_site_in_huge_pages() {
    support::cut::cut(
        "a_kill_between_the_bytes_of_a_site_in_huge_pages",
        Kvm,
        Memory::Hugetlb,
    );
}

#[test]
fn commands_of_another_client_between_the_query_and_the_stop() {
    support::relay::between(Kvm);
}

#[test]
fn a_guest_that_another_client_resumes_during_a_change() {
    support::relay::resumed_in_a_change(Kvm);
}

#[test]
fn refusals() {
    support::refusals(Kvm);
}

#[test]
fn a_qemu_that_names_other_threads_than_the_kernel() {
    support::kernel::other_threads();
}

#[test]
fn the_map_of_an_attached_qemu_is_the_kernels() {
    support::kernel::same_map();
}

#[test]
fn a_migration_that_qemu_denies() {
    support::kernel::denied_migration();
}

#[test]
fn a_background_snapshot_that_begins_before_a_freeze() {
    support::kernel::background_snapshot();
}

#[test]
fn registers_of_a_paused_guest() {
    support::kernel::registers_of_a_paused_guest();
}

#[test]
fn an_attacher_that_cannot_read_the_kernel() {
    support::kernel::without_kernel("an_attacher_that_cannot_read_the_kernel");
}

#[test]
fn memory_that_is_plugged_in() {
    support::hotplug::plugged_in(Kvm);
}

#[test]
fn memory_that_is_removed() {
    support::hotplug::removed(Kvm);
}

#[test]
fn memory_of_virtio_mem() {
    support::hotplug::virtio_mem(Kvm);
}

#[test]
fn memory_of_ivshmem() {
    support::hotplug::ivshmem(Kvm);
}

#[test]
fn memory_that_is_not_shared() {
    support::hotplug::not_shared(Kvm);
}

#[test]
fn a_vcpu_that_is_plugged_in_before_a_freeze() {
    support::hotplug::vcpu(Kvm);
}
