#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# First program of a guest with a stock kernel. Loads the modules, then runs each line that the console sends and says when it is done.
export PATH=/bin
busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t debugfs debug /sys/kernel/debug
mount -t tracefs trace /sys/kernel/tracing
for module in /modules/*.ko; do
	insmod "$module" || echo "init: no $module"
done
stty -echo </dev/console
echo "init: ready"
while read -r line; do
	eval "$line"
	echo "init: done"
done </dev/console
