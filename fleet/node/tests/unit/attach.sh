# systemd runs this in the machine that boot.sh makes. The results go to /host.
trap "test -e /host/done || systemctl --no-pager --lines=20 status patchbayd" EXIT
pid() { systemctl show --value --property MainPID patchbayd; }
# Counts only the attachers, not their watchdogs.
attachers() { pgrep -f "^/usr/bin/patchbay-attach (qemu|process)" | sort; }
client() {
	PATCHBAY_TEST_SOCKET=/run/patchbayd/patchbayd.sock /usr/bin/CLIENT --exact the_daemon_attaches_to_qemus_of_another_user --nocapture
}
# The QEMUs run as another user. Only that user may open the sockets and the file.
mkdir -m 755 /run/vm
chown nobody /run/vm
for guest in file memfd private; do
	case $guest in
	file) memory="-machine memory-backend=ram -object memory-backend-file,id=ram,size=32M,share=on,mem-path=/run/vm/ram" ;;
	memfd) memory="-machine memory-backend=ram -object memory-backend-memfd,id=ram,size=32M,share=on" ;;
	private) memory= ;;
	esac
	setpriv --reuid nobody --regid kvm --clear-groups sh -c "umask 077; exec qemu-system-x86_64 -accel kvm -m 32M -nodefaults \
		-display none -name $guest $memory -qmp unix:/run/vm/$guest,server=on,wait=off" &
done
# This one has no QMP socket, so it is found by its process. The others are attached to once.
setpriv --reuid nobody --regid kvm --clear-groups qemu-system-x86_64 -accel kvm -m 32M -nodefaults -display none -name plain &

systemctl start patchbayd
client
cat "/proc/$(pid)/status" >/host/status.daemon
attachers >/run/before
test "$(wc -l </run/before)" = 4
cat "/proc/$(head -n 1 /run/before)/status" >/host/status.attacher
# The attachers do not test these two: systemd 252 leaves /run writable in this machine, and no guest has an agent.
grep " /run/patchbay rw" "/proc/$(pid)/mountinfo"
systemctl show --property RestrictAddressFamilies patchbayd | grep AF_VSOCK

# Memory that QEMU shares is mapped, not read through its process.
for backing in /run/vm/ram /memfd:; do
	grep -l "$backing" $(sed 's,.*,/proc/&/maps,' /run/before)
done

# Attachers keep running without the daemon, because they keep holds.
first=$(pid)
kill -KILL "$first"
until test "$(pid)" != "$first" && test "$(pid)" != 0 && systemctl is-active patchbayd; do :; done
client
systemctl stop patchbayd
attachers | cmp - /run/before

# This detaches from all guests, which keep running.
systemctl kill patchbayd
until ! pgrep -x patchbay-attach; do :; done
test "$(pgrep -c -u nobody qemu)" = 4
echo all >/host/done
