// SPDX-License-Identifier: Apache-2.0
//! The shape of the interface: it follows the rules of `buf lint` (STANDARD), and it does not break
//! clients that were built before.

mod interface {
    mod baseline;
    mod lint;
    mod methods;
    mod rules;
    mod support;
}
