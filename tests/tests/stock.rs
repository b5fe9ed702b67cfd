// SPDX-License-Identifier: Apache-2.0
//! Tests discovery in guests with Debian's own kernels. They run in QEMU without KVM, which
//! suffices to read a guest but not to change it.

mod stock {
    mod discovery;
    mod qemu;
}
