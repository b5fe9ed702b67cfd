# SPDX-License-Identifier: Apache-2.0
"""The messages of patchbay.v1, generated from proto/patchbay/v1 by `cargo xtask stubs`."""
