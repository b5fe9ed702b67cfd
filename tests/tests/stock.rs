// SPDX-License-Identifier: Apache-2.0
//! Discovery in guests with Debian's own kernels. They run in QEMU without KVM, which is enough to
//! read a guest and not to change it.

mod stock {
    mod discovery;
    mod qemu;
}
