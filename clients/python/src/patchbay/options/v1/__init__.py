# SPDX-License-Identifier: Apache-2.0
"""The options of the methods in patchbay.v1, which setup.py generates from proto/patchbay/options."""
