# Run by systemd, in the machine that boot.sh makes. What it finds out goes to /host.
pid() { systemctl show --value --property MainPID patchbay-fleet; }
socket=/run/patchbay-fleet/fleet.sock
systemctl start patchbay-fleet
until test -S $socket; do :; done
stat -c %a $socket >/host/modes
cat "/proc/$(pid)/status" >/host/status

# A crash: systemd starts it again, on the store that it left.
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
