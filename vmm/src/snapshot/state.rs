// SPDX-License-Identifier: Apache-2.0

//! The content of the file `state`, as protobuf messages. KVM's structures are stored as their
//! bytes, whose number is checked before they are used.
//!
//! A message that gets its first list must be added to [`super::decode`], which bounds all lists.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::SnapshotError;

/// Returns a structure of KVM, or an array of them, as bytes.
pub fn to_bytes<T: IntoBytes + Immutable + ?Sized>(value: &T) -> Vec<u8> {
    value.as_bytes().to_vec()
}

/// Returns the structure of KVM that these bytes are.
pub fn from_bytes<T: FromBytes>(what: &'static str, bytes: &[u8]) -> Result<T, SnapshotError> {
    T::read_from_bytes(bytes).map_err(|_| SnapshotError::Invalid(what))
}

/// Returns the structures of KVM that these bytes are.
pub fn list_from_bytes<T: FromBytes>(
    what: &'static str,
    bytes: &[u8],
) -> Result<Vec<T>, SnapshotError> {
    bytes
        .chunks(size_of::<T>())
        .map(|one| from_bytes(what, one))
        .collect()
}

/// A guest without its memory.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MachineState {
    /// Size of the memory in bytes.
    #[prost(uint64, tag = "1")]
    pub memory_bytes: u64,
    /// Digest of the memory; see `memory.rs`.
    #[prost(bytes = "vec", tag = "2")]
    pub memory_digest: Vec<u8>,
    /// Patchbay's transports that the guest was offered, as `PATCHBAY_TRANSPORT_*` bits.
    #[prost(uint32, tag = "3")]
    pub transports: u32,
    #[prost(message, repeated, tag = "4")]
    pub vcpus: Vec<VcpuState>,
    /// `struct kvm_irqchip` of both PICs and the I/O APIC.
    #[prost(bytes = "vec", repeated, tag = "5")]
    pub irqchips: Vec<Vec<u8>>,
    /// `struct kvm_pit_state2`.
    #[prost(bytes = "vec", tag = "6")]
    pub pit: Vec<u8>,
    /// kvmclock in nanoseconds.
    #[prost(uint64, tag = "7")]
    pub clock: u64,
    #[prost(message, optional, tag = "8")]
    pub serial: Option<SerialState>,
    #[prost(message, optional, tag = "9")]
    pub power: Option<PowerState>,
    /// Virtio devices, in the order of their addresses.
    #[prost(message, repeated, tag = "10")]
    pub devices: Vec<DeviceState>,
    #[prost(message, optional, tag = "11")]
    pub control: Option<Control>,
}

/// A vCPU, in structures of KVM.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VcpuState {
    /// Array of `struct kvm_cpuid_entry2`.
    #[prost(bytes = "vec", tag = "1")]
    pub cpuid: Vec<u8>,
    #[prost(uint32, tag = "2")]
    pub tsc_khz: u32,
    #[prost(bytes = "vec", tag = "3")]
    pub regs: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    pub sregs: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    pub xsave: Vec<u8>,
    #[prost(bytes = "vec", tag = "6")]
    pub xcrs: Vec<u8>,
    #[prost(bytes = "vec", tag = "7")]
    pub debug_regs: Vec<u8>,
    #[prost(bytes = "vec", tag = "8")]
    pub lapic: Vec<u8>,
    /// Array of `struct kvm_msr_entry`.
    #[prost(bytes = "vec", tag = "9")]
    pub msrs: Vec<u8>,
    #[prost(bytes = "vec", tag = "10")]
    pub events: Vec<u8>,
    #[prost(uint32, tag = "11")]
    pub mp_state: u32,
}

/// The serial console's 16550.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SerialState {
    /// The nine registers, in the order of `vm_superio::SerialState`.
    #[prost(bytes = "vec", tag = "1")]
    pub registers: Vec<u8>,
    /// Input in the FIFO.
    #[prost(bytes = "vec", tag = "2")]
    pub fifo: Vec<u8>,
    /// Input that waits for room in the FIFO.
    #[prost(bytes = "vec", tag = "3")]
    pub pending: Vec<u8>,
}

/// The registers of power management.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PowerState {
    #[prost(uint32, tag = "1")]
    pub status: u32,
    #[prost(uint32, tag = "2")]
    pub enable: u32,
}

/// A virtio device and its transport.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceState {
    /// The device's type.
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Features that the device offers.
    #[prost(uint64, tag = "2")]
    pub features: u64,
    /// The configuration space.
    #[prost(bytes = "vec", tag = "3")]
    pub config: Vec<u8>,
    #[prost(uint32, tag = "4")]
    pub status: u32,
    #[prost(uint32, tag = "5")]
    pub interrupt_status: u32,
    #[prost(uint32, tag = "6")]
    pub device_features_sel: u32,
    #[prost(uint32, tag = "7")]
    pub driver_features_sel: u32,
    #[prost(uint64, tag = "8")]
    pub driver_features: u64,
    #[prost(uint32, tag = "9")]
    pub queue_sel: u32,
    #[prost(message, repeated, tag = "10")]
    pub queues: Vec<QueueState>,
    /// The driver is ready and the device runs.
    #[prost(bool, tag = "11")]
    pub active: bool,
}

/// A queue of a virtio device.
#[derive(Clone, PartialEq, prost::Message)]
pub struct QueueState {
    #[prost(uint32, tag = "1")]
    pub size: u32,
    #[prost(uint64, tag = "2")]
    pub descriptors: u64,
    #[prost(uint64, tag = "3")]
    pub available: u64,
    #[prost(uint64, tag = "4")]
    pub used: u64,
    #[prost(bool, tag = "5")]
    pub ready: bool,
    /// Set if the device is active and the queue is ready.
    #[prost(message, optional, tag = "6")]
    pub active: Option<ActiveQueue>,
}

/// Positions of a device in the rings of a queue.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct ActiveQueue {
    /// The next chain to take.
    #[prost(uint32, tag = "1")]
    pub next_available: u32,
    /// The next chain to return.
    #[prost(uint32, tag = "2")]
    pub next_used: u32,
}

/// The service's part.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Control {
    #[prost(string, tag = "1")]
    pub guest: String,
    #[prost(string, tag = "2")]
    pub incarnation: String,
    #[prost(message, repeated, tag = "3")]
    pub requests: Vec<Request>,
    #[prost(bytes = "vec", tag = "4")]
    pub ledger: Vec<u8>,
}

/// A request of the guest.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Request {
    #[prost(uint32, tag = "1")]
    pub op: u32,
    #[prost(bytes = "vec", tag = "2")]
    pub page: Vec<u8>,
    #[prost(message, repeated, tag = "3")]
    pub arrays: Vec<Array>,
}

/// An array that a request refers to.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Array {
    #[prost(uint64, tag = "1")]
    pub address: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub bytes: Vec<u8>,
}
