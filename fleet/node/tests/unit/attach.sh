# systemd runs this in the machine that boot.sh makes. The results go to /host.
trap "test -e /host/done || systemctl --no-pager --lines=20 status patchbayd patchbay-attach" EXIT
pid() { systemctl show --value --property MainPID "$1"; }
# Counts only the attachers, not the process that starts them, nor their watchdogs.
attachers() { pgrep -f "^/usr/bin/patchbay-attach (qemu|process)" | sort; }
client() {
	PATCHBAY_TEST_SOCKET=/run/patchbayd/patchbayd.sock /usr/bin/CLIENT --exact a_daemon_without_the_rights_serves_qemus_of_another_user --nocapture
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
# This one has no QMP socket, so it is found by its process. The others are attached to once. By the name of its program
# and its socket it is a monitor with a vsock device of its own.
mkdir -m 700 /run/vsock
chown nobody /run/vsock
cp "$(command -v qemu-system-x86_64)" /usr/bin/cloud-hypervisor
setpriv --reuid nobody --regid kvm --clear-groups cloud-hypervisor -accel kvm -m 32M -nodefaults -display none \
	-chardev socket,id=vsock,path=/run/vsock/v,server=on,wait=off &

# The units start in any order.
systemctl start patchbayd
systemctl start patchbay-attach
client
cat "/proc/$(pid patchbayd)/status" >/host/status.daemon
cat "/proc/$(pid patchbay-attach)/status" >/host/status.attach
attachers >/run/before
test "$(wc -l </run/before)" = 4
cat "/proc/$(head -n 1 /run/before)/status" >/host/status.attacher
stat -c '%a %U %G' /run/patchbay >/host/modes
stat -c '%a %U %G' /run/patchbay/attached-*.sock | sort -u >>/host/modes
# The attacher has created the socket of the agent with the rights of the monitor.
stat -c '%a %U' /run/vsock/v_1024 >/host/agent
# The attachers do not test these: systemd 252 leaves /run writable in this machine, and no guest has an agent.
grep " /run/patchbay rw" "/proc/$(pid patchbay-attach)/mountinfo"
systemctl show --property RestrictAddressFamilies patchbay-attach | grep AF_VSOCK

# Memory that QEMU shares is mapped, not read through its process.
for backing in /run/vm/ram /memfd:; do
	grep -l "$backing" $(sed 's,.*,/proc/&/maps,' /run/before)
done

# The daemon does not matter to the attachers.
first=$(pid patchbayd)
kill -KILL "$first"
until test "$(pid patchbayd)" != "$first" && test "$(pid patchbayd)" != 0 && systemctl is-active patchbayd; do :; done
client
systemctl restart patchbayd
client
attachers | cmp - /run/before

# After a crash, and at an upgrade, the attachers end, and others attach again.
kill -KILL "$(pid patchbay-attach)"
gone() { for attacher in $(cat /run/before); do test ! -e /proc/$attacher || return 1; done; }
until gone; do :; done
client
attachers >/run/before
systemctl restart patchbay-attach
gone
client

# The attacher has no CAP_KILL, and ends a monitor of another user with the ids of this user.
(export PATCHBAY_TEST_CUT=1; client)
timeout 30 sh -c 'while pgrep -u nobody cloud-hyper; do :; done' >/dev/null

# This detaches from all guests, which keep running.
systemctl stop patchbay-attach
test "$(systemctl show --value --property Result patchbay-attach)" = success
test -z "$(attachers)"
until ! pgrep -x patchbay-attach; do :; done
test ! -e /run/vsock/v_1024
test -z "$(find /run/patchbay -name '*.sock')"
test "$(pgrep -c -u nobody qemu)" = 3
echo all >/host/done
