# systemd runs this in the machine that boot.sh makes. The results go to /host.
pid() { systemctl show --value --property MainPID patchbay-fleet; }
socket=/run/patchbay-fleet/fleet.sock
systemctl start patchbay-fleet
until test -S $socket; do :; done
stat -c %a $socket >/host/modes
cat "/proc/$(pid)/status" >/host/status
id -u patchbay-fleet >/host/uid
# patchbayd's socket is open to this group.
id -nG patchbay-fleet | grep -w patchbay
# The controller now owns the files of an earlier version, which ran as root.
systemctl stop patchbay-fleet
chown -R 0:0 /var/lib/patchbay-fleet
systemctl start patchbay-fleet
until test -S $socket; do :; done

# After a crash, systemd restarts the controller, which uses its old store.
first=$(pid)
kill -KILL "$first"
until test "$(pid)" != "$first" && test "$(pid)" != 0 && systemctl is-active patchbay-fleet; do :; done
until test -S $socket; do :; done
echo restarted >/host/restarted
systemctl stop patchbay-fleet
systemctl show --value --property Result patchbay-fleet >/host/stopped
test ! -e $socket
test -e /var/lib/patchbay-fleet/fleet.redb
echo all >/host/done
