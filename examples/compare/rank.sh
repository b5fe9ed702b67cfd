#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Ranks keys of an unpatched kernel by their effect on system calls, and on datagrams over the loopback device.
#
#   cargo build --release -p patchbay-cli -p patchbay-vmm-program
#   examples/compare/rank.sh VMLINUZ MODULES [FOLDER [ARGUMENT...]]
#
# VMLINUZ: a distribution's kernel; MODULES: its lib/modules/VERSION; FOLDER: where the tables and the plots are written, here unless
# given; ARGUMENTs for `patchbay ci compare`, such as --seed. Needs gcc with a static C library.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
patchbay=${PATCHBAY_CLI:-$here/../../target/release/patchbay}
kernel=$(realpath "$1")
modules=$(realpath "$2")
folder=${3:-.}
shift $(($# < 3 ? $# : 3))
gcc -O2 -Wall -static -o "$folder/load" "$here/load.c"

# Keys that are known to crash this guest, or that end its connection to the host, are left out: see `patchbay keys get`.
for load in "syscalls 200" "network 2000"; do
	name=${load% *}
	# shellcheck disable=SC2086 # the load is two words
	(cd "$folder" && "$patchbay" ci compare --kernel "$kernel" --modules "$modules" --copy load --allow-guarded \
		--matrix '*' '!init_on_*' --metric '^(\S+) ns per round' --plot "$name.svg" "$@" -- ./load $load |
		tee "$name.txt")
done
