// SPDX-License-Identifier: Apache-2.0
// Measures the cost of kernel work in ticks of the time-stamp counter:
//   cost_tool WORK BATCH SAMPLES
// prints the smallest and the median number of ticks that BATCH operations took. WORK is
//   getppid   the shortest system call
//   lock      dup() and close(), each of which takes a spinlock once
//   mmap      mmap() and munmap() of one page
//   pipe      one byte to another process and back, through two pipes
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <x86intrin.h>

#define WARM_UP 8

static int there[2], back[2];

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void work_getppid(void)
{
	syscall(SYS_getppid);
}

static void work_lock(void)
{
	int file = dup(0);

	if (file < 0 || close(file))
		fail("dup");
}

static void work_mmap(void)
{
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED || munmap(page, 4096))
		fail("mmap");
}

static void work_pipe(void)
{
	char byte = 0;

	if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
		fail("pipe");
}

// Sends every byte back, until the other end is closed.
static void start_echo(void)
{
	char byte;
	pid_t child;

	if (pipe(there) || pipe(back))
		fail("pipe");
	child = fork();
	if (child < 0)
		fail("fork");
	if (child) {
		close(there[0]);
		close(back[1]);
		return;
	}
	close(there[1]);
	close(back[0]);
	while (read(there[0], &byte, 1) == 1)
		if (write(back[1], &byte, 1) != 1)
			break;
	_exit(0);
}

static int by_size(const void *a, const void *b)
{
	unsigned long long x = *(const unsigned long long *)a;
	unsigned long long y = *(const unsigned long long *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*work)(void);
	} works[] = {
		{ "getppid", work_getppid },
		{ "lock", work_lock },
		{ "mmap", work_mmap },
		{ "pipe", work_pipe },
	};
	unsigned long long *ticks, start;
	void (*work)(void) = NULL;
	long batch, samples, i, j;
	size_t n;

	for (n = 0; argc == 4 && n < sizeof(works) / sizeof(works[0]); n++)
		if (!strcmp(argv[1], works[n].name))
			work = works[n].work;
	batch = argc == 4 ? atol(argv[2]) : 0;
	samples = argc == 4 ? atol(argv[3]) : 0;
	if (!work || batch < 1 || samples < 1) {
		fprintf(stderr, "usage: cost_tool getppid|lock|mmap|pipe BATCH SAMPLES\n");
		return 2;
	}
	if (work == work_pipe)
		start_echo();
	ticks = calloc(samples, sizeof(*ticks));
	if (!ticks)
		fail("calloc");
	for (i = -WARM_UP; i < samples; i++) {
		start = __rdtsc();
		for (j = 0; j < batch; j++)
			work();
		if (i >= 0)
			ticks[i] = __rdtsc() - start;
	}
	qsort(ticks, samples, sizeof(*ticks), by_size);
	printf("%llu %llu\n", ticks[0], ticks[samples / 2]);
	return 0;
}
