// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! `patchbay-attach`.
fn main() {
    if std::env::args().nth(1).as_deref() == Some(patchbay_attach::watchdog::ARGUMENT) {
        let _ = patchbay_attach::watchdog::run();
    }
}
