# Run by systemd, in the machine that boot.sh makes. What it finds out goes to /host.
pid() { systemctl show --value --property MainPID patchbay-fleet; }
socket=/run/patchbay-fleet/fleet.sock
systemctl start patchbay-fleet
until test -S $socket; do :; done
stat -c %a $socket >/host/modes
cat "/proc/$(pid)/status" >/host/status
id -u patchbay-fleet >/host/uid
# patchbayd's socket is open to this group.
id -nG patchbay-fleet | grep -w patchbay
# What an earlier version left, which ran as root, is the controller's now.
systemctl stop patchbay-fleet
chown -R 0:0 /var/lib/patchbay-fleet
systemctl start patchbay-fleet
until test -S $socket; do :; done

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
