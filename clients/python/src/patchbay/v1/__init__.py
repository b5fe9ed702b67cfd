# SPDX-License-Identifier: Apache-2.0
"""The messages of patchbay.v1, which setup.py generates from proto/patchbay/v1."""
