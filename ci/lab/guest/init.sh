#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# The lab's init: builds a root from the host's file system and runs stage2.sh in it.
bb=/bin/busybox
say() { echo "lab: $*" >/dev/console; }
# Writes the reason to the console log and powers off, which ends QEMU.
die() { say "$*"; $bb poweroff -f; }

$bb mount -t devtmpfs dev /dev || die "no devtmpfs"
$bb mount -t proc proc /proc && $bb mount -t sysfs sys /sys || die "no proc or sysfs"
for module in /modules/*.ko; do
	$bb insmod "$module" || die "cannot load $module"
done

options=trans=virtio,version=9p2000.L,msize=512000
$bb mount -t 9p -o ro,cache=loose,$options root /lower || die "cannot mount the host's root"
$bb mount -t tmpfs -o size=75% upper /upper || die "no tmpfs"
$bb mkdir /upper/files /upper/work
$bb mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root ||
	die "cannot mount the overlay"

cd /root
for folder in dev proc sys run; do
	[ -d $folder ] || $bb mkdir $folder
done
$bb mount -t tmpfs -o mode=755 run run
$bb mkdir run/lab
$bb cp /bin/busybox /stage2 /job/* run/lab/
out=$($bb cat /job/out-folder)
$bb mkdir -p "/root$out"
$bb mount -t 9p -o cache=none,$options out "/root$out" || die "cannot mount $out"
$bb mount --move /dev dev
$bb mount --move /proc proc
$bb mount --move /sys sys
exec $bb switch_root /root /run/lab/busybox sh /run/lab/stage2
die "cannot switch to the new root"
