// SPDX-License-Identifier: Apache-2.0
// Opens sockets to the host, for the tests:
//   vsock_tool echo PORT            listens, and sends all data back, one client after another
//   vsock_tool connect PORT [OWN]   sends stdin to the host, then prints the answer; OWN is the
//                                   guest's own port, for which a number below 1024 needs root
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

// Copies until the end of the input. If write() accepts only a part, it is called again for the
// rest.
static int copy(int from, int to)
{
	static char buffer[1 << 16];
	ssize_t length;

	while ((length = read(from, buffer, sizeof(buffer))) > 0) {
		ssize_t done = 0;

		while (done < length) {
			ssize_t written = write(to, buffer + done, length - done);

			if (written < 0)
				return -1;
			done += written;
		}
	}
	return length < 0 ? -1 : 0;
}

static int echo(int listener, struct sockaddr_vm *address)
{
	address->svm_cid = VMADDR_CID_ANY;
	if (bind(listener, (struct sockaddr *)address, sizeof(*address)))
		return fail("bind");
	if (listen(listener, 16))
		return fail("listen");
	printf("listening\n");
	fflush(stdout);
	for (;;) {
		int client = accept(listener, NULL, NULL);

		if (client < 0)
			return fail("accept");
		// A client that disconnects does not end the program.
		if (copy(client, client))
			perror("echo");
		close(client);
	}
}

static int connect_host(int socket, struct sockaddr_vm *address, const char *own)
{
	struct sockaddr_vm from = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY };

	if (own) {
		from.svm_port = strtoul(own, NULL, 10);
		if (bind(socket, (struct sockaddr *)&from, sizeof(from)))
			return fail("bind");
	}
	address->svm_cid = VMADDR_CID_HOST;
	if (connect(socket, (struct sockaddr *)address, sizeof(*address)))
		return fail("connect");
	if (copy(STDIN_FILENO, socket))
		return fail("send");
	if (shutdown(socket, SHUT_WR))
		return fail("shutdown");
	if (copy(socket, STDOUT_FILENO))
		return fail("receive");
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_vm address = { .svm_family = AF_VSOCK };
	int fd;

	if (argc != 3 && argc != 4) {
		fprintf(stderr, "usage: vsock_tool echo|connect PORT [OWN]\n");
		return 2;
	}
	signal(SIGPIPE, SIG_IGN);
	fd = socket(AF_VSOCK, SOCK_STREAM, 0);
	if (fd < 0)
		return fail("socket");
	address.svm_port = strtoul(argv[2], NULL, 10);
	if (!strcmp(argv[1], "echo"))
		return echo(fd, &address);
	return connect_host(fd, &address, argv[3]);
}
