#!/bin/sh
# Boots systemd of a clean Debian root in separate namespaces, and runs steps.sh in it. Arguments: a
# scratch folder, the tar archive of the root, and the caller's folder, which appears as /host in
# the root. Run this by `unshare` with new mount, PID, cgroup, IPC, UTS and network namespaces.
set -e
scratch=$1
archive=$2
host=$3
mount -t tmpfs tmpfs "$scratch"
tar --extract --file "$archive" --directory "$scratch"
cd "$scratch"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty dev/
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs tmpfs run
mkdir host
mount --bind "$host" host
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
# pivot_root is used instead of chroot, because in a chroot systemd cannot make the private roots of
# its services.
mkdir old
pivot_root . old
cd /
umount --lazy /old
exec /lib/systemd/systemd --system --unit=steps.service --show-status=no
