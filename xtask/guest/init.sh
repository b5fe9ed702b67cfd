#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# First program of the guest. Runs a shell on the console that neither prompts nor echoes, so
# that a test can drive it line by line; or, given patchbay.run=PROGRAM on the kernel's command
# line, runs that. When either ends, so does the guest.
export PATH=/bin HOME=/
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
# These two are absent from a kernel without the options.
mount -t debugfs debug /sys/kernel/debug 2>/dev/null
mount -t tracefs trace /sys/kernel/tracing 2>/dev/null
mount -t tmpfs tmp /tmp
ip link set lo up 2>/dev/null

# The shell reads the console as a script: busybox's interactive shell, on a terminal without
# echo, takes a signal that comes while it reads for the end of its input (read_line_input() calls
# fgets()), and SIGCHLD comes when a background job ends. Ctrl-C ends a command, and not the shell.
set -- sh -c 'trap : INT; echo "init: the shell reads the console"; . /dev/tty'
for word in $(cat /proc/cmdline); do
	case $word in
	patchbay.run=*) set -- "${word#*=}" ;;
	patchbay.agent) patchbay-agent </dev/null >/dev/kmsg 2>&1 & ;;
	esac
done
# The console's own device, because /dev/console cannot be a controlling terminal.
console=$(cat /sys/class/tty/console/active)
console=/dev/${console##* }
[ -c "$console" ] || console=/dev/console
stty -echo <"$console"
setsid -c "$@" <"$console" >"$console" 2>&1
echo "init: $1 ended with status $?" >"$console"
# Without ACPI a power-off would only halt; a reset ends the guest all the same.
[ -d /sys/firmware/acpi ] && poweroff -f
reboot -f
