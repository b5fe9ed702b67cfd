// SPDX-License-Identifier: Apache-2.0
// Measures the cost of tracing for the benchmarks, in nanoseconds, and uses a tracepoint for the
// tests:
//   trace_tool ping-pong ROUNDS TIMES   two processes pass a byte back and forth through pipes;
//                                       prints the mean time of ROUNDS rounds, TIMES times
//   trace_tool write FILE TEXT          prints the time of writing TEXT to FILE
//   trace_tool count ID                 counts a tracepoint's events on CPU 0 with perf: prints
//                                       "counting", and the count when stdin ends
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <linux/perf_event.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

static long long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int pass_back(int from, int to)
{
	char byte;

	while (read(from, &byte, 1) == 1)
		if (write(to, &byte, 1) != 1)
			return 1;
	return 0;
}

static int ping_pong(long rounds, long times)
{
	int there[2], back[2];
	char byte = 0;

	if (pipe(there) || pipe(back))
		return fail("pipe");
	switch (fork()) {
	case -1:
		return fail("fork");
	case 0:
		close(there[1]);
		_exit(pass_back(there[0], back[1]));
	}
	close(there[0]);
	for (long time = 0; time < times; time++) {
		long long began = now();

		for (long round = 0; round < rounds; round++)
			if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
				return fail("ping");
		printf("%lld\n", (now() - began) / rounds);
	}
	close(there[1]);
	wait(NULL);
	return 0;
}

static int timed_write(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY);
	long long began = now();

	if (fd < 0)
		return fail(file);
	if (write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		return fail("write");
	printf("%lld\n", now() - began);
	return 0;
}

static int count(const char *id)
{
	struct perf_event_attr attributes = {
		.type = PERF_TYPE_TRACEPOINT,
		.size = sizeof(attributes),
		.config = strtoul(id, NULL, 10),
	};
	int fd = syscall(SYS_perf_event_open, &attributes, -1, 0, -1, 0);
	long long counted;
	char byte;

	if (fd < 0)
		return fail("perf_event_open");
	printf("counting\n");
	fflush(stdout);
	while (read(STDIN_FILENO, &byte, 1) == 1)
		;
	if (read(fd, &counted, sizeof(counted)) != sizeof(counted))
		return fail("read");
	printf("%lld\n", counted);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "ping-pong") && atol(argv[2]) > 0)
		return ping_pong(atol(argv[2]), atol(argv[3]));
	if (argc == 4 && !strcmp(argv[1], "write"))
		return timed_write(argv[2], argv[3]);
	if (argc == 3 && !strcmp(argv[1], "count"))
		return count(argv[2]);
	fprintf(stderr, "usage: trace_tool ping-pong ROUNDS TIMES | write FILE TEXT | count ID\n");
	return 2;
}
