# Boots systemd in separate namespaces, on an overlay of this machine's root. Arguments: a scratch
# folder, and the caller's folder, which appears as /host in the root. host/bin is copied to
# /usr/bin, host/units to /etc/systemd/system and host/etc to /etc/patchbay; systemd runs
# host/steps.sh. The machine has the users of host/sysusers. boot.rs runs this script by `unshare`
# with new mount, PID, cgroup, IPC and UTS namespaces.
set -e
scratch=$1
host=$2
mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch/upper" "$scratch/work" "$scratch/root"
mount -t overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" overlay "$scratch/root"
for program in "$host"/bin/*; do
	install -m 755 "$program" "$scratch/root/usr/bin/"
done
cd "$scratch/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
# The machine has its own /dev/kvm, which belongs to the group that a distribution gives it.
mount -t tmpfs -o mode=755 tmpfs dev
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty dev/
# systemd makes the /dev of a service with PrivateDevices= from these files.
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
if test -e /dev/kvm; then
	cp -a /dev/kvm dev/
	grep -q ^kvm: etc/group || echo kvm:x:989: >>etc/group
	chroot . chown root:kvm /dev/kvm
	chmod 660 dev/kvm
fi
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mkdir host
mount --bind "$host" host
cp -r host/units/. etc/systemd/system/
mkdir -p etc/patchbay
cp host/etc/* etc/patchbay/
chroot . systemd-sysusers - <host/sysusers
cat >etc/systemd/system/steps.service <<END
[Unit]
DefaultDependencies=no
SuccessAction=exit
FailureAction=exit
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'sh -ex /host/steps.sh >/host/log 2>&1'
END
export container=patchbay
# pivot_root is used because systemd cannot make the private roots of its services in a chroot.
mkdir old
pivot_root . old
cd /
umount --lazy /old
exec /lib/systemd/systemd --system --unit=steps.service --show-status=no
