#!/patchbay/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# The init of a guest that runs commands for `patchbay ci`: mounts file systems, loads the modules,
# and keeps the agent running. The host looks for "error" lines on the console.
bb=/patchbay/bin/busybox
say() { echo "<1>patchbay-init: $*" >/dev/kmsg; }
die() {
	say "error: $*"
	while :; do $bb sleep 1000; done
}

$bb mkdir -p /dev /proc /sys /tmp /run /root
$bb mount -t devtmpfs dev /dev || $bb mknod /dev/kmsg c 1 11
$bb mount -t proc proc /proc || die "the kernel has no procfs; set CONFIG_PROC_FS"
$bb mount -t sysfs sys /sys
# Each of these mounts fails if the kernel was built without the file system.
$bb mkdir -p /dev/pts /dev/shm
$bb mount -t devpts devpts /dev/pts 2>/dev/null
$bb mount -t tmpfs shm /dev/shm 2>/dev/null
$bb mount -t debugfs debug /sys/kernel/debug 2>/dev/null
$bb mount -t tracefs trace /sys/kernel/tracing 2>/dev/null
$bb mount -t cgroup2 cgroup /sys/fs/cgroup 2>/dev/null
for n in 0:stdin 1:stdout 2:stderr; do $bb ln -sfn "/proc/self/fd/${n%:*}" "/dev/${n#*:}"; done
$bb ln -sfn /proc/self/fd /dev/fd
$bb ip link set lo up 2>/dev/null

# insmod does not read the kernel's command line, so the virtio-mmio devices are passed as
# parameters of the module.
devices=
for word in $($bb cat /proc/cmdline); do
	case $word in
	virtio_mmio.device=*) devices="$devices ${word#virtio_mmio.}" ;;
	esac
done
for module in /patchbay/modules/*.ko; do
	[ -f "$module" ] || continue
	case $module in
	*-virtio_mmio.ko) parameters=$devices ;;
	*) parameters= ;;
	esac
	# shellcheck disable=SC2086 # one word per device
	$bb insmod "$module" $parameters || say "cannot load $module"
done

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/patchbay/bin
export HOME=/root TERM=dumb

# The shell reads the console as a script, because an interactive shell mistakes a signal for the
# end of its input. Ctrl-C ends only a command, not the shell.
case " $($bb cat /proc/cmdline) " in
*" patchbay.shell "*)
	console=$($bb cat /sys/class/tty/console/active)
	console=/dev/${console##* }
	$bb stty -echo <"$console"
	$bb setsid -c $bb sh -c 'trap : INT; echo "init: the shell reads the console"; . /dev/tty' \
		<"$console" >"$console" 2>&1 &
	;;
esac

[ -c /dev/vsock ] || die "the kernel has no vsock; set CONFIG_VSOCKETS, CONFIG_VIRTIO_VSOCKETS" \
	"and CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES, or give its modules with --modules"
# /dev/vsock also exists without a device, and the agent would then try to connect forever.
set -- /sys/bus/virtio/drivers/vmw_vsock_virtio_transport/virtio*
[ -e "$1" ] || [ ! -d /sys/bus ] || die "the kernel has vsock but its driver found no device;" \
	"set CONFIG_VIRTIO_VSOCKETS and CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES"

while :; do
	/patchbay/bin/patchbay-agent </dev/null >/dev/kmsg 2>&1
	$bb usleep 100000
done
