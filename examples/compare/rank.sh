#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Ranks keys of an unpatched kernel by their effect on system calls, and on datagrams over the loopback device.
#
#   cargo build --release -p patchbay-cli -p patchbay-vmm-program
#   examples/compare/rank.sh VMLINUZ MODULES [FOLDER [ARGUMENT...]]
#
# VMLINUZ: a distribution's kernel; MODULES: its lib/modules/VERSION; FOLDER: the folder for the
# tables and plots, by default the current one; ARGUMENTs for `patchbay ci compare`, such as --seed.
# Needs gcc with a static C library.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
patchbay=${PATCHBAY_CLI:-$here/../../target/release/patchbay}
kernel=$(realpath "$1")
modules=$(realpath "$2")
folder=${3:-.}
shift $(($# < 3 ? $# : 3))
gcc -O2 -Wall -static -o "$folder/load" "$here/load.c"

# Keys of the scheduler, of memory, of accounting and of the network. Flipping one of these keys
# neither crashes the guest nor ends its connection to the host. Keys that are known to do so are
# left out; `patchbay keys get` shows what is known about a key.
set -- --matrix 'sched_*' '!sched_feat_*' '!sched_clock*' 'init_on_alloc*' 'delayacct*' 'bpf_stats*' 'cpusets_enabled*' 'vm_numa_stat*' \
	'page_alloc_shuffle*' 'trace_pagefault*' 'memcg_sockets*' 'netstamp*' 'rps_needed*' 'xps_needed*' 'udp_encap*' 'tcp_md5*' "$@"
for load in "syscalls 50" "network 500"; do
	name=${load% *}
	# shellcheck disable=SC2086 # the load is two words
	(cd "$folder" && "$patchbay" ci compare --kernel "$kernel" --modules "$modules" --copy load --allow-guarded "$@" \
		--metric '^(\S+) ns per round' --plot "$name.svg" -- ./load $load | tee "$name.txt")
done
