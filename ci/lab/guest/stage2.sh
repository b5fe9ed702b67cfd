# SPDX-License-Identifier: Apache-2.0
# Runs the job and reports its exit status. init.sh executes this script in place of itself, as
# process 1. Ports: 1 control, 2 standard output, 3 standard error, 4 standard input; hvc0 is the
# terminal, if there is one.
lab=/run/lab
bb=$lab/busybox

$bb mkdir -p /dev/pts /dev/shm
$bb mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
$bb mount -t tmpfs shm /dev/shm
$bb mount -t debugfs debugfs /sys/kernel/debug
$bb ln -sfn /proc/self/fd /dev/fd
for n in 0:stdin 1:stdout 2:stderr; do $bb ln -sfn "/proc/self/fd/${n%:*}" "/dev/${n#*:}"; done
[ -c /dev/kvm ] && $bb chmod 666 /dev/kvm
$bb ip link set lo up
# Only a job with a TCP port has a network device. The address is ADDRESS in machine.rs.
if [ -d /sys/class/net/eth0 ]; then
	$bb ip addr add 10.0.2.15/24 dev eth0
	$bb ip link set eth0 up
fi
$bb ulimit -n 65536 2>/dev/null

# The kernel creates the ports asynchronously, port 4 last. In the name vportNp4, N is the number of
# the virtio device.
tries=0
until [ -c /dev/vport*p4 ]; do
	tries=$((tries + 1))
	[ $tries -lt 1000 ] || { echo "lab: no virtio ports" >/dev/console; exit 1; }
	$bb usleep 10000
done
port=$(echo /dev/vport*p4)
port=${port%4}
exec 9<>"${port}1"
echo ready >&9
# Discards the lines from the host, which sends them only to cause interrupts (NUDGE in machine.rs).
$bb cat <&9 >/dev/null 2>&1 &

if [ -f $lab/terminal ]; then
	# The session that keeps the terminal open sets its size, because the kernel forgets the
	# size when the terminal is closed.
	export bb lab
	$bb setsid -c $bb sh -c '. $lab/terminal; unset bb; exec $lab/busybox sh $lab/job' </dev/hvc0 >/dev/hvc0 2>&1 9>&-
	status=$?
else
	# The output goes through pipes, because a port can be open only once and the job may reopen
	# /dev/stdout.
	$bb mkfifo $lab/stdout $lab/stderr
	$bb cat $lab/stdout >"${port}2" 9>&- & out=$!
	$bb cat $lab/stderr >"${port}3" 9>&- & err=$!
	$bb sh $lab/job <"${port}4" >$lab/stdout 2>$lab/stderr 9>&-
	status=$?
	# Both copies end when the last writer closes its pipe. The wait is limited to 2 s, because
	# the job may have left a process behind that keeps a pipe open.
	tries=0
	while { kill -0 $out || kill -0 $err; } 2>/dev/null && [ $tries -lt 200 ]; do
		tries=$((tries + 1))
		$bb usleep 10000
	done
fi
$bb sync
echo "exit $status" >&9
# The host kills QEMU when it reads the exit status.
$bb sleep 10
$bb poweroff -f
