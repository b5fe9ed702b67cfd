#!/bin/sh
# systemd runs this in a clean Debian root. The steps install the previous version, use it, upgrade
# it and purge it. Each line must succeed.
trap 'test -e /host/done || journalctl --no-pager --lines=40' EXIT
# Waits silently until a command succeeds.
wait_for() {
	set +x
	until "$@" >/dev/null 2>&1; do :; done
	set -x
}
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive

# Installs.
dpkg --install /host/old/patchbay_*.deb /host/old/patchbay-agent_*.deb
dpkg --verify patchbay patchbay-agent
for program in patchbay patchbay-vmm patchbayd patchbay-fleet patchbay-attach; do
	$program --version
	test -s "/usr/share/man/man1/$program.1.gz"
done
# `patchbay ci run` copies this agent into its guests.
test -x /usr/lib/patchbay/patchbay-agent
systemctl is-enabled patchbay-agent.service
test -s /usr/share/man/man8/patchbay-agent.8.gz
test -s /usr/share/man/man1/patchbay-keys-enable.1.gz
# patchbayd writes the pages of the commands that it runs for patchbay.
zcat /usr/share/man/man1/patchbay-policy-can.1.gz | grep policy
for completion in /usr/share/bash-completion/completions/patchbay*; do bash -n "$completion"; done
systemd-analyze verify patchbayd.service patchbay-attach.service patchbay-fleet.service patchbay-agent.service

# Starts patchbayd and uses it with a guest in memory that is served like a monitor's guest.
patchbay policy check /etc/patchbay/policy.yaml
mkdir -p /run/patchbay
mkfifo /run/commands
/host/in_memory_guests /run/patchbay/test.sock test </run/commands &
exec 9>/run/commands
wait_for test -S /run/patchbay/test.sock
systemctl start patchbayd
socket=/run/patchbayd/patchbayd.sock
wait_for patchbay --socket $socket --guest test guest describe
PATCHBAY_COMPLETE=bash _CLAP_COMPLETE_INDEX=2 patchbay -- patchbay --guest te | grep test
patchbay --socket $socket --guest test keys enable alpha
patchbay --socket $socket --guest test keys get alpha | grep -i alpha
patchbay audit verify

# Writes an operator's policy, and starts a controller with its store.
echo '# ours' >>/etc/patchbay/policy.yaml
echo "OPTIONS=--standalone --host here=$socket" >/etc/patchbay/fleet.conf
echo "  - {name: controller, principals: ['uid:$(id -u patchbay-fleet)'], role: admin, may_assert: true}" >>/etc/patchbay/policy.yaml
systemctl reload patchbayd
systemctl start patchbay-fleet
test "$(systemctl show --value --property User patchbay-fleet)" = patchbay-fleet
setpriv --reuid patchbay-fleet --regid patchbay-fleet --init-groups patchbay --socket $socket --guest test guest describe
wait_for env PATCHBAY_FLEET_SOCKET=/run/patchbay-fleet/fleet.sock patchbay rollout list
systemctl reload patchbayd
cp /var/log/patchbayd/audit.jsonl /run/audit.before

# Guests of other monitors are attached to only if the operator says so, and never by the daemon.
test "$(systemctl is-enabled patchbay-attach)" = disabled
mkdir /run/vm
systemd-socket-activate --listen /run/vm/no-qemu --accept true &
echo 'OPTIONS=--qmp /run/vm --no-processes' >/etc/patchbay/attach.conf
systemctl enable --now patchbay-attach
wait_for sh -c 'journalctl --unit patchbay-attach | grep "/run/vm/no-qemu does not speak QMP"'
for unit in patchbayd patchbay-attach; do
	grep CapEff "/proc/$(systemctl show --value --property MainPID $unit)/status"
done >/run/capabilities
printf 'CapEff:\t0000000000000084\nCapEff:\t000000c0000800c2\n' | cmp - /run/capabilities
daemon=$(systemctl show --value --property MainPID patchbayd)
attacher=$(systemctl show --value --property MainPID patchbay-attach)

# Upgrades: the policy, the audit log and the store stay, and the daemon is the new one.
dpkg --install /host/new/patchbay_*.deb /host/new/patchbay-agent_*.deb
grep '# ours' /etc/patchbay/policy.yaml
head --bytes "$(stat --format %s /run/audit.before)" /var/log/patchbayd/audit.jsonl | cmp - /run/audit.before
test "$(systemctl show --value --property MainPID patchbayd)" != "$daemon"
test "$(systemctl show --value --property MainPID patchbay-attach)" != "$attacher"
systemctl is-enabled patchbay-attach
wait_for patchbay --socket $socket --guest test guest describe
patchbay --socket $socket --guest test keys disable alpha
patchbay audit verify
test "$(wc -l </var/log/patchbayd/audit.jsonl)" -gt "$(wc -l </run/audit.before)"
test -s /var/lib/patchbay-fleet/fleet.redb
wait_for env PATCHBAY_FLEET_SOCKET=/run/patchbay-fleet/fleet.sock patchbay rollout list

# Removes: programs and services are gone, data stays.
dpkg --remove patchbay patchbay-agent
test "$(systemctl is-active patchbayd)" = inactive
test "$(systemctl is-active patchbay-attach)" = inactive
test ! -e /sys/fs/cgroup/system.slice/patchbay-attach.service
test ! -e /usr/bin/patchbayd
test -s /var/log/patchbayd/audit.jsonl
grep '# ours' /etc/patchbay/policy.yaml

# Purges: nothing is left.
dpkg --purge patchbay patchbay-agent
test ! -e /etc/patchbay
test ! -e /var/log/patchbayd
test ! -e /var/lib/patchbay-fleet
test -z "$(find /etc /usr /var/lib/systemd -name '*patchbay*')"
echo all >/host/done
