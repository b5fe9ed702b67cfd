// SPDX-License-Identifier: GPL-2.0-only
/*
 * tracepoint/{plain,counted}/{probe,fire,hits,enabled}: two tracepoints of the
 * module. "counted" has a registration function and so needs more than its key.
 *
 *	probe	 write how many probes are to be attached, up to 2
 *	fire	 write N to pass the tracepoint N times
 *	hits	 how often the probes were called, taken together
 *	enabled	 whether the guest sees the tracepoint's key on
 */
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/tracepoint.h>

#include "test.h"

#define FIRE_MAX	1000000UL
#define PROBES_MAX	2

static atomic_t registrations;

static int counted_reg(void)
{
	atomic_inc(&registrations);
	return 0;
}

static void counted_unreg(void)
{
	atomic_dec(&registrations);
}

/* Since 6.16 DECLARE_TRACE() appends "_tp" to the name. */
#ifndef DECLARE_TRACE_EVENT
#define DECLARE_TRACE_EVENT DECLARE_TRACE
#endif

DECLARE_TRACE_EVENT(patchbay_test_plain, TP_PROTO(unsigned long n), TP_ARGS(n));
DECLARE_TRACE_EVENT(patchbay_test_counted, TP_PROTO(unsigned long n), TP_ARGS(n));
DEFINE_TRACE(patchbay_test_plain, TP_PROTO(unsigned long n), TP_ARGS(n));
DEFINE_TRACE_FN(patchbay_test_counted, counted_reg, counted_unreg,
		TP_PROTO(unsigned long n), TP_ARGS(n));

struct test_tracepoint {
	const char *name;
	struct tracepoint *tp;
	void (*fire)(unsigned long n);
	/* Of each probe. */
	atomic_long_t hits[PROBES_MAX];
	unsigned int probes;
};

static noinline void plain_fire(unsigned long n)
{
	trace_patchbay_test_plain(n);
}

static noinline void counted_fire(unsigned long n)
{
	trace_patchbay_test_counted(n);
}

static struct test_tracepoint test_tracepoints[] = {
	{
		.name = "plain",
		.tp = &__tracepoint_patchbay_test_plain,
		.fire = plain_fire,
	}, {
		.name = "counted",
		.tp = &__tracepoint_patchbay_test_counted,
		.fire = counted_fire,
	},
};

static DEFINE_MUTEX(probe_mutex);

static void test_probe(void *data, unsigned long n)
{
	atomic_long_t *hits = data;

	atomic_long_inc(hits);
}

static int set_probes(struct test_tracepoint *test, unsigned int probes)
{
	int ret = 0;

	mutex_lock(&probe_mutex);
	while (!ret && test->probes < probes) {
		ret = tracepoint_probe_register(test->tp, test_probe,
						&test->hits[test->probes]);
		if (!ret)
			test->probes++;
	}
	while (!ret && test->probes > probes) {
		ret = tracepoint_probe_unregister(test->tp, test_probe,
						  &test->hits[test->probes - 1]);
		if (!ret)
			test->probes--;
	}
	mutex_unlock(&probe_mutex);
	return ret;
}

static ssize_t probe_write(struct file *file, const char __user *from,
			   size_t size, loff_t *pos)
{
	unsigned long probes;
	int ret = read_number(from, size, PROBES_MAX, &probes);

	if (!ret)
		ret = set_probes(file_inode(file)->i_private, probes);
	return ret ? ret : size;
}

static const struct file_operations probe_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = probe_write,
};

static ssize_t fire_write(struct file *file, const char __user *from,
			  size_t size, loff_t *pos)
{
	struct test_tracepoint *test = file_inode(file)->i_private;
	unsigned long i, n;
	int ret = read_number(from, size, FIRE_MAX, &n);

	if (ret)
		return ret;
	for (i = 0; i < n; i++)
		test->fire(i);
	return size;
}

static const struct file_operations fire_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = fire_write,
};

static int hits_show(struct seq_file *file, void *unused)
{
	struct test_tracepoint *test = file->private;
	long hits = 0;
	int i;

	for (i = 0; i < PROBES_MAX; i++)
		hits += atomic_long_read(&test->hits[i]);
	seq_printf(file, "%ld\n", hits);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(hits);

static int enabled_show(struct seq_file *file, void *unused)
{
	struct test_tracepoint *test = file->private;

	seq_printf(file, "%d\n", static_key_enabled(&test->tp->key));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(enabled);

int tracepoints_init(struct dentry *root)
{
	struct dentry *tracepoints = debugfs_create_dir("tracepoint", root);
	int i;

	for (i = 0; i < ARRAY_SIZE(test_tracepoints); i++) {
		struct test_tracepoint *test = &test_tracepoints[i];
		struct dentry *dir = debugfs_create_dir(test->name, tracepoints);

		debugfs_create_file("probe", 0200, dir, test, &probe_fops);
		debugfs_create_file("fire", 0200, dir, test, &fire_fops);
		debugfs_create_file("hits", 0400, dir, test, &hits_fops);
		debugfs_create_file("enabled", 0400, dir, test, &enabled_fops);
	}
	return 0;
}

void tracepoints_exit(void)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(test_tracepoints); i++)
		set_probes(&test_tracepoints[i], 0);
	tracepoint_synchronize_unregister();
}
