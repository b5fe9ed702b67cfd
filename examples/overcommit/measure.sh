#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measures the throughput of one contended spinlock of an unpatched guest with 4 vCPUs: with the
# fair lock, with the unfair lock, and with the lock that `overcommit` selects. `overcommit` must
# turn the key on under load and off at rest. The host should have fewer CPUs than the guest has
# vCPUs.
#
#   cargo build -p patchbay-attach -p patchbay-cli -p patchbay-examples
#   cargo xtask lab -- examples/overcommit/measure.sh VMLINUZ [SECONDS [PERIOD]]
#
# VMLINUZ: a distribution's kernel; SECONDS of each measurement; PERIOD of `overcommit` in milliseconds. Needs qemu-system-x86,
# busybox-static and gcc with a static C library.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
programs=${PROGRAMS:-$here/../../target/debug}
kernel=$1
seconds=${2:-5}
period=${3:-4000}
folder=$(mktemp -d)
monitor= pids=
finish() { kill $monitor $pids 2>/dev/null || true; rm -rf "$folder"; }
trap finish EXIT
cd "$folder"

mkdir -p root/bin root/dev
cp /bin/busybox root/bin/
cp "$here/init.sh" root/init
chmod 755 root/init
gcc -O2 -static -pthread -o root/bin/lock_storm "$here/lock_storm.c"
mknod root/dev/console c 5 1
(cd root && find . | /bin/busybox cpio -o -H newc 2>/dev/null) >initrd

mkfifo input
sleep 100000 >input & pids=$!
qemu-system-x86_64 -accel kvm -cpu host -M microvm,memory-backend=ram,rtc=on,pit=on,pic=on -m 512 -smp 4 -nodefaults -no-user-config \
	-display none -object memory-backend-memfd,id=ram,size=512M,share=on -serial stdio -qmp "unix:$folder/qmp,server=on,wait=off" \
	-kernel "$kernel" -initrd initrd -append \
	"console=ttyS0 nopvspin maxcpus=1 tsc=reliable no_timer_check mitigations=off noxsave quiet panic=-1" \
	<input >output 2>&1 & monitor=$!

wait_for() { # TEXT TIMES FILE
	tries=0
	until [ "$(grep -ac "$1" "$3")" -ge "$2" ]; do
		tries=$((tries + 1))
		[ $tries -lt 6000 ] || { tail -20 "$3"; echo "no \"$1\"" >&2; exit 1; }
		sleep 0.1
	done
}
lines=0
guest() { # COMMAND: its output
	before=$(grep -ac "" output)
	echo "$1" >input
	lines=$((lines + 1))
	wait_for "init: done" $lines output
	tail -n +$((before + 1)) output | tr -d '\r' | grep -av "init: done" | sed 's/^/   /'
}
delay() { cat /proc/$monitor/task/*/schedstat | awk '{ r += $1; d += $2 } END { printf "   ran %.1f s, waited %.1f s\n", r / 1e9, d / 1e9 }'; }
committed() { grep -c '"result":"committed"' audit.log; }
patchbay() { "$programs/patchbay" --socket api --timeout 5m "$@"; }

wait_for "init: ready" 1 output
guest "uname -r; dmesg | grep -i 'pv spinlocks'; nproc"
"$programs/patchbay-attach" qemu --qmp qmp --allow-guarded --api-socket api --audit-log audit.log >attach.log 2>&1 & pids="$pids $!"
wait_for "its API" 1 attach.log
patchbay keys get virt_spin_lock_key

echo "fair lock, 4 threads"
guest "lock_storm 4 $seconds"; delay
patchbay keys enable virt_spin_lock_key --allow-guarded --reason measurement
echo "unfair lock, 4 threads"
guest "lock_storm 4 $seconds"; delay
echo "unfair lock, 1 thread"
guest "lock_storm 1 $seconds"
patchbay keys disable virt_spin_lock_key --allow-guarded --reason measurement
echo "fair lock, 1 thread"
guest "lock_storm 1 $seconds"

echo "overcommit chooses: at rest, and twice 4 threads and at rest"
by_hand=$(committed)
"$programs/overcommit" --socket api --pid $monitor --period "$period" >overcommit.log 2>&1 & pids="$pids $!"
guest "sleep 20"; delay
for round in 1 2; do
	guest "lock_storm 4 100000 >/storm & storm=\$!"
	wait_for ": unfair lock" $round overcommit.log
	guest "sleep $seconds; kill \$storm; cat /storm"; delay
	wait_for ": fair lock" $round overcommit.log
	guest "sleep 5"; delay
done
sed 's/^/   /' overcommit.log
patchbay keys get virt_spin_lock_key
changes=$(($(committed) - by_hand))
echo "$changes changes in the audit log"
[ $changes -eq 4 ] && [ "$(grep -c . overcommit.log)" -eq 4 ]
