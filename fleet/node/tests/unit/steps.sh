# systemd runs this in the machine that boot.sh makes. The results go to /host.
pid() { systemctl show --value --property MainPID patchbayd; }
socket=/run/patchbayd/patchbayd.sock
systemctl start patchbayd
until test -S $socket; do :; done
stat -c '%a %U %G' $socket >/host/modes
stat -c '%a %U' /var/log/patchbayd/audit.jsonl >>/host/modes
cat "/proc/$(pid)/status" >/host/status

systemctl reload patchbayd
first=$(pid)
# After a crash, systemd restarts the daemon.
kill -KILL "$first"
until test "$(pid)" != "$first" && test "$(pid)" != 0 && systemctl is-active patchbayd; do :; done
echo restarted >/host/restarted
systemctl stop patchbayd
systemctl show --value --property Result patchbayd >/host/stopped
test ! -e $socket
echo all >/host/done
