// SPDX-License-Identifier: Apache-2.0
// Generates kernel work for `patchbay ci compare`:
//   load syscalls|network ROUNDS
// makes system calls as programs do, or sends datagrams over the loopback device, and prints the
// nanoseconds per round. First it makes a tenth as many rounds, which are not measured.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_ROUNDS	100000000L
#define PAGES		16
#define ROUNDS_PER_FORK	64

static int pipe_ends[2], receiver, sender;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void check(int succeeded, const char *what)
{
	if (!succeeded)
		fail(what);
}

static void prepare_syscalls(void)
{
	check(!pipe(pipe_ends), "pipe");
}

static void syscalls(long round)
{
	char bytes[512] = { 0 };
	struct stat status;
	char *memory;
	pid_t child;
	int file, i;

	syscall(SYS_getppid);
	check(write(pipe_ends[1], bytes, sizeof(bytes)) == sizeof(bytes), "write");
	check(read(pipe_ends[0], bytes, sizeof(bytes)) == sizeof(bytes), "read");
	file = open("/proc/self/stat", O_RDONLY);
	check(file >= 0, "open");
	check(read(file, bytes, sizeof(bytes)) > 0, "read");
	close(file);
	check(!stat("/dev/null", &status), "stat");
	memory = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(memory != MAP_FAILED, "mmap");
	for (i = 0; i < PAGES; i++)
		memory[i * 4096] = 1;
	munmap(memory, PAGES * 4096);
	sched_yield();
	if (round % ROUNDS_PER_FORK)
		return;
	child = fork();
	check(child >= 0, "fork");
	if (!child)
		_exit(0);
	check(waitpid(child, NULL, 0) == child, "waitpid");
}

static void prepare_network(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	socklen_t size = sizeof(address);

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	receiver = socket(AF_INET, SOCK_DGRAM, 0);
	sender = socket(AF_INET, SOCK_DGRAM, 0);
	check(receiver >= 0 && sender >= 0, "socket");
	check(!bind(receiver, (void *)&address, size), "bind");
	check(!getsockname(receiver, (void *)&address, &size), "getsockname");
	check(!connect(sender, (void *)&address, size), "connect");
}

static void network(long round)
{
	char bytes[1000] = { 0 };

	(void)round;
	check(send(sender, bytes, sizeof(bytes), 0) == sizeof(bytes), "send");
	check(recv(receiver, bytes, sizeof(bytes), 0) == sizeof(bytes), "recv");
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*prepare)(void);
		void (*work)(long round);
	} works[] = {
		{ "syscalls", prepare_syscalls, syscalls },
		{ "network", prepare_network, network },
	};
	void (*work)(long round) = NULL;
	long rounds, i;
	double start;
	char *end;
	size_t n;

	rounds = argc == 3 ? strtol(argv[2], &end, 10) : 0;
	if (rounds < 1 || rounds > MOST_ROUNDS || *end)
		goto usage;
	for (n = 0; n < sizeof(works) / sizeof(works[0]); n++)
		if (!strcmp(argv[1], works[n].name)) {
			works[n].prepare();
			work = works[n].work;
		}
	if (!work)
		goto usage;
	for (i = 0; i < rounds / 10; i++)
		work(i);
	start = now();
	for (i = 0; i < rounds; i++)
		work(i);
	printf("%.1f ns per round\n", (now() - start) / rounds);
	return 0;
usage:
	fprintf(stderr, "usage: load syscalls|network ROUNDS, 1 to %ld\n", MOST_ROUNDS);
	return 2;
}
