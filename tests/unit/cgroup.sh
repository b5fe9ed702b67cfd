# Runs a command in a cgroup of its own: two machines at once would otherwise remove each other's units' cgroups.
# Arguments: a folder to mount the cgroups at, and the command. Run by `unshare` with a new mount namespace.
set -e
mount -t cgroup2 cgroup2 "$1"
parent=$1$(sed -n s/^0:://p /proc/self/cgroup)
group=$parent/patchbay-test-$$
shift
mkdir "$group"
echo 0 >"$group/cgroup.procs"
code=0
"$@" || code=$?
echo 0 >"$parent/cgroup.procs"
find "$group" -depth -type d -exec rmdir {} +
exit $code
