# systemd runs this script in the machine that boot.sh makes. The script writes its results to /host.
logs=/var/log/patchbay/demo
systemctl start patchbay@demo patchbay@other
until grep -q x $logs/console; do :; done
pid() { systemctl show --value --property MainPID "patchbay@$1"; }
for guest in demo other; do
	ps -o user= -p "$(pid $guest)" >/host/user.$guest
done
cat "/proc/$(pid demo)/status" >/host/status
stat -c %a /run/patchbay/demo/api.sock >/host/modes
stat -c %a $logs/console $logs/audit.jsonl >>/host/modes

mv $logs/audit.jsonl $logs/audit.jsonl.1
systemctl reload patchbay@demo
until test -e $logs/audit.jsonl; do :; done

! systemctl start patchbay@broken || until ! systemctl is-active patchbay@broken; do :; done
systemctl show --value --property Result patchbay@broken >/host/broken
systemctl stop patchbay@demo patchbay@other
systemctl show --value --property Result patchbay@demo >/host/stopped
test ! -e /run/patchbay/demo
echo all >/host/done
