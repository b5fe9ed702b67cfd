#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the commands that create users of etcd and their roles: one for the controllers, and one for each host.
#
#     etcd-roles.sh [--etcd-root PREFIX] CONTROLLER [HOST...]
#
# CONTROLLER is the common name of the controllers' certificates for etcd. HOST is the --host-name of a patchbayd, and the
# common name of its certificate for etcd.
set -eu
refuse() { echo "etcd-roles.sh: $1" >&2; exit 2; }

root=/patchbay/fleet/
if [ "${1-}" = --etcd-root ]; then
    root=${2-}
    shift; shift || refuse 'give the prefix'
fi
case $root in
    *[!A-Za-z0-9_./-]*) refuse "the prefix $root must consist of letters, digits, '-', '_', '.' and '/'" ;;
    */) ;;
    *) refuse "the prefix $root does not end with a slash" ;;
esac
controller=${1-}
[ $# -eq 0 ] || shift
# The output is run by a shell, so names must not contain special characters.
for name in "$controller" "$@"; do
    case $name in
        ''|*[!A-Za-z0-9_.-]*) refuse "\"$name\" is not a name of letters, digits, '-', '_' and '.'" ;;
        root) refuse 'etcd gives the user root all rights; give the host or controller another name' ;;
    esac
done
for host in "$@"; do
    [ "$host" != "$controller" ] || refuse "the host $host cannot have the same name as the controllers"
done

role() {
    echo "etcdctl user add $1 --no-password"
    echo "etcdctl role add $1"
    echo "etcdctl role grant-permission $1 --prefix=true readwrite $2"
    echo "etcdctl user grant-role $1 $1"
}
role "$controller" "$root"
for host in "$@"; do
    role "$host" "${root}registry/$host/"
done
