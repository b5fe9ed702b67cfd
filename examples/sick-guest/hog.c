// SPDX-License-Identifier: Apache-2.0
/* hog SECONDS: takes its CPU from everything else in user space. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	struct sched_param first = { .sched_priority = 50 };
	double end;
	/* Without this the kernel leaves 5 % of the time to the others. */
	FILE *limit = fopen("/proc/sys/kernel/sched_rt_runtime_us", "w");

	if (argc != 2 || !limit || fputs("-1", limit) < 0 || fclose(limit)) {
		fprintf(stderr, "hog SECONDS, as root\n");
		return 2;
	}
	if (sched_setscheduler(0, SCHED_FIFO, &first)) {
		perror("hog: sched_setscheduler");
		return 1;
	}
	end = now() + atof(argv[1]);
	while (now() < end)
		;
	return 0;
}
