// SPDX-License-Identifier: Apache-2.0

//! Transports of the guest's Patchbay requests: the hypercall and the MSR.

use std::sync::Arc;

use patchbay_guest::abi;
use patchbay_guest::requests::GuestRequests;

use crate::memory::{GuestRam, PAGE_SIZE};
use crate::x86::low_half;

/// MSR index of the MSR transport, announced to the guest in CPUID.
///
/// "KPB\0" does not collide with KVM's indices (0x4b564d00..=0x4b564dff, "KVM",
/// `Documentation/virt/kvm/x86/msr.rst`), with those of Hyper-V and Xen (0x40000000 on), or with
/// architectural ones (Intel below 0x2000, AMD 0xc000_0000 on).
pub const MSR_INDEX: u32 = 0x4b50_4200;

/// `KVM_HC_MAP_GPA_RANGE`, `include/uapi/linux/kvm_para.h`.
pub(crate) const HYPERCALL: u64 = 12;

/// KVM's own answer to a hypercall that it does not offer (`KVM_ENOSYS`,
/// `include/uapi/linux/kvm_para.h`).
pub(crate) const KVM_ENOSYS: i64 = -1000;

/// Refuses every request, for a guest that does not use Patchbay.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoRequests;

impl GuestRequests for NoRequests {
    fn attach(&self, _: patchbay_guest::memory::GuestRam) {}

    fn request(&self, _op: u32, _page: u64) -> i32 {
        -libc::ENOSYS
    }
}

/// A request for Patchbay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub op: u32,
    pub page: u64,
}

/// The monitor's end of both transports.
pub(crate) struct RequestPort {
    ram: GuestRam,
    handler: Arc<dyn GuestRequests>,
}

impl RequestPort {
    pub fn new(ram: GuestRam, handler: Arc<dyn GuestRequests>) -> Self {
        handler.attach(Arc::new(ram.clone()));
        Self { ram, handler }
    }

    /// Decodes a hypercall. Returns `None` if the hypercall is not Patchbay's. Such a call must get
    /// KVM's own answer.
    pub fn decode_hypercall(&self, number: u64, arguments: &[u64; 6]) -> Option<Request> {
        let [page, pages, magic_and_op, zero, ..] = *arguments;
        let ours = number == HYPERCALL
            && pages == 1
            && zero == 0
            && magic_and_op >> 32 == u64::from(abi::HYPERCALL_MAGIC);
        ours.then(|| Request {
            op: low_half(magic_and_op),
            page,
        })
    }

    /// Decodes an MSR write. Returns `None` if the index is not Patchbay's.
    pub fn decode_msr(&self, index: u32, value: u64) -> Option<Request> {
        let in_page = value & (PAGE_SIZE - 1);
        (index == MSR_INDEX).then(|| Request {
            op: low_half(in_page),
            page: value - in_page,
        })
    }

    /// Handles the request, and also writes the result to the page's header.
    pub fn answer(&self, request: Request) -> i32 {
        let page = request.page;
        if !page.is_multiple_of(PAGE_SIZE) || self.ram.piece(page, abi::REQUEST_PAGE_SIZE).is_err()
        {
            return -libc::EFAULT;
        }
        let status = self.handler.request(request.op, page);
        match self
            .ram
            .write(page + abi::STATUS_OFFSET, &status.to_le_bytes())
        {
            Ok(()) => status,
            Err(_) => -libc::EFAULT,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::memory::MEMORY_MIN;

    #[derive(Default)]
    struct Record(Mutex<Vec<(u32, u64)>>);

    impl GuestRequests for Record {
        fn attach(&self, _: patchbay_guest::memory::GuestRam) {}

        fn request(&self, op: u32, page: u64) -> i32 {
            self.0.lock().unwrap().push((op, page));
            -7
        }
    }

    fn port() -> (RequestPort, Arc<Record>, GuestRam) {
        let ram = GuestRam::new(MEMORY_MIN).unwrap();
        let record = Arc::new(Record::default());
        (RequestPort::new(ram.clone(), record.clone()), record, ram)
    }

    const OURS: u64 = (abi::HYPERCALL_MAGIC as u64) << 32;

    #[test]
    fn only_the_agreed_hypercall_is_ours() {
        let (port, _, _) = port();
        let ours = [0x3000, 1, OURS | 2, 0, 9, 9];
        assert_eq!(
            port.decode_hypercall(12, &ours),
            Some(Request {
                op: 2,
                page: 0x3000
            })
        );
        for (number, arguments) in [
            (11, ours),
            (12, [0x3000, 1, 2, 0, 0, 0]),
            (12, [0x3000, 1, (OURS + (1 << 32)) | 2, 0, 0, 0]),
            (12, [0x3000, 2, OURS | 2, 0, 0, 0]),
            (12, [0x3000, 1, OURS | 2, 1, 0, 0]),
        ] {
            assert_eq!(port.decode_hypercall(number, &arguments), None);
        }
    }

    #[test]
    fn the_msr_carries_page_and_operation() {
        let (port, _, _) = port();
        assert_eq!(
            port.decode_msr(MSR_INDEX, 0x5003),
            Some(Request {
                op: 3,
                page: 0x5000
            })
        );
        assert_eq!(port.decode_msr(MSR_INDEX + 1, 0x5003), None);
    }

    #[test]
    fn the_answer_is_in_the_page_too() {
        let (port, record, ram) = port();
        assert_eq!(
            port.answer(Request {
                op: 1,
                page: 0x4000
            }),
            -7
        );
        assert_eq!(*record.0.lock().unwrap(), [(1, 0x4000)]);
        let mut status = [0; 4];
        ram.read(0x4000 + abi::STATUS_OFFSET, &mut status).unwrap();
        assert_eq!(i32::from_le_bytes(status), -7);
    }

    #[test]
    fn invalid_pages_never_reach_the_handler() {
        let (port, record, _) = port();
        for page in [
            0x4001,
            MEMORY_MIN,
            MEMORY_MIN - 8,
            u64::MAX - 4095,
            u64::MAX,
        ] {
            assert_eq!(
                port.answer(Request { op: 1, page }),
                -libc::EFAULT,
                "{page:#x}"
            );
        }
        assert!(record.0.lock().unwrap().is_empty());
    }
}
