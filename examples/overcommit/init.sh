#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# The guest's init. Runs each line that it reads from the console, and prints "init: done" after
# each.
export PATH=/bin
/bin/busybox mkdir -p /proc /sys
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
stty -echo </dev/console
# The other CPUs come online only here (maxcpus=1), because contended locks would slow the boot
# down.
for cpu in /sys/devices/system/cpu/cpu[1-9]*/online; do echo 1 >"$cpu"; done
echo "init: ready"
while read -r line; do
	eval "$line"
	echo "init: done"
done </dev/console
