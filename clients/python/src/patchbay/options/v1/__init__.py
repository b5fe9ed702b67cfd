# SPDX-License-Identifier: Apache-2.0
"""The options of the methods in patchbay.v1, generated from proto/patchbay/options by `cargo xtask stubs`."""
