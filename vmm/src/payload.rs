// SPDX-License-Identifier: Apache-2.0

//! Loads a guest's payload and sets the initial registers of its vCPUs.

use kvm_bindings::{KVM_MP_STATE_RUNNABLE, Msrs, kvm_mp_state};
use kvm_ioctls::VcpuFd;

use crate::boot::{self, BootError, DeviceDiscovery, layout};
use crate::config::{Payload, RawCode, VmConfig};
use crate::devices::Virtio;
use crate::error::VmError;
use crate::memory::GuestRam;
use crate::snapshot;
use crate::x86::registers::{self, Mode};

/// Mode and registers of a vCPU at its first instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    mode: Mode,
    regs: kvm_bindings::kvm_regs,
}

/// Loads the payload into memory. A snapshot's memory is mapped already and is verified here.
/// Returns the start of each vCPU, or `None` for a vCPU that another vCPU must start or whose state
/// is restored.
pub(crate) fn load(
    ram: &GuestRam,
    config: &VmConfig,
    virtio: &Virtio,
) -> Result<Vec<Option<Start>>, VmError> {
    let mut starts = match &config.payload {
        Payload::Linux(linux) => {
            let mut linux = linux.clone();
            let devices = match linux.virtio_devices {
                DeviceDiscovery::CommandLine => {
                    linux.add_words(&virtio.command_line());
                    Vec::new()
                }
                DeviceDiscovery::Acpi => virtio.mmio_devices(),
            };
            let entry = boot::load(ram, &linux, config.vcpus, &devices)?;
            let mut regs = registers::general_registers(entry.rip);
            regs.rsp = layout::BOOT_STACK_TOP;
            regs.rbp = layout::BOOT_STACK_TOP;
            regs.rsi = entry.rsi;
            regs.rbx = entry.rbx;
            vec![Some(Start {
                mode: entry.mode,
                regs,
            })]
        }
        Payload::Raw(raw) => load_raw(ram, raw)?,
        Payload::Snapshot(snapshot) => {
            let digest = &snapshot.state().memory_digest;
            snapshot::verify_memory(snapshot.memory(), config.memory_bytes, digest)?;
            vec![]
        }
    };
    starts.resize(config.vcpus.into(), None);
    Ok(starts)
}

fn load_raw(ram: &GuestRam, raw: &RawCode) -> Result<Vec<Option<Start>>, VmError> {
    ram.write(raw.address, &raw.image)
        .map_err(BootError::from)?;
    let starts = raw.entries.iter().map(|entry| {
        entry.map(|entry| {
            let mut regs = registers::general_registers(entry.rip);
            regs.rsp = entry.rsp;
            regs.rdi = entry.argument;
            if entry.user_mode {
                regs.rflags |= registers::RFLAGS_IOPL3;
            }
            Start {
                mode: if entry.user_mode {
                    Mode::LongUser
                } else {
                    Mode::Long
                },
                regs,
            }
        })
    });
    Ok(starts.collect())
}

/// Sets the initial registers of a vCPU. A vCPU without a `start` waits until another vCPU starts
/// it.
pub(crate) fn set_up_vcpu(fd: &VcpuFd, start: Option<Start>) -> Result<(), VmError> {
    let mut lapic = fd.get_lapic().map_err(VmError::kvm("read a local APIC"))?;
    registers::local_interrupts(&mut lapic);
    fd.set_lapic(&lapic)
        .map_err(VmError::kvm("set a local APIC"))?;
    let msrs = Msrs::from_entries(&registers::boot_msrs()).map_err(|_| VmError::Cpuid)?;
    // KVM stops at the first MSR that it does not support, without an error. Kernels can run with
    // the defaults of both MSRs.
    fd.set_msrs(&msrs).map_err(VmError::kvm("set MSRs"))?;
    let Some(start) = start else {
        return Ok(());
    };
    let mut sregs = fd
        .get_sregs()
        .map_err(VmError::kvm("read a vCPU's registers"))?;
    registers::system_registers(&mut sregs, start.mode);
    fd.set_sregs(&sregs)
        .map_err(VmError::kvm("set a vCPU's registers"))?;
    fd.set_regs(&start.regs)
        .map_err(VmError::kvm("set a vCPU's registers"))?;
    fd.set_mp_state(kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    })
    .map_err(VmError::kvm("let a vCPU run"))
}
