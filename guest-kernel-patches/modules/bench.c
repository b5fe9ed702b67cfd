// SPDX-License-Identifier: GPL-2.0-only
/*
 * bench/{one,many,hundred,thousand}: reading one flips keys on and off by the guest's
 * own means and prints the nanoseconds for each way.
 * bench/taken: how many of the 1,000 branches are taken, bench/on: how many of
 * the 1,000 keys are on.
 */
#include <linux/ktime.h>
#include <linux/module.h>

#include "test.h"

static void time_keys(struct seq_file *file, struct static_key *const *keys,
		      unsigned int count)
{
	u64 start, on, off;
	unsigned int i;

	start = ktime_get_ns();
	for (i = 0; i < count; i++)
		static_key_enable(keys[i]);
	on = ktime_get_ns();
	for (i = 0; i < count; i++)
		static_key_disable(keys[i]);
	off = ktime_get_ns();

	seq_printf(file, "enable_ns %llu\ndisable_ns %llu\n", on - start, off - on);
}

static int one_show(struct seq_file *file, void *unused)
{
	time_keys(file, bench_keys, 1);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(one);

static int many_show(struct seq_file *file, void *unused)
{
	struct static_key *const key = &many_key.key;

	time_keys(file, &key, 1);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(many);

static int hundred_show(struct seq_file *file, void *unused)
{
	time_keys(file, bench_keys, 100);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(hundred);

static int thousand_show(struct seq_file *file, void *unused)
{
	time_keys(file, bench_keys, BENCH_KEYS);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(thousand);

static int taken_show(struct seq_file *file, void *unused)
{
	seq_printf(file, "%u\n", bench_keys_taken());
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(taken);

static int on_show(struct seq_file *file, void *unused)
{
	unsigned int i, on = 0;

	for (i = 0; i < BENCH_KEYS; i++)
		on += static_key_enabled(bench_keys[i]);
	seq_printf(file, "%u\n", on);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(on);

int bench_init(struct dentry *root)
{
	struct dentry *dir = debugfs_create_dir("bench", root);

	debugfs_create_file("one", 0400, dir, NULL, &one_fops);
	debugfs_create_file("many", 0400, dir, NULL, &many_fops);
	debugfs_create_file("hundred", 0400, dir, NULL, &hundred_fops);
	debugfs_create_file("thousand", 0400, dir, NULL, &thousand_fops);
	debugfs_create_file("taken", 0400, dir, NULL, &taken_fops);
	debugfs_create_file("on", 0400, dir, NULL, &on_fops);
	return 0;
}
