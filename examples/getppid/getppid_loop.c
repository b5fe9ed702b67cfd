// SPDX-License-Identifier: GPL-2.0-only
/*
 * Calls getppid() for ever, so that the branch in the kernel's sys_getppid() is
 * passed again and again. Argument: milliseconds between calls, default 100.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define INTERVAL_MAX_MS	(60 * 60 * 1000L)

int main(int argc, char **argv)
{
	struct timespec interval;
	long ms = 100;
	char *end;

	if (argc > 2) {
		fprintf(stderr, "usage: %s [MILLISECONDS]\n", argv[0]);
		return 2;
	}
	if (argc == 2) {
		errno = 0;
		ms = strtol(argv[1], &end, 10);
		if (errno || end == argv[1] || *end || ms < 0 ||
		    ms > INTERVAL_MAX_MS) {
			fprintf(stderr,
				"%s: \"%s\" is not a number of milliseconds from 0 to %ld\n",
				argv[0], argv[1], INTERVAL_MAX_MS);
			return 2;
		}
	}
	interval.tv_sec = ms / 1000;
	interval.tv_nsec = ms % 1000 * 1000000;

	for (;;) {
		/* The system call itself: a C library could keep the answer. */
		syscall(SYS_getppid);
		if (ms)
			nanosleep(&interval, NULL);
	}
}
