# Runs a command in a new cgroup. Without it, two machines that run at the same time would remove
# the cgroups of each other's units. Arguments: the folder where the cgroup file system is mounted,
# and the command. boot.rs runs this script by `unshare` with a new mount namespace.
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
