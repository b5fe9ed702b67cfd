// SPDX-License-Identifier: Apache-2.0
// Replaces the running kernel by another one, with the same command line:
//   kexec_tool KERNEL INITRD
#include <fcntl.h>
#include <stdio.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/reboot.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

int main(int argc, char **argv)
{
	// COMMAND_LINE_SIZE of x86
	char line[2048];
	ssize_t length;
	int kernel, initrd, file;

	if (argc != 3) {
		fprintf(stderr, "usage: kexec_tool KERNEL INITRD\n");
		return 2;
	}
	kernel = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (kernel < 0)
		return fail(argv[1]);
	initrd = open(argv[2], O_RDONLY | O_CLOEXEC);
	if (initrd < 0)
		return fail(argv[2]);
	file = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return fail("/proc/cmdline");
	length = read(file, line, sizeof(line));
	if (length < 1)
		return fail("/proc/cmdline");
	// The last byte of /proc/cmdline is a line feed, but kexec_file_load() requires a NUL
	// there.
	line[length - 1] = '\0';

	if (syscall(SYS_kexec_file_load, kernel, initrd, length, line, 0UL))
		return fail("kexec_file_load");
	reboot(LINUX_REBOOT_CMD_KEXEC);
	return fail("reboot");
}
