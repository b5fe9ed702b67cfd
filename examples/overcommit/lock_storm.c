// SPDX-License-Identifier: GPL-2.0-only
/*
 * Threads that take one spinlock of the kernel again and again: FUTEX_WAIT with
 * a value that is not the futex's locks the futex's hash bucket, compares, and
 * returns EAGAIN. Each thread stays on a CPU of its own. Prints how often the
 * lock was taken in each period.
 *
 * usage: lock_storm THREADS PERIODS [MILLISECONDS]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define THREADS_MAX	64

static int futex;

/* Each has its own cache line, so that only the kernel's lock is contended. */
static struct {
	_Alignas(128) atomic_ulong times;
} taken[THREADS_MAX];

static void *take(void *argument)
{
	long cpu = (long)argument;
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	/* This fails if the guest has fewer CPUs; the thread then runs on any CPU. */
	sched_setaffinity(0, sizeof(set), &set);
	for (;;) {
		syscall(SYS_futex, &futex, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
		atomic_fetch_add_explicit(&taken[cpu].times, 1,
					  memory_order_relaxed);
	}
	return NULL;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static unsigned long sum(long threads)
{
	unsigned long all = 0;

	for (long i = 0; i < threads; i++)
		all += atomic_load_explicit(&taken[i].times,
					    memory_order_relaxed);
	return all;
}

static long number(const char *text, long max)
{
	char *end;
	long value;

	errno = 0;
	value = strtol(text, &end, 10);
	if (errno || end == text || *end || value < 1 || value > max) {
		fprintf(stderr, "lock_storm: \"%s\" is not a number from 1 to %ld\n",
			text, max);
		exit(2);
	}
	return value;
}

int main(int argc, char **argv)
{
	struct timespec period;
	long threads, periods, ms;

	if (argc < 3 || argc > 4) {
		fprintf(stderr,
			"usage: %s THREADS PERIODS [MILLISECONDS]\n", argv[0]);
		return 2;
	}
	threads = number(argv[1], THREADS_MAX);
	periods = number(argv[2], 1000000);
	ms = argc == 4 ? number(argv[3], 60 * 60 * 1000) : 1000;
	period.tv_sec = ms / 1000;
	period.tv_nsec = ms % 1000 * 1000000;

	for (long i = 0; i < threads; i++) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, take, (void *)i)) {
			fprintf(stderr, "lock_storm: no thread can be started\n");
			return 1;
		}
	}
	while (periods--) {
		unsigned long before = sum(threads);
		double began = now();

		nanosleep(&period, NULL);
		printf("taken %.0f times per second\n",
		       (sum(threads) - before) / (now() - began));
		fflush(stdout);
	}
	return 0;
}
