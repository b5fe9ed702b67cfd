# SPDX-License-Identifier: Apache-2.0
"""Turns a key on for one block: flip.py SOCKET GUEST KEY."""

import sys

import patchbay

socket, name, key = sys.argv[1:]
with patchbay.connect(socket) as host:
    guest = host.guest(name)
    try:
        # If this program is killed, the service drops the reference after 60 s.
        with guest.enabled(key, ttl=60, reason="the example") as done:
            print(f"{key} is on, {done.summary.sites_patched} sites were patched")
        print(f"{key} is {'on' if guest.key(key).enabled else 'off'} again")
    except patchbay.NotFound as error:
        sys.exit(f"{error}; did you mean {', '.join(error.near)}?")
    except patchbay.GuestBusy as error:
        sys.exit(f"the gate {error.gate_name} stayed closed: {error}")
